//! Whose turn it is to commit: rank 0's, until it shows no sign of being at it.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use forebay_error::Result;

use super::attempt::Attempt;
use super::record::{Beat, encode};
use super::watch::Watch;

impl Attempt {
    /// Rank 0 always; others when the committer's counter has stood still for their turn, or hints say that it is their
    /// turn at once.
    pub(crate) fn is_turn(&self, watch: &mut Watch, now: Duration) -> Result<bool> {
        if self.spec.rank == 0 {
            return Ok(true);
        }
        let key = self.layout.record(self.spec.attempt, "committer");
        let beat: Option<Beat> = self.root.read(&key)?;
        let own = beat.is_some_and(|beat| beat.rank == self.spec.rank);
        let turn = self.policy.turn(self.spec.rank, self.seed());
        let count = beat.map(|beat| beat.count);
        let still = watch.committer.see(count, now);
        Ok(own || still >= turn || self.is_heir(beat.map_or(0, |beat| beat.rank)))
    }

    /// Shows that this rank gathers parts, three times a takeover time.
    pub(crate) fn bump(&self, bumped: &mut (u64, Duration)) {
        let now = self.root.clock.now();
        let due = bumped.1 + self.policy.takeover / 3;
        if self.spec.world == 1 || (now < due && (self.spec.rank == 0 || bumped.0 > 0)) {
            return;
        }
        *bumped = (bumped.0 + 1, now);
        let beat = Beat { rank: self.spec.rank, count: forebay_store::random() };
        let key = self.layout.record(self.spec.attempt, "committer");
        let written = encode(&beat, &[]).and_then(|bytes| self.root.store.put(&key, &bytes));
        if let Err(error) = written {
            tracing::debug!(%error, "no sign of the committer");
        }
    }

    /// Does long work, and shows all the while that this rank is at it: by a thread, since the work may not come up for
    /// air for minutes.
    pub(crate) fn bumping<T>(&self, bumped: &mut (u64, Duration), work: impl FnOnce() -> T) -> T {
        if self.spec.world == 1 {
            return work();
        }
        let (done, waiting) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let pause = self.policy.takeover / 3;
                while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(pause) {
                    self.bump(bumped);
                }
            });
            let result = work();
            drop(done);
            result
        })
    }
}
