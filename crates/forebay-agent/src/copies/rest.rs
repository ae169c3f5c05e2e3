//! When a buddy that failed is asked again, and when another one takes its place.

use std::time::{Duration, Instant};

use forebay_error::{Code, Error};

/// Wait after the first failure; it doubles.
const LEAST: Duration = Duration::from_secs(1);
/// Longest wait.
const MOST: Duration = Duration::from_secs(60);
/// Failures in a row from which on another one gets the copy.
const FAILS_MAX: u32 = 4;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest {
    fails: u32,
    until: Option<Instant>,
    is_full: bool,
}

impl Rest {
    /// It failed.
    pub(super) fn fail(&mut self, now: Instant, error: &Error) {
        let wait = LEAST.saturating_mul(1 << self.fails.min(10)).min(MOST);
        self.fails = self.fails.saturating_add(1);
        self.is_full = error.code() == Code::NoSpace;
        // What is full does not become empty in a second.
        let wait = if self.is_full { MOST } else { wait };
        self.until = Some(now + wait);
    }

    /// Whether it may be asked.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }

    /// Whether it is not waited for any more.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_full || self.fails >= FAILS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_is_waited_for_and_then_replaced() {
        let (now, error) = (Instant::now(), Error::new(Code::Timeout, "no answer"));
        let mut rest = Rest::default();
        assert!(rest.is_due(now) && !rest.is_given_up());
        for fails in 1..=FAILS_MAX {
            rest.fail(now, &error);
            assert!(!rest.is_due(now + Duration::from_millis(900)));
            assert_eq!(rest.is_given_up(), fails == FAILS_MAX);
        }
        (0..40).for_each(|_| rest.fail(now, &error));
        assert!(rest.is_due(now + MOST), "it is asked again for ever");
        let mut full = Rest::default();
        full.fail(now, &Error::new(Code::NoSpace, "full"));
        assert!(full.is_given_up() && !full.is_due(now + LEAST));
    }
}
