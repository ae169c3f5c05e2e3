//! `forebay tier jobs`: what the agent of this machine works for, a line each.
//!
//! JSON: `[{"job", "place", "steps", "waiting", "moving", "troubled": [tier]}]`; `troubled` are tiers that are not
//! well.

use std::io::Write;

use forebay_error::{Code, Error, Result};
use forebay_tier::status::{Health, Status};
use serde::Serialize;

use super::args::SocketArgs;
use super::track::connect;
use crate::ckpt::{Outcome, table};
use crate::console::{Console, clean};

#[derive(Serialize)]
struct Line {
    job: String,
    /// The folder that steps come from.
    place: String,
    steps: usize,
    waiting: u64,
    moving: usize,
    troubled: Vec<String>,
}

/// Runs it. A tier that is down makes the exit code 1, as in `status`.
pub(super) fn run(args: &SocketArgs, console: &Console) -> Result<Outcome> {
    let mut agent = connect(args)?;
    let (mut lines, mut well) = (Vec::new(), true);
    for job in agent.jobs()? {
        let status = match agent.status(Some(&job)) {
            Ok(status) => status,
            // It was taken back meanwhile.
            Err(error) if error.code() == Code::NotFound => continue,
            Err(error) => return Err(error),
        };
        well &= !status.tiers.iter().any(|tier| tier.health == Health::Down);
        lines.push(line(job, &status));
    }
    if lines.is_empty() {
        return Err(Error::new(Code::NotFound, "the agent has no job"));
    }
    let written = match console.is_json() {
        true => console.json(&lines),
        false => console.print(|out| print(out, &lines)),
    };
    Outcome::good_if(well).told(written, console)
}

fn line(job: String, status: &Status) -> Line {
    let first = status.tiers.first().map(|tier| tier.place.as_str()).unwrap_or_default();
    let is_well = |health| matches!(health, Health::Ok | Health::Unknown);
    let troubled = status.tiers.iter().filter(|tier| !is_well(tier.health));
    Line {
        job,
        place: first.strip_prefix("fd://").unwrap_or(first).to_owned(),
        steps: status.steps.len(),
        waiting: status.waiting,
        moving: status.transfers.len(),
        troubled: troubled.map(|tier| tier.name.clone()).collect(),
    }
}

fn print(out: &mut dyn Write, lines: &[Line]) -> std::io::Result<()> {
    use table::Side::{Left, Right};
    let head = [
        ("JOB", Left),
        ("STEPS", Right),
        ("WAITING", Right),
        ("MOVING", Right),
        ("NOT WELL", Left),
        ("PLACE", Left),
    ];
    let row = |line: &Line| {
        let troubled: Vec<_> = line.troubled.iter().map(|tier| clean(tier)).collect();
        [
            clean(&line.job).into_owned(),
            line.steps.to_string(),
            line.waiting.to_string(),
            line.moving.to_string(),
            troubled.join(", "),
            clean(&line.place).into_owned(),
        ]
    };
    table::write(out, head, &lines.iter().map(row).collect::<Vec<_>>())
}
