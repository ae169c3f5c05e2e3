//! Hints: a faster way to hear of what the store's records say.
//!
//! A hint may be lost, late, doubled, garbled or of another attempt; it only makes a rank look sooner. The one
//! exception carries what a broken store cannot: a rank that hears of a failure writes it down on the failing rank's
//! behalf. A lie can so cost an attempt, never a committed step.
//!
//! # What travels
//!
//! [`Board`] is one rank's end of a key-value store that all ranks share (torch's). It does no I/O: it gives out
//! [`Order`]s, one at a time, and takes the answers, so whoever owns the connection carries them. Keys, below a prefix
//! of the run's own:
//!
//! | key | value | written | read |
//! | --- | --- | --- | --- |
//! | `beat/<rank>` | a decimal counter; `closed` once the rank saves no more | every second by each rank, whether it saves or not | every second by ranks that wait |
//! | `parts/<attempt>` | a decimal counter of published parts | by each rank, once | by the rank in charge |
//! | `event/<attempt>` | a notice: failed and why, or decided | by whoever has news | 20 times a second by ranks that wait |
//!
//! Ranks that wait read an event in one request of some 15 microseconds of the server; from 500 ranks on they ask more
//! rarely, so that all of them together make 10 000 requests a second. The rank in charge reads all counters in one
//! request a second, others those of the lowest 16 ranks only: that is how they find out that they are in charge.
//!
//! # When is a rank dead?
//!
//! A counter that stands still for [`SILENT`] makes a rank *suspect*, if this rank hears well meanwhile: at least four
//! rounds in which its own counter came back as it was sent. That alone proves nothing. Counters are sent by whatever
//! thread owns the connection, which may need a lock that the process holds for long (Python's), or the connection may
//! be lost. So a rank whose counter was not acknowledged for [`PULSE_AFTER`] shows its life in the checkpoint store
//! instead, from a native thread that needs nothing but the store ([`Pulse`]). A rank in charge looks there, by its
//! own clock, and only when that stands still too, for [`Policy::pulse`](super::Policy::pulse), is the rank dead. A
//! process that was stopped for less than both times together, 10 s, is not taken for dead; one that runs and reaches
//! either store never is. If it is after all (a process stopped for longer), that costs the attempt: the decision says
//! so, and the rank finds it when it wakes.
//!
//! A rank that is cut off from hints for [`PULSE_MAX`] says once that it does without ([`OFF`]), and is then judged by
//! the lease of its attempt alone, as all are where there are no hints.

mod board;
mod ledger;
mod notice;
mod peers;
mod pulse;
#[cfg(test)]
mod tests;

use std::time::Duration;

use super::id::AttemptId;
use super::record::Failure;

pub use board::Board;
pub use ledger::{Answer, Order};
pub use pulse::Pulse;
pub(crate) use pulse::{ALIVE, OFF, key as pulse_key};

/// How long a counter stands still before its rank is suspect.
pub(crate) const SILENT: Duration = Duration::from_secs(5);
/// How long a rank's own counter may go unacknowledged before it shows its life in the checkpoint store. With
/// [`PULSE_EVERY`] below [`SILENT`], so that a pulse is there when others begin to look.
pub(crate) const PULSE_AFTER: Duration = Duration::from_secs(2);
/// Between two such signs.
pub(crate) const PULSE_EVERY: Duration = Duration::from_secs(1);
/// How long it does so before it says that it does without hints: 30 small objects.
pub(crate) const PULSE_MAX: Duration = Duration::from_secs(30);

/// Something that happened on another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Told: a rank has published its part. Heard: all have.
    Part,
    /// A rank has failed.
    Failed(Failure),
    /// The decision or the outcome is there.
    Decided,
}

/// A rank that others should look after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// Which.
    pub rank: u32,
    /// Host and process, for people.
    pub who: String,
    /// Whether it said that it saves no more; otherwise it was not heard of.
    pub left: bool,
}

/// A channel between the ranks of an attempt.
pub trait Hints: Send + Sync {
    /// Tells the other ranks. Returns at once; what cannot be sent is dropped.
    fn tell(&self, attempt: AttemptId, hint: &Hint);

    /// Waits until something arrives for the attempt, at most `time`, and returns it; nothing where the time is up.
    fn wait(&self, attempt: AttemptId, time: Duration) -> Vec<Hint>;

    /// Says that this rank works on an attempt: from now on for some seconds it listens to how the others are.
    fn attend(&self, _attempt: AttemptId) {}

    /// Whether hints come through now: then a rank need not look so often itself.
    fn hears(&self) -> bool {
        false
    }

    /// Ranks to look after, in their order; none while this rank does not hear well.
    fn suspects(&self) -> Vec<Suspect> {
        Vec::new()
    }
}
