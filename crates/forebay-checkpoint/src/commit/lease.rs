//! Leases: counters that a holder bumps and an observer watches.
//!
//! An observer never asks what time it was when the holder wrote; it asks whether the counter has changed, by its own
//! clock. A holder whose counter stands still for the whole of a lease counts as dead; one that was only slow finds
//! that its rights are gone before it can do harm.

use std::time::Duration;

/// Watches one counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseWatch {
    count: Option<u64>,
    since: Duration,
}

impl LeaseWatch {
    /// Starts to watch at `now`.
    pub(crate) fn new(now: Duration) -> Self {
        Self { count: None, since: now }
    }

    /// What is there now (`None`: no record yet); returns for how long it has not changed.
    pub(crate) fn see(&mut self, count: Option<u64>, now: Duration) -> Duration {
        if count != self.count {
            self.count = count;
            self.since = now;
        }
        now.saturating_sub(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_observers_clock_counts() {
        let at = Duration::from_secs;
        let mut watch = LeaseWatch::new(at(100));
        assert_eq!(watch.see(Some(7), at(100)), at(0));
        assert_eq!(watch.see(Some(7), at(130)), at(30));
        assert_eq!(watch.see(Some(8), at(131)), at(0));
        // A counter that goes back (another process took the lease) is a sign of life too.
        assert_eq!(watch.see(Some(1), at(140)), at(0));
        // A clock that stands still, or goes back, never lets a lease run out.
        assert_eq!(watch.see(Some(1), at(140)), at(0));
        assert_eq!(watch.see(Some(1), at(90)), at(0));
    }
}
