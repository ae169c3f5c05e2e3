//! `forebay ckpt du`: bytes of each step, by what they are good for.
//!
//! JSON: `{"root", "steps": [{"step", "committed_bytes", "pending_bytes", "dead_bytes"}], "committed_bytes",
//! "pending_bytes", "dead_bytes", "other_bytes", "total_bytes"}`. `other` is what is in the root and is of no save:
//! records of commits, files of other programs.

use forebay_checkpoint::commit::{AttemptStatus, Policy, StepState, listing};
use forebay_error::Result;
use serde::Serialize;

use super::args::RootArgs;
use super::table::{self, Side};
use super::{Outcome, place};
use crate::console::Console;
use crate::units::decimal;

/// The most files of a root that are looked at.
const FILES_MAX: usize = 1 << 22;

#[derive(Serialize)]
struct Usage {
    root: String,
    steps: Vec<Row>,
    committed_bytes: u64,
    pending_bytes: u64,
    dead_bytes: u64,
    other_bytes: u64,
    total_bytes: u64,
}

#[derive(Serialize)]
struct Row {
    step: u64,
    committed_bytes: u64,
    pending_bytes: u64,
    dead_bytes: u64,
}

/// Runs the command.
pub(super) fn run(args: &RootArgs, console: &Console) -> Result<Outcome> {
    let root = place::root(&args.root)?;
    let steps: Vec<Row> = listing(&root, Policy::default().lease)?.iter().map(row).collect();
    let sum = |of: fn(&Row) -> u64| steps.iter().map(of).fold(0, u64::saturating_add);
    let (committed_bytes, pending_bytes, dead_bytes) =
        (sum(|row| row.committed_bytes), sum(|row| row.pending_bytes), sum(|row| row.dead_bytes));
    let objects = root.store.list("", FILES_MAX)?;
    let total_bytes = objects.iter().map(|object| object.bytes).fold(0, u64::saturating_add);
    let known = committed_bytes + pending_bytes + dead_bytes;
    let usage = Usage {
        root: root.store.name(),
        steps,
        committed_bytes,
        pending_bytes,
        dead_bytes,
        other_bytes: total_bytes.saturating_sub(known),
        total_bytes,
    };
    if console.is_json() {
        console.json(&usage)?;
        return Ok(Outcome::Good);
    }
    let cells = |name: String, committed, pending, dead| {
        [name, decimal(committed), decimal(pending), decimal(dead)]
    };
    let mut rows: Vec<[String; 4]> = usage
        .steps
        .iter()
        .map(|row| {
            let step = row.step.to_string();
            cells(step, row.committed_bytes, row.pending_bytes, row.dead_bytes)
        })
        .collect();
    rows.push(cells("all".to_owned(), committed_bytes, pending_bytes, dead_bytes));
    console.print(|out| {
        let head = [
            ("STEP", Side::Right),
            ("COMMITTED", Side::Right),
            ("PENDING", Side::Right),
            ("DEAD", Side::Right),
        ];
        table::write(out, head, &rows)?;
        writeln!(
            out,
            "{} in all, {} of records and other files",
            decimal(usage.total_bytes),
            decimal(usage.other_bytes)
        )
    })?;
    Ok(Outcome::Good)
}

fn row(state: &StepState) -> Row {
    let of = |pending: bool| {
        let attempts = state.attempts.iter();
        let attempts =
            attempts.filter(|attempt| (attempt.status == AttemptStatus::Pending) == pending);
        attempts.map(|attempt| attempt.bytes).fold(0, u64::saturating_add)
    };
    Row {
        step: state.step,
        committed_bytes: state.commit.as_ref().map_or(0, |commit| commit.bytes),
        pending_bytes: of(true),
        dead_bytes: of(false),
    }
}
