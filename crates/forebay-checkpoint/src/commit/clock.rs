//! Time, as one observer sees it.
//!
//! Nothing here compares clocks of two machines. A waiting rank uses its own monotonic clock; ages of objects come from
//! the store. Tests put a clock of their own in, which is how a crash matrix of hours runs in seconds.

use std::time::{Duration, Instant};

/// A monotonic clock that one can wait on.
pub trait Clock: Send + Sync {
    /// Time since some moment that never changes.
    fn now(&self) -> Duration;

    /// Returns when that much time has passed, or a little later.
    fn sleep(&self, time: Duration);
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
