//! Removing from one tier what its rules let go, and collecting what is left of it later.
//!
//! What the rules decided on was seen a while ago. So right before a step is taken away from one tier, a tier that is
//! said to have it too is asked whether it does, with every file of it; if none does, the step stays.

use std::time::Duration;

use forebay_checkpoint::commit::{
    Adoption, AttemptId, GcOptions, Layout, PruneOptions, Root, gc_folder, retire,
};
use forebay_error::{Error, Result};

use super::io_priority;
use super::journal::checksum_of;
use super::state::{Shared, State};
use crate::audit_log::Event;

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
}

/// Does it.
pub(crate) fn run(shared: &Shared, task: &Task) {
    io_priority::set(shared.tiers.config.moving.io_priority);
    let done = remove(shared, task).and_then(|()| collect(shared, task));
    shared.change(|state| {
        ended(state, task);
        if let Err(error) = done {
            state.trouble(Some(task.tier), None, &error, Some(Duration::from_secs(1)));
        }
    });
}

/// The tier is free for the next task.
pub(crate) fn ended(state: &mut State, task: &Task) {
    let Some(tier) = state.tiers.get_mut(task.tier) else { return };
    tier.tidying = false;
    tier.removing.clear();
    tier.stale.extend(task.remove.iter().map(|(step, _)| *step));
    tier.stale.extend(task.collect.iter().copied());
    tier.look_now = true;
}

fn options(shared: &Shared) -> GcOptions {
    GcOptions { grace: shared.tiers.config.moving.grace, ..GcOptions::default() }
}

fn remove(shared: &Shared, task: &Task) -> Result<()> {
    if task.remove.is_empty() {
        return Ok(());
    }
    let root = shared.tiers.root(task.tier)?;
    let mut commits = Vec::new();
    let mut checksums = Vec::new();
    for ((step, attempt), others) in task.remove.iter().zip(&task.others) {
        if !others.is_empty() && !others.iter().any(|tier| has(shared, *tier, *step, *attempt)) {
            let note = "a step stays: its other copy was not found whole";
            tracing::warn!(step, tier = task.tier, note);
            continue;
        }
        checksums.push(checksum_of(&root, *step));
        commits.push((*step, *attempt));
    }
    let report = retire(&root, &commits, &PruneOptions { gc: options(shared), wait: false })?;
    for ((step, attempt), checksum) in commits.iter().zip(checksums) {
        if report.unpublished.contains(step) {
            log(shared, &root, *step, *attempt, checksum);
        }
    }
    tell(shared, task.tier, report.failed);
    Ok(())
}

fn tell(shared: &Shared, tier: usize, failed: Vec<(u64, Error)>) {
    for (step, error) in failed {
        shared.change(|state| state.trouble(Some(tier), Some(step), &error, None));
    }
}

/// Whether a tier has this commit now, with every file.
fn has(shared: &Shared, tier: usize, step: u64, attempt: AttemptId) -> bool {
    let whole = |root: Root| -> Result<bool> {
        let commit = Adoption::read(&root, step)?;
        Ok(commit.attempt() == attempt && commit.missing(&root)?.is_empty())
    };
    shared.tiers.root(tier).and_then(whole).unwrap_or(false)
}

fn log(shared: &Shared, root: &Root, step: u64, attempt: AttemptId, checksum: Option<String>) {
    shared.log(Event {
        who: shared.tiers.who.clone(),
        what: "remove".to_owned(),
        origin: "rules".to_owned(),
        step: Some(step),
        attempt: Some(attempt.to_string()),
        from: Some(root.store.name()),
        checksum,
        ..Event::default()
    });
}

fn collect(shared: &Shared, task: &Task) -> Result<()> {
    let root = shared.tiers.root(task.tier)?;
    for step in &task.collect {
        if shared.is_stopping() {
            return Ok(());
        }
        let report = gc_folder(&root, &Layout::of_step(*step), &options(shared));
        for (_, error) in report.failed {
            shared.change(|state| state.trouble(Some(task.tier), Some(*step), &error, None));
        }
    }
    Ok(())
}
