//! How many reads to keep in flight.
//!
//! Drives differ: an array of NVMe drives needs tens of MiB in flight, a virtual disk gives its best with eight and a
//! third less with a hundred (seen: 1.0 GB/s with 128 MiB in flight, 1.9 with 16), and bytes that wait long in staging
//! memory have left the processor's cache when they are copied on. So the depth starts low and is doubled as long as
//! that pays: a window of completions is timed at each depth, and the first doubling that brings less than a tenth more
//! is taken back. A few windows later it is tried again, because other users of the drive come and go.

use std::time::{Duration, Instant};

/// Depth to begin with, in pieces.
const DEPTH_START: usize = 2;

/// Completions that make a window, beside the depth itself: what was in flight before the change does not count.
const WINDOW_PIECES: usize = 8;

/// A window is at least so long: on a fast drive eight pieces are over in a millisecond, which says nothing.
const WINDOW_MIN: Duration = Duration::from_millis(10);

/// Gain that a doubling must bring, in hundredths.
const GAIN_PERCENT: u64 = 10;

/// Windows after which a higher depth is tried again.
const RETRY_WINDOWS: usize = 32;

/// Chooses the depth by hill climbing.
pub(crate) struct Pacer {
    depth: usize,
    depth_max: usize,
    /// Bytes a second at the depth below, while a doubling is on trial.
    below: Option<u64>,
    /// Windows until the next trial.
    rest: usize,
    /// Completions to pass over: they were submitted at the former depth.
    skip: usize,
    pieces: usize,
    bytes: u64,
    started: Instant,
}

impl Pacer {
    pub(crate) fn new(depth_max: usize) -> Self {
        let depth = DEPTH_START.min(depth_max.max(1));
        Self {
            depth,
            depth_max: depth_max.max(1),
            below: None,
            rest: 0,
            skip: depth,
            pieces: 0,
            bytes: 0,
            started: Instant::now(),
        }
    }

    /// Pieces to keep in flight.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Counts a completed piece.
    pub(crate) fn completed(&mut self, bytes: u64, now: Instant) {
        if self.skip > 0 {
            self.skip -= 1;
            if self.skip == 0 {
                self.begin(now);
            }
            return;
        }
        self.pieces += 1;
        self.bytes += bytes;
        let spent = now.saturating_duration_since(self.started);
        if self.pieces < WINDOW_PIECES.max(self.depth) || spent < WINDOW_MIN {
            return;
        }
        let micros = u64::try_from(spent.as_micros()).unwrap_or(u64::MAX).max(1);
        self.judge(self.bytes.saturating_mul(1_000_000) / micros);
        if self.skip == 0 {
            self.begin(now);
        }
    }

    /// Decides at the end of a window.
    fn judge(&mut self, rate: u64) {
        if let Some(below) = self.below.take()
            && rate.saturating_mul(100) < below.saturating_mul(100 + GAIN_PERCENT)
        {
            self.set(self.depth / 2);
            self.rest = RETRY_WINDOWS;
        } else if self.rest > 0 {
            self.rest -= 1;
        } else if self.depth < self.depth_max {
            self.below = Some(rate);
            self.set((self.depth * 2).min(self.depth_max));
        }
    }

    fn set(&mut self, depth: usize) {
        self.depth = depth.max(1);
        self.skip = self.depth;
    }

    fn begin(&mut self, now: Instant) {
        self.pieces = 0;
        self.bytes = 0;
        self.started = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a pacer on a drive whose rate (pieces a second) depends on the depth.
    fn settle(rate: impl Fn(usize) -> f64, pieces: usize) -> Vec<usize> {
        let mut pacer = Pacer::new(16);
        let mut now = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..pieces {
            now += Duration::from_secs_f64(1.0 / rate(pacer.depth()));
            pacer.completed(4 << 20, now);
            seen.push(pacer.depth());
        }
        seen
    }

    #[test]
    fn a_drive_that_gains_by_depth_gets_it() {
        let seen = settle(|depth| 400.0 * depth as f64, 200);
        assert_eq!(seen.last(), Some(&16));
    }

    #[test]
    fn a_drive_that_loses_by_depth_stays_low() {
        let seen = settle(|depth| 500.0 / depth as f64, 400);
        let high = seen.iter().filter(|&&depth| depth > 2).count();
        assert!(high * 5 < seen.len(), "{high} of {} above the start", seen.len());
    }

    #[test]
    fn a_drive_that_changes_is_found_out() {
        let mut pacer = Pacer::new(16);
        let mut now = Instant::now();
        for index in 0..4000 {
            let rate = if index < 500 { 400.0 } else { 200.0 * pacer.depth() as f64 };
            now += Duration::from_secs_f64(1.0 / rate);
            pacer.completed(4 << 20, now);
        }
        assert_eq!(pacer.depth(), 16);
    }

    #[test]
    fn the_depth_keeps_its_bounds() {
        assert_eq!(Pacer::new(0).depth(), 1);
        assert!(
            settle(|depth| 1e6 * depth as f64, 1000).iter().all(|depth| (1..=16).contains(depth))
        );
    }
}
