//! `forebay ckpt list`: the steps of a root, whatever became of them; `forebay ckpt latest`: the one to restore.
//!
//! JSON of `list`: `{"root", "latest", "steps": [{"step", "state", "age_s", "bytes", "commit", "attempts"}]}`, steps
//! in order. `latest` is a number, or null (also where damage leaves it open). `state` is `committed`, `pending`,
//! `removed` (its files go when the grace time is over), `lost` (it was committed, and its `.metadata` is gone) or
//! `dead`; of attempts also `replaced`. `commit`, or null: `{"attempt", "epoch", "parent", "ranks", "manifest",
//! "bytes", "age_s", "damage"}`; `attempt` is null where another program wrote it. `attempts` are tries that are not
//! the commit: `{"attempt", "state", "why", "ranks", "began", "contributed", "bytes", "age_s"}`. Of `latest`:
//! `{"step", "path", "bytes", "age_s"}`.

use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptState, AttemptStatus, CommitInfo, GcOptions, Policy, Root, State, StepState,
    latest as newest, latest_of, listing, step_folder, steps,
};
use forebay_error::{Code, Result};
use serde::Serialize;

use super::args::{ListArgs, RootArgs};
use super::table::{self, Side};
use super::{Outcome, age, place};
use crate::console::{Console, clean};
use crate::units::decimal;

#[derive(Serialize)]
struct Listing {
    root: String,
    latest: Option<u64>,
    steps: Vec<StepRow>,
}

#[derive(Serialize)]
struct StepRow {
    step: u64,
    state: &'static str,
    age_s: f64,
    bytes: u64,
    commit: Option<CommitRow>,
    attempts: Vec<AttemptRow>,
}

#[derive(Serialize)]
struct CommitRow {
    attempt: Option<String>,
    epoch: u64,
    parent: Option<u64>,
    ranks: u32,
    manifest: Option<String>,
    bytes: u64,
    age_s: f64,
    damage: Option<String>,
}

#[derive(Serialize)]
struct AttemptRow {
    attempt: String,
    state: &'static str,
    why: Option<String>,
    ranks: Option<u32>,
    began: u32,
    contributed: u32,
    bytes: u64,
    age_s: f64,
}

#[derive(Serialize)]
struct Newest {
    step: u64,
    path: String,
    bytes: u64,
    age_s: f64,
}

/// All steps of a root; what is younger than a writer's lease may be under way.
pub(super) fn states(root: &Root) -> Result<Vec<StepState>> {
    steps(root, Policy::default().lease)
}

/// Runs `list`.
pub(super) fn list(args: &ListArgs, console: &Console) -> Result<Outcome> {
    let root = place::root(&args.root)?;
    let states = listing(&root, Policy::default().lease)?;
    for name in place::links(&args.root) {
        let what = "is a link to a folder, so it is no step: name its path to restore it";
        console.warning(&format!("{name} {what}"));
    }
    // The list is for looking at damage: that it leaves the latest open is no reason to show nothing.
    let latest = match latest_of(&root, &states) {
        Err(error) if error.code() == Code::InvalidMetadata => {
            for line in error.render().lines() {
                console.warning(line);
            }
            None
        }
        latest => latest?.map(|state| state.step),
    };
    if console.is_json() {
        let steps = states.iter().map(step_row).collect();
        console.json(&Listing { root: root.store.name(), latest, steps })?;
        return Ok(Outcome::Good);
    }
    for state in &states {
        let damage = state.commit.as_ref().and_then(|commit| commit.damage.as_ref());
        if let Some(damage) = damage {
            console.warning(&format!("step {}: the commit cannot be read: {damage}", state.step));
        }
    }
    let rows: Vec<[String; 7]> =
        states.iter().flat_map(|state| rows(state, latest == Some(state.step))).collect();
    console.print(|out| match rows.is_empty() {
        true => writeln!(out, "no steps"),
        false => {
            let head = [
                ("STEP", Side::Right),
                ("STATE", Side::Left),
                ("AGE", Side::Right),
                ("SIZE", Side::Right),
                ("RANKS", Side::Right),
                ("ATTEMPT", Side::Left),
                ("", Side::Left),
            ];
            table::write(out, head, &rows)
        }
    })?;
    Ok(Outcome::Good)
}

/// Runs `latest`.
pub(super) fn latest(args: &RootArgs, console: &Console) -> Result<Outcome> {
    let root = place::root(&args.root)?;
    let state = newest(&root)?.ok_or_else(|| place::nothing(&root))?;
    let folder = place::folder(&args.root)?.folder(&step_folder(state.step));
    let path = folder.path().display().to_string();
    match console.is_json() {
        true => {
            let (bytes, age_s) = (state.bytes(), state.age().as_secs_f64());
            console.json(&Newest { step: state.step, path, bytes, age_s })?;
        }
        false => console.print(|out| writeln!(out, "{}", state.step))?,
    }
    Ok(Outcome::Good)
}

/// The name of a state.
pub(super) fn state_name(state: State) -> &'static str {
    match state {
        State::Committed => "committed",
        State::Pending => "pending",
        State::Removed => "removed",
        State::Lost => "lost",
        State::Dead => "dead",
    }
}

/// The state of an attempt that is not the commit, and what more there is to say.
fn status(attempt: &AttemptState) -> (&'static str, Option<String>) {
    match &attempt.status {
        AttemptStatus::Pending => ("pending", None),
        AttemptStatus::Failed(why) => ("dead", Some(format!("failed: {why}"))),
        AttemptStatus::Replaced => ("replaced", Some("by a later save of the step".to_owned())),
        AttemptStatus::Removed => ("removed", Some(until_gone(attempt.age))),
        AttemptStatus::Lost => {
            ("lost", Some("it was committed; its .metadata is missing".to_owned()))
        }
        AttemptStatus::Dead => ("dead", None),
    }
}

/// When the files of a removed step may go, where nobody asks for another grace time.
fn until_gone(age: Duration) -> String {
    match GcOptions::default().grace.checked_sub(age) {
        Some(left) if left.as_secs() > 0 => {
            format!("{} s until a prune or gc may take its files", left.as_secs())
        }
        _ => "the next prune or gc takes its files".to_owned(),
    }
}

fn step_row(state: &StepState) -> StepRow {
    StepRow {
        step: state.step,
        state: state_name(state.state()),
        age_s: state.age().as_secs_f64(),
        bytes: state.bytes(),
        commit: state.commit.as_ref().map(commit_row),
        attempts: state.attempts.iter().map(attempt_row).collect(),
    }
}

fn commit_row(commit: &CommitInfo) -> CommitRow {
    CommitRow {
        attempt: commit.attempt.map(|attempt| attempt.to_string()),
        epoch: commit.epoch,
        parent: commit.parent,
        ranks: commit.world,
        manifest: commit.manifest.clone(),
        bytes: commit.bytes,
        age_s: commit.age.as_secs_f64(),
        damage: commit.damage.clone(),
    }
}

fn attempt_row(attempt: &AttemptState) -> AttemptRow {
    let (state, why) = status(attempt);
    let (ranks, began, contributed) = attempt.ranks;
    AttemptRow {
        attempt: attempt.attempt.to_string(),
        state,
        why,
        ranks,
        began,
        contributed,
        bytes: attempt.bytes,
        age_s: attempt.age.as_secs_f64(),
    }
}

/// Lines of a step: the commit, then what else is there.
fn rows(state: &StepState, is_latest: bool) -> Vec<[String; 7]> {
    let step = state.step.to_string();
    let mut rows = Vec::new();
    if let Some(commit) = &state.commit {
        let ranks = if commit.world == 0 { "?".to_owned() } else { commit.world.to_string() };
        let attempt = commit.attempt.map_or("-".to_owned(), |attempt| attempt.to_string());
        let mut notes = Vec::new();
        if is_latest {
            notes.push("latest");
        }
        if commit.attempt.is_none() && commit.damage.is_none() {
            notes.push("not by Forebay");
        }
        if commit.attempt.is_some() && commit.manifest.is_none() && commit.damage.is_none() {
            notes.push("without records: of no job");
        }
        if commit.damage.is_some() {
            notes.push("damaged");
        }
        let size = decimal(commit.bytes);
        let state = state_name(State::Committed).to_owned();
        rows.push([step.clone(), state, age(commit.age), size, ranks, attempt, notes.join(", ")]);
    }
    for attempt in &state.attempts {
        let (name, why) = status(attempt);
        let (ranks, began, contributed) = attempt.ranks;
        let of = ranks.map_or("?".to_owned(), |ranks| ranks.to_string());
        let why = why.unwrap_or_default();
        let note = match name {
            "pending" => format!("{began} of {of} ranks began"),
            _ => clean(&why).into_owned(),
        };
        rows.push([
            step.clone(),
            name.to_owned(),
            age(attempt.age),
            decimal(attempt.bytes),
            format!("{contributed}/{of}"),
            attempt.attempt.to_string(),
            note,
        ]);
    }
    rows
}
