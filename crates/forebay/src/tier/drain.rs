//! `forebay tier drain`: moves every step to where it should be, then ends. With `--job` the agent of this machine
//! moves them, and this waits for it (see [`drain_job`]).
//!
//! JSON: `{"done", "seconds", "bytes", "moving", "waiting", "removing", "stuck", "refused", "unseen": [tier],
//! "errors"}`; the middle six say what is left where `done` is false. Copies that cannot be removed (`stuck`), and
//! those for stores that take no commits (`refused`), are not waited for.

use std::time::{Duration, Instant};

use forebay_error::Result;
use forebay_tier::runner::{Duties, Pending, Runner};
use forebay_tier::status::{Status, Trouble};
use forebay_tier::told::Told;
use serde::Serialize;

use super::args::DrainArgs;
use super::{drain_job, here};
use crate::ckpt::Outcome;
use crate::console::Console;
use crate::interrupt;
use crate::progress::{Progress, TICK};
use crate::units::{decimal, seconds};

/// Between two looks while nothing moves; twice that each time a tier still does not answer, to [`REST_MAX`]: each look
/// asks every tier.
const REST: Duration = Duration::from_millis(500);
const REST_MAX: Duration = Duration::from_secs(8);

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
    let until = args.timeout.map(|timeout| started + timeout);
    let mut told = Teller::new(console);
    let (pending, status, bytes) = match args.config.job {
        Some(_) => drain_job::run(&args.config, &config, until, &mut told)?,
        None => {
            let runner = here::open(&config, Duties::All)?;
            let pending = drain(&runner, until, &mut told)?;
            let status = runner.status();
            runner.stop();
            let bytes = written(&status);
            (pending, status, bytes)
        }
    };
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
    drop(told);
    let written = match console.is_json() {
        true => console.json(&report),
        false => console.print(|out| print(out, &report)),
    };
    Outcome::good_if(report.done).told(written, console)
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

/// Bytes that came to all tiers.
pub(super) fn written(status: &Status) -> u64 {
    status.tiers.iter().map(|tier| tier.written_bytes).sum()
}

/// Waits until nothing is left to do, or the time is over; errors are told as they come.
fn drain(runner: &Runner, until: Option<Instant>, told: &mut Teller<'_>) -> Result<Pending> {
    let mut rest = REST;
    loop {
        told.tell(&runner.status(), 0);
        let pending = runner.pending();
        if is_over(until) {
            return Ok(pending);
        }
        if pending.moving > 0 || pending.waiting > 0 {
            rest = REST;
            pause(TICK, until)?;
            continue;
        }
        // What was seen may be from before the last step arrived: nothing counts before another look.
        let looked = runner.look(REST);
        let pending = runner.pending();
        if looked && pending.is_over() {
            return Ok(pending);
        }
        pause(rest, until)?;
        rest = if pending.unseen.is_empty() { REST } else { REST_MAX.min(rest * 2) };
    }
}

/// Whether there is no time left.
pub(super) fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

/// Sleeps for so long, or until there is no time left. Errors: a signal came.
pub(super) fn pause(time: Duration, until: Option<Instant>) -> Result<()> {
    let end = Instant::now() + time;
    let end = until.map_or(end, |until| until.min(end));
    loop {
        interrupt::check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(TICK));
    }
}

/// Says how it goes: errors once, and a bar.
pub(super) struct Teller<'a> {
    console: &'a Console,
    told: Told,
    /// Until when errors were looked at, in seconds since 1970.
    seen: f64,
    bar: Option<(Progress, u64)>,
}

impl<'a> Teller<'a> {
    fn new(console: &'a Console) -> Self {
        Self { console, told: Told::default(), seen: 0.0, bar: None }
    }

    /// Errors that are there already are of before, and are not told.
    pub(super) fn forget(&mut self, status: &Status) {
        self.seen = status.errors.last().map_or(self.seen, |error| error.at.max(self.seen));
    }

    /// Tells what is new. `before`: bytes that came to the tiers before this began.
    pub(super) fn tell(&mut self, status: &Status, before: u64) {
        for error in status.errors.iter().filter(|error| error.at > self.seen) {
            if self.told.is_new(error.tier, error.step, &error.what, Instant::now()) {
                self.console.warning(&error.what);
            }
        }
        self.forget(status);
        self.show(status, before);
    }

    /// A bar of what is under way: a new one when there is more to do than was known.
    fn show(&mut self, status: &Status, before: u64) {
        let done = written(status).saturating_sub(before);
        let left: u64 = status
            .transfers
            .iter()
            .map(|transfer| transfer.total_bytes.saturating_sub(transfer.done_bytes))
            .sum();
        let total = done + left;
        if left > 0 && self.bar.as_ref().is_none_or(|(_, known)| total > *known) {
            self.bar = Some((Progress::new(self.console, "moving", total), total));
        }
        if let Some((bar, _)) = &self.bar {
            bar.set(done);
        }
    }
}
