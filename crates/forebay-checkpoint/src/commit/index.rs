//! A flat prefix of commit keys: what a listing of a bucket says of a commit without reading it.
//!
//! Where each request is a round trip ([`Store::is_remote`](forebay_store::Store::is_remote)), four of them a step make
//! a listing of a thousand steps one of minutes. So whoever publishes a commit there also puts an empty object whose
//! key says what the record of the commit does:
//!
//! ```text
//! .forebay/commits/<step>_<attempt>_<epoch>_<parent, or ->_<world>_<committer>_<bytes of its files>
//! ```
//!
//! One listing of everything, a thousand keys a request, then has the steps, what is in their folders, and these. Where
//! there is much else, or steps of very many files, each step is listed by itself, several at once. A key
//! is a **hint**. It is taken for a commit only where `.metadata` is there, exactly one attempt of the step has a
//! decision, and it is that of the key; all other steps are read, several at once. What decides anything reads the
//! commit itself: [`latest`](super::latest) that of the step which it returns, a prune all. Damage of a record is seen
//! there, not in a listing by hints. A key that was not written (the writer died) costs the reads; one whose commit is
//! gone means nothing, and is removed by a collection.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_error::{Code, Result};
use forebay_format::parallel;
use forebay_store::Listed;

use super::census::Census;
use super::gc::{GcOptions, GcReport, remove};
use super::id::AttemptId;
use super::names::{Layout, manifest, step_folder, step_of_folder};
use super::record::Commit;
use super::root::{LIST_MAX, Root};
use super::steps::{CommitInfo, StepState, numbers};

/// Where the keys are.
const COMMITS: &str = ".forebay/commits/";

/// The most objects of a root that are listed at once: fifty requests, one after another. Where there are more, a
/// request for each step, sixteen at once, is no more to wait for.
const FLAT_MAX: usize = 50_000;

/// What a key says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    pub(crate) step: u64,
    pub(crate) attempt: AttemptId,
    epoch: u64,
    parent: Option<u64>,
    world: u32,
    by: u32,
    bytes: u64,
}

impl Noted {
    fn of(commit: &Commit, attempt: AttemptId) -> Self {
        let (step, epoch, parent) = (commit.step, commit.epoch, commit.parent);
        let bytes = commit.files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
        Self { step, attempt, epoch, parent, world: commit.world, by: commit.by, bytes }
    }

    fn key(&self) -> String {
        let Self { step, attempt, epoch, parent, world, by, bytes } = self;
        let parent = parent.map_or("-".to_owned(), |parent| parent.to_string());
        format!("{COMMITS}{step}_{attempt}_{epoch}_{parent}_{world}_{by}_{bytes}")
    }

    /// `None` for what [`Self::key`] does not make.
    fn parse(key: &str) -> Option<Self> {
        let words: Vec<&str> = key.strip_prefix(COMMITS)?.split('_').collect();
        let [step, attempt, epoch, parent, world, by, bytes] = words.as_slice() else {
            return None;
        };
        let noted = Self {
            step: step.parse().ok()?,
            attempt: attempt.parse().ok()?,
            epoch: epoch.parse().ok()?,
            parent: if *parent == "-" { None } else { Some(parent.parse().ok()?) },
            world: world.parse().ok()?,
            by: by.parse().ok()?,
            bytes: bytes.parse().ok()?,
        };
        (noted.key() == key).then_some(noted)
    }

    fn info(&self, metadata: &Listed) -> CommitInfo {
        CommitInfo {
            attempt: Some(self.attempt),
            epoch: self.epoch,
            parent: self.parent,
            world: self.world,
            manifest: Some(manifest(self.attempt, self.by)),
            files: Vec::new(),
            bytes: self.bytes.saturating_add(metadata.bytes),
            bytes_here: self.bytes.saturating_add(metadata.bytes),
            age: metadata.age.0,
            damage: None,
            epoch_lost: false,
        }
    }
}

/// Notes a commit that was published, where that helps. A failure costs later listings some requests.
pub(crate) fn note(root: &Root, layout: &Layout, attempt: AttemptId, commit: &Commit) {
    let of_step = step_of_folder(layout.prefix().trim_end_matches('/'));
    if !root.store.is_remote() || of_step != Some(commit.step) {
        return;
    }
    if let Err(error) = root.store.put(&Noted::of(commit, attempt).key(), &[]) {
        tracing::debug!(%error, "a commit is not noted for listings");
    }
}

/// All steps with what is in them, in order, as [`steps`](super::steps) has them, with the help of hints in a bucket: a
/// listing for people, and to find what is then read. Of a commit that a hint tells, `files` are left out and damage is
/// not seen.
pub fn listing(root: &Root, alive: Duration) -> Result<Vec<StepState>> {
    match root.store.is_remote() {
        true => of_bucket(root, alive, true),
        false => super::steps::steps(root, alive),
    }
}

/// What is in the folders of steps, and keys, by step.
#[derive(Default)]
struct Objects {
    folders: BTreeMap<u64, Vec<Listed>>,
    noted: BTreeMap<u64, Vec<Noted>>,
}

impl Objects {
    /// From one listing of everything, or where that is too long one of each step.
    fn list(root: &Root, hinted: bool) -> Result<Self> {
        let mut all = Self::default();
        match root.store.list("", FLAT_MAX) {
            Ok(objects) => objects.into_iter().for_each(|object| all.add(object)),
            Err(error) if error.code() == Code::Unsupported => all.add_steps(root, hinted)?,
            Err(error) => return Err(error),
        }
        Ok(all)
    }

    fn add(&mut self, object: Listed) {
        if let Some(found) = Noted::parse(&object.key) {
            self.noted.entry(found.step).or_default().push(found);
            return;
        }
        let folder = object.key.split_once('/').and_then(|(folder, _)| step_of_folder(folder));
        if let Some(step) = folder {
            self.folders.entry(step).or_default().push(object);
        }
    }

    fn add_steps(&mut self, root: &Root, hinted: bool) -> Result<()> {
        let prefixes = numbers(root)?.into_iter().map(|step| format!("{}/", step_folder(step)));
        let keys = hinted.then(|| COMMITS.to_owned());
        let prefixes: Vec<String> = prefixes.chain(keys).collect();
        for objects in parallel::map(&prefixes, |prefix| root.store.list(prefix, LIST_MAX)) {
            objects?.into_iter().for_each(|object| self.add(object));
        }
        Ok(())
    }
}

/// The steps of a bucket.
pub(crate) fn of_bucket(root: &Root, alive: Duration, hinted: bool) -> Result<Vec<StepState>> {
    let Objects { folders, noted } = Objects::list(root, hinted)?;
    let folders: Vec<(u64, Census)> = folders
        .into_iter()
        .map(|(step, objects)| (step, Census::of(&Layout::of_step(step), objects)))
        .collect();
    let states = parallel::map(&folders, |(step, census)| {
        let own = noted.get(step).filter(|_| hinted).map(Vec::as_slice).unwrap_or_default();
        match own.iter().find_map(|noted| hint(census, noted)) {
            Some(info) => Ok(census.state_with(root, *step, Some(info), alive)),
            None => census.state(root, *step, alive),
        }
    });
    let states: Vec<Option<StepState>> = states.into_iter().collect::<Result<_>>()?;
    Ok(states.into_iter().flatten().collect())
}

/// The commit that a key tells, if the folder does not say otherwise.
fn hint(census: &Census, noted: &Noted) -> Option<CommitInfo> {
    let metadata = census.metadata.as_ref()?;
    let decided = |attempt: &&AttemptId| census.has_record(**attempt, "decision");
    let mut decided = census.attempts.keys().filter(decided);
    let alone = decided.next() == Some(&noted.attempt) && decided.next().is_none();
    (alone && !census.is_being_removed(noted.attempt)).then(|| noted.info(metadata))
}

/// Removes keys whose commit is gone.
pub(crate) fn tidy(root: &Root, options: &GcOptions, report: &mut GcReport) {
    if root.store.is_remote()
        && let Err(error) = remove_stale(root, options, report)
    {
        report.failed.push((COMMITS.to_owned(), error));
    }
}

fn remove_stale(root: &Root, options: &GcOptions, report: &mut GcReport) -> Result<()> {
    let found = match root.store.list(COMMITS, LIST_MAX) {
        Ok(found) => found,
        Err(error) if error.code() == Code::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut by_step: BTreeMap<u64, Vec<(Noted, Listed)>> = BTreeMap::new();
    for object in found {
        if let Some(noted) = Noted::parse(&object.key) {
            by_step.entry(noted.step).or_default().push((noted, object));
        }
    }
    if by_step.is_empty() {
        return Ok(());
    }
    let there: BTreeSet<u64> = numbers(root)?.into_iter().collect();
    for (step, keys) in by_step {
        // One key of a step that is there is as good as any: it is compared where it is used.
        let doubtful = !there.contains(&step) || keys.len() > 1;
        for (noted, object) in keys.iter().filter(|_| doubtful) {
            let records = Layout::of_step(step).records(noted.attempt);
            if object.age.0 < options.grace || !root.store.names(&records, LIST_MAX)?.is_empty() {
                continue;
            }
            match options.dry_run {
                true => report.removed.push((object.key.clone(), object.bytes)),
                false => drop(remove(root, object, report)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::id::RunId;

    #[test]
    fn keys_go_there_and_back_and_others_are_none() {
        let attempt = AttemptId { run: RunId(0xc0ffee), save: 31 };
        let noted =
            Noted { step: 12, attempt, epoch: 3, parent: Some(11), world: 8, by: 0, bytes: 4096 };
        let key = noted.key();
        assert_eq!(key, ".forebay/commits/12_00c0ffee-1f_3_11_8_0_4096");
        assert_eq!(Noted::parse(&key), Some(noted.clone()));
        let first = Noted { parent: None, ..noted };
        assert_eq!(Noted::parse(&first.key()), Some(first));
        for bad in ["12", "12_00c0ffee-1f_3_11_8_0", "012_00c0ffee-1f_3_11_8_0_4096", ""] {
            assert_eq!(Noted::parse(&format!("{COMMITS}{bad}")), None, "{bad}");
        }
        assert_eq!(Noted::parse("12_00c0ffee-1f_3_11_8_0_4096"), None);
    }
}
