//! What stays on a tier, and what may go.

use std::collections::BTreeSet;

use super::{Rank, Rules, StepCopy, View};

impl Rules {
    /// The commits of a tier that its rules keep.
    pub fn kept(&self, view: &View, tier: usize) -> BTreeSet<u64> {
        let Some(rules) = self.tiers.get(tier) else { return view.line_of(tier).collect() };
        let keep = &rules.keep;
        let mut kept: BTreeSet<u64> = view.line_of(tier).rev().take(keep.last).collect();
        kept.extend(view.line_of(tier).filter(|step| {
            let copy = view.committed(tier, *step);
            let young = keep.within.zip(copy).is_some_and(|(within, copy)| copy.age < within);
            let divides = keep.every.is_some_and(|n| step.is_multiple_of(n.get()));
            young || divides || keep.pins.contains(step)
        }));
        kept
    }

    /// The commits of a tier that go, in the order of commits: those that the rules do not keep, that [may go](super),
    /// and that would not come again.
    pub fn evictable(&self, view: &View, tier: usize) -> Vec<u64> {
        let kept = self.kept(view, tier);
        let goes = |step: &u64| {
            !kept.contains(step)
                && self.may_go(view, tier, *step)
                && !self.comes_again(view, tier, *step)
        };
        view.line_of(tier).filter(goes).collect()
    }

    /// Whether an earlier tier has a step that this one takes, and would bring it again: where that keeps more than
    /// this one, the same steps would go to and fro for ever.
    fn comes_again(&self, view: &View, tier: usize, step: u64) -> bool {
        let Some(copy) = view.committed(tier, step) else { return false };
        let takes = self.tiers.get(tier).is_some_and(|rules| rules.takes(step));
        let earlier = || (0..tier).any(|earlier| view.keeps(earlier, step, copy.attempt));
        tier > 0 && takes && earlier() && !view.passed_by(tier, step, copy)
    }

    /// What to take away from a tier for `bytes` more, the oldest first: what goes anyhow; then what the rules would
    /// keep but is neither pinned nor the newest, and is committed or was saved anew elsewhere. `None` where that is
    /// not enough.
    pub fn reclaim(&self, view: &View, tier: usize, bytes: u64) -> Option<Vec<u64>> {
        let Some(capacity) = self.tiers.get(tier)?.capacity else { return Some(Vec::new()) };
        let mut over = view.used(tier).saturating_add(bytes).saturating_sub(capacity);
        let first = self.evictable(view, tier);
        let spare = |step: &u64| !first.contains(step) && self.is_spare(view, tier, *step);
        let second: Vec<u64> = view.line_of(tier).filter(spare).collect();
        let mut taken = Vec::new();
        for step in first.into_iter().chain(second) {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(view.committed(tier, step).map_or(0, |copy| copy.bytes));
            taken.push(step);
        }
        (over == 0).then_some(taken)
    }

    /// Whether a step that the rules keep may go all the same when room is needed.
    fn is_spare(&self, view: &View, tier: usize, step: u64) -> bool {
        let pinned = self.tiers.get(tier).is_some_and(|rules| rules.keep.pins.contains(&step));
        let copied = view.committed(tier, step).is_some_and(|copy| {
            copy.rank == Rank::Older || view.elsewhere(tier, step, copy.attempt)
        });
        let newest = view.line.last() == Some(&step);
        !pinned && !newest && copied && self.may_go(view, tier, step)
    }

    /// What holds whatever the rules of the tier say, see [the module](super).
    fn may_go(&self, view: &View, tier: usize, step: u64) -> bool {
        let Some(copy) = view.committed(tier, step) else { return false };
        if copy.in_use || copy.going || self.holds.contains(&step) {
            return false;
        }
        if self.awaited(view, tier, step, copy) {
            return false;
        }
        let sole = !view.elsewhere(tier, step, copy.attempt);
        let newest = view.line.last() == Some(&step);
        !(sole && (tier == 0 || newest))
    }

    /// Whether a later tier takes it and does not have it, and it is on this one to bring it there: no tier between the
    /// two has it.
    fn awaited(&self, view: &View, tier: usize, step: u64, copy: &StepCopy) -> bool {
        if copy.rank != Rank::Counts {
            return false;
        }
        let later = (0..view.tiers.len()).skip(tier + 1);
        later.zip(self.tiers.iter().skip(tier + 1)).any(|(later, rules)| {
            // One that has another commit of the step, which is not older, takes it no more: a person has to look.
            let older = |there: &StepCopy| there.rank == Rank::Older && !self.holds.contains(&step);
            rules.takes(step)
                && view.committed(later, step).is_none_or(older)
                && !view.passed_by(later, step, copy)
                && !(tier + 1..later).any(|between| view.keeps(between, step, copy.attempt))
        })
    }
}
