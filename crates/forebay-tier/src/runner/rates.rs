//! Rates over the last seconds, from a count that only rises.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How far back.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// Least time between two samples.
const SAMPLE: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Rate {
    samples: VecDeque<(Instant, u64)>,
}

impl Rate {
    /// The count is so much now; returns the rate a second. Zero until two samples are there.
    pub(crate) fn see(&mut self, now: Instant, count: u64) -> f64 {
        let due = self.samples.back().is_none_or(|(at, _)| now.duration_since(*at) >= SAMPLE);
        if due {
            self.samples.push_back((now, count));
        }
        // One sample from before the window stays: the window begins between it and the next.
        while self.samples.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            self.samples.pop_front();
        }
        let Some((at, first)) = self.samples.front() else { return 0.0 };
        let time = now.duration_since(*at);
        // Of less time than between two samples a part or two would look like a flood.
        match time < SAMPLE {
            true => 0.0,
            false => count.saturating_sub(*first) as f64 / time.as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_the_last_ten_seconds() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert_eq!(rate.see(start, 0), 0.0);
        for second in 1..=20u64 {
            let seen = rate.see(start + Duration::from_secs(second), second * 100);
            assert!((seen - 100.0).abs() < 1.0, "{seen} after {second} s");
        }
        // Nothing more: it falls to nothing within the window.
        let later = |seconds: u64| start + Duration::from_secs(20 + seconds);
        assert!(rate.see(later(5), 2000) < 60.0);
        assert!(rate.see(later(11), 2000) < 10.0);
        assert_eq!(rate.see(later(30), 2000), 0.0);
    }
}
