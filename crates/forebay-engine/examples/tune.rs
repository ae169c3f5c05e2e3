//! Tries tunings of the engine on a folder of files: `tune FOLDER [--device D] [--rounds N] [key=value,...]...`. Each
//! list of settings is one line of the result; all lines are run in turn, round by round, so that drift hits all alike.
//! **unsafe**: targets are provided by address.
//!
//! Keys: `threads path cache piece_mib slots readers batch_mib ahead_mib release tmpfs rate_min trial retry_s depth
//! arena_mib window_mib`.
//!
//! - `readers` is how many read beside DMA, at the most; at least one does, and no more than `threads` less one.
//! - `tmpfs` is up to how many threads tmpfs is worth DMA: `threads=16,tmpfs=16,readers=10` does both there, with
//!   ten readers, and `path=dma` DMA alone.
//! - `rate_min` is the rate of registering, in GB/s, below which DMA ends after `trial` batches if there are nine
//!   threads or more, and is not tried again for `retry_s`; 0: it never ends. The verdict is the process's: `retry_s=0`
//!   has each load find out for itself.
//! - `release` is how many spent batches go at once when the window is full; `window_mib` makes it so.
//!
//! CPU is the whole process's, from the start of a load until all that it registered is released, which is after the
//! clock has stopped; `idle` is how long that took, and `left` what was registered when it began. `registering` is the
//! last load's rate of mapping and registering, none where nothing was, and what became of DMA.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_device::Device;
use forebay_device::cuda::DeviceBuffer;
use forebay_engine::{
    CacheChoice, Engine, EngineConfig, LoadOptions, Move, PathChoice, Plan, Report, measure_link,
    sources_of,
};
use forebay_error::{Code, Error, Result};
use forebay_format::OpenFile;
use rustix::time::{ClockId, clock_gettime};

struct Line {
    text: String,
    engine: Arc<Engine>,
    options: LoadOptions,
    first: f64,
    seconds: Vec<f64>,
    cpu: Vec<f64>,
    paths: String,
}

fn parse(device: &Device, text: &str) -> Result<Line> {
    let mut config = EngineConfig::default();
    let mut options = LoadOptions::default();
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let number = value.parse::<usize>().unwrap_or(0);
        match key {
            "threads" => options.threads = Some(number),
            "path" => options.path = PathChoice::parse(value)?,
            "cache" => options.cache = CacheChoice::parse(value)?,
            "piece_mib" => config.piece_bytes = (number as u64) << 20,
            "arena_mib" => config.arena_bytes = number << 20,
            "window_mib" => config.dma_window_bytes = (number as u64) << 20,
            "slots" => config.tuning.slots_ahead = number,
            "readers" => config.tuning.readers_beside_dma = number,
            "batch_mib" => config.tuning.dma_batch_bytes = (number as u64) << 20,
            "ahead_mib" => config.tuning.dma_ahead_bytes = (number as u64) << 20,
            "release" => config.tuning.release_at_once = number,
            "tmpfs" => config.tuning.dma_on_tmpfs_threads = number,
            "rate_min" => config.tuning.dma_rate_min_bytes_per_s = number as u64 * 1_000_000_000,
            "trial" => config.tuning.dma_trial_batches = number,
            "retry_s" => config.tuning.dma_retry_after = Duration::from_secs(number as u64),
            "depth" => config.tuning.direct_depth = number,
            _ => return Err(Error::new(Code::Usage, format!("no setting is called `{key}`"))),
        }
    }
    Ok(Line {
        text: text.to_owned(),
        engine: Engine::new(device.clone(), config),
        options,
        first: 0.0,
        seconds: Vec::new(),
        cpu: Vec::new(),
        paths: String::new(),
    })
}

fn registering(report: &Report) -> String {
    let rate = report.registering_bytes_per_s / 1e9;
    match (rate > 0.0, report.dma_ended_early) {
        (false, _) => " registering none".to_owned(),
        (true, false) => format!(" registering {rate:.1} GB/s"),
        (true, true) => format!(" registering {rate:.1} GB/s, DMA ended early"),
    }
}

fn process_cpu_seconds() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

fn run(line: &mut Line, files: &[Arc<OpenFile>], targets: &[(u64, u64)]) -> Result<()> {
    let (mut moves, mut sizes, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for (object, (file, &(address, len))) in files.iter().zip(targets).enumerate() {
        moves.push(Move::contiguous(object as u32, object as u32, 0, 0, file.size().min(len)));
        sizes.push(len);
        places.push(address);
    }
    let plan = Plan::build(moves, sizes, line.engine.config().piece_bytes, &[])?;
    let cpu = process_cpu_seconds();
    let start = Instant::now();
    let session = line.engine.start(plan, sources_of(files)?, line.options.clone())?;
    // SAFETY: the buffers outlive the session.
    unsafe { session.provide(&places, None, None)? };
    let report = session.finish()?;
    let seconds = start.elapsed().as_secs_f64();
    let idle = Instant::now();
    session.wait_idle(Duration::from_secs(60));
    let idle = idle.elapsed().as_secs_f64();
    line.cpu.push(process_cpu_seconds() - cpu);
    if line.seconds.is_empty() && line.first == 0.0 {
        line.first = seconds;
    } else {
        line.seconds.push(seconds);
    }
    let shares: Vec<String> = report
        .paths
        .iter()
        .map(|share| {
            format!("{} {:.2}", share.path.as_str(), share.bytes as f64 / report.bytes as f64)
        })
        .collect();
    let left = report.registered_left_bytes >> 20;
    let pace = registering(&report);
    line.paths = format!("{} left {left} MiB idle {:.0} ms{pace}", shares.join(" "), idle * 1e3);
    if !report.refusals.is_empty() {
        line.paths.push_str(&format!(" {:?}", report.refusals));
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "a tool for a terminal")]
fn work() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().unwrap_or_default());
    let (mut device, mut rounds, mut texts) = ("cuda:0".to_owned(), 5, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--device" => device = arguments.next().unwrap_or_default(),
            "--rounds" => rounds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(5),
            _ => texts.push(argument),
        }
    }
    let device = Device::open(&device)?;
    let mut files = Vec::new();
    let entries = std::fs::read_dir(&folder).map_err(|error| Error::io("cannot list", error))?;
    for entry in entries.flatten().filter(|entry| entry.path().is_file()) {
        files.push(Arc::new(OpenFile::open(&entry.path())?));
    }
    let total: u64 = files.iter().map(|file| file.size()).sum();
    let mut lines = texts.iter().map(|text| parse(&device, text)).collect::<Result<Vec<_>>>()?;
    let link = measure_link(&device, 256 << 20, 5)?.to_device / 1e9;
    println!("{} files, {:.2} GB, link {link:.1} GB/s", files.len(), total as f64 / 1e9);
    let Device::Cuda(gpu) = &device else { return Ok(()) };
    gpu.with_context(|| {
        let buffer_of = |file: &Arc<OpenFile>| DeviceBuffer::new(gpu, file.size());
        let buffers = files.iter().map(buffer_of).collect::<Result<Vec<_>>>()?;
        let target_of = |buffer: &DeviceBuffer| (buffer.address(), buffer.len());
        let targets: Vec<_> = buffers.iter().map(target_of).collect();
        for _ in 0..=rounds {
            for line in &mut lines {
                run(line, &files, &targets)?;
            }
        }
        for line in &mut lines {
            line.seconds.sort_by(f64::total_cmp);
            line.cpu.sort_by(f64::total_cmp);
            let gigabytes = total as f64 / 1e9;
            let median = line.seconds.get(line.seconds.len() / 2).copied().unwrap_or(f64::NAN);
            let slowest = line.seconds.last().copied().unwrap_or(f64::NAN);
            let cpu = line.cpu.get(line.cpu.len() / 2).copied().unwrap_or(f64::NAN);
            println!(
                "{:5.1} GB/s ({:.2} of link, slowest {:5.1}, first {:5.1}) cpu {:4.0} ms/GB \
                 | {} | {}",
                gigabytes / median,
                gigabytes / median / link,
                gigabytes / slowest,
                gigabytes / line.first,
                cpu * 1e3 / gigabytes,
                line.text,
                line.paths,
            );
        }
        Ok(())
    })
}

#[expect(clippy::print_stderr, reason = "a tool for a terminal")]
fn main() -> std::process::ExitCode {
    match work() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", error.render());
            std::process::ExitCode::FAILURE
        }
    }
}
