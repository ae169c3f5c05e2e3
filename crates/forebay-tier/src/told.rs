//! What was told already: trouble that lasts is told once a minute, and not at every look that meets it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// After that long the same trouble is told again.
const AGAIN: Duration = Duration::from_secs(60);
/// Most that are remembered; beyond, all are forgotten, and told once more.
const LINES_MAX: usize = 1024;

/// Tier, step and text of each, and when it was told.
#[derive(Debug, Default)]
pub struct Told(BTreeMap<(Option<usize>, Option<u64>, String), Instant>);

impl Told {
    /// Whether trouble with a tier or a step is to be told now; it counts as told then.
    pub fn is_new(
        &mut self,
        tier: Option<usize>,
        step: Option<u64>,
        what: &str,
        now: Instant,
    ) -> bool {
        let lately = |at: &Instant| now.saturating_duration_since(*at) < AGAIN;
        let key = (tier, step, what.to_owned());
        if self.0.get(&key).is_some_and(lately) {
            return false;
        }
        self.0.retain(|_, at| lately(at));
        if self.0.len() >= LINES_MAX {
            self.0.clear();
        }
        self.0.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_told_once_a_minute_and_what_differs_at_once() {
        let (mut told, start) = (Told::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(told.is_new(Some(1), None, "down", at(0)));
        assert!(!told.is_new(Some(1), None, "down", at(59)));
        assert!(told.is_new(Some(2), None, "down", at(59)), "another tier");
        assert!(told.is_new(Some(1), Some(7), "down", at(59)), "a step");
        assert!(told.is_new(Some(1), None, "gone", at(59)), "another reason");
        assert!(told.is_new(Some(1), None, "down", at(60)));
        assert!(!told.is_new(Some(1), None, "down", at(61)));
        for number in 0..3 * LINES_MAX {
            told.is_new(None, None, &number.to_string(), at(61));
            assert!(told.0.len() <= LINES_MAX);
        }
    }
}
