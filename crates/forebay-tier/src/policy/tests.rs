//! The rules against a simple model: a job that saves, movers that do what they are told, collectors that remove what
//! they may, in any order.

use std::collections::BTreeMap;

use forebay_checkpoint::commit::RunId;
use proptest::prelude::*;

use super::*;
use crate::limits::Priority;

fn attempt(save: u64) -> AttemptId {
    AttemptId { run: RunId(1), save: save as u32 }
}

fn copy(step: u64, bytes: u64, age: u64) -> StepCopy {
    let age = Duration::from_secs(age);
    let (committed, rank) = (true, Rank::Counts);
    let (attempt, whole_bytes, in_use, going) = (attempt(step), bytes, false, false);
    StepCopy { attempt, bytes, whole_bytes, age, committed, in_use, going, rank }
}

fn keep(last: usize, every: u64) -> Keep {
    Keep { last, every: NonZeroU64::new(every), within: None, pins: BTreeSet::new() }
}

fn rules(tiers: Vec<TierRules>, backlog: Backlog) -> Rules {
    Rules { tiers, holds: BTreeSet::new(), backlog }
}

/// Three tiers: two steps near, four on the shared one, every tenth in the archive.
fn three() -> Rules {
    let every = |n| Takes::Every(NonZeroU64::new(n).unwrap());
    let tier = |takes, keep, capacity| TierRules { takes, keep, capacity, ever: capacity };
    rules(
        vec![
            tier(Takes::All, keep(2, 0), Some(40)),
            tier(Takes::All, keep(4, 10), None),
            tier(every(10), keep(100, 0), None),
        ],
        Backlog::Wait,
    )
}

fn view(line: &[u64], tiers: &[&[u64]]) -> View {
    let tier = |steps: &&[u64]| {
        let copies = steps.iter().map(|step| (*step, copy(*step, 10, 1000 - *step))).collect();
        TierView { copies, ..TierView::default() }
    };
    View { line: line.to_vec(), tiers: tiers.iter().map(tier).collect() }
}

#[test]
fn steps_go_hop_by_hop_the_newest_first() {
    let view = view(&[10, 11, 12], &[&[10, 11, 12], &[10], &[]]);
    let replaces = None;
    let order = |step, from, to, priority| Order { step, from, to, priority, replaces };
    assert_eq!(
        three().moves(&view),
        [
            order(12, 0, 1, Priority::Newest),
            order(11, 0, 1, Priority::Archive),
            order(10, 1, 2, Priority::Archive),
        ]
    );
}

#[test]
fn drives_of_nodes_are_no_copy_for_others() {
    let line = [1, 2, 3];
    let rules = three();
    let mut here = view(&line, &[&line, &line, &[]]);
    here.tiers[0].partial = true;
    assert_eq!(rules.evictable(&here, 0), [1]);
    // The second tier keeps four; here it is to keep one.
    let mut few = three();
    few.tiers[1].keep = keep(1, 0);
    assert_eq!(few.evictable(&here, 1), [1, 2]);
    // The newest is nowhere else.
    let mut only = view(&line, &[&[3], &[1, 2], &[]]);
    assert!(only.elsewhere(1, 3, attempt(3)));
    only.tiers[0].partial = true;
    assert!(!only.elsewhere(1, 3, attempt(3)));
    assert!(rules.evictable(&only, 0).is_empty());
}

#[test]
fn a_tier_that_is_silent_is_no_source_and_still_counts() {
    let mut here = view(&[10, 20], &[&[10, 20], &[20], &[10]]);
    here.tiers[1].silent = true;
    // 10 is not brought back to a tier that a farther one has passed; 20 comes from where it can be read.
    let priority = Priority::Newest;
    let order = Order { step: 20, from: 0, to: 2, priority, replaces: None };
    assert_eq!(three().moves(&here), [order]);
}

#[test]
fn a_full_tier_is_passed_over_for_the_next_and_a_step_does_not_come_back() {
    let mut rules = three();
    rules.tiers[1].capacity = Some(5);
    let view = view(&[10, 20], &[&[10, 20], &[], &[10]]);
    let moves = rules.moves(&view);
    assert_eq!(moves.iter().map(|order| (order.step, order.to)).collect::<Vec<_>>(), [(20, 2)]);
}

#[test]
fn a_step_that_went_past_a_tier_that_was_down_comes_to_it_if_that_keeps_it() {
    let moves = |last, every, shared: &[u64]| {
        let mut rules = three();
        (rules.tiers[1].keep, rules.tiers[2].takes) = (keep(last, every), Takes::All);
        let line = [9, 10, 11, 12, 13];
        let view = view(&line, &[&[10, 11, 12, 13], shared, &line]);
        let moves = rules.moves(&view);
        assert!(moves.iter().all(|order| (order.from, order.to) == (0, 1)));
        moves.iter().map(|order| order.step).collect::<Vec<_>>()
    };
    assert_eq!(moves(4, 0, &[9, 10, 13]), [12, 11]);
    assert_eq!(moves(2, 0, &[9, 13]), [12], "the others would go at once");
    assert!(moves(2, 0, &[9, 12, 13]).is_empty(), "its rules have let them go");
    assert_eq!(moves(2, 10, &[9, 12, 13]), [10]);
    assert!(moves(4, 0, &[12, 13]).is_empty(), "the oldest go for room");
    assert!(moves(4, 0, &[]).is_empty(), "it is new");
    // 14 was left behind by a job that went back: it stands first, and is no sign that the tier lacks something.
    let mut rules = three();
    (rules.tiers[1].keep, rules.tiers[2].takes) = (keep(9, 0), Takes::All);
    let line = [14, 10, 11, 12];
    let view = view(&line, &[&[10, 11, 12], &[14, 11, 12], &line]);
    assert_eq!(rules.moves(&view), []);
    assert!(rules.hop_of(&view, 10).is_none());
}

/// A job went back: tier 0 has its new commits of these steps, and the older ones rank after them.
fn gone_back(mut view: View, steps: &[u64]) -> View {
    for step in steps {
        view.tiers[0].copies.get_mut(step).unwrap().attempt = attempt(1000 + step);
        for tier in &mut view.tiers[1..] {
            tier.copies.get_mut(step).into_iter().for_each(|copy| copy.rank = Rank::Older);
        }
    }
    view
}

#[test]
fn commits_of_a_job_that_went_back_replace_the_older_ones_on_every_tier() {
    let line = [10, 20, 30];
    let mut rules = three();
    let here = gone_back(view(&line, &[&line, &[10, 20, 30], &[10, 20, 30]]), &[20, 30]);
    let order =
        |step, priority| Order { step, from: 0, to: 1, priority, replaces: Some(attempt(step)) };
    // From tier 0, never the older one of tier 1 on to tier 2.
    assert_eq!(rules.moves(&here), [order(30, Priority::Newest), order(20, Priority::Archive)]);
    rules.tiers[0].keep = keep(0, 0);
    assert_eq!(rules.evictable(&here, 0), [10], "the others are on no other tier yet");
    rules.tiers[0].keep = keep(2, 0);
    let mut next = here.clone();
    for step in [20, 30] {
        let new = next.tiers[0].copies[&step].clone();
        next.tiers[1].copies.insert(step, new);
    }
    let hops: Vec<_> = rules.moves(&next).iter().map(|o| (o.step, o.from, o.to)).collect();
    assert_eq!(hops, [(30, 1, 2), (20, 1, 2)]);
    // One that is held stays, and what is not known to be older as well.
    rules.holds.insert(20);
    let mut aside = here.clone();
    aside.tiers[1].copies.get_mut(&30).unwrap().rank = Rank::Aside;
    let hops: Vec<_> = rules.moves(&aside).iter().map(|o| (o.step, o.from, o.to)).collect();
    assert_eq!(hops, [(30, 0, 2)]);
}

#[test]
fn an_older_commit_gives_way_where_there_is_no_room_and_stays_counted_until_then() {
    let line = [10, 20, 30];
    let mut rules = three();
    rules.tiers[1].keep = keep(9, 0);
    rules.tiers[1].capacity = Some(30);
    let here = gone_back(view(&line, &[&line, &line, &[10]]), &[20, 30]);
    assert!(rules.moves(&here).iter().all(|order| order.to != 1), "both would be there at once");
    assert_eq!(rules.reclaim(&here, 1, 20), Some(vec![10, 20]));
    rules.holds.insert(20);
    assert_eq!(rules.reclaim(&here, 1, 20), None);
}

#[test]
fn what_is_committed_nowhere_else_stays_on_tier_0() {
    let line = [1, 2, 3, 4];
    let rules = three();
    assert!(rules.evictable(&view(&line, &[&line, &[], &[]]), 0).is_empty());
    assert_eq!(rules.evictable(&view(&line, &[&line, &[1, 2], &[]]), 0), [1, 2]);
    let mut used = view(&line, &[&line, &[1, 2], &[]]);
    used.tiers[0].copies.get_mut(&1).unwrap().in_use = true;
    assert_eq!(rules.evictable(&used, 0), [2]);
    // A copy that is going is none, and takes no room any more.
    let mut going = view(&line, &[&line, &[1, 2], &[]]);
    going.tiers[1].copies.get_mut(&1).unwrap().going = true;
    assert_eq!(rules.evictable(&going, 0), [2]);
    assert_eq!(going.used(1), 10);
    let mut other = view(&line, &[&line, &[1, 2], &[]]);
    other.tiers[1].copies.get_mut(&1).unwrap().attempt = attempt(99);
    assert_eq!(rules.evictable(&other, 0), [2]);
    let mut moving = view(&line, &[&line, &[1, 2], &[]]);
    moving.tiers[1].copies.get_mut(&2).unwrap().committed = false;
    assert_eq!(rules.evictable(&moving, 0), [1]);
}

#[test]
fn an_archived_step_waits_for_its_archive_and_holds_and_pins_stay() {
    let line = [10, 20, 21, 22, 23, 24, 25];
    let mut rules = three();
    rules.tiers[1].keep = keep(2, 0);
    let here = view(&line, &[&[25], &line, &[10]]);
    // 20 is not archived yet.
    assert_eq!(rules.evictable(&here, 1), [10, 21, 22, 23]);
    rules.holds.insert(22);
    rules.tiers[1].keep.pins.insert(10);
    assert_eq!(rules.evictable(&here, 1), [21, 23]);
    rules.tiers[1].keep.within = Some(Duration::from_secs(1000 - 20));
    assert!(rules.evictable(&here, 1).is_empty());
}

#[test]
fn a_step_that_an_earlier_tier_would_bring_again_stays_until_that_lets_it_go() {
    let line = [10, 20, 21, 22];
    let mut rules = three();
    rules.tiers[0].keep = keep(3, 0);
    rules.tiers[1].keep = keep(1, 0);
    let here = view(&line, &[&[20, 21, 22], &line, &[10]]);
    assert_eq!(rules.evictable(&here, 1), [10], "20 to 22 would be back at once");
    assert_eq!(rules.kept(&here, 1), [22].into());
    // The archive has it: it would not come again.
    let here = view(&line, &[&[20, 21, 22], &line, &[10, 20]]);
    assert_eq!(rules.evictable(&here, 1), [10, 20]);
    // It is on its way out of the first tier, or the tier does not take it.
    let mut going = view(&line, &[&[21, 22], &line, &[10, 20]]);
    going.tiers[0].copies.get_mut(&21).unwrap().going = true;
    assert_eq!(rules.evictable(&going, 1), [10, 20, 21]);
    rules.tiers[1].takes = Takes::Pinned;
    assert_eq!(rules.evictable(&here, 1), [10, 20, 21]);
}

#[test]
fn a_bucket_that_lacks_a_step_does_not_fill_the_first_tier() {
    let line = [10, 20, 30, 40];
    let mut rules = three();
    rules.tiers[1].keep = keep(1, 0);
    // The archive takes all of these and has none: the shared tier is to bring them there.
    let here = view(&line, &[&line, &[10, 20], &[]]);
    assert_eq!(rules.evictable(&here, 0), [10, 20]);
    assert!(rules.evictable(&here, 1).is_empty());
}

#[test]
fn a_full_first_tier_evicts_then_waits_skips_or_goes_on() {
    let line = [1, 2, 3, 4];
    let mut rules = three();
    let drained = view(&line, &[&line, &line, &[]]);
    // 3 is kept by the rules, and gives way; 4 is the newest.
    assert_eq!(rules.admit(&drained, 25), Admission::Save { tier: 0, evict: vec![1, 2, 3] });
    let stuck = view(&line, &[&line, &[], &[]]);
    assert_eq!(rules.admit(&stuck, 10), Admission::Wait);
    assert_eq!(rules.admit(&stuck, 41), Admission::Never);
    // What others take of a file system now they may give back.
    rules.tiers[0].ever = Some(60);
    assert_eq!(rules.admit(&stuck, 41), Admission::Wait);
    assert_eq!(rules.admit(&stuck, 61), Admission::Never);
    rules.tiers[0].ever = Some(40);
    rules.backlog = Backlog::Skip;
    assert_eq!(rules.admit(&stuck, 10), Admission::Skip);
    rules.backlog = Backlog::Straight;
    assert_eq!(rules.admit(&stuck, 10), Admission::Save { tier: 1, evict: vec![] });
    for tier in &mut rules.tiers[1..] {
        (tier.capacity, tier.ever) = (Some(5), Some(5));
    }
    assert_eq!(rules.admit(&stuck, 10), Admission::Wait);
    assert_eq!(rules.admit(&stuck, 41), Admission::Never);
}

/// What the model does next.
#[derive(Clone, Debug)]
enum Act {
    Save(u64),
    Move(usize),
    Evict(usize),
    /// A tier loses a step, as when somebody removes it by hand.
    Lose(usize, usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u64..30).prop_map(Act::Save),
        6 => (0usize..4).prop_map(Act::Move),
        4 => (0usize..3).prop_map(Act::Evict),
        1 => (1usize..3, 0usize..9).prop_map(|(tier, at)| Act::Lose(tier, at)),
    ]
}

fn tier_rules(near: bool) -> impl Strategy<Value = TierRules> {
    let takes = prop_oneof![
        Just(Takes::All),
        (1u64..5).prop_map(|n| Takes::Every(NonZeroU64::new(n).unwrap())),
        Just(Takes::Pinned),
    ];
    let pins = prop::collection::btree_set(1u64..30, 0..3);
    let room = if near { (30u64..200).prop_map(Some).boxed() } else { Just(None).boxed() };
    (takes, 0usize..4, 0u64..6, pins, room).prop_map(|(takes, last, every, pins, capacity)| {
        TierRules { takes, keep: Keep { pins, ..keep(last, every) }, capacity, ever: capacity }
    })
}

struct Model {
    view: View,
    next: u64,
}

impl Model {
    fn remove(&mut self, rules: &Rules, tier: usize, steps: &[u64]) {
        for step in steps {
            let held = rules.holds.contains(step);
            let pinned = rules.tiers[tier].keep.pins.contains(step);
            assert!(!held && !pinned, "{step} is held or pinned on tier {tier}");
            let gone = self.view.tiers[tier].copies.remove(step).unwrap();
            let left = (0..3).any(|other| self.view.has(other, *step, gone.attempt));
            assert!(left || tier > 0, "{step} was on tier 0 only");
            assert!(left || self.view.line.last() != Some(step), "the newest is gone");
            // A mover would have to bring it again, or never could.
            let wants = |later: usize| rules.tiers[later].takes(*step);
            let there = (tier + 1..3).any(|at| self.view.has(at, *step, gone.attempt));
            for later in tier + 1..3 {
                assert!(!wants(later) || there, "{step} cannot come to tier {later} any more");
            }
        }
    }

    fn act(&mut self, rules: &Rules, act: &Act) {
        match act {
            Act::Save(bytes) => {
                if let Admission::Save { tier, evict } = rules.admit(&self.view, *bytes) {
                    self.remove(rules, tier, &evict);
                    let (step, bytes) = (self.next, *bytes);
                    self.next += 1;
                    self.view.tiers[tier].copies.insert(step, copy(step, bytes, 0));
                    self.view.line.push(step);
                }
            }
            Act::Move(at) => {
                if let Some(order) = rules.moves(&self.view).get(*at).copied() {
                    assert!(order.from < order.to && rules.tiers[order.to].takes(order.step));
                    let moved = self.view.tiers[order.from].copies[&order.step].clone();
                    let before = self.view.tiers[order.to].copies.insert(order.step, moved);
                    assert!(before.is_none(), "moved onto another");
                }
            }
            Act::Evict(tier) => {
                let evict = rules.evictable(&self.view, *tier);
                let kept = rules.kept(&self.view, *tier);
                assert!(evict.iter().all(|step| !kept.contains(step)));
                self.remove(rules, *tier, &evict);
            }
            Act::Lose(tier, at) => {
                let step = self.view.tiers[*tier].copies.keys().nth(*at).copied();
                step.map(|step| self.view.tiers[*tier].copies.remove(&step));
            }
        }
        let on_any = |step: &u64| self.view.tiers.iter().any(|tier| tier.copies.contains_key(step));
        let line: Vec<u64> = self.view.line.iter().copied().filter(on_any).collect();
        self.view.line = line;
        for (tier, of) in (0..3).zip(&rules.tiers) {
            assert!(of.capacity.is_none_or(|capacity| self.view.used(tier) <= capacity));
        }
    }
}

proptest! {
    #[test]
    fn a_job_never_loses_what_it_may_not(
        near in tier_rules(true), middle in tier_rules(false), far in tier_rules(false),
        holds in prop::collection::btree_set(1u64..30, 0..3),
        backlog in prop_oneof![Just(Backlog::Wait), Just(Backlog::Skip), Just(Backlog::Straight)],
        acts in prop::collection::vec(act(), 1..80),
    ) {
        let rules = Rules { tiers: vec![near, middle, far], holds, backlog };
        let tiers = vec![TierView::default(); 3];
        let mut model = Model { view: View { line: Vec::new(), tiers }, next: 1 };
        for act in &acts {
            model.act(&rules, act);
        }
        // Movers that go on come to an end, and then every tier has what it takes.
        for _ in 0..500 {
            if rules.moves(&model.view).is_empty() {
                break;
            }
            model.act(&rules, &Act::Move(0));
        }
        prop_assert!(rules.moves(&model.view).is_empty());
        let near: BTreeMap<u64, StepCopy> = model.view.tiers[0].copies.clone();
        for (step, copy) in near {
            for tier in 1..3 {
                let there = (tier..3).any(|at| model.view.has(at, step, copy.attempt));
                prop_assert!(!rules.tiers[tier].takes(step) || there);
            }
        }
    }
}
