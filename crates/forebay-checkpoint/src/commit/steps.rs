//! What is in a checkpoint root: steps that are committed, pending or dead.
//!
//! `.metadata` alone says whether a step is committed. Everything else here explains: the record of the commit, the
//! attempts that have not committed, their age by the store's clock.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_error::Result;
use forebay_store::{Listed, is_temp};

use super::gc::UNPUBLISHED;
use super::id::AttemptId;
use super::names::{Layout, Place, rank_of, step_of_folder};
use super::record::{Begin, Commit, Decision, FileRef, Outcome};
use super::root::{LIST_MAX, Root};

/// What a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can be loaded.
    Committed,
    /// Somebody may be writing it: what is there is younger than the time that counts as alive.
    Pending,
    /// Left over: never committed, or being removed.
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
    /// The files that it needs, where there is a record.
    pub files: Vec<FileRef>,
    /// Bytes of those and of `.metadata`.
    pub bytes: u64,
    /// Age of `.metadata` by the store's clock.
    pub age: Duration,
    /// Why the commit or its record cannot be read, if so: it is listed, and nothing of its folder is removed.
    pub damage: Option<String>,
}

/// How an attempt that is not the commit stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptStatus {
    /// May be under way.
    Pending,
    /// Says that it failed, and why.
    Failed(String),
    /// Was committed, and replaced or unpublished.
    Replaced,
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
        let pending = |attempt: &AttemptState| attempt.status == AttemptStatus::Pending;
        match &self.commit {
            Some(_) => State::Committed,
            None if self.attempts.iter().any(pending) => State::Pending,
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

/// All steps with what is in them, in order. `alive`: how young something must be to count as under way; the lease of the
/// writers' policy or more.
pub fn steps(root: &Root, alive: Duration) -> Result<Vec<StepState>> {
    let mut states = Vec::new();
    for step in numbers(root)? {
        let census = Census::take(root, &Layout::of_step(step))?;
        if let Some(state) = census.state(root, step, alive)? {
            states.push(state);
        }
    }
    Ok(states)
}

/// One step; `None` where its folder is not there or holds nothing of a checkpoint.
pub(crate) fn step_state(root: &Root, step: u64) -> Result<Option<StepState>> {
    Census::take(root, &Layout::of_step(step))?.state(root, step, Duration::ZERO)
}

/// The objects of a step's folder, by whom they belong to.
pub(crate) struct Census {
    pub(crate) layout: Layout,
    pub(crate) metadata: Option<Listed>,
    pub(crate) attempts: BTreeMap<AttemptId, Vec<Listed>>,
    pub(crate) readers: Vec<Listed>,
    /// Temporary objects of the store, left by writers that were killed.
    pub(crate) temps: Vec<Listed>,
}

impl Census {
    pub(crate) fn take(root: &Root, layout: &Layout) -> Result<Self> {
        let mut census = Self {
            layout: layout.clone(),
            metadata: None,
            attempts: BTreeMap::new(),
            readers: Vec::new(),
            temps: Vec::new(),
        };
        for object in root.store.list(layout.prefix(), LIST_MAX)? {
            if is_temp(&object.key) {
                census.temps.push(object);
                continue;
            }
            match layout.place(&object.key) {
                Place::Metadata => census.metadata = Some(object),
                Place::File(attempt) | Place::Record(attempt) => {
                    census.attempts.entry(attempt).or_default().push(object);
                }
                Place::Reader => census.readers.push(object),
                Place::Foreign => {}
            }
        }
        Ok(census)
    }

    /// Age of the youngest object of an attempt.
    pub(crate) fn age(&self, attempt: AttemptId) -> Duration {
        let objects = self.attempts.get(&attempt).into_iter().flatten();
        objects.map(|object| object.age.0).min().unwrap_or(Duration::MAX)
    }

    /// Names of records of an attempt.
    fn records(&self, attempt: AttemptId) -> impl Iterator<Item = &str> {
        let prefix = self.layout.records(attempt);
        let objects = self.attempts.get(&attempt).into_iter().flatten();
        objects.filter_map(move |object| object.key.strip_prefix(&prefix))
    }

    pub(crate) fn has_record(&self, attempt: AttemptId, name: &str) -> bool {
        self.records(attempt).any(|record| record == name)
    }

    /// Whether a remover has moved a commit aside under this attempt.
    pub(crate) fn has_aside(&self, attempt: AttemptId) -> bool {
        self.records(attempt).any(|record| record.starts_with(UNPUBLISHED))
    }

    /// What the commit says of itself.
    pub(crate) fn commit(&self, root: &Root) -> Result<Option<CommitInfo>> {
        let Some(listed) = &self.metadata else { return Ok(None) };
        let mut info = CommitInfo {
            attempt: None,
            epoch: 0,
            parent: None,
            world: 0,
            manifest: None,
            files: Vec::new(),
            bytes: listed.bytes,
            age: listed.age.0,
            damage: None,
        };
        match root.committed(&self.layout) {
            // Unpublished since it was listed.
            Ok(None) => return Ok(None),
            Ok(Some(attempt)) => info.attempt = attempt,
            Err(error) => info.damage = Some(error.render()),
        }
        let Some(attempt) = info.attempt else { return Ok(Some(info)) };
        match root.decision(&self.layout, attempt) {
            Ok(Some(Decision::Commit(commit))) => info.fill(commit),
            Ok(Some(Decision::Abort(_))) => {
                info.damage = Some("the record of the commit says that it was given up".to_owned());
            }
            Ok(None) => {
                let objects = self.attempts.get(&attempt).into_iter().flatten();
                info.bytes += objects.map(|object| object.bytes).sum::<u64>();
            }
            Err(error) => info.damage = Some(error.render()),
        }
        Ok(Some(info))
    }

    fn state(&self, root: &Root, step: u64, alive: Duration) -> Result<Option<StepState>> {
        let commit = self.commit(root)?;
        let current = commit.as_ref().and_then(|commit| commit.attempt);
        let others = self.attempts.keys().filter(|attempt| Some(**attempt) != current);
        let attempts: Vec<_> = others.map(|attempt| self.attempt(root, *attempt, alive)).collect();
        if commit.is_none() && attempts.is_empty() {
            return Ok(None);
        }
        Ok(Some(StepState { step, commit, attempts }))
    }

    fn attempt(&self, root: &Root, attempt: AttemptId, alive: Duration) -> AttemptState {
        let count =
            |what| self.records(attempt).filter(|name| rank_of(name, what).is_some()).count();
        let objects = self.attempts.get(&attempt).into_iter().flatten();
        let age = self.age(attempt);
        let begins = count("begin") as u32;
        AttemptState {
            attempt,
            status: self.status(root, attempt, age < alive),
            ranks: (self.world(root, attempt), begins, count("part") as u32),
            bytes: objects.map(|object| object.bytes).sum(),
            age,
        }
    }

    fn status(&self, root: &Root, attempt: AttemptId, alive: bool) -> AttemptStatus {
        if self.has_record(attempt, "removing") {
            return AttemptStatus::Replaced;
        }
        let outcome = self.layout.record(attempt, "outcome");
        match root.decision(&self.layout, attempt) {
            Ok(Some(Decision::Abort(failure))) => {
                AttemptStatus::Failed(failure.to_error().to_string())
            }
            Ok(Some(Decision::Commit(_))) => match root.read::<Outcome>(&outcome) {
                Ok(Some(Outcome::Committed { .. })) => AttemptStatus::Replaced,
                Ok(Some(Outcome::Failed(failure))) => {
                    AttemptStatus::Failed(failure.to_error().to_string())
                }
                _ if alive => AttemptStatus::Pending,
                // A single rank leaves no outcome; its source is gone once it was published.
                _ if self.records(attempt).all(|name| rank_of(name, "metadata").is_none()) => {
                    AttemptStatus::Replaced
                }
                _ => AttemptStatus::Dead,
            },
            _ if alive => AttemptStatus::Pending,
            _ => AttemptStatus::Dead,
        }
    }

    fn world(&self, root: &Root, attempt: AttemptId) -> Option<u32> {
        let name = self.records(attempt).find(|name| rank_of(name, "begin").is_some())?;
        let key = self.layout.record(attempt, name);
        root.read::<Begin>(&key).ok().flatten().map(|begin| begin.world)
    }
}

impl CommitInfo {
    fn fill(&mut self, commit: Commit) {
        self.epoch = commit.epoch;
        self.parent = commit.parent;
        self.world = commit.world;
        self.manifest = Some(commit.manifest);
        self.bytes =
            commit.files.iter().fold(self.bytes, |sum, file| sum.saturating_add(file.bytes));
        self.files = commit.files;
    }
}
