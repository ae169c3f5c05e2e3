//! A rank's part in an attempt: it begins, writes data, contributes its part, or fails for all to see.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::{DataObject, Expect};

use super::dead::Pulses;
use super::epoch;
use super::hints::{Hint, Hints};
use super::id::{AttemptId, StructureHash};
use super::marks::Marks;
use super::names::{self, Layout};
use super::policy::Policy;
use super::record::{Base, Beat, Begin, Decision, encode};
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
    /// How many ranks the record of the commit tells of.
    pub(crate) writers: u32,
    /// Whether somebody else uses this attempt and rank.
    foreign: bool,
    pub(crate) rooms: Rooms,
    /// The rank's part, kept for the case that it commits.
    pub(crate) own_part: Option<Vec<u8>>,
    /// Keys of the data files, to be removed when the attempt fails.
    pub(crate) files: Mutex<Vec<String>>,
    /// Keys of the records that this rank has made, to be removed when it is over.
    pub(crate) made: Mutex<Vec<String>>,
    /// How many looks in a row have failed.
    misses: AtomicU32,
    beat: Mutex<(u64, Duration)>,
    pub(crate) pulses: Mutex<Pulses>,
}

/// Room that was set aside and not used yet.
#[derive(Default)]
pub(crate) struct Rooms {
    pub(crate) part: Option<Box<dyn DataObject>>,
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
            nonce: forebay_store::random(),
            base: None,
        };
        let mut attempt = Self {
            root: root.clone(),
            layout,
            policy: policy.clone(),
            hints,
            begin,
            writers: spec.world,
            foreign: false,
            rooms: Rooms::default(),
            own_part: None,
            files: Mutex::new(Vec::new()),
            made: Mutex::new(Vec::new()),
            misses: AtomicU32::new(0),
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

    /// Says that so many ranks wrote what this one commits for all of them, with nobody beside it in the attempt.
    pub fn writes_for(&mut self, ranks: u32) {
        self.writers = ranks;
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
            self.note_made(key);
        }
        let key = self.record_of("begin", self.spec.rank);
        match self.root.create_once(&key, &encode(&self.begin, &[])?) {
            Ok(true) => self.note_made(key),
            Ok(false) => return Err(self.begun_before(&key)),
            Err(error) => {
                if error.code() == Code::NotDurable {
                    self.note_made(key);
                }
                return Err(error);
            }
        }
        if self.spec.world > 1 {
            let key = self.record_of("room", self.spec.rank);
            self.note_made(key.clone());
            let room = self.spec.part_bytes.saturating_add(FAIL_ROOM_BYTES);
            self.rooms.part = Some(self.root.store.create_data(&key, room)?);
        }
        Ok(())
    }

    fn begun_before(&mut self, key: &str) -> Error {
        self.foreign = true;
        // Nor are the records of that name ours.
        lock(&self.made).clear();
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
        if current.is_some() {
            Marks::check_replaceable(&self.root, &self.layout, self.spec.step)?;
        }
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
        lock(&self.files).push(key.clone());
        self.root.store.create_data(&key, bytes)
    }

    /// Says that this rank is alive. To be called at least every third of the lease while data is written, from any
    /// thread; more calls cost nothing. What goes wrong here is no fault of the save: the next beat may do better.
    pub fn beat(&self) {
        let now = self.root.clock.now();
        let mut beat = lock(&self.beat);
        if now.saturating_sub(beat.1) < self.policy.lease / 3 {
            return;
        }
        *beat = (beat.0 + 1, now);
        let record = Beat { rank: self.spec.rank, count: beat.0 };
        let key = self.record_of("beat", self.spec.rank);
        if beat.0 == 1 {
            self.note_made(key.clone());
        }
        let written = encode(&record, &[]).and_then(|bytes| self.root.store.put(&key, &bytes));
        if let Err(error) = written {
            tracing::debug!(%error, "no beat");
        }
    }

    /// Fails if the attempt has failed elsewhere, or a rank is dead by all signs, so that a rank need not write data
    /// for nothing. One read as a rule. A store that does not answer may do so the next time: it is forgiven as often
    /// in a row as in the wait for the outcome ([`Policy::poll_errors_max`]).
    pub fn check(&self) -> Result<()> {
        let end = match self.find_end() {
            Ok(end) => end,
            Err(error) => {
                let misses = self.misses.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::debug!(%error, misses, "cannot look whether the attempt goes on");
                return if misses < self.policy.poll_errors_max { Ok(()) } else { Err(error) };
            }
        };
        self.misses.store(0, Ordering::Relaxed);
        end.map_or(Ok(()), Err)
    }

    /// Why the attempt is over, if it is. Errors are of the store.
    fn find_end(&self) -> Result<Option<Error>> {
        match self.root.decision(&self.layout, self.spec.attempt)? {
            Some(Decision::Abort(failure)) => Ok(Some(failure.to_error())),
            Some(Decision::Commit(_)) => Ok(None),
            None => self.check_for_dead(),
        }
    }

    /// Remembers a record to be removed.
    pub(crate) fn note_made(&self, key: String) {
        lock(&self.made).push(key);
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

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
