//! From what was seen of each tier to what the rules decide on.
//!
//! Three things the rules are not told as they are:
//!
//! - Data of steps that were removed, and wait for their grace time, count as gone: else more and more would be removed
//!   for room that is coming anyway. Whether there is room *now* is looked at apart ([`Picture::fits_now`]).
//! - Commits that no line leads to (of a life of the job that was left behind) are the oldest, and the last copy of one
//!   is held: that a person decides.
//! - A tier that does not answer gets and gives nothing, and what it is known to have still counts.

use std::collections::{BTreeMap, BTreeSet};

use forebay_checkpoint::commit::{
    AttemptId, AttemptStatus, Claims, CommitInfo, Pin, Ranked, StepState,
};

use super::sight::{Seen, Sight};
use super::tiers::Tiers;
use crate::limits::Priority;
use crate::policy::{Order, Rank, Rules, StepCopy, Takes, TierView, View};

/// A tier as the picture is made of it.
pub(crate) struct Known<'a> {
    /// What was seen last; `None` before the first look.
    pub(crate) sight: Option<&'a Sight>,
    /// Whether steps can go there and come from there now.
    pub(crate) usable: (bool, bool),
    /// Steps that may not go now: they are being copied from there, or their removal has just failed.
    pub(crate) in_use: BTreeSet<u64>,
    /// Steps that are being removed there, or were since the last look.
    pub(crate) going: BTreeSet<u64>,
}

/// See the module.
pub(crate) struct Picture {
    pub(crate) view: View,
    pub(crate) rules: Rules,
    /// Commits that no line leads to any more.
    pub(crate) off_line: BTreeSet<u64>,
    /// By step, then by name.
    pub(crate) pins: BTreeMap<u64, BTreeSet<String>>,
    pub(crate) holds: BTreeSet<u64>,
    /// Bytes of checkpoints on each tier now, those that are going included.
    pub(crate) used: Vec<u64>,
    /// Bytes that its file system has room for, where that is known.
    free: Vec<Option<u64>>,
    /// The same without what cannot be used now: for moves.
    moves: (View, Rules),
    /// Tiers that can be read, and refuse writes.
    refusing: BTreeSet<usize>,
    /// Whether everything that could keep a step is known.
    pub(crate) marks_known: bool,
}

impl Picture {
    pub(crate) fn of(tiers: &Tiers, known: &[Known<'_>]) -> Self {
        let sights = || known.iter().filter_map(|tier| tier.sight);
        let commits = Commits::of(&sights().collect::<Vec<_>>());
        let ranked = commits.rank();
        let mut pins: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        let mut holds = BTreeSet::new();
        for marks in sights().filter_map(|sight| sight.marks.as_ref()) {
            holds.extend(marks.holds.iter().copied());
            for Pin { name, step, .. } in &marks.pins {
                pins.entry(*step).or_default().insert(name.clone());
            }
        }
        let line = [&ranked.off_line[..], &ranked.line[..]].concat();
        let of_tier = |tier: &Known<'_>| tier_view(tier, &commits);
        let of_tiers: Vec<(TierView, u64)> = known.iter().map(of_tier).collect();
        let used = of_tiers.iter().map(|(view, going)| {
            let copies = view.copies.values().map(|copy| copy.bytes);
            copies.fold(view.other_bytes.saturating_add(*going), u64::saturating_add)
        });
        let used: Vec<u64> = used.collect();
        let free: Vec<Option<u64>> =
            known.iter().map(|tier| tier.sight.and_then(|sight| sight.free)).collect();
        let views = of_tiers.into_iter().map(|(view, _)| view).collect();
        let view = View { line, tiers: views };
        let pinned: BTreeSet<u64> = pins.keys().copied().collect();
        let sole = ranked.off_line.iter().filter(|step| copies_of(&view, **step) < 2);
        let held = holds.iter().chain(sole).copied().collect();
        let mut rules = tiers.rules(&pinned, held);
        for ((tier, used), free) in rules.tiers.iter_mut().zip(&used).zip(&free) {
            let room = free.map(|free| used.saturating_add(free));
            tier.capacity = tier.capacity.into_iter().chain(room).min();
        }
        for (tier, known) in rules.tiers.iter_mut().zip(known) {
            let size = known.sight.and_then(|sight| sight.size);
            tier.ever = tier.ever.into_iter().chain(size).min();
        }
        let moves = usable(&view, &rules, known);
        let refuses =
            |(number, tier): (usize, &Known<'_>)| (tier.usable == (false, true)).then_some(number);
        let refusing = known.iter().enumerate().filter_map(refuses).collect();
        let marks_known = known.iter().all(|tier| tier.sight.is_some_and(|s| s.marks.is_some()));
        let off_line = ranked.off_line.iter().copied().collect();
        Self { view, rules, off_line, pins, holds, used, free, moves, refusing, marks_known }
    }

    /// What is to be moved, the most urgent first, room not looked at.
    pub(crate) fn wanted(&self) -> Vec<Order> {
        let (view, rules) = &self.moves;
        let mut boundless = rules.clone();
        boundless.tiers.iter_mut().for_each(|tier| tier.capacity = None);
        boundless.moves(view)
    }

    /// What would be moved to tiers that refuse it just now: it is owed to them all the same.
    pub(crate) fn refused(&self) -> Vec<Order> {
        if self.refusing.is_empty() {
            return Vec::new();
        }
        let mut rules = self.rules.clone();
        rules.tiers.iter_mut().for_each(|tier| tier.capacity = None);
        let mut owed = rules.moves(&self.moves.0);
        owed.retain(|order| self.refusing.contains(&order.to));
        owed
    }

    /// Where a step goes that has no room where it is wanted.
    pub(crate) fn elsewhere(&self, order: &Order) -> Option<Order> {
        let (view, rules) = &self.moves;
        let (from, to) = rules.hop_of(view, order.step)?;
        Some(Order { from, to, replaces: self.commit(to, order.step), ..*order })
    }

    /// Whether a step's bytes have room on a tier now.
    pub(crate) fn fits_now(&self, tier: usize, bytes: u64) -> bool {
        self.room(tier).is_none_or(|room| bytes <= room)
    }

    /// Bytes that a tier has room for now, where that is limited.
    pub(crate) fn room(&self, tier: usize) -> Option<u64> {
        let configured = self.rules.tiers.get(tier).and_then(|tier| tier.capacity);
        let used = self.used.get(tier).copied().unwrap_or(0);
        let free = self.free.get(tier).copied().flatten();
        configured.map(|capacity| capacity.saturating_sub(used)).into_iter().chain(free).min()
    }

    /// Bytes that a step would still need on a tier.
    pub(crate) fn missing_bytes(&self, order: &Order) -> u64 {
        let copy = |tier: usize| self.view.tiers.get(tier)?.copies.get(&order.step);
        // An older commit of it stays until it is replaced, and its data for the grace time.
        let there = copy(order.to).filter(|copy| !copy.committed).map_or(0, |copy| copy.bytes);
        copy(order.from).map_or(0, |copy| copy.whole_bytes).saturating_sub(there)
    }

    /// What to take away on a tier so that the newest step has room there: only steps that are older.
    pub(crate) fn make_room(&self, order: &Order) -> Vec<u64> {
        if order.priority != Priority::Newest {
            return Vec::new();
        }
        let bytes = self.missing_bytes(order);
        self.rules.reclaim(&self.view, order.to, bytes).unwrap_or_default()
    }

    /// The commit of a step on a tier.
    pub(crate) fn commit(&self, tier: usize, step: u64) -> Option<AttemptId> {
        let copy = self.view.tiers.get(tier)?.copies.get(&step)?;
        copy.committed.then_some(copy.attempt)
    }

    /// Whether a tier has the commit of a step that counts.
    pub(crate) fn counts(&self, tier: usize, step: u64) -> bool {
        let copy = self.view.tiers.get(tier).and_then(|tier| tier.copies.get(&step));
        copy.is_some_and(|copy| copy.committed && copy.rank == Rank::Counts)
    }

    /// Older commits that stay in the way of what was saved later because they are held: tier and step.
    pub(crate) fn held_back(&self) -> BTreeSet<(usize, u64)> {
        let older = |tier: usize| {
            let copies = self.view.tiers.get(tier).into_iter().flat_map(|tier| &tier.copies);
            let held = copies.filter(|(step, copy)| {
                copy.committed && copy.rank == Rank::Older && self.holds.contains(step)
            });
            held.map(move |(step, _)| (tier, *step))
        };
        (0..self.view.tiers.len()).flat_map(older).collect()
    }

    /// Tiers that have this commit and keep it, but for one.
    pub(crate) fn others(&self, but: usize, step: u64, attempt: AttemptId) -> Vec<usize> {
        let stays = |tier: usize| {
            let whole = self.view.tiers.get(tier).filter(|tier| !tier.partial);
            let copy = whole.and_then(|tier| tier.copies.get(&step));
            copy.is_some_and(|copy| copy.committed && copy.attempt == attempt && !copy.going)
        };
        (0..self.view.tiers.len()).filter(|tier| *tier != but && stays(*tier)).collect()
    }

    /// Bytes of the newest commit: what the next save is likely to need.
    pub(crate) fn newest_bytes(&self) -> Option<u64> {
        let newest = self.view.line.last()?;
        // Elsewhere it has the bytes of all nodes.
        let of_node = self.view.tiers.first().filter(|tier| tier.partial).map(std::slice::from_ref);
        let tiers = of_node.unwrap_or(&self.view.tiers);
        let copies = tiers.iter().filter_map(|tier| tier.copies.get(newest));
        copies.filter(|copy| copy.committed).map(|copy| copy.bytes).max()
    }
}

/// Copies of a step that stay.
fn copies_of(view: &View, step: u64) -> usize {
    let stays = |copy: &StepCopy| copy.committed && !copy.going;
    let copy = |tier: &TierView| !tier.partial && tier.copies.get(&step).is_some_and(stays);
    view.tiers.iter().filter(|tier| copy(tier)).count()
}

/// The commits of all tiers.
struct Commits<'a> {
    claims: Claims,
    /// Of several commits of one step the one that counts.
    chosen: BTreeMap<u64, &'a CommitInfo>,
}

impl<'a> Commits<'a> {
    fn of(sights: &[&'a Sight]) -> Self {
        let mut claims = Claims::default();
        let mut all: Vec<(u64, &CommitInfo)> = Vec::new();
        for sight in sights {
            claims.merge(&sight.claims);
            let commits = sight.steps.iter();
            let commits =
                commits.filter_map(|(step, seen)| Some((*step, seen.state.commit.as_ref()?)));
            // What Forebay did not write is not moved, and no rule counts it.
            all.extend(commits.filter(|(_, commit)| {
                commit.attempt.is_some() && commit.damage.is_none() && !commit.epoch_lost
            }));
        }
        let chosen = claims.choose(&all);
        Self { claims, chosen }
    }

    /// In their order.
    fn rank(&self) -> Ranked {
        let commits = self.chosen.iter().map(|(step, commit)| (*step, *commit));
        self.claims.rank(&commits.collect::<Vec<_>>())
    }

    /// How a tier's commit of a step stands to the others.
    fn rank_of(&self, step: u64, commit: &CommitInfo) -> Rank {
        match self.chosen.get(&step) {
            Some(chosen) if chosen.attempt != commit.attempt => match commit.is_before(chosen) {
                true => Rank::Older,
                false => Rank::Aside,
            },
            _ => Rank::Counts,
        }
    }
}

/// A tier as the rules see it, and bytes that are going.
fn tier_view(known: &Known<'_>, commits: &Commits<'_>) -> (TierView, u64) {
    let partial = known.sight.is_some_and(|sight| sight.partial);
    let (mut view, mut going) = (TierView { partial, ..TierView::default() }, 0u64);
    for (step, seen) in known.sight.into_iter().flat_map(|sight| &sight.steps) {
        let rank = |commit: &CommitInfo| commits.rank_of(*step, commit);
        let (copy, more_going, other) = step_copy(seen, rank);
        let (in_use, is_going) = (known.in_use.contains(step), known.going.contains(step));
        let copy = copy.map(|copy| StepCopy { in_use, going: is_going, ..copy });
        going = going.saturating_add(more_going);
        view.other_bytes = view.other_bytes.saturating_add(other);
        view.copies.extend(copy.map(|copy| (*step, copy)));
    }
    (view, going)
}

/// The copy of a step on a tier, apart from what is done with it now; bytes that are going there, and bytes of anything
/// else.
fn step_copy(seen: &Seen, rank: impl Fn(&CommitInfo) -> Rank) -> (Option<StepCopy>, u64, u64) {
    let StepState { commit, attempts, .. } = &*seen.state;
    let is_removed = |status: &AttemptStatus| *status == AttemptStatus::Removed;
    let going = attempts.iter().filter(|attempt| is_removed(&attempt.status));
    let going = going.map(|attempt| attempt.bytes).sum();
    let left = attempts.iter().filter(|attempt| !is_removed(&attempt.status));
    let sound = commit.as_ref().filter(|commit| commit.damage.is_none());
    if let Some((commit, attempt)) = sound.and_then(|commit| Some((commit, commit.attempt?))) {
        let (bytes, whole_bytes, age) = (commit.bytes_here, commit.bytes, seen.age());
        let copy = StepCopy {
            attempt,
            bytes,
            whole_bytes,
            age,
            committed: true,
            in_use: false,
            going: false,
            rank: rank(commit),
        };
        return (Some(copy), going, left.map(|attempt| attempt.bytes).sum());
    }
    let damaged = commit.as_ref().map_or(0, |commit| commit.bytes);
    let mut left: Vec<_> = left.collect();
    left.sort_by_key(|attempt| attempt.bytes);
    let on_its_way = left.pop();
    let copy = on_its_way.map(|attempt| StepCopy {
        attempt: attempt.attempt,
        bytes: attempt.bytes,
        whole_bytes: attempt.bytes,
        age: attempt.age,
        committed: false,
        in_use: false,
        going: false,
        rank: Rank::Counts,
    });
    let other: u64 = left.iter().map(|attempt| attempt.bytes).sum();
    (copy, going, damaged.saturating_add(other))
}

/// View and rules for moves: what cannot be written to takes nothing, what cannot be read gives nothing.
fn usable(view: &View, rules: &Rules, known: &[Known<'_>]) -> (View, Rules) {
    let (mut view, mut rules) = (view.clone(), rules.clone());
    for (number, tier) in known.iter().enumerate() {
        let (takes, gives) = tier.usable;
        if let Some(rules) = rules.tiers.get_mut(number).filter(|_| !takes) {
            rules.takes = Takes::Pinned;
            rules.keep.pins.clear();
        }
        if let Some(view) = view.tiers.get_mut(number) {
            view.silent = !gives;
        }
    }
    (view, rules)
}
