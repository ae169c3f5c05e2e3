//! Signs of life while a step is moved: to collectors there, and to removers here.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_checkpoint::commit::{Adoption, ReadLease, Root};

/// How often: a third of a reader's lease, and far below any collector's grace time.
const EVERY: Duration = Duration::from_secs(20);

/// See the module.
pub(super) struct Pulse<'a> {
    to: &'a Root,
    adoption: &'a Adoption,
    mover: u32,
    lease: &'a ReadLease,
    last: Mutex<(u64, Duration)>,
}

impl<'a> Pulse<'a> {
    pub(super) fn new(
        to: &'a Root,
        adoption: &'a Adoption,
        mover: u32,
        lease: &'a ReadLease,
    ) -> Self {
        Self { to, adoption, mover, lease, last: Mutex::new((0, to.clock.now())) }
    }

    /// To be called with every part. What goes wrong here is no fault of the move: the next one may do better.
    pub(super) fn beat(&self) {
        self.lease.beat();
        let now = self.to.clock.now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(last.1) < EVERY {
            return;
        }
        *last = (last.0 + 1, now);
        if let Err(error) = self.adoption.beat(self.to, self.mover, last.0) {
            tracing::debug!(%error, "no beat of a mover");
        }
    }
}
