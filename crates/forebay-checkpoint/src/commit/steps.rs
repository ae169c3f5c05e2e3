//! What is in a checkpoint root: steps that are committed, pending or dead.
//!
//! `.metadata` alone says whether a step is committed. Everything else here explains: the record of the commit, the
//! attempts that have not committed, their age by the store's clock.

use std::time::Duration;

use forebay_error::Result;

use super::census::Census;
use super::id::AttemptId;
use super::names::{Layout, step_of_folder};
use super::record::{Commit, FileRef};
use super::root::{LIST_MAX, Root};

/// What a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can be loaded.
    Committed,
    /// Somebody may be writing it: what is there is younger than the time that counts as alive.
    Pending,
    /// It was removed; its files go when the grace time is over.
    Removed,
    /// It was committed, and nobody has removed it, but its `.metadata` is gone.
    Lost,
    /// Left over: never committed.
    Dead,
}

/// A commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitInfo {
    /// Whose; `None` where Forebay did not write it.
    pub attempt: Option<AttemptId>,
    /// The writer's epoch; 0 where none is known.
    pub epoch: u64,
    /// The step before it on its line, where known.
    pub parent: Option<u64>,
    /// How many ranks wrote it; 0 where that is not known.
    pub world: u32,
    /// The manifest's name, where there is a record.
    pub manifest: Option<String>,
    /// The files that it needs, where there is a record and it was read ([`listing`](super::listing) need not).
    pub files: Vec<FileRef>,
    /// Bytes of those and of `.metadata`.
    pub bytes: u64,
    /// Bytes of it that are here: all, but on a node that keeps its own ranks' data
    /// ([`sees_all`](forebay_store::Store::sees_all)).
    pub bytes_here: u64,
    /// Age of `.metadata` by the store's clock.
    pub age: Duration,
    /// Why the commit or its record cannot be read, if so: it is listed, and nothing of its folder is removed.
    pub damage: Option<String>,
    /// Whether the damage leaves open which epoch it is of: it may be on any line.
    pub epoch_lost: bool,
}

/// How an attempt that is not the commit stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptStatus {
    /// May be under way.
    Pending,
    /// Says that it failed, and why.
    Failed(String),
    /// Was committed, and replaced.
    Replaced,
    /// Was committed, and removed by a prune; its age counts from there.
    Removed,
    /// Was committed and neither replaced nor removed, and `.metadata` is not there.
    Lost,
    /// Nothing was heard of it for longer than counts as alive.
    Dead,
}

/// An attempt that is not the commit: under way, or left over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptState {
    /// Which.
    pub attempt: AttemptId,
    /// How it stands.
    pub status: AttemptStatus,
    /// Ranks that should take part, where known; that began; that have contributed.
    pub ranks: (Option<u32>, u32, u32),
    /// Bytes of all that it left.
    pub bytes: u64,
    /// Age of its youngest object by the store's clock.
    pub age: Duration,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepState {
    /// Its number.
    pub step: u64,
    /// Its commit, if it has one.
    pub commit: Option<CommitInfo>,
    /// What else is there.
    pub attempts: Vec<AttemptState>,
}

impl StepState {
    /// What it is.
    pub fn state(&self) -> State {
        let any = |status| self.attempts.iter().any(|attempt| attempt.status == status);
        match &self.commit {
            Some(_) => State::Committed,
            None if any(AttemptStatus::Pending) => State::Pending,
            None if any(AttemptStatus::Lost) => State::Lost,
            None if any(AttemptStatus::Removed) => State::Removed,
            None => State::Dead,
        }
    }

    /// Age of the commit, else of the youngest leftover.
    pub fn age(&self) -> Duration {
        let leftovers = self.attempts.iter().map(|attempt| attempt.age).min();
        self.commit.as_ref().map(|commit| commit.age).or(leftovers).unwrap_or_default()
    }

    /// Bytes of the commit, else of what is left over.
    pub fn bytes(&self) -> u64 {
        let leftovers = self.attempts.iter().map(|attempt| attempt.bytes).sum();
        self.commit.as_ref().map_or(leftovers, |commit| commit.bytes)
    }

    /// Ranks of the commit, else the most that any attempt had; 0 where unknown.
    pub fn ranks(&self) -> u32 {
        let most = self.attempts.iter().map(|attempt| attempt.ranks.0.unwrap_or(attempt.ranks.1));
        self.commit.as_ref().map_or_else(|| most.max().unwrap_or(0), |commit| commit.world)
    }
}

/// The steps that have a folder, in order.
pub fn numbers(root: &Root) -> Result<Vec<u64>> {
    let names = root.store.names("", LIST_MAX)?;
    let folder = |(name, is_folder): &(String, bool)| is_folder.then(|| step_of_folder(name))?;
    let mut steps: Vec<u64> = names.iter().filter_map(folder).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// All steps with what is in them, in order. `alive`: how young something must be to count as under way; the lease of
/// the writers' policy or more.
pub fn steps(root: &Root, alive: Duration) -> Result<Vec<StepState>> {
    if root.store.is_remote() {
        return super::index::of_bucket(root, alive, false);
    }
    let mut states = Vec::new();
    for step in numbers(root)? {
        let census = Census::take(root, &Layout::of_step(step))?;
        if let Some(state) = census.state(root, step, alive)? {
            states.push(state);
        }
    }
    Ok(states)
}

/// One step; `None` where its folder is not there or holds nothing of a checkpoint. `alive` as in [`steps`].
pub fn step_state(root: &Root, step: u64, alive: Duration) -> Result<Option<StepState>> {
    Census::take(root, &Layout::of_step(step))?.state(root, step, alive)
}

impl CommitInfo {
    pub(crate) fn fill(&mut self, commit: Commit) {
        self.epoch = commit.epoch;
        self.parent = commit.parent;
        self.world = commit.world;
        self.manifest = Some(commit.manifest);
        self.bytes =
            commit.files.iter().fold(self.bytes, |sum, file| sum.saturating_add(file.bytes));
        self.bytes_here = self.bytes;
        self.files = commit.files;
    }
}
