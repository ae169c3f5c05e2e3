//! A rank's part in an attempt: it begins, writes data, contributes its part, or fails for all to see.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_store::{DataObject, Expect, Published};

use super::dead::Pulses;
use super::epoch;
use super::hints::{Hint, Hints};
use super::id::{AttemptId, StructureHash};
use super::names::{self, Layout};
use super::policy::Policy;
use super::record::{Base, Beat, Begin, Decision, PartHead, encode};
use super::root::Root;

/// Room for a failure record, set aside at the start: one block of most file systems.
pub(crate) const FAIL_ROOM_BYTES: u64 = 4096;

/// What a rank needs to know to take part in a save. All but `rank` and `part_bytes` must be the same on all ranks.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The step's folder, relative to the store; empty where the store is the step itself.
    pub folder: String,
    /// The step.
    pub step: u64,
    /// The attempt: never used before.
    pub attempt: AttemptId,
    /// This rank.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// What all ranks must agree on.
    pub structure: StructureHash,
    /// The run's epoch, see [`epoch::claim`]; 0 where none was claimed.
    pub epoch: u64,
    /// The step before this one on the run's line.
    pub parent: Option<u64>,
    /// Room to set aside for this rank's part. A larger part is written too, if there is room.
    pub part_bytes: u64,
    /// Host and process, for people.
    pub who: String,
}

/// One rank's side of an attempt. See the module of [`commit`](super) for how a save calls it.
pub struct Attempt {
    pub(crate) root: Root,
    pub(crate) layout: Layout,
    pub(crate) spec: Spec,
    pub(crate) policy: Policy,
    pub(crate) hints: Option<Arc<dyn Hints>>,
    pub(crate) begin: Begin,
    /// Whether the begin record is there and ours.
    pub(crate) owned: bool,
    /// Whether somebody else uses this attempt and rank.
    foreign: bool,
    pub(crate) rooms: Rooms,
    /// The rank's part, kept for the case that it commits.
    pub(crate) own_part: Option<Vec<u8>>,
    /// Keys of the data files, to be removed when the attempt fails.
    pub(crate) files: Mutex<Vec<String>>,
    beat: Mutex<(u64, Duration)>,
    pub(crate) pulses: Mutex<Pulses>,
}

/// Room that was set aside and not used yet.
#[derive(Default)]
pub(crate) struct Rooms {
    part: Option<Box<dyn DataObject>>,
    pub(crate) fail: Option<Box<dyn DataObject>>,
}

impl Attempt {
    /// Begins: looks whether this writer is fenced off and whether the step may be written, sets room aside, and says
    /// so to the other ranks.
    ///
    /// Errors: `fenced`, `already_exists` (the step, or the attempt), `no_space`, `usage`, `unsupported`, I/O. The
    /// other ranks hear of it as far as the store can still be written to.
    pub fn begin(
        root: &Root,
        policy: &Policy,
        hints: Option<Arc<dyn Hints>>,
        spec: Spec,
    ) -> Result<Self> {
        if spec.rank >= spec.world {
            let what = format!("rank {} of a world of {}", spec.rank, spec.world);
            return Err(Error::new(Code::Usage, what));
        }
        let layout = Layout::new(&spec.folder);
        let begin = Begin {
            attempt: spec.attempt.to_string(),
            step: spec.step,
            rank: spec.rank,
            world: spec.world,
            structure: spec.structure.to_string(),
            epoch: spec.epoch,
            parent: spec.parent,
            who: spec.who.clone(),
            nonce: super::random(),
            base: None,
        };
        let mut attempt = Self {
            root: root.clone(),
            layout,
            policy: policy.clone(),
            hints,
            begin,
            owned: false,
            foreign: false,
            rooms: Rooms::default(),
            own_part: None,
            files: Mutex::new(Vec::new()),
            beat: Mutex::new((0, root.clock.now())),
            pulses: Mutex::default(),
            spec,
        };
        match attempt.set_out() {
            Ok(()) => Ok(attempt),
            // Somebody else's attempt: it is not ours to fail.
            Err(error) if attempt.foreign => Err(error),
            Err(error) => Err(attempt.fail(error)),
        }
    }

    fn set_out(&mut self) -> Result<()> {
        epoch::check(&self.root, self.spec.epoch)?;
        self.look_at_base()?;
        if self.spec.world > 1 {
            let key = self.record_of("fail", self.spec.rank);
            let room = self.root.store.create_data(&key, FAIL_ROOM_BYTES);
            self.rooms.fail = Some(room.map_err(|error| match error.code() {
                Code::AlreadyExists => self.begun_before(&key),
                _ => error,
            })?);
        }
        let key = self.record_of("begin", self.spec.rank);
        if !self.root.create_once(&key, &encode(&self.begin, &[])?)? {
            return Err(self.begun_before(&key));
        }
        self.owned = true;
        if self.spec.world > 1 {
            let key = self.record_of("room", self.spec.rank);
            let room = self.spec.part_bytes.saturating_add(FAIL_ROOM_BYTES);
            self.rooms.part = Some(self.root.store.create_data(&key, room)?);
        }
        Ok(())
    }

    fn begun_before(&mut self, key: &str) -> Error {
        self.foreign = true;
        let what = format!("attempt {} was begun before", self.spec.attempt);
        let error = Error::new(Code::AlreadyExists, what).at(self.root.place(key));
        error.hint("two jobs use one run id, or a save counter went back")
    }

    /// Rank 0 notes what is to be replaced; the others need not read it.
    fn look_at_base(&mut self) -> Result<()> {
        if self.spec.rank != 0 {
            return self.root.check_fit(&Expect::Absent, &self.layout.metadata());
        }
        let current = self.root.current(&self.layout)?;
        let expect = match &current {
            Some(current) => Expect::Version(current.version.clone()),
            None => Expect::Absent,
        };
        if current.is_some() && !self.policy.overwrite {
            let what = format!("step {} is committed already", self.spec.step);
            let error = Error::new(Code::AlreadyExists, what);
            return Err(error.at(self.root.place(&self.layout.metadata())));
        }
        self.root.check_fit(&expect, &self.layout.metadata())?;
        self.begin.base = current.map(|current| Base {
            version: current.version.0,
            attempt: current.attempt.map(|attempt| attempt.to_string()),
        });
        Ok(())
    }

    /// The attempt.
    pub fn id(&self) -> AttemptId {
        self.spec.attempt
    }

    /// The name that the manifest must have if this rank commits; it is also given to the closure that assembles.
    pub fn manifest_name(&self) -> String {
        names::manifest(self.spec.attempt, self.spec.rank)
    }

    /// Starts one of this rank's data files, `<attempt>_<rank>_<number>.distcp`, with room for `bytes`. It must be
    /// sealed before [`publish_part`](Self::publish_part). Returns its name in the folder too.
    pub fn data_file(&self, number: u32, bytes: u64) -> Result<(String, Box<dyn DataObject>)> {
        let name = names::data_file(self.spec.attempt, self.spec.rank, number);
        Ok((name.clone(), self.own_file(&name, bytes)?))
    }

    /// Starts a side file of this rank that is committed with the rest, `<attempt>_<rank>_<suffix>`.
    pub fn side_file(&self, suffix: &str, bytes: u64) -> Result<(String, Box<dyn DataObject>)> {
        let name = format!("{}_{}_{suffix}", self.spec.attempt, self.spec.rank);
        if suffix.contains('/') {
            return Err(Error::new(Code::UnsafePath, "a side file's name has a `/`").at(name));
        }
        Ok((name.clone(), self.own_file(&name, bytes)?))
    }

    fn own_file(&self, name: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        let key = self.layout.file(name);
        self.files.lock().unwrap_or_else(PoisonError::into_inner).push(key.clone());
        self.root.store.create_data(&key, bytes)
    }

    /// Says that this rank is alive. To be called at least every third of the lease while data is written, from any
    /// thread; more calls cost nothing. What goes wrong here is no fault of the save: the next beat may do better.
    pub fn beat(&self) {
        let now = self.root.clock.now();
        let mut beat = self.beat.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(beat.1) < self.policy.lease / 3 {
            return;
        }
        *beat = (beat.0 + 1, now);
        let record = Beat { rank: self.spec.rank, count: beat.0 };
        let key = self.record_of("beat", self.spec.rank);
        let written = encode(&record, &[]).and_then(|bytes| self.root.store.put(&key, &bytes));
        if let Err(error) = written {
            tracing::debug!(%error, "no beat");
        }
    }

    /// Fails if the attempt has failed elsewhere, or a rank is dead by all signs, so that a rank need not write data
    /// for nothing. One read as a rule.
    pub fn check(&self) -> Result<()> {
        match self.root.decision(&self.layout, self.spec.attempt)? {
            Some(Decision::Abort(failure)) => Err(failure.to_error()),
            Some(Decision::Commit(_)) => Ok(()),
            None => self.check_for_dead(),
        }
    }

    /// Contributes this rank's part: all its data files must be sealed. From here on the rank only
    /// [waits](Self::wait_or_commit).
    pub fn publish_part(&mut self, part: &[u8]) -> Result<()> {
        if self.own_part.is_some() {
            return Err(Error::new(Code::Usage, "a rank has one part"));
        }
        self.own_part = Some(part.to_vec());
        if self.spec.world == 1 {
            return Ok(());
        }
        self.check()?;
        let head = PartHead {
            attempt: self.begin.attempt.clone(),
            rank: self.spec.rank,
            world: self.spec.world,
            structure: self.begin.structure.clone(),
            epoch: self.spec.epoch,
        };
        let bytes = encode(&head, part)?;
        let staged = self.stage_part(&bytes)?;
        let key = self.record_of("part", self.spec.rank);
        let published = self.root.store.publish(&staged, &key, &Expect::Absent);
        let there = || Ok(self.root.store.get(&key, self.policy.parts_bytes_max)?.is_some());
        match published {
            Ok(Published::Done { .. }) => {}
            Ok(Published::Lost) => {}
            // The reply to a publication that happened may be lost, and then its source is gone.
            Ok(Published::Withdrawn) if there()? => {}
            Err(_) if there()? => {}
            Ok(Published::Withdrawn) => return Err(self.collected()),
            Err(error) => return Err(error),
        }
        self.tell(&Hint::Part);
        Ok(())
    }

    /// Writes the part into its room, or beside it where it is too large; returns where.
    fn stage_part(&mut self, bytes: &[u8]) -> Result<String> {
        let key = self.record_of("room", self.spec.rank);
        let room_bytes = self.spec.part_bytes.saturating_add(FAIL_ROOM_BYTES);
        match self.rooms.part.take() {
            Some(room) if bytes.len() as u64 <= room_bytes => {
                write_all_at(room.sink(), bytes, 0)?;
                room.seal()?;
            }
            _ => self.root.store.put(&key, bytes)?,
        }
        Ok(key)
    }

    pub(crate) fn record_of(&self, what: &str, rank: u32) -> String {
        self.layout.of_rank(self.spec.attempt, what, rank)
    }

    pub(crate) fn tell(&self, hint: &Hint) {
        if let Some(hints) = &self.hints {
            hints.tell(self.spec.attempt, hint);
        }
    }
}
