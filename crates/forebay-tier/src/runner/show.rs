//! What is seen of a runner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::picture::Picture;
use super::state::{Moving, SLOW, Shared, State};
use crate::limits::Priority;
use crate::policy::{Order, Rank};
use crate::status::{CopyState, Status, StepStatus, TierStatus, Transfer};

/// All of it, as of now.
pub(crate) fn status(shared: &Shared) -> Status {
    let mut state = shared.lock();
    let picture = shared.picture(&state);
    // Of what was seen now: what the planner looked at may be from before, and then something seems to be done.
    state.wanted = picture.wanted();
    let tiers = (0..state.tiers.len()).map(|tier| tier_status(shared, &mut state, &picture, tier));
    let tiers = tiers.collect();
    let refused = picture.refused();
    let wanted = || state.wanted.iter().chain(&refused);
    Status {
        who: shared.tiers.who.clone(),
        up_seconds: shared.started.elapsed().as_secs_f64(),
        tiers,
        steps: steps(&state, &picture, wanted()),
        transfers: state.moving.iter().map(|moving| transfer(moving)).collect(),
        waiting: waiting(&state, wanted()),
        errors: state.troubles.iter().cloned().collect(),
        copies: None,
    }
}

/// Steps that wait to be moved and are not under way.
fn waiting<'a>(state: &State, wanted: impl Iterator<Item = &'a Order>) -> u64 {
    let mut steps: BTreeSet<u64> = wanted.map(|order| order.step).collect();
    for moving in &state.moving {
        steps.remove(&moving.order.step);
    }
    steps.len() as u64
}

/// Whether a step that wants to come has no room there, or the next save has none.
fn is_full(shared: &Shared, state: &State, picture: &Picture, tier: usize) -> bool {
    let waits = state.wanted.iter().filter(|order| order.to == tier).take(4);
    let mut waits = waits.peekable();
    if waits.peek().is_some() {
        return waits.all(|order| !picture.fits_now(tier, picture.missing_bytes(order)));
    }
    // Saves come to the first tier.
    let next = picture.newest_bytes().filter(|_| tier == 0);
    next.is_some_and(|bytes| {
        !picture.fits_now(0, bytes) && picture.rules.reclaim(&picture.view, 0, bytes).is_none()
    }) && shared.tiers.count() > 1
}

fn tier_status(shared: &Shared, state: &mut State, picture: &Picture, number: usize) -> TierStatus {
    let Some(tier) = shared.tiers.tiers.get(number) else { return TierStatus::default() };
    let full = is_full(shared, state, picture, number);
    let (read_bytes, written_bytes) = tier.limits.passed();
    let caps = tier.limits.caps();
    let view = picture.view.tiers.get(number);
    let committed =
        view.map_or(0, |view| view.copies.values().filter(|copy| copy.committed).count() as u64);
    let now = Instant::now();
    let Some(of_tier) = state.tiers.get_mut(number) else { return TierStatus::default() };
    let (read_rate, write_rate) =
        (of_tier.rates.0.see(now, read_bytes), of_tier.rates.1.see(now, written_bytes));
    let mut notes = of_tier.notes.clone();
    if let Some(since) = of_tier.looking_since.map(|since| since.elapsed())
        && since >= SLOW
    {
        notes.push(format!("has not answered for {} s", since.as_secs()));
    }
    if let Some(error) = &of_tier.look_error {
        notes.push(super::state::one_line(error));
    }
    if of_tier.sight.as_ref().is_some_and(|sight| sight.marks.is_none()) {
        notes.push("a pin cannot be read: nothing is removed".to_owned());
    }
    TierStatus {
        name: tier.config.name.clone(),
        place: tier.config.place.clone(),
        health: of_tier.health(full),
        used_bytes: picture.used.get(number).copied().unwrap_or(0),
        capacity_bytes: tier.config.capacity,
        committed,
        read_bytes,
        written_bytes,
        read_rate,
        write_rate,
        read_cap: caps.read.map(u64::from),
        write_cap: caps.write.map(u64::from),
        paused: tier.limits.is_paused(),
        notes,
        free_bytes: of_tier.sight.as_ref().and_then(|sight| sight.free),
    }
}

fn steps<'a>(
    state: &State,
    picture: &Picture,
    wanted: impl Iterator<Item = &'a Order>,
) -> Vec<StepStatus> {
    let mut coming: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for order in wanted {
        coming.entry(order.step).or_default().push(order.to);
    }
    let moving: BTreeMap<u64, usize> =
        state.moving.iter().map(|moving| (moving.order.step, moving.order.to)).collect();
    let line = picture.view.line.iter();
    line.map(|step| step_status(*step, picture, &coming, &moving)).collect()
}

fn step_status(
    step: u64,
    picture: &Picture,
    coming: &BTreeMap<u64, Vec<usize>>,
    moving: &BTreeMap<u64, usize>,
) -> StepStatus {
    let tiers = &picture.view.tiers;
    let commits = || tiers.iter().filter_map(|tier| tier.copies.get(&step)).filter(|c| c.committed);
    let counts = commits().find(|copy| copy.rank == Rank::Counts);
    let attempt = counts.or_else(|| commits().next()).map(|copy| copy.attempt);
    let nearest = commits().find(|copy| Some(copy.attempt) == attempt);
    let state_of = |(number, tier): (usize, &crate::policy::TierView)| match tier.copies.get(&step)
    {
        Some(copy) if copy.committed && Some(copy.attempt) == attempt => match tier.partial {
            true => CopyState::OnNodes,
            false => CopyState::Committed,
        },
        Some(copy) if copy.committed => CopyState::Other,
        _ if moving.get(&step) == Some(&number) => CopyState::Moving,
        _ if coming.get(&step).is_some_and(|to| to.contains(&number)) => CopyState::Waiting,
        Some(_) => CopyState::Partial,
        None => CopyState::Absent,
    };
    StepStatus {
        step,
        attempt: attempt.map(|attempt| attempt.to_string()).unwrap_or_default(),
        bytes: nearest.map_or(0, |copy| copy.bytes),
        age_seconds: nearest.map_or(0.0, |copy| copy.age.as_secs_f64()),
        pins: picture
            .pins
            .get(&step)
            .map(|pins| pins.iter().cloned().collect())
            .unwrap_or_default(),
        held: picture.holds.contains(&step),
        copies: tiers.iter().enumerate().map(state_of).collect(),
    }
}

fn transfer(moving: &Moving) -> Transfer {
    let (done, total) = (moving.done.load(Ordering::Relaxed), moving.total.load(Ordering::Relaxed));
    let mut rate = moving.rate.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let rate = rate.see(Instant::now(), done);
    let left = total.saturating_sub(done);
    let priority = match moving.order.priority {
        Priority::Restore => "restore",
        Priority::Newest => "newest",
        Priority::Archive => "archive",
    };
    Transfer {
        step: moving.order.step,
        from: moving.order.from,
        to: moving.order.to,
        priority: priority.to_owned(),
        done_bytes: done,
        total_bytes: total,
        rate,
        left_seconds: (rate > 0.0 && total > 0).then(|| left as f64 / rate),
        tries: moving.tries,
    }
}
