//! How long things may take.

use std::time::Duration;

/// Times and limits of a save. The defaults suit jobs of one to a few thousand ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// From the moment a rank starts to wait until it gives the attempt up.
    pub deadline: Duration,
    /// A rank whose counter stands still for that long is dead. It must be bumped at least three times in that time:
    /// [`Attempt::beat`](super::Attempt::beat).
    pub lease: Duration,
    /// A rank that hints make suspect is dead when its sign of life in the store stands still for that long too.
    pub pulse: Duration,
    /// How long the first committer may show no sign before the next ranks take over: 1, 2, 2, 3, 3, 3, 3, 4 ...
    /// times this, and a random part of it.
    pub takeover: Duration,
    /// How long a rank may be away that never began, before the storage counts as not shared.
    pub appear: Duration,
    /// Shortest and longest pause between two looks without hints.
    pub poll: (Duration, Duration),
    /// Longest pause between two looks while hints come through.
    pub poll_hinted: Duration,
    /// How many looks in a row may fail before the rank gives up.
    pub poll_errors_max: u32,
    /// Whether a commit of the same step may be replaced. The old one stays until the new one is there.
    pub overwrite: bool,
    /// Whether the committer looks for every file that the commit refers to, and its size, before it decides.
    pub check_files: bool,
    /// Most bytes of all parts together, in the committer's memory.
    pub parts_bytes_max: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(600),
            lease: Duration::from_secs(60),
            pulse: Duration::from_secs(5),
            takeover: Duration::from_secs(10),
            appear: Duration::from_secs(120),
            poll: (Duration::from_millis(2), Duration::from_secs(1)),
            poll_hinted: Duration::from_secs(3),
            poll_errors_max: 5,
            overwrite: true,
            check_files: true,
            parts_bytes_max: 4 << 30,
        }
    }
}

impl Policy {
    /// When `rank` takes over from a committer that shows no sign of life: doubling crowds, spread by a jitter that
    /// is the same each time for the rank.
    pub(crate) fn turn(&self, rank: u32, seed: u64) -> Duration {
        if rank == 0 {
            return Duration::ZERO;
        }
        let level = u32::BITS - rank.leading_zeros();
        self.takeover * level + self.jitter(rank, seed)
    }

    /// Up to half of `takeover`, from the rank and a seed.
    pub(crate) fn jitter(&self, rank: u32, seed: u64) -> Duration {
        let mixed = (seed ^ u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.takeover / 2 * ((mixed >> 48) as u32) / (1 << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranks_take_over_first_and_all_do_in_the_end() {
        let policy = Policy::default();
        let turn = |rank| policy.turn(rank, 5).as_secs_f64() / policy.takeover.as_secs_f64();
        assert_eq!(turn(0), 0.0);
        assert!((1.0..1.5).contains(&turn(1)));
        assert!((2.0..2.5).contains(&turn(3)));
        assert!((14.0..14.5).contains(&turn(16_383)));
        let waits: std::collections::HashSet<_> = (64..128).map(|r| policy.turn(r, 5)).collect();
        assert!(waits.len() > 48, "jitter spreads them: {}", waits.len());
    }
}
