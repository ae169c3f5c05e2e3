//! From which tier to restore: the nearest copy that verifies.
//!
//! First the commit is chosen, then the copy. Of all tiers' latest commits the newest counts (by epoch, then by the
//! save's number); the tiers that have this very commit are looked at from the nearest to the farthest; one that cannot
//! be read or does not verify is passed over and told. Only where no copy of it is sound does the next older candidate
//! come: and that is told too, because going back in time is not what was asked for.
//!
//! What is on the drives of nodes only is no copy to restore from, since no node can read another's: they have to bring
//! it to the next tier first ([`unlanded`]). Each then reads its own ranks' files from its own drive.

use std::collections::BTreeSet;

use forebay_checkpoint::commit::{Adoption, AttemptId, FileRef, Root, latest};
use forebay_checkpoint::manifest::Manifest;
use forebay_checkpoint::save::Seal;
use forebay_engine::read_exact_at;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_store::is_data;

use crate::hop::rank_of;

/// Bytes that are read at a time.
const READ_BYTES: u64 = 8 << 20;

/// Which step is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The newest of all tiers.
    Latest,
    /// This one.
    Step(u64),
}

/// How closely a copy is looked at before it is chosen. A restore compares every block that it reads in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// `.metadata` and the manifest by their checksums, every file by its size.
    Listing,
    /// And every byte of every file.
    Bytes,
}

/// A tier that was passed over, and why.
#[derive(Debug)]
pub struct Passed {
    /// Its number.
    pub tier: usize,
    /// The step that was looked for there, where one was.
    pub step: Option<u64>,
    /// What is wrong with it.
    pub error: Error,
}

/// Where to restore from.
#[derive(Debug)]
pub struct Source {
    /// The tier's number.
    pub tier: usize,
    /// The step.
    pub step: u64,
    /// Its commit.
    pub attempt: AttemptId,
    /// Whether a newer commit is known of which no copy is sound.
    pub older_than_wanted: bool,
    /// Tiers that were passed over: bad ones, not those that just do not have the step.
    pub passed: Vec<Passed>,
}

/// A commit that some tier has: sorts by age.
type Candidate = (u64, u64, u64, AttemptId);

/// Chooses. `tiers`: the nearest first.
///
/// Errors: `not_found` where no tier has it; the error of the nearest copy, with all others as hints, where none is
/// sound.
pub fn choose(tiers: &[Root], wanted: Wanted, look: Look) -> Result<Source> {
    let mut passed = Vec::new();
    let candidates = candidates(tiers, wanted, &mut passed);
    for (at, (_, _, step, attempt)) in candidates.iter().rev().enumerate() {
        for (tier, root) in tiers.iter().enumerate() {
            match sound(root, *step, *attempt, look) {
                Ok(false) => {}
                Ok(true) => {
                    let (step, attempt) = (*step, *attempt);
                    let older_than_wanted = at > 0;
                    return Ok(Source { tier, step, attempt, older_than_wanted, passed });
                }
                Err(error) => {
                    tracing::warn!(tier, step, %error, "a copy is passed over");
                    passed.push(Passed { tier, step: Some(*step), error });
                }
            }
        }
    }
    Err(none(tiers, wanted, passed))
}

/// A commit on the drives of nodes that is newer than all that is in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unlanded {
    /// The step.
    pub step: u64,
    /// Bytes of it that the nearest whole tier lacks.
    pub lacking: u64,
    /// Whose data are among them.
    pub ranks: BTreeSet<u32>,
}

/// Looks whether a commit, or the newest of all tiers, is on the drives of nodes only: then it can be restored once
/// they have brought it to another tier. Tiers that do not answer are passed over.
///
/// Errors: I/O.
pub fn unlanded(tiers: &[Root], wanted: Wanted) -> Result<Option<Unlanded>> {
    let candidates = candidates(tiers, wanted, &mut Vec::new());
    let Some((_, _, step, attempt)) = candidates.last().copied() else { return Ok(None) };
    let is_whole = |root: &&Root| root.store.sees_all();
    let Some(node) = tiers.iter().find(|root| !is_whole(root)) else { return Ok(None) };
    let commit = match Adoption::read(node, step) {
        Ok(commit) if commit.attempt() == attempt => commit,
        Ok(_) => return Ok(None),
        Err(error) if error.code() == Code::NotCommitted => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut missing = None;
    for root in tiers.iter().filter(is_whole) {
        match commit.is_at(root) {
            Ok(true) => return Ok(None),
            Ok(false) => missing = missing.or(Some(commit.missing(root)?)),
            Err(error) => tracing::warn!(%error, "a tier is passed over"),
        }
    }
    let missing = missing.unwrap_or_else(|| commit.files().to_vec());
    let lacking = missing.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes));
    Ok(Some(Unlanded { step, lacking, ranks: ranks_of(&missing) }))
}

/// The ranks whose data of a step are whole on the drive of this node. Empty where it has none, or there is no such
/// step.
///
/// Errors: I/O.
pub fn ranks_here(node: &Root, step: u64) -> Result<BTreeSet<u32>> {
    let commit = match Adoption::read(node, step) {
        Ok(commit) => commit,
        Err(error) if error.code() == Code::NotCommitted => return Ok(BTreeSet::new()),
        Err(error) => return Err(error),
    };
    let elsewhere = ranks_of(&commit.missing(node)?);
    Ok(ranks_of(commit.files()).difference(&elsewhere).copied().collect())
}

fn ranks_of(files: &[FileRef]) -> BTreeSet<u32> {
    let data = files.iter().filter(|file| is_data(&file.name));
    data.filter_map(|file| rank_of(&file.name)).collect()
}

fn none(tiers: &[Root], wanted: Wanted, passed: Vec<Passed>) -> Error {
    let name = |tier: usize| tiers.get(tier).map(|root| root.store.name()).unwrap_or_default();
    let mut passed = passed.into_iter();
    let Some(first) = passed.next() else {
        let what = match wanted {
            Wanted::Latest => "no tier has a checkpoint".to_owned(),
            Wanted::Step(step) => format!("no tier has step {step}"),
        };
        let all: Vec<String> = (0..tiers.len()).map(name).collect();
        return Error::new(Code::NotFound, what).hint(format!("looked in {}", all.join(", ")));
    };
    let hint = |passed: Passed| format!("tier {}: {}", passed.tier, passed.error);
    passed.map(hint).fold(first.error, |error, hint| error.hint(hint))
}

/// The commits that are looked for, the oldest first. Tiers that do not answer are passed over.
fn candidates(tiers: &[Root], wanted: Wanted, passed: &mut Vec<Passed>) -> Vec<Candidate> {
    let mut found: BTreeSet<Candidate> = BTreeSet::new();
    for (tier, root) in tiers.iter().enumerate() {
        let (step, known) = match wanted {
            Wanted::Step(step) => (Some(step), of_step(root, step)),
            Wanted::Latest => (None, of_latest(root)),
        };
        match known {
            Ok(known) => found.extend(known),
            Err(error) => passed.push(Passed { tier, step, error }),
        }
    }
    found.into_iter().collect()
}

fn of_step(root: &Root, step: u64) -> Result<Option<Candidate>> {
    match Adoption::read(root, step) {
        Ok(commit) => Ok(Some((commit.epoch(), commit.attempt().place(), step, commit.attempt()))),
        Err(error) if error.code() == Code::NotCommitted => Ok(None),
        Err(error) => Err(error),
    }
}

fn of_latest(root: &Root) -> Result<Option<Candidate>> {
    let Some(state) = latest(root)? else { return Ok(None) };
    let commit = state.commit.as_ref();
    Ok(commit.and_then(|commit| {
        let attempt = commit.attempt?;
        Some((commit.epoch, attempt.place(), state.step, attempt))
    }))
}

/// Whether a tier has this commit, sound; false where it has none or another.
fn sound(root: &Root, step: u64, attempt: AttemptId, look: Look) -> Result<bool> {
    if !root.store.sees_all() {
        // The drives of nodes: they bring it to the next tier, to be read from there.
        return Ok(false);
    }
    let commit = match Adoption::read(root, step) {
        Ok(commit) if commit.attempt() == attempt => commit,
        Ok(_) => return Ok(false),
        Err(error) if error.code() == Code::NotCommitted => return Ok(false),
        Err(error) => return Err(error),
    };
    let place = |file: &str| format!("{}/{}", root.store.name(), commit.layout().file(file));
    if let Some(file) = commit.missing(root)?.first() {
        let what = format!("a file of {} bytes is not there, or has another size", file.bytes);
        return Err(Error::new(Code::MissingFile, what).at(place(&file.name)));
    }
    let seal = Seal::find(&commit.metadata_source())?;
    let Some(seal) = seal else {
        let what = "`.metadata` names no manifest";
        return Err(Error::new(Code::InvalidMetadata, what).at(place(".metadata")));
    };
    let source = root.store.open_data(&commit.layout().file(&seal.manifest))?;
    let manifest = Manifest::open(source, Some(&seal.hash))?;
    if look == Look::Bytes {
        manifest.check_sections()?;
        for rank in 0..manifest.info().world_size {
            for file in manifest.part_files(rank)? {
                let Some(crc) = file.crc else { continue };
                let of = FileRef { name: file.name, bytes: file.bytes };
                check_bytes(root, &commit, &of, crc)?;
            }
        }
    }
    Ok(true)
}

fn check_bytes(root: &Root, commit: &Adoption, file: &FileRef, expected: u32) -> Result<()> {
    let source = root.store.open_data(&commit.layout().file(&file.name))?;
    let (mut at, mut crc) = (0, 0);
    let mut buffer = Vec::new();
    while at < file.bytes {
        let count = (file.bytes - at).min(READ_BYTES);
        buffer.resize(count as usize, 0);
        read_exact_at(&*source, &mut buffer, at)?;
        crc = crc32_join(crc, crc32(&buffer), count);
        at += count;
    }
    if crc == expected {
        return Ok(());
    }
    let what = "its bytes are not those that were saved";
    Err(Error::new(Code::Checksum, what).at(source.name()))
}
