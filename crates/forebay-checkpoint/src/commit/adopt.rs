//! A commit of one root becomes one of another: what a copy of a step needs beside the bytes of its files.
//!
//! The files are copied by whoever moves them ([`Adoption::files`]); this is the protocol around them, the same as for
//! a save, so that listings, `latest`, collectors and fences of the other root need not know that anything was copied:
//!
//! 1. **Begin.** Each mover creates `begin-<mover>` there, and beats while it copies: a collector sees an attempt that
//!    is alive, and takes the right to publish from one that is not, as it does with ranks.
//! 2. **Files**, under their own names, each whole and durable before it has that name.
//! 3. **Publish.** Whoever finds all files there with their sizes copies the claims of epochs up to the commit's, so
//!    that `latest` walks the same line, then the decision byte for byte, stages `.metadata`, looks whether its begin
//!    record is still there, and publishes where nothing is. Several movers may do that at once: the store lets one.
//!
//! An older commit of the step that is there is replaced only if the mover names it ([`Adoption::replacing`]), in one
//! step, by the version that was looked at; as with a save, removers that have announced themselves pass first, and
//! what is held stays. What it leaves is an attempt that was replaced: a collector's, after the grace time.
//!
//! A mover whose begin record was taken stops with `fenced`, and may begin anew once the collector has removed the last
//! record, the decision: never while files are being removed.

use std::collections::HashMap;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Published};

use super::aside::let_removers_pass;
use super::epoch;
use super::id::AttemptId;
use super::marks::Marks;
use super::names::{EPOCHS, Layout};
use super::record::{Beat, Begin, Commit, Decision, EpochClaim, FileRef, Outcome, decode, encode};
use super::root::{Bytes, LIST_MAX, RECORD_BYTES_MAX, Root};

/// Most bytes of `.metadata`: more is not read for its files either.
const METADATA_BYTES_MAX: u64 = 1 << 30;

/// A commit that is to be copied, as it was read.
#[derive(Clone)]
pub struct Adoption {
    layout: Layout,
    attempt: AttemptId,
    commit: Commit,
    decision: Vec<u8>,
    metadata: Vec<u8>,
    /// Claims of epochs, by number.
    claims: Vec<(u64, Vec<u8>)>,
    /// What it may replace.
    replaces: Option<AttemptId>,
}

/// What is at the commit point of the other root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    Open,
    /// The same commit.
    There,
    /// Another one; `None` where Forebay did not write it, or it cannot be read.
    Other(Option<AttemptId>),
}

/// How a copy became a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Whether this call published it; else it was there.
    pub published: bool,
    /// Whether the store could promise that it survives a loss of power.
    pub durable: bool,
}

impl Adoption {
    /// Reads the commit of a step, and checks what guards its `.metadata`.
    ///
    /// Errors: I/O; `not_committed`; `unsupported` where Forebay did not write it; `missing_file` where the record of
    /// the commit is gone; those of a damaged record or `.metadata`.
    pub fn read(from: &Root, step: u64) -> Result<Self> {
        let layout = Layout::of_step(step);
        let key = layout.metadata();
        let place = from.place(&key);
        let Some((metadata, _)) = from.store.get(&key, METADATA_BYTES_MAX)? else {
            return Err(Error::new(Code::NotCommitted, "the step has no `.metadata`").at(place));
        };
        let source = Bytes { name: place.clone(), bytes: metadata };
        let Some(attempt) = from.identify.attempt(&source)? else {
            let what =
                "Forebay did not write this checkpoint: there are no checksums to move it by";
            return Err(Error::new(Code::Unsupported, what).at(place));
        };
        // Reads all of it, and compares it with its own checksum.
        from.identify.files(&source)?;
        let key = layout.record(attempt, "decision");
        let Some((decision, _)) = from.store.get(&key, RECORD_BYTES_MAX)? else {
            let what = "the record of the commit is not there";
            return Err(Error::new(Code::MissingFile, what).at(from.place(&key)));
        };
        let decoded = decode::<Decision>(&decision).map_err(|error| error.at(from.place(&key)))?;
        let Some((Decision::Commit(commit), _)) = decoded else {
            let what = "the record of the commit says that it was given up";
            return Err(Error::new(Code::InvalidMetadata, what).at(from.place(&key)));
        };
        if commit.attempt != attempt.to_string() || commit.step != step {
            let what = "the record of the commit is of another one";
            return Err(Error::new(Code::InvalidMetadata, what).at(from.place(&key)));
        }
        let claims = claims(from, commit.epoch)?;
        let metadata = source.bytes;
        Ok(Self { layout, attempt, commit, decision, metadata, claims, replaces: None })
    }

    /// It may replace this older commit of the step, and no other.
    pub fn replacing(mut self, older: Option<AttemptId>) -> Self {
        self.replaces = older;
        self
    }

    /// Whose commit it is.
    pub fn attempt(&self) -> AttemptId {
        self.attempt
    }

    /// Of which step.
    pub fn step(&self) -> u64 {
        self.commit.step
    }

    /// The writer's epoch; 0 where none was claimed.
    pub fn epoch(&self) -> u64 {
        self.commit.epoch
    }

    /// Where its files are.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The files that it needs, the manifest included, `.metadata` not.
    pub fn files(&self) -> &[FileRef] {
        &self.commit.files
    }

    /// The manifest's name.
    pub fn manifest(&self) -> &str {
        &self.commit.manifest
    }

    /// The bytes of `.metadata`.
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// The key of a mover's own record: removed when the step is committed, collected when the attempt is dead. The
    /// name must be none that [`Layout`] lists.
    pub fn own_record(&self, name: &str) -> String {
        self.layout.record(self.attempt, name)
    }

    /// Whether the root still has this commit.
    pub fn is_at(&self, root: &Root) -> Result<bool> {
        Ok(root.committed(&self.layout)? == Some(Some(self.attempt)))
    }

    /// Fails where it cannot be published there as things stand: `lost_commit` where another commit of the step is
    /// there than it may replace, `already_exists` where that one is held. Errors: I/O.
    pub fn check_welcome(&self, to: &Root) -> Result<()> {
        match self.standing(to)? {
            Standing::Open | Standing::There => Ok(()),
            Standing::Other(other) if other.is_some() && other == self.replaces => {
                Marks::check_replaceable(to, &self.layout, self.commit.step)
            }
            Standing::Other(other) => Err(self.lost(to, other)),
        }
    }

    /// What is at the commit point of a root.
    pub fn standing(&self, to: &Root) -> Result<Standing> {
        Ok(match to.current(&self.layout)? {
            None => Standing::Open,
            Some(current) if current.attempt == Some(self.attempt) => Standing::There,
            Some(current) => Standing::Other(current.attempt),
        })
    }

    /// A mover takes part; again, if it was killed. `movers`: how many there are, for listings.
    ///
    /// Errors: I/O; `fenced` where the attempt was collected there and is not wholly gone.
    pub fn begin(&self, to: &Root, (mover, movers): (u32, u32), who: &str) -> Result<()> {
        let key = self.of_mover("begin", mover);
        if to.read::<Begin>(&key)?.is_some() {
            return Ok(());
        }
        if to.decision(&self.layout, self.attempt)?.is_some() {
            return Err(self.collected(to));
        }
        let begin = Begin {
            attempt: self.attempt.to_string(),
            step: self.commit.step,
            rank: mover,
            world: movers,
            structure: self.commit.structure.clone(),
            epoch: self.commit.epoch,
            parent: self.commit.parent,
            who: who.to_owned(),
            nonce: forebay_store::random(),
            base: None,
        };
        // False: another process of that number was quicker, which is as good.
        to.create_once(&key, &encode(&begin, &[])?).map(drop)
    }

    /// A mover lives. `count` rises.
    pub fn beat(&self, to: &Root, mover: u32, count: u64) -> Result<()> {
        let bytes = encode(&Beat { rank: mover, count }, &[])?;
        to.store.put(&self.of_mover("beat", mover), &bytes)
    }

    /// The files that are not there yet with their bytes.
    pub fn missing(&self, to: &Root) -> Result<Vec<FileRef>> {
        let prefix = self.layout.prefix();
        let listed = to.store.list(prefix, LIST_MAX)?;
        let sizes: HashMap<&str, u64> = listed
            .iter()
            .filter_map(|object| Some((object.key.strip_prefix(prefix)?, object.bytes)))
            .collect();
        let is_there = |file: &&FileRef| sizes.get(file.name.as_str()) == Some(&file.bytes);
        Ok(self.commit.files.iter().filter(|file| !is_there(file)).cloned().collect())
    }

    /// Publishes `.metadata`: all files must be there, durably. See the module.
    ///
    /// Errors: I/O; `missing_file`; `fenced` where the attempt was collected there; `lost_commit` where another attempt
    /// at the step is committed; `already_exists` where another job has claimed one of its epochs, or what it would
    /// replace is held.
    pub fn publish(&self, to: &Root, mover: u32) -> Result<Adopted> {
        if let Some(adopted) = self.look(to, to.store.abilities().durable_publish)? {
            return Ok(adopted);
        }
        to.check_fit(&self.expect(to)?, &self.layout.metadata())?;
        self.copy_claims(to)?;
        if let Some(file) = self.missing(to)?.first() {
            let place = to.place(&self.layout.file(&file.name));
            return Err(Error::new(Code::MissingFile, "a file is not there yet").at(place));
        }
        let staged = self.of_mover("metadata", mover);
        to.store.put(&staged, &self.metadata)?;
        if !to.create_once(&self.own_record("decision"), &self.decision)? {
            return Err(self.collected(to));
        }
        if to.read::<Begin>(&self.of_mover("begin", mover))?.is_none() {
            // Tidied up by a mover that saw the commit, or collected.
            return match self.look(to, to.store.abilities().durable_publish)? {
                Some(adopted) => Ok(adopted),
                None => Err(self.collected(to)),
            };
        }
        // As late as possible: the hold of what is to go, and its version.
        if let Some(older) = self.replaces {
            let_removers_pass(to, &self.layout, older)?;
        }
        self.check_welcome(to)?;
        let expect = self.expect(to)?;
        let published = to.store.publish(&staged, &self.layout.metadata(), &expect);
        if let Ok(Published::Done { durable }) = published {
            return Ok(self.conclude(to, Adopted { published: true, durable }));
        }
        let durable = published.is_ok() && to.store.abilities().durable_publish;
        match (self.look(to, durable)?, published) {
            (Some(adopted), _) => Ok(adopted),
            (None, Err(error)) => Err(error),
            (None, Ok(_)) => Err(self.collected(to)),
        }
    }

    /// What must be at the commit point for it to be published. Errors: `lost_commit`, I/O.
    fn expect(&self, to: &Root) -> Result<Expect> {
        match to.current(&self.layout)? {
            None => Ok(Expect::Absent),
            Some(there) if there.attempt.is_some() && there.attempt == self.replaces => {
                Ok(Expect::Version(there.version))
            }
            // Ours was published by another mover: what is expected then is met by none, and the next look says so.
            Some(there) if there.attempt == Some(self.attempt) => Ok(Expect::Absent),
            Some(there) => Err(self.lost(to, there.attempt)),
        }
    }

    /// Whether it is committed there, and tidied up. Errors: `lost_commit`, I/O.
    fn look(&self, to: &Root, durable: bool) -> Result<Option<Adopted>> {
        match self.standing(to)? {
            Standing::Open => Ok(None),
            Standing::There => Ok(Some(self.conclude(to, Adopted { published: false, durable }))),
            Standing::Other(other) if other.is_some() && other == self.replaces => Ok(None),
            Standing::Other(other) => Err(self.lost(to, other)),
        }
    }

    /// The error where another commit of the step is there.
    pub fn lost(&self, to: &Root, other: Option<AttemptId>) -> Error {
        let whose = other.map_or("one that is not Forebay's".to_owned(), |id| id.to_string());
        let what = format!("another commit of step {} is there: {whose}", self.commit.step);
        let error = Error::new(Code::LostCommit, what).at(to.place(&self.layout.metadata()));
        error.hint("to have this one there, prune that step there first")
    }

    fn collected(&self, to: &Root) -> Error {
        let what =
            format!("the copy of {} was given up there and is being collected", self.attempt);
        let error = Error::new(Code::Fenced, what).at(to.place(self.layout.prefix()));
        error.hint("it can be copied again once `forebay ckpt gc` has removed what is left of it")
    }

    fn copy_claims(&self, to: &Root) -> Result<()> {
        for (number, bytes) in &self.claims {
            let key = epoch_key(*number);
            if !to.create_once(&key, bytes)? {
                let what = format!("another job has claimed epoch {number} there");
                let error = Error::new(Code::AlreadyExists, what).at(to.place(&key));
                return Err(error.hint("two jobs may not share one folder of checkpoints"));
            }
        }
        Ok(())
    }

    /// To be called where the commit was found there: nobody needs the movers' records any more, and one that was
    /// killed after the commit has left some. What fails here is a collector's to do again.
    pub fn conclude(&self, to: &Root, adopted: Adopted) -> Adopted {
        super::index::note(to, &self.layout, self.attempt, &self.commit);
        let outcome = Outcome::Committed { durable: adopted.durable };
        let tidied = encode(&outcome, &[]).and_then(|bytes| {
            to.create_once(&self.own_record("outcome"), &bytes)?;
            let prefix = self.layout.records(self.attempt);
            let names = to.store.names(&prefix, LIST_MAX)?.into_iter().map(|(name, _)| name);
            let spent = names.filter(|name| name != "decision" && name != "outcome");
            let keys: Vec<String> = spent.map(|name| format!("{prefix}{name}")).collect();
            to.store.discard(&keys)
        });
        if let Err(error) = tidied {
            tracing::debug!(%error, "records of a copy could not be tidied up");
        }
        adopted
    }

    fn of_mover(&self, what: &str, mover: u32) -> String {
        self.layout.of_rank(self.attempt, what, mover)
    }
}

impl std::fmt::Debug for Adoption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Adoption({} of step {})", self.attempt, self.commit.step)
    }
}

fn epoch_key(number: u64) -> String {
    format!("{EPOCHS}{number:08x}")
}

/// The claims up to an epoch, as they were written. One that is damaged is not carried further.
fn claims(from: &Root, last: u64) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut found = Vec::new();
    for number in epoch::all(from)?.into_iter().filter(|number| *number <= last) {
        let key = epoch_key(number);
        let Some((bytes, _)) = from.store.get(&key, RECORD_BYTES_MAX)? else { continue };
        match decode::<EpochClaim>(&bytes) {
            Ok(Some(_)) => found.push((number, bytes)),
            Ok(None) => tracing::warn!(key, "the claim of an epoch is empty and is not copied"),
            Err(error) => tracing::warn!(key, %error, "a claim is damaged and is not copied"),
        }
    }
    Ok(found)
}

/// The `.metadata` of an [`Adoption`] as a source.
impl Adoption {
    /// For readers of `.metadata`.
    pub fn metadata_source(&self) -> impl RangeSource + use<> {
        Bytes { name: self.layout.metadata(), bytes: self.metadata.clone() }
    }
}
