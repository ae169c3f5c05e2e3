//! Removing from one tier what its rules let go, and collecting what is left of it later.
//!
//! What the rules decided on was seen a while ago, and others remove too: the tidier of another tier, a runner of
//! another process. So a removal is announced first, and right before the step goes a tier that is said to have it too
//! is asked whether it does, with every file of it, and whether nobody has announced that it goes there; if none does,
//! the step stays. Two that rely on each other's copy both announce before they ask: one of them sees the other at
//! least, and each tries again after a time of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{
    Adoption, AttemptId, GcOptions, Layout, PruneOptions, Root, gc_beside, gc_folders,
    is_being_removed, retire_while,
};
use forebay_error::{Code, Error, Result};

use super::io_priority;
use super::sight::ALIVE;
use super::state::{Shared, State};
use crate::audit_log::Event;

/// Grace times after which what shows no sign of life is collected: who writes it may be paused.
pub(crate) const DEAD_GRACES: u32 = 15;

/// What to do on one tier.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) tier: usize,
    /// Commits to remove.
    pub(crate) remove: Vec<(u64, AttemptId)>,
    /// For each of them, the tiers that have it too, as last seen.
    pub(crate) others: Vec<Vec<usize>>,
    /// Steps with leftovers.
    pub(crate) collect: Vec<u64>,
    /// Also what lies beside the steps.
    pub(crate) beside: bool,
}

/// What could not be done, by step; no error where the step stays for now, as it must.
type Undone = BTreeMap<u64, Option<Error>>;

/// Does it.
pub(crate) fn run(shared: &Shared, task: &Task) {
    io_priority::set(shared.tiers.config.moving.io_priority);
    let mut undone = remove(shared, task);
    let beside = collect(shared, task, &mut undone);
    shared.change(|state| {
        ended(state, task);
        for error in beside {
            state.trouble(Some(task.tier), None, &error, None);
        }
        let steps = task.remove.iter().map(|(step, _)| *step).chain(task.collect.iter().copied());
        for step in steps.collect::<std::collections::BTreeSet<_>>() {
            match undone.remove(&step) {
                None => drop(state.tidies.remove(&(step, task.tier))),
                Some(why) => again_later(shared, state, (step, task.tier), why),
            }
        }
    });
}

fn again_later(shared: &Shared, state: &mut State, at: (u64, usize), why: Option<Error>) {
    let seed = at.0 ^ shared.started.elapsed().as_nanos() as u64 ^ u64::from(std::process::id());
    let again = state.tidies.entry(at).or_default().fail(Instant::now(), seed);
    if let Some(error) = why {
        state.trouble(Some(at.1), Some(at.0), &error, Some(again));
    }
}

/// The tier is free for the next task. What it removed is not there any more for others, and is looked at.
pub(crate) fn ended(state: &mut State, task: &Task) {
    let Some(tier) = state.tiers.get_mut(task.tier) else { return };
    tier.tidying = false;
    let steps = task.remove.iter().map(|(step, _)| *step);
    tier.look_again(steps.clone().chain(task.collect.iter().copied()));
    let shown = tier.owed;
    tier.removing.extend(steps.map(|step| (step, Some(shown))));
}

fn options(shared: &Shared) -> GcOptions {
    GcOptions { grace: shared.tiers.config.moving.grace, ..GcOptions::default() }
}

fn remove(shared: &Shared, task: &Task) -> Undone {
    if task.remove.is_empty() {
        return Undone::new();
    }
    let all_for = |error: &Error| {
        let each = |(step, _): &(u64, AttemptId)| (*step, Some(error.again()));
        task.remove.iter().map(each).collect()
    };
    let root = match shared.tiers.existing(task.tier) {
        Ok(root) => root,
        Err(error) => return all_for(&error),
    };
    let mut stays = Undone::new();
    let mut logged: Vec<(u64, AttemptId)> = Vec::new();
    let mut may_go = |step: u64, attempt: AttemptId| {
        let at = task.remove.iter().position(|commit| *commit == (step, attempt));
        let others = at.and_then(|at| task.others.get(at)).map_or(&[][..], Vec::as_slice);
        match confirm(shared, others, step, attempt) {
            Ok(()) => {
                log(shared, &root, "remove", (step, attempt));
                logged.push((step, attempt));
                Ok(true)
            }
            Err(why) => {
                stays.insert(step, why);
                Ok(false)
            }
        }
    };
    let how = PruneOptions { gc: options(shared), wait: false };
    let report = retire_while(&root, &task.remove, &how, &mut may_go);
    let gone = report.as_ref().map_or(&[][..], |report| &report.unpublished);
    for commit in logged.into_iter().filter(|(step, _)| !gone.contains(step)) {
        log(shared, &root, "stay", commit);
    }
    match report {
        Ok(report) => {
            stays.extend(report.failed.into_iter().map(|(step, error)| (step, Some(error))));
            stays
        }
        Err(error) => all_for(&error),
    }
}

/// Whether one of the other tiers has the commit now, with every file, and keeps it. Errors: why the step stays, where
/// that is worth telling.
fn confirm(
    shared: &Shared,
    others: &[usize],
    step: u64,
    attempt: AttemptId,
) -> std::result::Result<(), Option<Error>> {
    if others.is_empty() {
        return Ok(());
    }
    let mut going = false;
    let keeps = |tier: &usize| -> Result<bool> {
        let root = shared.tiers.existing(*tier)?;
        let commit = Adoption::read(&root, step)?;
        let whole = commit.attempt() == attempt && commit.missing(&root)?.is_empty();
        let goes = whole && is_being_removed(&root, step, attempt)?;
        going |= goes;
        Ok(whole && !goes)
    };
    let found: Vec<Result<bool>> = others.iter().map(keeps).collect();
    if found.iter().any(|keeps| matches!(keeps, Ok(true))) {
        return Ok(());
    }
    if going {
        // Whoever removes it there is to be first.
        return Err(None);
    }
    let what = format!("step {step} stays: its other copy was not found whole");
    let error = Error::new(Code::MissingFile, what);
    Err(Some(match found.into_iter().find_map(Result::err) {
        Some(cause) => error.with_source(cause),
        None => error,
    }))
}

/// Notes what happens to a commit: `remove` before it goes, so that none goes unnoted; `stay` where it did not go after
/// all.
fn log(shared: &Shared, root: &Root, what: &str, (step, attempt): (u64, AttemptId)) {
    shared.log_before(Event {
        who: shared.tiers.who.clone(),
        what: what.to_owned(),
        origin: "rules".to_owned(),
        step: Some(step),
        attempt: Some(attempt.to_string()),
        from: Some(root.store.name()),
        checksum: shared.checksum_of(root, step),
        ..Event::default()
    });
}

/// Collects; returns what went wrong beside the steps.
fn collect(shared: &Shared, task: &Task, undone: &mut Undone) -> Vec<Error> {
    let root = match shared.tiers.existing(task.tier) {
        Ok(root) => root,
        Err(error) => {
            let failed = task.collect.iter().map(|step| (*step, Some(error.again())));
            undone.extend(failed.collect::<Vec<_>>());
            return Vec::new();
        }
    };
    if shared.is_stopping() {
        return Vec::new();
    }
    let stopped = || shared.is_stopping();
    let layouts: Vec<Layout> = task.collect.iter().copied().map(Layout::of_step).collect();
    for (place, error) in gc_folders(&root, &layouts, &options(shared), &stopped).failed {
        let at = layouts.iter().position(|layout| place.starts_with(layout.prefix()));
        let step = at.and_then(|at| task.collect.get(at));
        undone.extend(step.map(|step| (*step, Some(error))));
    }
    if !task.beside || shared.is_stopping() {
        return Vec::new();
    }
    // Uploads are of writers that may be at work, whatever the grace time is.
    let grace = dead_after(shared).max(ALIVE);
    match gc_beside(&root, &GcOptions { grace, ..GcOptions::default() }) {
        Ok(report) => report.failed.into_iter().map(|(_, error)| error).collect(),
        Err(error) => vec![error],
    }
}

/// How often what lies beside the steps is looked at.
pub(crate) fn beside_every(shared: &Shared) -> Duration {
    dead_after(shared).max(Duration::from_secs(1))
}

fn dead_after(shared: &Shared) -> Duration {
    shared.tiers.config.moving.grace.saturating_mul(DEAD_GRACES)
}
