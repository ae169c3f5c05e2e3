//! `forebay load`: opens the model, chooses, checks digests that were asked for, allocates, loads, measures the limit,
//! and reports. Nothing outlives the command: it is a way to see what a load does on this machine.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_checkpoint::open::{Opened, open_model};
use forebay_device::Device;
use forebay_device::cuda::CudaDevice;
use forebay_engine::{
    Engine, EngineConfig, LoadOptions, Plan, RangeSource, Report, Selection, Session, Wanted,
    sources_of,
};
use forebay_error::Result;
use forebay_format::{Catalog, Format, Model, hex};
use rustix::time::{ClockId, clock_gettime};

use crate::args::{EngineArgs, LoadArgs};
use crate::ckpt::place_of;
use crate::console::Console;
use crate::limits::Limit;
use crate::progress::{Progress, TICK};
use crate::report::{self, Arrived, DeviceMemory, DeviceName, LoadReport, Run};
use crate::select::choose;
use crate::targets::{Targets, open_device};
use crate::units::{binary, count};
use crate::{interrupt, limits, parallel, verify};

/// How long workers may take to go home after the last byte before the report is made without their last CPU time.
const IDLE_WAIT: Duration = Duration::from_secs(5);

/// Everything that one load needs; used again for the next.
pub(crate) struct Job {
    pub(crate) engine: Arc<Engine>,
    pub(crate) plan: Plan,
    pub(crate) sources: Vec<Arc<dyn RangeSource>>,
}

/// Runs the command.
pub(crate) fn run(args: &LoadArgs, console: &Console) -> Result<()> {
    let started = Instant::now();
    let opened = open_model(place_of(&args.model)?)?;
    let choice = choose(&opened.listing.catalog, &args.select)?;
    let model = resolve(&opened, &choice.wanted)?;
    let open_seconds = started.elapsed().as_secs_f64();
    let mut warnings = model.catalog.warnings.clone();
    let device = open_device(args.device.as_deref())?;
    let (engine, options) = configure(&args.engine, &device);
    let mut selection = Selection::new(&model.catalog, choice.wanted)?;
    if !model.catalog.has_blocks {
        // Those of whole records get a second look, which covers slices too.
        selection = selection.unchecked();
    }
    let (wanted, plan) = selection.plan(engine.config().piece_bytes)?;
    warnings.extend(memory_warning(&device, plan.bytes()));
    for warning in &warnings {
        console.warning(warning);
    }
    let checked = verify::check_files(&model, &args.expect_sha256, console)?;
    let mut watch = MemoryWatch::start(&device)?;
    let allocating = Instant::now();
    let targets = Targets::new(&device, plan.target_bytes())?;
    let allocate_seconds = allocating.elapsed().as_secs_f64();
    watch.look()?;
    let job = Job { engine, plan, sources: sources_of(&model.files)? };
    let mut loads = Vec::new();
    for _ in 0..args.repeat {
        let progress = Progress::new(console, "loading", job.plan.bytes());
        loads.push(job.load(&options, &targets, |session| {
            progress.set(session.done_bytes());
            watch.look()
        })?);
    }
    let device_memory = watch.finish(targets.allocated_bytes())?;
    let arrived = match args.digest {
        true => Some(digests(&model.catalog, &wanted, &targets)?),
        false => None,
    };
    let checks = second_look(&model, &wanted, console)?;
    model.check_unchanged()?;
    let threads = loads.last().map_or(1, |run| run.threads);
    let (limit, limit_unknown) = measure_limit(&device, threads, job.plan.bytes());
    for run in &mut loads {
        run.share_of_limit = limit.as_ref().map(|limit| run.gb_per_s / limit.gb_per_s);
    }
    let (verified, not_verified) = verdicts(&model, &checked, checks, loads.last());
    let report = LoadReport {
        model: args.model.display().to_string(),
        format: model.catalog.format.name(),
        device: name_of(&device),
        tensors: wanted.len(),
        tensors_unsharded: choice.unsharded,
        bytes: job.plan.bytes(),
        open_seconds,
        allocate_seconds,
        loads,
        limit,
        limit_unknown,
        device_memory,
        verified,
        not_verified,
        warnings,
        arrived,
    };
    match console.is_json() {
        true => console.json(&report),
        false => console.print(|out| report::print(out, &report)),
    }
}

/// The model with the tensors that are wanted ready to be read.
fn resolve(opened: &Opened, wanted: &[Wanted]) -> Result<Model> {
    let tensors = &opened.listing.catalog.tensors;
    let entries = wanted.iter().filter_map(|want| tensors.get(want.tensor));
    let names: HashSet<&str> = entries.map(|entry| entry.name.as_str()).collect();
    opened.resolve(|name| names.contains(name))
}

/// Compares stored checksums with the files, where the engine could not do it on the way: how many, and of how many
/// bytes.
fn second_look(model: &Model, wanted: &[Wanted], console: &Console) -> Result<(usize, u64)> {
    if model.catalog.has_blocks {
        return Ok((0, 0));
    }
    let tensors: Vec<usize> = wanted.iter().map(|want| want.tensor).collect();
    verify::checksums(model, &tensors, console)
}

/// The limit, or why there is none. A limit that cannot be measured does not make the load a failure.
fn measure_limit(device: &Device, threads: usize, bytes: u64) -> (Option<Limit>, Option<String>) {
    if bytes < limits::WORTH_BYTES {
        let least = binary(limits::WORTH_BYTES);
        return (None, Some(format!("a load of less than {least} is too short to compare")));
    }
    match limits::of_device(device, threads, bytes) {
        Ok(limit) => (Some(limit), None),
        Err(error) => (None, Some(error.to_string())),
    }
}

/// An engine and options as the flags say.
fn configure(args: &EngineArgs, device: &Device) -> (Arc<Engine>, LoadOptions) {
    let config = EngineConfig {
        arena_bytes: usize::try_from(args.arena).unwrap_or(usize::MAX),
        dma_window_bytes: args.dma_window,
        ..EngineConfig::default()
    };
    let options = LoadOptions { threads: args.threads, path: args.path, cache: args.cache };
    (Engine::new(device.clone(), config), options)
}

impl Job {
    /// Loads once. `look` is called ten times a second.
    pub(crate) fn load(
        &self,
        options: &LoadOptions,
        targets: &Arc<Targets>,
        mut look: impl FnMut(&Session) -> Result<()>,
    ) -> Result<Run> {
        // Loads shorter than a tick never look around below.
        interrupt::check()?;
        let cpu = process_cpu_seconds();
        let session =
            self.engine.start(self.plan.clone(), self.sources.clone(), options.clone())?;
        targets.provide(&session)?;
        while !session.wait(TICK)? {
            look(&session)?;
            if let Err(interrupted) = interrupt::check() {
                session.cancel();
                return Err(interrupted);
            }
        }
        session.wait_idle(IDLE_WAIT);
        let cpu = process_cpu_seconds() - cpu;
        let report: Report = session.finish()?;
        Ok(Run::new(report, cpu))
    }
}

fn process_cpu_seconds() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

/// Tells before the kernel's out-of-memory killer does, which would say nothing.
fn memory_warning(device: &Device, bytes: u64) -> Option<String> {
    let free = forebay_topology::memory_headroom().filter(|_| !device.is_gpu())?;
    (bytes > free).then(|| {
        format!(
            "{} are to be loaded and {} of memory are available; `--names` or `--shard` load \
             a part",
            binary(bytes),
            binary(free)
        )
    })
}

pub(crate) fn name_of(device: &Device) -> DeviceName {
    let (product, uuid) = match device {
        Device::Host => (None, None),
        Device::Cuda(gpu) => (Some(gpu.name().to_owned()), Some(gpu.uuid().to_owned())),
    };
    DeviceName { name: device.name(), product, uuid }
}

fn digests(catalog: &Catalog, wanted: &[Wanted], targets: &Targets) -> Result<Vec<Arrived>> {
    parallel::map(wanted, forebay_topology::worker_cpus(), |target, want| {
        let entry = catalog.tensors.get(want.tensor);
        let (name, dtype, shape) = match entry {
            Some(entry) => (entry.name.clone(), entry.dtype.name(), entry.shape.clone()),
            None => Default::default(),
        };
        let region = want.region.as_ref();
        Ok(Arrived {
            name,
            dtype,
            shape: region.map_or(shape, |region| region.sizes.clone()),
            start: region.map(|region| region.offsets.clone()),
            bytes: targets.bytes_of(target),
            sha256: hex(&targets.sha256(target)?),
        })
    })
}

/// What was verified, and what could not be. `checksums` are those of whole records: how many, and of how many bytes.
fn verdicts(
    model: &Model,
    checked: &[String],
    checksums: (usize, u64),
    run: Option<&Run>,
) -> (Vec<String>, Vec<String>) {
    let files = model.files.len();
    let rules = match model.catalog.format {
        Format::Safetensors => "headers and sizes of {}, by the rules of the safetensors library",
        _ => "headers, places and sizes of what was loaded from {}",
    };
    let mut verified = vec![rules.replace("{}", &count(files, "file"))];
    if let Some(run) = run {
        let same = count(run.files_unchanged, "file");
        verified.push(format!("{same} unchanged during the load (size, mtime, ctime)"));
        verified.extend(blocks_verified(run));
    }
    if checksums.0 > 0 {
        let (number, bytes) = (count(checksums.0, "stored checksum"), binary(checksums.1));
        verified.push(format!("{number} (CRC-32) of {bytes}, by a second look at the files"));
    }
    verified.extend(checked.iter().map(|file| format!("SHA-256 of {file}, as expected")));
    let has_none = matches!(model.catalog.format, Format::Safetensors | Format::SafetensorsShards);
    let not_verified = match has_none && checked.len() < files {
        true => vec![
            "the tensors' bytes: plain safetensors carry no checksum (`--expect-sha256` compares \
             files with published ones)"
                .to_owned(),
        ],
        false => Vec::new(),
    };
    (verified, not_verified)
}

/// Which blocks were compared with their checksums, and where.
fn blocks_verified(run: &Run) -> Option<String> {
    let (gpu, cpu) = (run.verified_gpu_bytes, run.verified_cpu_bytes);
    let place = match (gpu, cpu) {
        (0, 0) => return None,
        (0, _) => "by the CPU, as they were read".to_owned(),
        (_, 0) => "by the GPU, in its memory".to_owned(),
        _ => format!(
            "{} by the GPU, in its memory, {} by the CPU, as they were read",
            binary(gpu),
            binary(cpu)
        ),
    };
    Some(format!("checksums (CRC-32) of blocks of {}: {place}", binary(gpu + cpu)))
}

/// Watches the memory of a GPU.
struct MemoryWatch {
    gpu: Option<Arc<CudaDevice>>,
    total: u64,
    before: u64,
    least: u64,
}

impl MemoryWatch {
    fn start(device: &Device) -> Result<Self> {
        let gpu = match device {
            Device::Cuda(gpu) => Some(gpu.clone()),
            Device::Host => None,
        };
        let (before, total) = match &gpu {
            Some(gpu) => gpu.with_context(|| gpu.memory_info())?,
            None => (0, 0),
        };
        Ok(Self { gpu, total, before, least: before })
    }

    fn look(&mut self) -> Result<()> {
        if let Some(gpu) = &self.gpu {
            let (free, _) = gpu.with_context(|| gpu.memory_info())?;
            self.least = self.least.min(free);
        }
        Ok(())
    }

    fn finish(mut self, tensors_bytes: u64) -> Result<Option<DeviceMemory>> {
        self.look()?;
        let Some(gpu) = &self.gpu else { return Ok(None) };
        let (free_after_bytes, _) = gpu.with_context(|| gpu.memory_info())?;
        let peak_bytes = self.before.saturating_sub(self.least);
        Ok(Some(DeviceMemory {
            total_bytes: self.total,
            free_before_bytes: self.before,
            free_after_bytes,
            peak_bytes,
            tensors_bytes,
            beyond_tensors_bytes: peak_bytes.saturating_sub(tensors_bytes),
        }))
    }
}
