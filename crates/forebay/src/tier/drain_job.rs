//! `forebay tier drain --job`: waits until the agent of this machine has moved everything of one of its jobs.

use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tier::config::Config;
use forebay_tier::runner::Pending;
use forebay_tier::status::{CopyState, Health, Status, StepStatus};

use super::agent;
use super::args::ConfigArgs;
use super::drain::{Teller, is_over, pause, written};

/// How often the agent is asked.
const ASK: Duration = Duration::from_millis(500);
/// For it to look at all tiers once it was woken: what it says before may be older than the last save.
const LOOK: Duration = Duration::from_secs(1);

/// Waits; what is left, how the job stands, and the bytes that were moved meanwhile.
///
/// Errors: `not_found` where no agent answers, or it has no such job; those of the connection; a signal.
pub(super) fn run(
    args: &ConfigArgs,
    config: &Config,
    until: Option<Instant>,
    told: &mut Teller<'_>,
) -> Result<(Pending, Status, u64)> {
    let none = || Error::new(Code::NotFound, "no agent answers");
    let mut agent = agent::find(args, config)?.ok_or_else(none)?;
    let first = agent.status()?;
    told.forget(&first);
    let before = written(&first);
    agent.wake()?;
    pause(LOOK, until)?;
    loop {
        let status = agent.status()?;
        told.tell(&status, before);
        let pending = pending(&status);
        if pending.is_none() || is_over(until) {
            let bytes = written(&status).saturating_sub(before);
            return Ok((pending, status, bytes));
        }
        pause(ASK, until)?;
    }
}

/// What a job has left: steps under way, steps that are not where they should be, tiers of which nobody knows.
fn pending(status: &Status) -> Pending {
    let is_left = |copy: &CopyState| {
        matches!(copy, CopyState::Waiting | CopyState::Moving | CopyState::Partial)
    };
    let left = |step: &&StepStatus| step.copies.iter().any(is_left);
    let moving = status.transfers.len();
    let left = status.steps.iter().filter(left).count().saturating_sub(moving);
    let is_unseen = |health| matches!(health, Health::Unknown | Health::Down);
    let unseen = status.tiers.iter().filter(|tier| is_unseen(tier.health));
    Pending {
        moving,
        waiting: left.max(usize::try_from(status.waiting).unwrap_or(usize::MAX)),
        unseen: unseen.map(|tier| tier.name.clone()).collect(),
        ..Pending::default()
    }
}
