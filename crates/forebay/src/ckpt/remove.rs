//! `forebay ckpt prune` and `forebay ckpt gc`: what both remove, and how they tell it.
//!
//! JSON: `{"dry_run", "unpublished": [step], "unpublished_bytes", "off_line": [step], "removed": [{"file", "bytes"}],
//! "removed_bytes", "kept": [{"folder", "attempt", "why"}], "failed": [{"what", "code", "text"}]}`; what comes before
//! `removed` of `prune` alone. `unpublished` are steps that are no commits any more (or would not be), whose data, so
//! many bytes, go when the grace time is over. `off_line` are commits of a life of the job that was left behind: they
//! are never pruned.

use std::time::Duration;

use forebay_checkpoint::commit::{
    GcOptions, GcReport, PruneOptions, Retention, gc as collect, prune as retire,
};
use forebay_error::{Error, Result};
use serde::Serialize;

use super::args::{GcArgs, PruneArgs};
use super::{Outcome, place};
use crate::console::{Console, clean};
use crate::units::{count, decimal};

#[derive(Serialize)]
struct Report {
    dry_run: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    unpublished: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unpublished_bytes: Option<u64>,
    /// Of each of `unpublished`.
    #[serde(skip)]
    sizes: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    off_line: Option<Vec<u64>>,
    removed: Vec<Removed>,
    removed_bytes: u64,
    kept: Vec<Kept>,
    failed: Vec<Failed>,
}

#[derive(Serialize)]
struct Removed {
    file: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Kept {
    folder: String,
    attempt: String,
    why: String,
}

#[derive(Serialize)]
struct Failed {
    what: String,
    code: &'static str,
    text: String,
}

/// Runs `prune`.
pub(super) fn prune(args: &PruneArgs, console: &Console) -> Result<Outcome> {
    let root = place::root(&args.root)?;
    let retention = Retention {
        keep_last: args.keep_last.unwrap_or(1) as usize,
        keep_every: args.keep_every,
        pins: args.pin.iter().copied().collect(),
    };
    let options = PruneOptions { gc: options(args.grace, args.dry_run), wait: args.wait };
    let report = retire(&root, &retention, &options)?;
    let failed = report.failed.into_iter().map(|(step, error)| (format!("step {step}"), error));
    let failed = failed.collect();
    let steps = Steps {
        unpublished: report.unpublished,
        sizes: report.unpublished_bytes,
        off_line: report.off_line,
    };
    tell(args.dry_run, Some(steps), report.gc, failed, console)
}

/// Runs `gc`.
pub(super) fn gc(args: &GcArgs, console: &Console) -> Result<Outcome> {
    let root = place::collected(&args.root)?;
    let report = collect(&root, &options(args.grace, args.dry_run))?;
    tell(args.dry_run, None, report, Vec::new(), console)
}

fn options(grace: u64, dry_run: bool) -> GcOptions {
    GcOptions { grace: Duration::from_secs(grace), dry_run, ..GcOptions::default() }
}

/// What `prune` says of steps.
struct Steps {
    unpublished: Vec<u64>,
    sizes: Vec<u64>,
    off_line: Vec<u64>,
}

fn tell(
    dry_run: bool,
    steps: Option<Steps>,
    gc: GcReport,
    mut failed: Vec<(String, Error)>,
    console: &Console,
) -> Result<Outcome> {
    let removed_bytes = gc.bytes();
    failed.extend(gc.failed);
    for (_, error) in &failed {
        console.error(error);
    }
    let unpublished_bytes = steps.as_ref().map(|steps| steps.sizes.iter().sum());
    let (mut unpublished, mut sizes, mut off_line) = (None, Vec::new(), None);
    if let Some(steps) = steps {
        (unpublished, sizes) = (Some(steps.unpublished), steps.sizes);
        off_line = Some(steps.off_line);
    }
    let kept = gc.kept.into_iter();
    let report = Report {
        dry_run,
        unpublished,
        unpublished_bytes,
        sizes,
        off_line,
        removed: gc.removed.into_iter().map(|(file, bytes)| Removed { file, bytes }).collect(),
        removed_bytes,
        kept: kept
            .map(|(folder, attempt, why)| {
                let folder = folder.trim_end_matches('/').to_owned();
                Kept { folder, attempt: attempt.to_string(), why }
            })
            .collect(),
        failed: failed
            .into_iter()
            .map(|(what, error)| Failed {
                what,
                code: error.code().as_str(),
                text: error.to_string(),
            })
            .collect(),
    };
    let written = match console.is_json() {
        true => console.json(&report),
        false => console.print(|out| print(out, &report)),
    };
    Outcome::good_if(report.failed.is_empty()).told(written, console)
}

fn print(out: &mut dyn std::io::Write, report: &Report) -> std::io::Result<()> {
    let would = if report.dry_run { "would be " } else { "" };
    for (step, bytes) in report.unpublished.iter().flatten().zip(&report.sizes) {
        writeln!(out, "step {step}: {would}pruned, {}", decimal(*bytes))?;
    }
    for step in report.off_line.iter().flatten() {
        writeln!(out, "step {step}: stays: it is on no line that the newest step goes back to")?;
    }
    for removed in &report.removed {
        writeln!(out, "{}: {would}removed", clean(&removed.file))?;
    }
    for kept in &report.kept {
        let (folder, why) = (clean(&kept.folder), clean(&kept.why));
        writeln!(out, "{folder}: attempt {} stays: {why}", kept.attempt)?;
    }
    let files = count(report.removed.len(), "file");
    writeln!(out, "{files} {would}removed, {}", decimal(report.removed_bytes))
}
