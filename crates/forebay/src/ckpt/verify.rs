//! `forebay ckpt verify`: every byte of a checkpoint, compared with whatever there is to compare it with.
//!
//! JSON: `{"checkpoints": [{"path", "step", "sound", "origin", "tensors", "objects", "files", "checked_bytes",
//! "unchecked_bytes", "seconds", "gb_per_s", "faults", "more_faults", "warnings"}], "sound"}`. A fault is `{"code",
//! "what", "place", "file", "name", "offset"}`; `name`, of a tensor or object, and `offset` are null where they are
//! not known. A warning is `{"concern", "text"}`.

use std::collections::HashSet;

use forebay_checkpoint::commit::numbers;
use forebay_checkpoint::open::{Fault, Origin, Verified, verify_folder};
use forebay_error::{Code, Result};
use serde::Serialize;

use super::args::VerifyArgs;
use super::place::{self, Step};
use super::watch::Watch;
use super::{Outcome, list};
use crate::console::Console;
use crate::units::{count, decimal, gb_per_s, rate};

#[derive(Serialize)]
struct Report {
    checkpoints: Vec<Row>,
    sound: bool,
}

#[derive(Serialize)]
struct Row {
    path: String,
    step: Option<u64>,
    sound: bool,
    origin: Option<&'static str>,
    tensors: usize,
    objects: usize,
    files: usize,
    checked_bytes: u64,
    unchecked_bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    faults: Vec<FaultRow>,
    more_faults: usize,
    warnings: Vec<WarningRow>,
}

#[derive(Serialize)]
struct FaultRow {
    code: &'static str,
    what: String,
    place: Option<String>,
    file: String,
    name: Option<String>,
    offset: Option<u64>,
}

#[derive(Serialize)]
struct WarningRow {
    concern: &'static str,
    text: String,
}

/// Runs the command.
pub(super) fn run(args: &VerifyArgs, console: &Console) -> Result<Outcome> {
    let mut rows = Vec::new();
    if args.all {
        let root = place::root(&args.path)?;
        let folder = place::folder(&args.path)?;
        let committed = list::states(&root)?.into_iter().filter(|state| state.commit.is_some());
        let committed: Vec<u64> = committed.map(|state| state.step).collect();
        if committed.is_empty() {
            return Err(place::nothing(&root));
        }
        for number in committed {
            let step = place::of_root(&root, &folder, number);
            match check(&step, console) {
                Ok(row) => rows.push(row),
                // Pruned since it was listed.
                Err(error) if error.code() == Code::NotFound && !is_there(&root, number) => {}
                Err(error) => return Err(error),
            }
        }
    } else {
        let step = place::step(&args.path, args.step)?;
        rows.push(check(&step, console)?);
    }
    let sound = rows.iter().all(|row| row.sound);
    let written = match console.is_json() {
        true => console.json(&Report { checkpoints: rows, sound }),
        false => console.print(|out| rows.iter().try_for_each(|row| print(out, row))),
    };
    Outcome::good_if(sound).told(written, console)
}

fn is_there(root: &forebay_checkpoint::commit::Root, number: u64) -> bool {
    numbers(root).is_ok_and(|numbers| numbers.contains(&number))
}

/// Checks one; its faults and warnings go to stderr at once.
fn check(step: &Step, console: &Console) -> Result<Row> {
    let watch = Watch::new(console, "verifying", &[step]);
    let found = verify_folder(step.folder(), &watch)?;
    let seconds = watch.seconds();
    // The bar goes before anything is said.
    drop(watch);
    for warning in &found.warnings {
        console.warning(&warning.text);
    }
    tell(&found.faults, console);
    if found.more_faults > 0 {
        console.warning(&format!("{} are not listed", count(found.more_faults, "more fault")));
    }
    Ok(row(step, found, seconds))
}

/// One line a file: a file that was cut has a fault in each of its blocks, and the one that says why comes first.
fn tell(faults: &[Fault], console: &Console) {
    let mut files: Vec<&str> = Vec::new();
    let mut seen = HashSet::new();
    files.extend(faults.iter().map(|fault| fault.file.as_str()).filter(|file| seen.insert(*file)));
    for file in files {
        let of_file = || faults.iter().filter(|fault| fault.file == file);
        let explains = |fault: &&Fault| {
            matches!(fault.error.code(), Code::Truncated | Code::MissingFile | Code::NotFound)
        };
        let Some(first) = of_file().find(explains).or_else(|| of_file().next()) else { continue };
        console.error(&first.error);
        let more = of_file().count() - 1;
        if more > 0 {
            let more = count(more, "more fault");
            console.warning(&format!("{file} has {more}: `--json` lists them"));
        }
    }
}

fn row(step: &Step, found: Verified, seconds: f64) -> Row {
    let warnings = found.warnings.into_iter();
    Row {
        path: step.shown(),
        step: step.step,
        sound: found.faults.is_empty(),
        origin: found.origin.as_ref().map(origin_name),
        tensors: found.values.0,
        objects: found.values.1,
        files: found.files,
        checked_bytes: found.checked_bytes,
        unchecked_bytes: found.unchecked_bytes,
        seconds,
        gb_per_s: gb_per_s(found.checked_bytes + found.unchecked_bytes, seconds),
        faults: found.faults.into_iter().map(fault_row).collect(),
        more_faults: found.more_faults,
        warnings: warnings
            .map(|warning| WarningRow { concern: warning.concern.name(), text: warning.text })
            .collect(),
    }
}

/// The name of a writer.
pub(super) fn origin_name(origin: &Origin) -> &'static str {
    match origin {
        Origin::Dcp { .. } => "dcp",
        Origin::HfShards => "hf_shards",
        Origin::Forebay(_) => "forebay",
    }
}

fn fault_row(fault: Fault) -> FaultRow {
    FaultRow {
        code: fault.error.code().as_str(),
        what: fault.error.what().to_owned(),
        place: fault.error.place().map(str::to_owned),
        file: fault.file,
        name: fault.name,
        offset: fault.offset,
    }
}

fn print(out: &mut dyn std::io::Write, row: &Row) -> std::io::Result<()> {
    let verdict = match (row.sound, row.faults.len() + row.more_faults) {
        (true, _) => "sound".to_owned(),
        (false, faults) => format!("damaged, {}", count(faults, "fault")),
    };
    let name = row.step.map_or_else(|| row.path.clone(), |step| format!("step {step}"));
    write!(
        out,
        "{}: {verdict}: {}, {} in {}; {} checked",
        crate::console::clean(&name),
        count(row.tensors, "tensor"),
        count(row.objects, "object"),
        count(row.files, "file"),
        decimal(row.checked_bytes),
    )?;
    if row.unchecked_bytes > 0 {
        write!(out, ", {} have no checksum", decimal(row.unchecked_bytes))?;
    }
    writeln!(out, ", at {}", rate(row.gb_per_s))
}
