//! What goes where, what may go away, and what a save does when the first tier is full. Decisions only, made from a
//! [`View`] of all tiers: nothing is read, moved or removed here, so that every rule can be tested by itself.
//!
//! Tiers are numbered from the nearest: 0 is where saves go, each later one is farther and larger. "The newest" is the
//! last in the order of commits, which is not that of numbers (see `latest`).
//!
//! What never happens, whatever the rules say:
//!
//! - A step goes from tier 0 that is not committed elsewhere, by the same attempt.
//! - A step goes from a tier that a later one still takes and does not have, unless one between them has it: a bucket
//!   that is out of reach must not fill the first tier.
//! - The newest commit goes from the last tier that has it; so does one that is held.
//! - A step that is being moved goes from its source.
//! - A commit is moved that is not the one that counts for its step ([`Rank`]).
//! - A commit that is held is replaced, or one by another that was not made later.

mod admit;
mod keep;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::time::Duration;

use forebay_checkpoint::commit::AttemptId;

pub use admit::{Admission, Backlog};
pub use moves::Order;

/// How a copy stands to the commits of the same step on other tiers: a job that went back to an earlier step saves the
/// later ones again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// It is the commit of the step: where there is no other, or of several the last in the order of commits.
    Counts,
    /// Another tier has the one that counts, which was made later: that replaces it.
    Older,
    /// Another one counts, and was not made later as far as is known: a person has to look.
    Aside,
}

/// A step on a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepCopy {
    /// Whose.
    pub attempt: AttemptId,
    /// Its bytes; on the drives of nodes those of this one.
    pub bytes: u64,
    /// Its bytes on all nodes.
    pub whole_bytes: u64,
    /// Since it was committed there, by the store's clock; not for one that is not.
    pub age: Duration,
    /// Whether it is committed there; else it is on its way.
    pub committed: bool,
    /// It may not go now: somebody copies it from there, or restores it, or a removal of it has just failed.
    pub in_use: bool,
    /// It is being removed: no other copy goes because this one is here, and its bytes count as gone.
    pub going: bool,
    /// Of one that is committed.
    pub rank: Rank,
}

/// What is on a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierView {
    /// By step.
    pub copies: BTreeMap<u64, StepCopy>,
    /// Bytes of whatever else takes room there.
    pub other_bytes: u64,
    /// It cannot be read now: what it has counts, and nothing comes from there.
    pub silent: bool,
    /// It is the drives of several nodes, and bytes are those of this one: what it has is gone when a node is, so no
    /// copy goes elsewhere because it is here.
    pub partial: bool,
}

/// What is on all tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// All steps that any tier has committed, in the order of commits, the newest last.
    pub line: Vec<u64>,
    /// The nearest first.
    pub tiers: Vec<TierView>,
}

/// Which steps a tier keeps: those that any of these keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The last so many that the tier has.
    pub last: usize,
    /// Those that this divides.
    pub every: Option<NonZeroU64>,
    /// Those that are younger.
    pub within: Option<Duration>,
    /// These.
    pub pins: BTreeSet<u64>,
}

/// Which steps come to a tier by themselves. Pinned ones always do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// All.
    All,
    /// Those that this divides: an archive.
    Every(NonZeroU64),
    /// None but the pinned.
    Pinned,
}

/// The rules of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierRules {
    /// What comes. Of tier 0: everything, by saves.
    pub takes: Takes,
    /// What stays.
    pub keep: Keep,
    /// Most bytes that may be there now; `None`: as much as comes.
    pub capacity: Option<u64>,
    /// Most bytes that can ever be there, whatever else takes room at the moment; `None`: no limit is known.
    pub ever: Option<u64>,
}

/// The rules of all tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// As many as the view has tiers; what has no rules is left alone.
    pub tiers: Vec<TierRules>,
    /// Steps that are removed nowhere: a legal hold.
    pub holds: BTreeSet<u64>,
    /// What a save does for which tier 0 has no room.
    pub backlog: Backlog,
}

impl View {
    /// Bytes on a tier, what is on its way there included, what is going not.
    pub fn used(&self, tier: usize) -> u64 {
        let Some(tier) = self.tiers.get(tier) else { return 0 };
        let copies = tier.copies.values().filter(|copy| !copy.going).map(|copy| copy.bytes);
        copies.fold(tier.other_bytes, u64::saturating_add)
    }

    /// The step that is committed on a tier.
    fn committed(&self, tier: usize, step: u64) -> Option<&StepCopy> {
        self.tiers.get(tier)?.copies.get(&step).filter(|copy| copy.committed)
    }

    /// Whether a tier has this very commit.
    fn has(&self, tier: usize, step: u64, attempt: AttemptId) -> bool {
        self.committed(tier, step).is_some_and(|copy| copy.attempt == attempt)
    }

    /// The same, and it stays there, whole.
    fn keeps(&self, tier: usize, step: u64, attempt: AttemptId) -> bool {
        let is_whole = self.tiers.get(tier).is_some_and(|tier| !tier.partial);
        let stays = self.committed(tier, step).is_some_and(|copy| !copy.going);
        is_whole && stays && self.has(tier, step, attempt)
    }

    /// Whether another tier has it and keeps it.
    fn elsewhere(&self, tier: usize, step: u64, attempt: AttemptId) -> bool {
        (0..self.tiers.len()).any(|other| other != tier && self.keeps(other, step, attempt))
    }

    /// The commits of a tier, in their order.
    fn line_of(&self, tier: usize) -> impl DoubleEndedIterator<Item = u64> {
        self.line.iter().copied().filter(move |step| self.committed(tier, *step).is_some())
    }
}

impl TierRules {
    /// Whether a step comes to the tier.
    fn takes(&self, step: u64) -> bool {
        let by_rule = match self.takes {
            Takes::All => true,
            Takes::Every(n) => step.is_multiple_of(n.get()),
            Takes::Pinned => false,
        };
        by_rule || self.keep.pins.contains(&step)
    }
}

#[cfg(test)]
mod tests;
