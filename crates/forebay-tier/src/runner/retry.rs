//! When something that failed is tried again: after a time that doubles, with a random part, so that many who failed at
//! once do not come back at once.

use std::time::{Duration, Instant};

use forebay_error::{Code, Error};

use crate::status::Health;

/// Shortest wait.
const LEAST: Duration = Duration::from_millis(500);
/// Longest wait.
const MOST: Duration = Duration::from_secs(60);

/// Tries of one thing that fails.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retry {
    /// Failures in a row.
    pub(crate) fails: u32,
    until: Option<Instant>,
}

impl Retry {
    /// It failed; returns how long it is left alone.
    pub(crate) fn fail(&mut self, now: Instant, seed: u64) -> Duration {
        let wait = wait(self.fails, seed);
        self.fails = self.fails.saturating_add(1);
        self.until = Some(now + wait);
        wait
    }

    /// It is left alone for that long at least.
    pub(crate) fn rest(&mut self, now: Instant, time: Duration) {
        self.until = self.until.max(Some(now + time));
    }

    /// Whether it may be tried.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

/// Between half of the doubled time and all of it.
fn wait(fails: u32, seed: u64) -> Duration {
    let full = LEAST.saturating_mul(1 << fails.min(10)).min(MOST);
    let mixed = (seed ^ u64::from(fails)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    full / 2 + full / 2 * (mixed as u32 >> 16) / (1 << 16)
}

/// What a failed write says of a tier.
pub(crate) fn health_of(error: &Error) -> Health {
    match error.code() {
        Code::NoSpace => Health::Full,
        Code::PermissionDenied => Health::ReadOnly,
        _ if is_read_only(error) => Health::ReadOnly,
        Code::Unsupported => Health::ReadOnly,
        _ => Health::Troubled,
    }
}

/// EROFS has no code of its own; the cause says it.
fn is_read_only(error: &Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if kind == Some(std::io::ErrorKind::ReadOnlyFilesystem) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_minute_and_differ() {
        for fails in 0..40 {
            let full = LEAST.saturating_mul(1 << fails.min(10)).min(MOST);
            for seed in 0..20 {
                let wait = wait(fails, seed);
                assert!(wait >= full / 2 && wait <= full, "{fails}: {wait:?}");
            }
        }
        let spread: std::collections::HashSet<_> = (0..100).map(|seed| wait(5, seed)).collect();
        assert!(spread.len() > 80);
        let now = Instant::now();
        let mut retry = Retry::default();
        assert!(retry.is_due(now));
        let first = retry.fail(now, 1);
        assert!(!retry.is_due(now) && retry.is_due(now + first));
    }

    #[test]
    fn errors_say_what_is_wrong_with_a_tier() {
        let io = |errno| Error::io("cannot write", std::io::Error::from_raw_os_error(errno));
        assert_eq!(health_of(&io(libc::EROFS)), Health::ReadOnly);
        assert_eq!(health_of(&io(libc::ENOSPC)), Health::Full);
        assert_eq!(health_of(&io(libc::EACCES)), Health::ReadOnly);
        assert_eq!(health_of(&io(libc::EIO)), Health::Troubled);
    }
}
