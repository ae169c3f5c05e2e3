//! Doing what somebody asks for.

use std::num::NonZeroU64;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_checkpoint::commit::{Hold, Marks, Pin, Root};
use forebay_error::{Code, Error, Result};

use super::action::{Action, Outcome, RemovedStep};
use super::plan::removable;
use super::promote::{Promotion, promote};
use super::state::{Shared, one_line};
use crate::audit_log::Event;
use crate::limits::Caps;

/// Does it; `who` is for the audit log.
pub(crate) fn act(shared: &Shared, action: &Action, who: &str) -> Result<Outcome> {
    let outcome = match action {
        Action::Pause { tier } => paused(shared, tier.as_deref(), true),
        Action::Resume { tier } => paused(shared, tier.as_deref(), false),
        Action::SetCaps { tier, read, write } => set_caps(shared, tier, *read, *write),
        Action::Pin { step, name } => pin(shared, *step, name, who),
        Action::Unpin { name } => unpin(shared, name),
        Action::Hold { step, why } => hold(shared, *step, why.as_deref(), who),
        Action::Release { step } => release(shared, *step),
        Action::Promote { step, name, to, export } => {
            let promotion =
                Promotion { step: *step, name, to: to.as_deref(), export: *export, who };
            return promote(shared, &promotion);
        }
        Action::Prune { dry_run } => return prune(shared, *dry_run),
        Action::Wake => {
            wake(shared);
            return Ok(Outcome::of("all tiers are looked at"));
        }
    }?;
    log(shared, action, who, &outcome);
    Ok(outcome)
}

/// All tiers are looked at now.
pub(crate) fn wake(shared: &Shared) {
    shared.change(|state| {
        for tier in &mut state.tiers {
            tier.look_again([]);
        }
    });
}

fn log(shared: &Shared, action: &Action, who: &str, outcome: &Outcome) {
    let step = match action {
        Action::Pin { step, .. } | Action::Hold { step, .. } | Action::Release { step } => {
            Some(*step)
        }
        _ => None,
    };
    let attempt = step.and_then(|step| {
        let state = shared.lock();
        let picture = shared.picture(&state);
        (0..state.tiers.len()).find_map(|tier| picture.commit(tier, step))
    });
    shared.log(Event {
        who: who.to_owned(),
        what: action.name().to_owned(),
        origin: "request".to_owned(),
        step,
        attempt: attempt.map(|attempt| attempt.to_string()),
        note: Some(
            std::iter::once(&outcome.done)
                .chain(&outcome.failed)
                .cloned()
                .collect::<Vec<_>>()
                .join("; "),
        ),
        ..Event::default()
    });
}

fn paused(shared: &Shared, tier: Option<&str>, pause: bool) -> Result<Outcome> {
    let number = tier.map(|name| shared.tiers.config.tier(name)).transpose()?;
    for (at, tier) in shared.tiers.tiers.iter().enumerate() {
        if number.is_none_or(|number| number == at) {
            match pause {
                true => tier.limits.pause(),
                false => tier.limits.resume(),
            }
        }
    }
    shared.wake_all();
    let whose = tier.map_or("all tiers".to_owned(), |name| format!("tier {name}"));
    let how = if pause { "paused" } else { "resumed" };
    Ok(Outcome::of(format!("{whose} {how}")))
}

fn set_caps(shared: &Shared, name: &str, read: Option<u64>, write: Option<u64>) -> Result<Outcome> {
    let limits = &shared.tiers.tier(shared.tiers.config.tier(name)?)?.limits;
    let before = limits.caps();
    let cap = |said: Option<u64>, before| said.map_or(before, NonZeroU64::new);
    let caps = Caps { read: cap(read, before.read), write: cap(write, before.write) };
    limits.set_caps(caps);
    let shown =
        |cap: Option<NonZeroU64>| cap.map_or("no limit".to_owned(), |cap| format!("{cap} bytes/s"));
    let (read, write) = (shown(caps.read), shown(caps.write));
    Ok(Outcome::of(format!("tier {name}: read {read}, write {write}")))
}

/// Does something on every tier; what is taken away needs no folder that is not there. Errors: it could be done on
/// none.
fn everywhere(
    shared: &Shared,
    makes: bool,
    mut each: impl FnMut(&Root) -> Result<()>,
) -> Result<(Vec<String>, Vec<String>)> {
    let (mut done, mut failed, mut first) = (Vec::new(), Vec::new(), None);
    for (number, tier) in shared.tiers.tiers.iter().enumerate() {
        let name = &tier.config.name;
        let root = match makes {
            true => shared.tiers.root(number).map(Some),
            false => shared.tiers.found(number),
        };
        match root.and_then(|root| root.map_or(Ok(()), |root| each(&root))) {
            Ok(()) => done.push(name.clone()),
            Err(error) if error.code() == Code::Usage => return Err(error),
            Err(error) => {
                failed.push(format!("tier {name}: {}", one_line(&error)));
                first.get_or_insert(error);
            }
        }
    }
    wake(shared);
    match first {
        Some(error) if done.is_empty() => Err(error),
        _ => Ok((done, failed)),
    }
}

/// Fails where no tier has the step.
fn require(shared: &Shared, step: u64) -> Result<()> {
    let state = shared.lock();
    let picture = shared.picture(&state);
    if (0..state.tiers.len()).any(|tier| picture.commit(tier, step).is_some()) {
        return Ok(());
    }
    let unseen = state.tiers.iter().filter(|tier| tier.sight.is_none()).count();
    let error = Error::new(Code::NotFound, format!("no tier has step {step}"));
    Err(match unseen {
        0 => error,
        unseen => error.hint(format!("{unseen} tiers were not seen yet")),
    })
}

fn pin(shared: &Shared, step: u64, name: &str, who: &str) -> Result<Outcome> {
    require(shared, step)?;
    let pin = Pin { name: name.to_owned(), step, who: who.to_owned(), unix: unix() };
    let (_, failed) = everywhere(shared, true, |root| Marks::pin(root, &pin))?;
    let done = format!("step {step} is pinned as {name}");
    Ok(Outcome { done, failed, ..Outcome::default() })
}

fn unpin(shared: &Shared, name: &str) -> Result<Outcome> {
    let mut was = false;
    let (_, failed) = everywhere(shared, false, |root| {
        was |= Marks::unpin(root, name)?;
        Ok(())
    })?;
    if !was && failed.is_empty() {
        return Err(Error::new(Code::NotFound, format!("no step is pinned as {name}")));
    }
    let mut outcome = Outcome { done: format!("{name} is no pin"), failed, ..Outcome::default() };
    if !outcome.failed.is_empty() {
        outcome.notes.push("it still counts where it could not be removed".to_owned());
    }
    Ok(outcome)
}

fn hold(shared: &Shared, step: u64, why: Option<&str>, who: &str) -> Result<Outcome> {
    require(shared, step)?;
    let why = why.map(str::to_owned);
    let hold = Hold { step, who: who.to_owned(), unix: unix(), why };
    let (_, failed) = everywhere(shared, true, |root| Marks::hold(root, &hold))?;
    Ok(Outcome { done: format!("step {step} is held"), failed, ..Outcome::default() })
}

fn release(shared: &Shared, step: u64) -> Result<Outcome> {
    let mut was = false;
    let (_, failed) = everywhere(shared, false, |root| {
        was |= Marks::release(root, step)?;
        Ok(())
    })?;
    if !was && failed.is_empty() {
        return Err(Error::new(Code::NotFound, format!("step {step} is not held")));
    }
    let mut outcome =
        Outcome { done: format!("step {step} is released"), failed, ..Outcome::default() };
    if !outcome.failed.is_empty() {
        outcome.notes.push("it still counts where it could not be removed".to_owned());
    }
    Ok(outcome)
}

/// What the rules let go. The planner removes it by itself; this says what that is, and has it done now.
fn prune(shared: &Shared, dry_run: bool) -> Result<Outcome> {
    let removed: Vec<RemovedStep> = {
        let state = shared.lock();
        let picture = shared.picture_of_all(&state);
        let of_tier = |tier: usize| {
            let name = shared.tiers.tiers.get(tier).map(|tier| tier.config.name.clone());
            let name = name.unwrap_or_default();
            removable(&state, &picture, tier).into_iter().filter_map({
                let picture = &picture;
                move |step| {
                    let copy = picture.view.tiers.get(tier)?.copies.get(&step)?;
                    let attempt = copy.attempt.to_string();
                    Some(RemovedStep { tier: name.clone(), step, attempt, bytes: copy.bytes })
                }
            })
        };
        (0..state.tiers.len()).flat_map(of_tier).collect()
    };
    if !dry_run {
        wake(shared);
    }
    let verb = if dry_run { "would be removed" } else { "are being removed" };
    let done = format!("{} copies of steps {verb}", removed.len());
    Ok(Outcome { done, removed, ..Outcome::default() })
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
