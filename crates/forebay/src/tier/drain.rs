//! `forebay tier drain`: moves every step to where it should be, then ends.
//!
//! JSON: `{"done", "seconds", "bytes", "moving", "waiting", "removing", "stuck", "refused", "unseen": [tier],
//! "errors"}`; the middle six say what is left where `done` is false. Copies that cannot be removed (`stuck`), and
//! those for stores that take no commits (`refused`), are not waited for.

use std::time::{Duration, Instant};

use forebay_error::Result;
use forebay_tier::runner::{Duties, Pending, Runner};
use forebay_tier::status::{Status, Trouble};
use serde::Serialize;

use super::args::DrainArgs;
use super::here;
use crate::ckpt::Outcome;
use crate::console::Console;
use crate::interrupt;
use crate::progress::{Progress, TICK};
use crate::units::{decimal, seconds};

#[derive(Serialize)]
struct Report {
    done: bool,
    seconds: f64,
    bytes: u64,
    moving: usize,
    waiting: usize,
    removing: usize,
    stuck: usize,
    refused: usize,
    unseen: Vec<String>,
    errors: Vec<Trouble>,
}

/// Runs it. An agent over the same tiers does no harm: both meet at the destination.
pub(super) fn run(args: &DrainArgs, console: &Console) -> Result<Outcome> {
    let config = args.config.load()?;
    let started = Instant::now();
    let runner = here::open(&config, Duties::All)?;
    let until = args.timeout.map(|timeout| started + timeout);
    let pending = drain(&runner, until, console)?;
    let status = runner.status();
    let bytes = written(&status);
    runner.stop();
    let report = Report {
        done: pending.is_none(),
        seconds: started.elapsed().as_secs_f64(),
        bytes,
        moving: pending.moving,
        waiting: pending.waiting,
        removing: pending.removing,
        stuck: pending.stuck,
        refused: pending.refused,
        unseen: pending.unseen,
        errors: status.errors,
    };
    let told = match console.is_json() {
        true => console.json(&report),
        false => console.print(|out| print(out, &report)),
    };
    Outcome::good_if(report.done).told(told, console)
}

fn print(out: &mut dyn std::io::Write, report: &Report) -> std::io::Result<()> {
    let (bytes, time) = (decimal(report.bytes), seconds(report.seconds));
    if report.done {
        return writeln!(out, "everything is where it should be: {bytes} moved in {time}");
    }
    let left = report.moving + report.waiting;
    writeln!(out, "not done after {time}: {bytes} moved, {left} steps left to move")?;
    if report.stuck > 0 {
        writeln!(out, "{} copies cannot be removed", report.stuck)?;
    }
    if report.refused > 0 {
        let refused = report.refused;
        writeln!(out, "{refused} copies are for tiers whose stores take no checkpoints")?;
    }
    match report.unseen.is_empty() {
        true => Ok(()),
        false => writeln!(out, "tiers that do not answer: {}", report.unseen.join(", ")),
    }
}

fn written(status: &Status) -> u64 {
    status.tiers.iter().map(|tier| tier.written_bytes).sum()
}

/// Waits until nothing is left to do, or the time is over; errors are told as they come.
fn drain(runner: &Runner, until: Option<Instant>, console: &Console) -> Result<Pending> {
    let mut bar: Option<(Progress, u64)> = None;
    let mut told = 0.0;
    loop {
        interrupt::check()?;
        let status = runner.status();
        told = tell(&status, told, console);
        show(&mut bar, &status, console);
        let pending = runner.pending();
        let over = until.is_some_and(|until| Instant::now() >= until);
        if over {
            return Ok(pending);
        }
        // What was seen may be from before the last step arrived: nothing counts before another look.
        if pending.moving == 0 && pending.waiting == 0 {
            let looked = runner.look(Duration::from_millis(500));
            let pending = runner.pending();
            if looked && pending.is_over() {
                return Ok(pending);
            }
        } else {
            std::thread::sleep(TICK);
        }
    }
}

/// Errors that came since then; returns until when they are told.
fn tell(status: &Status, told: f64, console: &Console) -> f64 {
    for error in status.errors.iter().filter(|error| error.at > told) {
        console.warning(&error.what);
    }
    status.errors.last().map_or(told, |error| error.at.max(told))
}

/// A bar of what is under way: a new one when there is more to do than was known.
fn show(bar: &mut Option<(Progress, u64)>, status: &Status, console: &Console) {
    let done = written(status);
    let left: u64 = status
        .transfers
        .iter()
        .map(|transfer| transfer.total_bytes.saturating_sub(transfer.done_bytes))
        .sum();
    let total = done + left;
    if left > 0 && bar.as_ref().is_none_or(|(_, known)| total > *known) {
        *bar = Some((Progress::new(console, "moving", total), total));
    }
    if let Some((bar, _)) = bar {
        bar.set(done);
    }
}
