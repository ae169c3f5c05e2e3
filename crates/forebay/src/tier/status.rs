//! `forebay tier status`.
//!
//! JSON: [`forebay_tier::status::Status`], all of it.

use std::io::Write;
use std::time::Duration;

use forebay_agent::words;
use forebay_error::Result;
use forebay_tier::runner::Duties;
use forebay_tier::status::{CopyState, Health, Status, StepStatus, TierStatus};

use super::args::StatusArgs;
use super::{agent, here};
use crate::ckpt::{Outcome, age, table};
use crate::console::{Console, clean};
use crate::units::decimal;

/// Errors that are shown.
const ERRORS: usize = 5;

/// Runs it. A tier that is down makes the exit code 1: what was asked for is whether all is well.
pub(super) fn run(args: &StatusArgs, console: &Console) -> Result<Outcome> {
    let config = args.config.load()?;
    let status = match agent::find(&args.config, &config)? {
        Some(mut agent) => agent.status()?,
        None => {
            let runner = here::open(&config, Duties::Look)?;
            here::look(&runner, console)?;
            runner.status()
        }
    };
    let well = status.tiers.iter().all(|tier| {
        matches!(tier.health, Health::Ok | Health::Troubled | Health::Full | Health::Unknown)
    });
    let written = match console.is_json() {
        true => console.json(&status),
        false => console.print(|out| print(out, &status, args.last)),
    };
    Outcome::good_if(well).told(written, console)
}

fn print(out: &mut dyn Write, status: &Status, last: usize) -> std::io::Result<()> {
    use table::Side::{Left, Right};
    let head = [
        ("TIER", Left),
        ("HEALTH", Left),
        ("STEPS", Right),
        ("USED", Right),
        ("OF", Right),
        ("IN", Right),
        ("OUT", Right),
        ("PLACE", Left),
    ];
    table::write(out, head, &status.tiers.iter().map(tier_row).collect::<Vec<_>>())?;
    for tier in &status.tiers {
        for note in &tier.notes {
            writeln!(out, "  {}: {}", clean(&tier.name), clean(note))?;
        }
    }
    steps(out, status, last)?;
    for transfer in &status.transfers {
        let name = |tier: usize| status.tiers.get(tier).map_or("?", |tier| tier.name.as_str());
        let (done, total) = (decimal(transfer.done_bytes), decimal(transfer.total_bytes));
        let (from, to) = (clean(name(transfer.from)), clean(name(transfer.to)));
        let left = transfer
            .left_seconds
            .map(|s| format!(", {} left", age(Duration::from_secs_f64(s.min(1e9)))));
        let left = left.unwrap_or_default();
        let rate = decimal(transfer.rate as u64);
        writeln!(
            out,
            "moving step {} from {from} to {to}: {done} of {total}, {rate}/s{left}",
            transfer.step
        )?;
    }
    if status.waiting > 0 {
        writeln!(out, "{} more to move", status.waiting)?;
    }
    for line in status.copies.iter().flat_map(words::copies) {
        writeln!(out, "{}", clean(&line))?;
    }
    let nodes = status.copies.iter().flat_map(|copies| &copies.nodes);
    for node in nodes {
        let alive = if node.is_alive { "alive" } else { "not heard of" };
        let error = node.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        writeln!(out, "  {}, {alive}{}", clean(&node.host), clean(&error))?;
    }
    errors(out, status)
}

fn tier_row(tier: &TierStatus) -> [String; 8] {
    let rate = |rate: f64, cap: Option<u64>| {
        let cap = cap.map(|cap| format!(" (of {})", decimal(cap))).unwrap_or_default();
        format!("{}/s{cap}", decimal(rate as u64))
    };
    let room =
        tier.capacity_bytes.or(tier.free_bytes.map(|free| free.saturating_add(tier.used_bytes)));
    let paused = if tier.paused { ", paused" } else { "" };
    [
        clean(&tier.name).into_owned(),
        format!("{}{paused}", health(tier.health)),
        tier.committed.to_string(),
        decimal(tier.used_bytes),
        room.map_or("-".to_owned(), decimal),
        rate(tier.write_rate, tier.write_cap),
        rate(tier.read_rate, tier.read_cap),
        clean(&tier.place).into_owned(),
    ]
}

fn health(health: Health) -> &'static str {
    match health {
        Health::Unknown => "unknown",
        Health::Ok => "ok",
        Health::Troubled => "troubled",
        Health::Full => "full",
        Health::ReadOnly => "read only",
        Health::Down => "down",
    }
}

fn copy(state: CopyState) -> &'static str {
    match state {
        CopyState::Absent => "-",
        CopyState::Waiting => "waits",
        CopyState::Moving => "moving",
        CopyState::Partial => "partial",
        CopyState::Committed => "yes",
        CopyState::OnNodes => "nodes",
        CopyState::Copied => "copied",
        CopyState::Other => "other",
    }
}

/// The last steps, a column for each tier.
fn steps(out: &mut dyn Write, status: &Status, last: usize) -> std::io::Result<()> {
    let more = status.steps.len().saturating_sub(last);
    let shown = status.steps.get(more..).unwrap_or_default();
    if shown.is_empty() {
        return Ok(());
    }
    use table::Side::{Left, Right};
    let head = [("STEP", Right), ("AGE", Right), ("SIZE", Right), ("COPIES", Left), ("KEPT", Left)];
    writeln!(out)?;
    let row = |step: &StepStatus| {
        let copies = step.copies.iter().zip(&status.tiers);
        let copies: Vec<String> =
            copies.map(|(state, tier)| format!("{} {}", clean(&tier.name), copy(*state))).collect();
        let held = step.held.then(|| "held".to_owned());
        let kept: Vec<String> =
            held.into_iter().chain(step.pins.iter().map(|pin| clean(pin).into_owned())).collect();
        [
            step.step.to_string(),
            age(Duration::from_secs_f64(step.age_seconds.clamp(0.0, 1e10))),
            decimal(step.bytes),
            copies.join(", "),
            kept.join(", "),
        ]
    };
    table::write(out, head, &shown.iter().map(row).collect::<Vec<_>>())?;
    if more > 0 {
        writeln!(out, "and {more} before")?;
    }
    writeln!(out)
}

fn errors(out: &mut dyn Write, status: &Status) -> std::io::Result<()> {
    let more = status.errors.len().saturating_sub(ERRORS);
    for error in status.errors.get(more..).unwrap_or_default() {
        let tier = error.tier.and_then(|tier| status.tiers.get(tier)).map(|tier| clean(&tier.name));
        let tier = tier.map(|tier| format!("tier {tier}, ")).unwrap_or_default();
        let step = error.step.map(|step| format!("step {step}, ")).unwrap_or_default();
        writeln!(out, "error[{}]: {tier}{step}{}", error.code, clean(&error.what))?;
    }
    Ok(())
}
