//! `forebay tier jobs`: what the agent of this machine works for, a line each.
//!
//! JSON: `[{"job", "place", "steps", "waiting", "moving", "troubled": [tier], "staged": [{...}]}]`; `troubled` are
//! tiers that are not well, `staged` saves that are kept or finished for processes. Of a job whose folder the agent of
//! another node moves there are only those.

use std::io::Write;

use forebay_agent::{StagedSave, words};
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
    staged: Vec<StagedSave>,
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
    for save in agent.staged(None)? {
        let known = lines.iter().position(|line| line.job == save.job);
        let known = known.unwrap_or_else(|| {
            lines.push(line(save.job.clone(), &Status::default()));
            lines.len() - 1
        });
        if let Some(line) = lines.get_mut(known) {
            line.staged.push(save);
        }
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
        staged: Vec::new(),
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
    table::write(out, head, &lines.iter().map(row).collect::<Vec<_>>())?;
    lines.iter().flat_map(|line| &line.staged).try_for_each(|save| print_staged(out, save))
}

fn print_staged(out: &mut dyn Write, save: &StagedSave) -> std::io::Result<()> {
    let (job, size) = (clean(&save.job), words::bytes(save.bytes));
    let who = format!("step {}, rank {} of {}", save.step, save.rank, save.world);
    let time = words::time(save.seconds);
    match save.finishing {
        false => writeln!(out, "{job}: {who}: {size} staged for {time}"),
        true => {
            let written = words::bytes(save.written);
            writeln!(out, "{job}: {who}: its process died {time} ago, {written} of {size} written")
        }
    }
}
