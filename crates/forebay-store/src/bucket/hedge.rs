//! When to ask a second time for what is slow to come.
//!
//! One read in hundreds takes many times as long as the others: a busy disk behind the store, a bad path to it. A
//! second request for the same range then is done long before the first. It is sent when a read has taken 1.5 times
//! what 95 of 100 reads of its size class take, and never for more than one in twenty, so that a store that is slow as
//! a whole is not asked twice for everything.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Reads that are remembered in each class.
const REMEMBERED: usize = 128;
/// Fewer say nothing about the 95th of 100.
const KNOWN_MIN: usize = 20;
const DELAY_MIN: Duration = Duration::from_millis(30);
/// Second requests for each first one.
const SHARE: f64 = 0.05;
/// Second requests that may be sent at once.
const SAVED_MAX: f64 = 4.0;
/// Reads of sizes within a factor of four are of one class.
const CLASSES: usize = 20;

/// See the module.
pub(super) struct Pace {
    state: Mutex<State>,
    on: bool,
}

struct State {
    classes: Vec<Class>,
    saved: f64,
    sent: u64,
}

#[derive(Clone, Default)]
struct Class {
    times: Vec<Duration>,
    next: usize,
}

impl Pace {
    pub(super) fn new(on: bool) -> Self {
        let state = State { classes: vec![Class::default(); CLASSES], saved: 1.0, sent: 0 };
        Self { state: Mutex::new(state), on }
    }

    /// How long a read may take before it is asked for again; `None` while that is not known, or is not wanted.
    pub(super) fn delay(&self, bytes: u64) -> Option<Duration> {
        if !self.on {
            return None;
        }
        let state = self.state();
        let class = state.classes.get(class_of(bytes))?;
        if class.times.len() < KNOWN_MIN {
            return None;
        }
        let mut times = class.times.clone();
        times.sort_unstable();
        let slow = *times.get(times.len() * 95 / 100)?;
        Some(slow.mul_f64(1.5).max(DELAY_MIN))
    }

    /// Whether a second request may be sent.
    pub(super) fn may_ask_again(&self) -> bool {
        let mut state = self.state();
        if state.saved < 1.0 {
            return false;
        }
        state.saved -= 1.0;
        state.sent += 1;
        true
    }

    /// A first request has been answered, or the second one in its place, in that time.
    pub(super) fn took(&self, bytes: u64, time: Duration) {
        let mut state = self.state();
        state.saved = (state.saved + SHARE).min(SAVED_MAX);
        let Some(class) = state.classes.get_mut(class_of(bytes)) else { return };
        if class.times.len() < REMEMBERED {
            class.times.push(time);
        } else if let Some(oldest) = class.times.get_mut(class.next) {
            *oldest = time;
            class.next = (class.next + 1) % REMEMBERED;
        }
    }

    /// Second requests so far.
    pub(super) fn asked_again(&self) -> u64 {
        self.state().sent
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn class_of(bytes: u64) -> usize {
    ((64 - bytes.leading_zeros()) / 2).min(CLASSES as u32 - 1) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_follows_from_what_reads_took() {
        let pace = Pace::new(true);
        assert_eq!(pace.delay(1000), None);
        for time in 1..=100 {
            pace.took(1000, Duration::from_millis(time));
        }
        assert_eq!(pace.delay(1000), Some(Duration::from_millis(144)));
        assert_eq!(pace.delay(8 << 20), None, "another class");
        assert_eq!(Pace::new(false).delay(1000), None);
    }

    #[test]
    fn one_in_twenty_is_asked_again_at_most() {
        let pace = Pace::new(true);
        let mut sent = 0;
        for _ in 0..1000 {
            sent += u32::from(pace.may_ask_again());
            pace.took(1, Duration::from_millis(1));
        }
        assert!((40..=55).contains(&sent), "{sent}");
        assert_eq!(pace.asked_again(), u64::from(sent));
    }
}
