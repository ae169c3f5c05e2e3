//! What goes where next.

use forebay_checkpoint::commit::AttemptId;

use super::{Rank, Rules, StepCopy, TierRules, View};
use crate::limits::Priority;

/// A step that is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Which.
    pub step: u64,
    /// The tier that has it.
    pub from: usize,
    /// The tier that takes it.
    pub to: usize,
    /// How urgent it is.
    pub priority: Priority,
    /// The older commit of the step that it replaces there.
    pub replaces: Option<AttemptId>,
}

/// What of a tier is around a step, in the line of all.
#[derive(Clone, Copy, Default)]
struct Around {
    /// Whether it has one that is older, in the line and by its number: what a job left behind when it went back stands
    /// before all others in the line, and says nothing of them.
    older: bool,
    /// How many it has, or gets, that are newer.
    newer: usize,
}

impl View {
    /// For each place of the line, the lowest number of what a tier has before it; the highest there is for none.
    fn lowest_before(&self, tier: usize) -> Vec<u64> {
        let mut lowest = u64::MAX;
        let before = |step: &u64| {
            let found = lowest;
            if self.committed(tier, *step).is_some() {
                lowest = lowest.min(*step);
            }
            found
        };
        self.line.iter().map(before).collect()
    }

    /// Whether a tier had the step and let it go, or never needs it: a still farther one has this commit, and steps
    /// come hop by hop.
    pub(super) fn passed_by(&self, tier: usize, step: u64, copy: &StepCopy) -> bool {
        (tier + 1..self.tiers.len()).any(|farther| self.has(farther, step, copy.attempt))
    }
}

impl TierRules {
    /// Whether a step that went past the tier belongs there still: it was made after one that is there, so the tier was
    /// in use and did not answer, or was full; and what it keeps would keep it. What it has let go for its rules, or
    /// for room, which goes from the oldest on, does not come again.
    fn misses(&self, around: Around, step: u64, copy: &StepCopy) -> bool {
        let keep = &self.keep;
        let is_kept = around.newer < keep.last
            || keep.every.is_some_and(|n| step.is_multiple_of(n.get()))
            || keep.within.is_some_and(|within| copy.age < within)
            || keep.pins.contains(&step);
        around.older && is_kept
    }
}

impl Rules {
    /// What is to be moved now: the newest first, then from the newest to the oldest. A step goes hop by hop: to the
    /// nearest tier that takes it and lacks it, from the nearest one before that has it. An older commit of the step is
    /// replaced, unless it is held; a tier that has another one gets none.
    pub fn moves(&self, view: &View) -> Vec<Order> {
        let newest = view.line.last();
        let tiers = 0..view.tiers.len();
        let lowest: Vec<Vec<u64>> = tiers.clone().map(|tier| view.lowest_before(tier)).collect();
        let mut around = vec![Around::default(); view.tiers.len()];
        let mut order = |(at, step): (usize, &u64)| {
            for (lowest, around) in lowest.iter().zip(&mut around) {
                around.older = lowest.get(at).is_some_and(|lowest| lowest < step);
            }
            let hop = self.hop(view, &around, *step);
            for (tier, around) in tiers.clone().zip(&mut around) {
                let comes = hop.is_some_and(|(_, to)| to == tier);
                around.newer += usize::from(comes || view.committed(tier, *step).is_some());
            }
            let (from, to) = hop?;
            let urgent = newest == Some(step);
            let priority = if urgent { Priority::Newest } else { Priority::Archive };
            let replaces = view.committed(to, *step).map(|older| older.attempt);
            Some(Order { step: *step, from, to, priority, replaces })
        };
        view.line.iter().enumerate().rev().filter_map(&mut order).collect()
    }

    /// The next hop of a step: from which tier to which.
    pub fn hop_of(&self, view: &View, step: u64) -> Option<(usize, usize)> {
        let around = |tier| {
            let at = view.line.iter().position(|other| *other == step).unwrap_or_default();
            let (older, newer) = view.line.split_at(at);
            let is_there = |step: &&u64| view.committed(tier, **step).is_some();
            let newer = newer.iter().skip(1).filter(is_there).count();
            let is_older = |other: &u64| *other < step && is_there(&other);
            Around { older: older.iter().any(is_older), newer }
        };
        let around: Vec<Around> = (0..view.tiers.len()).map(around).collect();
        self.hop(view, &around, step)
    }

    fn hop(&self, view: &View, around: &[Around], step: u64) -> Option<(usize, usize)> {
        let mut source: Option<(usize, &StepCopy)> = None;
        for (tier, rules) in (0..view.tiers.len()).zip(&self.tiers) {
            let there = view.committed(tier, step);
            match there.map(|copy| (copy, copy.rank)) {
                Some((copy, Rank::Counts)) => {
                    if view.tiers.get(tier).is_some_and(|tier| !tier.silent) {
                        source = Some((tier, copy));
                    }
                    continue;
                }
                Some((_, Rank::Older)) if !self.holds.contains(&step) => {}
                Some((_, Rank::Older | Rank::Aside)) => continue,
                None => {}
            }
            let Some((from, copy)) = source else { continue };
            let around = around.get(tier).copied().unwrap_or_default();
            if rules.takes(step)
                && (there.is_some()
                    || !view.passed_by(tier, step, copy)
                    || rules.misses(around, step, copy))
                && self.has_room(view, tier, step, copy)
            {
                return Some((from, tier));
            }
        }
        None
    }

    /// Whether it fits, what of it is there already not counted twice; an older commit of it stays until it is
    /// replaced. A farther tier is tried where it does not.
    fn has_room(&self, view: &View, tier: usize, step: u64, copy: &StepCopy) -> bool {
        let there = view.tiers.get(tier).and_then(|tier| tier.copies.get(&step));
        let there = there.filter(|there| !there.committed);
        let more = copy.whole_bytes.saturating_sub(there.map_or(0, |copy| copy.bytes));
        self.reclaim(view, tier, more).is_some_and(|evict| evict.is_empty())
    }
}
