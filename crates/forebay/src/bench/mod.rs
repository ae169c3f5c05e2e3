//! `forebay bench load`: loads of one model, many times, beside the raw limits of the machine measured in the same run.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`model`] | makes the model when none is given |
//! | [`cache`] | brings the page cache into the state asked for, and checks that it is |
//! | [`table`] | the results, for people and as JSON |
//!
//! Machines drift, so combinations of threads and path take turns: first load of each, second load of each, and so on.
//! On the host each load has fresh memory, page faults included, as a program that loads has; on a GPU the memory is
//! allocated once, because frameworks keep theirs. The engine is made once
//! (for each choice of `--verify`): the first load of a combination that uses
//! the arena pays for pinning it, the others do not; the table shows it apart.
//!
//! `--verify` has loads of a checkpoint with checksums take turns by who compares them: the GPU where it can (as every
//! load does), the CPU, nobody. The last is for these measurements alone: no load can be told so.

mod cache;
mod model;
mod table;

use std::path::Path;

use forebay_checkpoint::open::open_model;
use forebay_device::Device;
use forebay_engine::{Engine, EngineConfig, LoadOptions, PathChoice, Selection, sources_of};
use forebay_error::{Code, Error, Result};
use forebay_format::Model;
use serde::Serialize;

use crate::args::{BenchArgs, CacheState, VerifyChoice};
use crate::console::Console;
use crate::limits::{self, Limit};
use crate::load::{Job, name_of};
use crate::report::Run;
use crate::targets::{Targets, open_device};
use crate::units::count;
use table::{BenchReport, ModelFacts, Row};

/// Combinations of threads and path at the most.
const COMBINATIONS_MAX: usize = 256;

/// One way to load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Setting {
    /// `None`: what a load takes by default.
    pub(crate) threads: Option<usize>,
    #[serde(skip)]
    pub(crate) choice: PathChoice,
    pub(crate) path: &'static str,
    pub(crate) verify: VerifyChoice,
}

/// Loads with one choice of who verifies.
struct Verifying {
    choice: VerifyChoice,
    job: Job,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, console: &Console) -> Result<()> {
    let settings = settings(args)?;
    let device = open_device(args.device.as_deref())?;
    let made;
    let path: &Path = match &args.model {
        Some(path) => path,
        None => {
            made = model::Made::new(args.dir.as_deref(), args.gb, console)?;
            made.path()
        }
    };
    let model = open_model(path)?.resolve_all()?;
    for warning in &model.catalog.warnings {
        console.warning(warning);
    }
    let file_system = cache::check_possible(&model, args.cache)?;
    console.note("measuring the limits");
    let mut limits = measure_limits(&model, &device, &settings, args.cache)?;
    let (loads, residency) = loads(args, &settings, &model, &device, console)?;
    if args.cache == CacheState::Cold {
        keep_better(&mut limits, limits::disk(&model)?);
    }
    let limit = binding(&limits, args.cache);
    let rows = settings.iter().zip(loads);
    let report = BenchReport {
        bench: "load",
        version: env!("CARGO_PKG_VERSION"),
        device: name_of(&device),
        cpus: forebay_topology::worker_cpus(),
        model: ModelFacts {
            path: path.display().to_string(),
            made: args.model.is_none(),
            bytes: model.catalog.total_bytes(),
            tensors: model.catalog.tensors.len(),
            files: model.files.len(),
            file_system,
        },
        cache: residency,
        results: rows.map(|(setting, runs)| Row::new(setting, runs, limit.as_ref())).collect(),
        limits,
        limit,
    };
    match console.is_json() {
        true => console.json(&report),
        false => console.print(|out| table::print(out, &report)),
    }
}

fn settings(args: &BenchArgs) -> Result<Vec<Setting>> {
    let mut threads: Vec<Option<usize>> = args.threads.iter().map(|&count| Some(count)).collect();
    if threads.is_empty() {
        threads.push(None);
    }
    let mut settings = Vec::new();
    for &choice in &args.paths {
        let path = table::path_name(choice);
        for &threads in &threads {
            let of = |&verify| Setting { threads, choice, path, verify };
            settings.extend(args.verify.iter().map(of));
        }
    }
    if settings.len() > COMBINATIONS_MAX {
        let what = format!("{} combinations, at most {COMBINATIONS_MAX}", settings.len());
        return Err(Error::new(Code::Usage, what));
    }
    Ok(settings)
}

/// The raw limits: the way into the device's memory always, the disk when it takes part.
fn measure_limits(
    model: &Model,
    device: &Device,
    settings: &[Setting],
    state: CacheState,
) -> Result<Vec<Limit>> {
    let default = forebay_topology::worker_cpus().min(forebay_engine::THREADS_DEFAULT_MAX);
    let threads = settings.iter().filter_map(|setting| setting.threads).max().unwrap_or(default);
    let mut limits = vec![limits::of_device(device, threads, u64::MAX)?];
    if device.is_gpu() {
        limits.push(limits::memory_copy(threads, u64::MAX)?);
    }
    if state == CacheState::Cold {
        limits.extend(limits::disk(model)?);
    }
    Ok(limits)
}

/// Disks drift more than links do, so theirs is measured before and after the loads, and the better one counts.
fn keep_better(limits: &mut Vec<Limit>, again: Option<Limit>) {
    let Some(again) = again else { return };
    match limits.iter_mut().find(|limit| limit.what == again.what) {
        Some(limit) if limit.gb_per_s >= again.gb_per_s => {}
        Some(limit) => *limit = again,
        None => limits.push(again),
    }
}

/// The limit that no load can beat: of the way into memory and, for cold files, of the disk the lesser.
fn binding(limits: &[Limit], state: CacheState) -> Option<Limit> {
    let disk = limits.iter().find(|limit| limit.what == "disk" && state == CacheState::Cold);
    let device = limits.first();
    let lesser = disk.into_iter().chain(device).min_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s));
    lesser.cloned()
}

/// What is loaded, once for each choice of who verifies, each with an engine of its own.
fn jobs(args: &BenchArgs, model: &Model, device: &Device) -> Result<Vec<Verifying>> {
    let mut choices = args.verify.clone();
    choices.dedup();
    let job_of = |choice| {
        let mut config = EngineConfig::default();
        config.tuning.gpu_checks = choice == VerifyChoice::Auto;
        let engine = Engine::new(device.clone(), config);
        let mut selection = Selection::all(&model.catalog)?;
        if choice == VerifyChoice::Off {
            selection = selection.unchecked();
        }
        let (_, plan) = selection.plan(engine.config().piece_bytes)?;
        let job = Job { engine, plan, sources: sources_of(&model.files)? };
        Ok(Verifying { choice, job })
    };
    choices.into_iter().map(job_of).collect()
}

/// All loads, a list for each setting, and the worst state of the page cache that any of them met.
fn loads(
    args: &BenchArgs,
    settings: &[Setting],
    model: &Model,
    device: &Device,
    console: &Console,
) -> Result<(Vec<Vec<Run>>, cache::Found)> {
    let jobs = jobs(args, model, device)?;
    let Some(Verifying { job: first, .. }) = jobs.first() else {
        return Err(Error::new(Code::Usage, "nobody is to verify, and nobody is not to"));
    };
    // Every job has the same targets.
    let sizes = first.plan.target_bytes();
    let kept = match device.is_gpu() {
        true => Some(Targets::new(device, sizes)?),
        false => None,
    };
    let mut loads = vec![Vec::new(); settings.len()];
    let mut worst: Option<cache::Found> = None;
    for round in 0..args.repeat {
        let what = count(settings.len(), "setting");
        console.note(&format!("loading, round {} of {}, {what}", round + 1, args.repeat));
        for (setting, runs) in settings.iter().zip(&mut loads) {
            let found = cache::enforce(model, args.cache)?;
            worst = Some(match worst {
                Some(worst) => worst.worse(found, args.cache),
                None => found,
            });
            let targets = match &kept {
                Some(targets) => targets.clone(),
                None => Targets::new(device, sizes)?,
            };
            let options = LoadOptions {
                threads: setting.threads,
                path: setting.choice,
                ..LoadOptions::default()
            };
            let job = jobs.iter().find(|own| own.choice == setting.verify).map(|own| &own.job);
            runs.push(job.unwrap_or(first).load(&options, &targets, |_| Ok(()))?);
        }
    }
    let worst = worst.ok_or_else(|| Error::new(Code::Internal, "no loads"))?;
    Ok((loads, worst))
}
