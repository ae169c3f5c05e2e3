//! A save comes: is there room for it on tier 0, and if not, what then?

use super::{Rules, View};

/// What a save does for which tier 0 has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// It waits until something has been moved on.
    Wait,
    /// It is left out.
    Skip,
    /// It goes to the nearest later tier with room; it waits where there is none.
    Straight,
}

/// What a save is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Save to this tier, once these steps have been taken away from it.
    Save {
        /// Which tier.
        tier: usize,
        /// Steps to remove there before, in this order.
        evict: Vec<u64>,
    },
    /// Ask again later: something has to be moved on first.
    Wait,
    /// Leave this save out.
    Skip,
    /// No tier can ever hold that much: asking again is of no use.
    Never,
}

impl Rules {
    /// Where a save of so many bytes goes.
    pub fn admit(&self, view: &View, bytes: u64) -> Admission {
        if let Some(evict) = self.reclaim(view, 0, bytes) {
            return Admission::Save { tier: 0, evict };
        }
        let fits = |tier: usize| {
            let rules = self.tiers.get(tier);
            rules.is_some_and(|rules| rules.ever.is_none_or(|most| bytes <= most))
        };
        let later = 1..view.tiers.len().min(self.tiers.len());
        match self.backlog {
            Backlog::Skip => Admission::Skip,
            Backlog::Wait if fits(0) => Admission::Wait,
            Backlog::Wait => Admission::Never,
            Backlog::Straight => {
                let save = |tier| Some((tier, self.reclaim(view, tier, bytes)?));
                match later.clone().find_map(save) {
                    Some((tier, evict)) => Admission::Save { tier, evict },
                    None if fits(0) || later.into_iter().any(fits) => Admission::Wait,
                    None => Admission::Never,
                }
            }
        }
    }
}
