//! Hints: a faster way to hear of what the store's records say.
//!
//! A hint may be lost, late, doubled or of another attempt; it only makes a rank look sooner. The one exception carries
//! what a broken store cannot: a rank that hears of a failure writes it down on the failing rank's behalf.

use std::time::Duration;

use super::id::AttemptId;
use super::record::Failure;

/// Something that happened on another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A rank has published its part.
    Part {
        /// Which.
        rank: u32,
    },
    /// A rank has failed.
    Failed(Failure),
    /// The decision or the outcome is there.
    Decided,
}

/// A channel between the ranks of an attempt: torch's store, agents.
pub trait Hints: Send + Sync {
    /// Tells the other ranks. Returns at once; what cannot be sent is dropped.
    fn tell(&self, attempt: AttemptId, hint: &Hint);

    /// Waits until something arrives for the attempt, at most `time`, and returns it; nothing where the time is up.
    fn wait(&self, attempt: AttemptId, time: Duration) -> Vec<Hint>;
}
