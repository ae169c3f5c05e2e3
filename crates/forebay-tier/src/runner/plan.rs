//! The thread that decides: what is moved now, what is removed, what is collected. It asks no store; what it starts
//! runs in threads of its own, and tells it when it ends.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{AttemptId, AttemptStatus};
use forebay_error::{Code, Error};

use super::picture::Picture;
use super::state::{Moving, Shared, State};
use super::{Duties, journal, tidy, transfer};
use crate::policy::Order;

/// Longest sleep: how late a retry that is due is begun.
const LOOK: Duration = Duration::from_millis(500);
/// Steps that are taken away in one go.
const REMOVED_AT_ONCE: usize = 64;
/// Steps without room for which another tier is looked for.
const BLOCKED_MAX: usize = 8;

/// What is to be started.
enum Start {
    Move(Arc<Moving>),
    Tidy(tidy::Task),
}

/// Until the runner stops; then waits for what was started.
pub(crate) fn run(shared: &Arc<Shared>) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut seen = u64::MAX;
    let mut fresh = Instant::now();
    while !shared.is_stopping() {
        let mut state = shared.lock();
        if state.changes == seen && fresh.elapsed() < LOOK {
            state = shared.wait(state, LOOK);
        }
        (seen, fresh) = (state.changes, Instant::now());
        sample(shared, &mut state);
        let picture = shared.picture(&state);
        let starts = decide(shared, &mut state, &picture);
        drop(state);
        threads.retain(|thread| !thread.is_finished());
        threads.extend(starts.into_iter().filter_map(|start| begin(shared, start)));
        if shared.journal.has_begun_to_hang() {
            let error = journal::hangs(shared.tiers.config.moving.audit_log.as_deref());
            shared.change(|state| state.trouble(None, None, &error, None));
        }
    }
    let until = Instant::now() + super::JOIN_WAIT;
    threads.into_iter().for_each(|thread| super::join(thread, until));
}

/// Rates are of samples taken now and then.
fn sample(shared: &Shared, state: &mut State) {
    let now = Instant::now();
    for (tier, state) in shared.tiers.tiers.iter().zip(&mut state.tiers) {
        let (read, written) = tier.limits.passed();
        state.rates.0.see(now, read);
        state.rates.1.see(now, written);
    }
}

fn decide(shared: &Shared, state: &mut State, picture: &Picture) -> Vec<Start> {
    state.wanted = picture.wanted();
    tell_held_back(state, picture);
    let now = Instant::now();
    state.forget_failures(&picture.view.line.iter().copied().collect());
    let mut starts = Vec::new();
    let mut room: Vec<(usize, Vec<u64>)> = Vec::new();
    // What a tier has that was not looked at yet is not known: a step must not pass it by for that. One that is slow is
    // not waited for.
    let known = state.tiers.iter().all(super::state::TierState::is_known);
    if shared.duties == Duties::All && known {
        moves(shared, state, picture, now, &mut starts, &mut room);
    }
    let reach = state.reach;
    let is_ours = |tier: &usize| reach.has(is_partial(picture, *tier));
    for tier in (0..state.tiers.len()).filter(is_ours) {
        starts.extend(tidy_of(shared, state, picture, tier, now, &room).map(Start::Tidy));
    }
    starts
}

fn is_partial(picture: &Picture, tier: usize) -> bool {
    picture.view.tiers.get(tier).is_some_and(|tier| tier.partial)
}

/// Once, as long as it is so.
fn tell_held_back(state: &mut State, picture: &Picture) {
    let now = picture.held_back();
    for (tier, step) in now.difference(&state.held_back).copied().collect::<Vec<_>>() {
        let what = format!("step {step} was saved anew, and the older one here is held: it stays");
        let error = Error::new(Code::AlreadyExists, what);
        let error = error.hint("`forebay tier release` ends the hold, and it is replaced then");
        state.trouble(Some(tier), Some(step), &error, None);
    }
    state.held_back = now;
}

fn moves(
    shared: &Shared,
    state: &mut State,
    picture: &Picture,
    now: Instant,
    starts: &mut Vec<Start>,
    room: &mut Vec<(usize, Vec<u64>)>,
) {
    let most = shared.tiers.config.moving.transfers_at_once;
    let mut blocked = 0;
    // A tier that is passed over is asked again now and then, with what it is owed.
    let mut orders = picture.refused();
    orders.retain(|order| state.tiers.get(order.to).is_some_and(|tier| tier.is_retried(now)));
    orders.extend(state.wanted.iter().copied());
    for order in orders {
        if state.moving.len() >= most {
            return;
        }
        let fits = |order: &Order| picture.fits_now(order.to, picture.missing_bytes(order));
        let order = match fits(&order) {
            true => order,
            false if blocked < BLOCKED_MAX => {
                blocked += 1;
                room.push((order.to, picture.make_room(&order)));
                match picture.elsewhere(&order).filter(fits) {
                    Some(other) => other,
                    None => continue,
                }
            }
            false => continue,
        };
        let is_ours = state.reach.has(is_partial(picture, order.from));
        if is_ours && may_start(state, &order, now) {
            let tries = state.retries.get(&(order.step, order.to)).map_or(0, |retry| retry.fails);
            let moving = Arc::new(Moving::new(order, tries));
            state.moving.push(Arc::clone(&moving));
            starts.push(Start::Move(moving));
        }
    }
}

fn may_start(state: &State, order: &Order, now: Instant) -> bool {
    let under_way = state.moving.iter().any(|moving| moving.order.step == order.step);
    let due = state.retries.get(&(order.step, order.to)).is_none_or(|retry| retry.is_due(now));
    let Some(tier) = state.tiers.get(order.to) else { return false };
    let removing = |tier: usize| {
        state.tiers.get(tier).is_some_and(|tier| tier.removing.contains_key(&order.step))
    };
    // One step finds out whether a tier that refused takes anything again.
    let probing = tier.blocked.is_some()
        && (!tier.gate.is_due(now) || state.moving.iter().any(|m| m.order.to == order.to));
    due && !under_way && !probing && !removing(order.from) && !removing(order.to)
}

/// What there is to remove or collect on a tier, if anything and if nothing is under way there.
fn tidy_of(
    shared: &Shared,
    state: &mut State,
    picture: &Picture,
    number: usize,
    now: Instant,
    room: &[(usize, Vec<u64>)],
) -> Option<tidy::Task> {
    let tier = state.tiers.get(number)?;
    if tier.tidying || tier.is_down() {
        return None;
    }
    let mut steps = removable(state, picture, number);
    let wanted = room.iter().filter(|(tier, _)| *tier == number);
    let more: Vec<u64> = wanted.flat_map(|(_, steps)| steps.iter().copied()).collect();
    for step in confirm_sole(picture, number, more) {
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    // One tier at a time, the nearest first: two copies must not go because of each other.
    let goes = |step: u64| state.tiers.iter().any(|tier| tier.removing.contains_key(&step));
    let remove: Vec<(u64, AttemptId)> = steps
        .into_iter()
        .filter(|step| !goes(*step))
        .filter_map(|step| Some((step, picture.commit(number, step)?)))
        .take(REMOVED_AT_ONCE)
        .collect();
    let collect = leftovers(shared, state, number, now);
    let tier = state.tiers.get_mut(number)?;
    let beside = tier.sight.is_some() && tier.beside_at.is_none_or(|at| now >= at);
    if remove.is_empty() && collect.is_empty() && !beside {
        return None;
    }
    tier.tidying = true;
    tier.removing.extend(remove.iter().map(|(step, _)| (*step, None)));
    if beside {
        tier.beside_at = Some(now + tidy::beside_every(shared));
    }
    let grace = shared.tiers.config.moving.grace;
    if !collect.is_empty() {
        tier.collect_at = Some(now + (grace / 4).max(Duration::from_secs(1)));
    }
    let others = |(step, attempt): &(u64, AttemptId)| picture.others(number, *step, *attempt);
    let others = remove.iter().map(others).collect();
    Some(tidy::Task { tier: number, remove, others, collect, beside })
}

/// The commits of a tier that go by its rules. While pins and holds of some tier are not known, none goes whose last
/// copy it may be.
pub(crate) fn removable(state: &State, picture: &Picture, tier: usize) -> Vec<u64> {
    let refused = state
        .tiers
        .get(tier)
        .is_some_and(|tier| tier.sight.as_ref().is_none_or(|sight| sight.marks.is_none()));
    if refused {
        return Vec::new();
    }
    confirm_sole(picture, tier, picture.rules.evictable(&picture.view, tier))
}

fn confirm_sole(picture: &Picture, tier: usize, steps: Vec<u64>) -> Vec<u64> {
    let copied = |step: &u64| {
        let commit = picture.commit(tier, *step);
        commit.is_some_and(|attempt| !picture.others(tier, *step, attempt).is_empty())
    };
    steps.into_iter().filter(|step| picture.marks_known || copied(step)).collect()
}

/// Steps with leftovers that are old enough: the data of steps that were removed, after the grace time; what nobody
/// goes on with, after fifteen of them, because who writes it may be paused.
fn leftovers(shared: &Shared, state: &State, number: usize, now: Instant) -> Vec<u64> {
    let grace = shared.tiers.config.moving.grace;
    let Some(tier) = state.tiers.get(number) else { return Vec::new() };
    // What is to come is known once every tier was looked at.
    let known = state.tiers.iter().all(super::state::TierState::is_known);
    if !known || tier.collect_at.is_some_and(|at| now < at) {
        return Vec::new();
    }
    let Some(sight) = &tier.sight else { return Vec::new() };
    // What has come of a step that is still to come is gone on with, however long it waits behind others.
    let is_moving = |step: u64| {
        let moving = state.moving.iter().map(|moving| &moving.order).chain(&state.wanted);
        moving.into_iter().any(|order| order.step == step && order.to == number)
    };
    let is_old = |seen: &super::sight::Seen| {
        let attempts = &seen.state.attempts;
        !attempts.is_empty()
            && attempts.iter().all(|attempt| {
                let grace = match attempt.status {
                    AttemptStatus::Pending | AttemptStatus::Lost => return false,
                    AttemptStatus::Removed => grace,
                    _ => grace.saturating_mul(tidy::DEAD_GRACES),
                };
                attempt.age.saturating_add(seen.at.elapsed()) >= grace
            })
    };
    let may = |step: u64| !is_moving(step) && state.may_tidy(step, number, now);
    let old = sight.steps.iter().filter(|(step, seen)| may(**step) && is_old(seen));
    old.map(|(step, _)| *step).take(REMOVED_AT_ONCE).collect()
}

/// Removes something in a thread of its own.
pub(crate) fn begin_tidy(shared: &Arc<Shared>, task: tidy::Task) -> Option<JoinHandle<()>> {
    begin(shared, Start::Tidy(task))
}

fn begin(shared: &Arc<Shared>, start: Start) -> Option<JoinHandle<()>> {
    let of = Arc::clone(shared);
    let builder = std::thread::Builder::new();
    let spawned = match &start {
        Start::Move(moving) => {
            let moving = Arc::clone(moving);
            let name = format!("tier-move-{}", moving.order.step);
            builder.name(name).spawn(move || transfer::run(&of, &moving))
        }
        Start::Tidy(task) => {
            let task = task.clone();
            let name = format!("tier-tidy-{}", task.tier);
            builder.name(name).spawn(move || tidy::run(&of, &task))
        }
    };
    match spawned {
        Ok(thread) => Some(thread),
        Err(error) => {
            let error = Error::io("cannot start a thread", error);
            shared.change(|state| {
                match &start {
                    Start::Move(moving) => state.moving.retain(|m| !Arc::ptr_eq(m, moving)),
                    Start::Tidy(task) => tidy::ended(state, task),
                }
                state.trouble(None, None, &error, Some(LOOK));
            });
            None
        }
    }
}
