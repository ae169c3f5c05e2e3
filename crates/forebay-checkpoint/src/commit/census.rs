//! One listing of a step's folder, and what follows from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_error::{Category, Code, Error, Result};
use forebay_store::{Listed, is_temp};

use super::aside::UNPUBLISHED;
use super::id::AttemptId;
use super::mention;
use super::names::{Layout, Place, rank_of};
use super::record::{Begin, Decision, Outcome};
use super::root::{LIST_MAX, Root};
use super::steps::{AttemptState, AttemptStatus, CommitInfo, StepState};

/// The objects of a step's folder, by whom they belong to.
pub(crate) struct Census {
    pub(crate) layout: Layout,
    pub(crate) metadata: Option<Listed>,
    pub(crate) attempts: BTreeMap<AttemptId, Vec<Listed>>,
    pub(crate) readers: Vec<Listed>,
    /// Temporary objects of the store, left by writers that were killed.
    pub(crate) temps: Vec<Listed>,
}

/// Whether an error says that bytes are not what was written: all else may be another time, or from another place.
pub(crate) fn is_damage(error: &Error) -> bool {
    error.code().category() == Category::Data && error.code() != Code::FileChanged
}

/// Whether an error will be the same at the next look: damage, or what this version does not read.
fn is_unreadable(error: &Error) -> bool {
    is_damage(error) || error.code() == Code::Unsupported
}

impl Census {
    pub(crate) fn take(root: &Root, layout: &Layout) -> Result<Self> {
        Ok(Self::of(layout, root.store.list(layout.prefix(), LIST_MAX)?))
    }

    /// Of objects that were listed.
    pub(crate) fn of(layout: &Layout, objects: Vec<Listed>) -> Self {
        let mut census = Self {
            layout: layout.clone(),
            metadata: None,
            attempts: BTreeMap::new(),
            readers: Vec::new(),
            temps: Vec::new(),
        };
        for object in objects {
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
        census
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

    /// What the commit says of itself. What is damaged is told in it.
    ///
    /// Errors: I/O. A commit that cannot be read now is not one that is damaged.
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
            bytes_here: listed.bytes,
            age: listed.age.0,
            damage: None,
            epoch_lost: false,
        };
        match root.committed(&self.layout) {
            // Unpublished since it was listed.
            Ok(None) => return Ok(None),
            Ok(Some(Some(attempt))) => {
                info.attempt = Some(attempt);
                self.explain(root, attempt, &mut info)?;
                if !root.store.sees_all() {
                    info.bytes_here = self.file_bytes(attempt);
                }
            }
            Ok(Some(None)) => {
                if let Some(attempt) = self.mentioned(root, |_| true)? {
                    let what = format!("it names files of {attempt}, and not whose commit it is");
                    self.lose_metadata(root, what, &mut info)?;
                }
            }
            Err(error) if is_unreadable(&error) => {
                self.lose_metadata(root, error.render(), &mut info)?;
            }
            Err(error) => return Err(error),
        }
        Ok(Some(info))
    }

    /// Of the attempts that have left anything here and are `wanted`, one whose files `.metadata` names, be it whose it
    /// may.
    pub(crate) fn mentioned(
        &self,
        root: &Root,
        wanted: impl Fn(AttemptId) -> bool,
    ) -> Result<Option<AttemptId>> {
        if self.metadata.is_none() || !self.attempts.keys().any(|attempt| wanted(*attempt)) {
            return Ok(None);
        }
        let Some(source) = root.open_metadata(&self.layout)? else { return Ok(None) };
        let is_here = |attempt| self.attempts.contains_key(&attempt) && wanted(attempt);
        mention::find(source.as_ref(), is_here)
    }

    /// Bytes of an attempt's data that are here.
    fn file_bytes(&self, attempt: AttemptId) -> u64 {
        let objects = self.attempts.get(&attempt).into_iter().flatten();
        let is_file = |object: &&Listed| matches!(self.layout.place(&object.key), Place::File(_));
        objects.filter(is_file).map(|object| object.bytes).fold(0, u64::saturating_add)
    }

    /// What the record of the commit says.
    fn explain(&self, root: &Root, attempt: AttemptId, info: &mut CommitInfo) -> Result<()> {
        match root.decision(&self.layout, attempt) {
            Ok(Some(Decision::Commit(commit))) => info.fill(commit),
            Ok(Some(Decision::Abort(_))) => {
                info.damage = Some("the record of the commit says that it was given up".to_owned());
                info.epoch_lost = true;
            }
            Ok(None) => {
                let objects = self.attempts.get(&attempt).into_iter().flatten();
                info.bytes += objects.map(|object| object.bytes).sum::<u64>();
                info.bytes_here = info.bytes;
            }
            Err(error) if is_unreadable(&error) => {
                let hint = "the step may be whole: if `forebay ckpt verify` says so, remove that \
                            record, and it counts as of no epoch";
                info.damage = Some(error.hint(hint).render());
                info.epoch_lost = true;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// `.metadata` is damaged. Where one record alone tells of a commit, it was that.
    fn lose_metadata(&self, root: &Root, damage: String, info: &mut CommitInfo) -> Result<()> {
        info.damage = Some(damage);
        let mut epochs = BTreeSet::new();
        for attempt in self.attempts.keys() {
            match root.decision(&self.layout, *attempt) {
                Ok(Some(Decision::Commit(commit))) => drop(epochs.insert(commit.epoch)),
                Ok(Some(Decision::Abort(_)) | None) => {}
                Err(error) if is_unreadable(&error) => epochs.extend([0, u64::MAX]),
                Err(error) => return Err(error),
            }
        }
        match (epochs.len(), epochs.first()) {
            (1, Some(epoch)) => info.epoch = *epoch,
            _ => info.epoch_lost = true,
        }
        Ok(())
    }

    /// The step as it is listed; `None` where there is nothing of a checkpoint.
    pub(crate) fn state(
        &self,
        root: &Root,
        step: u64,
        alive: Duration,
    ) -> Result<Option<StepState>> {
        let commit = self.commit(root)?;
        Ok(self.state_with(root, step, commit, alive))
    }

    /// The same, of a commit that is known.
    pub(crate) fn state_with(
        &self,
        root: &Root,
        step: u64,
        commit: Option<CommitInfo>,
        alive: Duration,
    ) -> Option<StepState> {
        let current = commit.as_ref().and_then(|commit| commit.attempt);
        let others = self.attempts.keys().filter(|attempt| Some(**attempt) != current);
        let attempts: Vec<_> = others.map(|attempt| self.attempt(root, *attempt, alive)).collect();
        if commit.is_none() && attempts.is_empty() {
            return None;
        }
        Some(StepState { step, commit, attempts })
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
        if self.is_being_removed(attempt) || self.was_removed_elsewhere(root, attempt) {
            return AttemptStatus::Removed;
        }
        let outcome = self.layout.record(attempt, "outcome");
        // A single rank leaves no outcome; its source is gone once it was published.
        let published = self.records(attempt).all(|name| rank_of(name, "metadata").is_none());
        // Where there is no `.metadata`, the source may just be on its way there.
        let replaced = published && self.metadata.is_some();
        match root.decision(&self.layout, attempt) {
            Ok(Some(Decision::Abort(failure))) => {
                AttemptStatus::Failed(failure.to_error().to_string())
            }
            Ok(Some(Decision::Commit(_))) => match root.read::<Outcome>(&outcome) {
                Ok(Some(Outcome::Committed { .. })) => self.gone(root, attempt),
                Ok(Some(Outcome::Failed(failure))) => {
                    AttemptStatus::Failed(failure.to_error().to_string())
                }
                _ if alive && !replaced => AttemptStatus::Pending,
                _ if published => match self.is_cleaned_up(attempt) {
                    true => self.gone(root, attempt),
                    false => AttemptStatus::Replaced,
                },
                _ => AttemptStatus::Dead,
            },
            _ if alive => AttemptStatus::Pending,
            _ => AttemptStatus::Dead,
        }
    }

    /// What became of a commit that is not there: replaced, or lost. That is told of one alone whose data are there and
    /// which no other attempt has replaced or could have.
    fn gone(&self, root: &Root, attempt: AttemptId) -> AttemptStatus {
        let is_file = |object: &Listed| matches!(self.layout.place(&object.key), Place::File(_));
        let has_files = self.attempts.get(&attempt).into_iter().flatten().any(is_file);
        let replaces = |other: &AttemptId| {
            *other != attempt
                && !matches!(
                    root.decision(&self.layout, *other),
                    Ok(None | Some(Decision::Abort(_)))
                )
        };
        let removed = |other: &AttemptId| self.is_being_removed(*other);
        let mut all = self.attempts.keys();
        let explained = all.any(|other| replaces(other) || removed(other));
        match self.metadata.is_none() && has_files && !explained {
            true => AttemptStatus::Lost,
            false => AttemptStatus::Replaced,
        }
    }

    /// Whether a prune has announced that it takes the commit away, or has taken it where there was no room to say so.
    pub(crate) fn is_being_removed(&self, attempt: AttemptId) -> bool {
        self.has_record(attempt, "removing") || self.has_aside(attempt)
    }

    /// Whether another node has removed an attempt, of which this one still has data: a record is there before any
    /// data, and goes last.
    fn was_removed_elsewhere(&self, root: &Root, attempt: AttemptId) -> bool {
        !root.store.sees_all() && self.records(attempt).next().is_none()
    }

    /// Whether all that is left of an attempt's records is what its commit needs: it ended, and well.
    fn is_cleaned_up(&self, attempt: AttemptId) -> bool {
        self.records(attempt).all(|name| ["decision", "outcome"].contains(&name))
    }

    fn world(&self, root: &Root, attempt: AttemptId) -> Option<u32> {
        let name = self.records(attempt).find(|name| rank_of(name, "begin").is_some())?;
        let key = self.layout.record(attempt, name);
        root.read::<Begin>(&key).ok().flatten().map(|begin| begin.world)
    }
}
