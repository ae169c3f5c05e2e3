//! Failing: so that every rank hears of it, even on a full disk, and nothing is left that cannot be used.

use std::time::Duration;

use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_store::Expect;

use super::attempt::{Attempt, Rooms, lock};
use super::hints::Hint;
use super::record::{Decision, Failure, encode};
use super::withdraw::is_blank;

/// How often a record that tells the others of a failure is tried.
const ABORT_TRIES: u32 = 4;

impl Attempt {
    /// Fails the attempt for every rank and removes this rank's data. Returns the error, for the caller to raise:
    /// that of the rank which failed first.
    pub fn fail(mut self, error: Error) -> Error {
        let failure = Failure::of(self.spec.rank, &error);
        self.tell(&Hint::Failed(failure.clone()));
        match self.abort(&failure) {
            Ok(Decision::Abort(first)) => {
                self.discard();
                if first != failure && !is_blank(&first) {
                    return first.to_error();
                }
            }
            Ok(Decision::Commit(_)) => tracing::warn!("a rank failed after all had their parts"),
            Err(also) => {
                tracing::warn!(error = %also, "a failure could not be written down");
                if self.spec.world == 1 {
                    // Nobody else can commit it. On a full disk this is what makes room.
                    self.discard();
                }
            }
        }
        error
    }

    /// Decides to abort; returns the decision that stands, which may be another.
    pub(crate) fn abort(&mut self, failure: &Failure) -> Result<Decision> {
        let bytes = encode(&Decision::Abort(failure.clone()), &[])?;
        let mut pause = Duration::from_millis(10);
        let mut last = None;
        for _ in 0..ABORT_TRIES {
            match self.try_abort(&bytes) {
                Ok(Some(decision)) => return Ok(decision),
                Ok(None) => last = None,
                Err(error) => last = Some(error),
            }
            self.root.clock.sleep(pause);
            pause *= 4;
        }
        match last {
            Some(error) if error.code() == Code::NoSpace => self.abort_without_words(error),
            Some(error) => Err(error),
            None => Err(self.collected()),
        }
    }

    /// On a disk that was full before this rank had set anything aside. A name needs no block, so the others stop, and
    /// know from the record's being empty that the disk is full.
    fn abort_without_words(&self, error: Error) -> Result<Decision> {
        let key = self.layout.record(self.spec.attempt, "decision");
        self.root.create_once(&key, &[]).map_err(|_| error)?;
        let decision = self.root.decision(&self.layout, self.spec.attempt)?;
        decision.ok_or_else(|| self.collected())
    }

    /// First through the room that was set aside, then by creating the record.
    fn try_abort(&mut self, bytes: &[u8]) -> Result<Option<Decision>> {
        let key = self.layout.record(self.spec.attempt, "decision");
        if let Some(room) = self.rooms.fail.take() {
            let written = write_all_at(room.sink(), bytes, 0).and_then(|()| room.seal());
            let staged = self.record_of("fail", self.spec.rank);
            // Whether it worked is read below.
            let done =
                written.and_then(|()| self.root.store.publish(&staged, &key, &Expect::Absent));
            if let Err(error) = done {
                tracing::debug!(%error, "the room for a failure could not be used");
            }
        }
        if let Some(decision) = self.root.decision(&self.layout, self.spec.attempt)? {
            return Ok(Some(decision));
        }
        self.root.create_once(&key, bytes)?;
        self.root.decision(&self.layout, self.spec.attempt)
    }

    /// Removes what this rank made in an attempt whose abort is decided. What cannot be removed is left to the
    /// collector.
    pub(crate) fn discard(&mut self) {
        let files = std::mem::take(&mut *lock(&self.files));
        self.clean_up(files);
    }

    /// Removes some objects and this rank's records of an attempt that has ended; the decision and the outcome stay.
    /// Nothing of it is needed any more, so the disk is not waited for.
    pub(crate) fn clean_up(&mut self, mut keys: Vec<String>) {
        self.rooms = Rooms::default();
        keys.append(&mut lock(&self.made));
        if let Err(error) = self.root.store.discard(&keys) {
            tracing::debug!(%error, "left to the collector");
        }
    }

    /// The error of a writer that was thought dead.
    pub(crate) fn collected(&self) -> Error {
        let what = format!("attempt {} was given up for dead and collected", self.spec.attempt);
        let error = Error::new(Code::Fenced, what);
        error
            .at(self.root.place(self.layout.prefix()))
            .hint("the rank was silent for longer than the grace of a garbage collection")
    }
}
