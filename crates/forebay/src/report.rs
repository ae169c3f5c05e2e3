//! The report of `forebay load`. As JSON it is [`LoadReport`], field by field; [`print()`] says the same to people.

use std::io::{self, Write};

use forebay_engine::Report;
use serde::Serialize;

use crate::console::clean;
use crate::limits::Limit;
use crate::spread::Spread;
use crate::units::{binary, count, decimal, gb_per_s, ms_per_gb, rate, seconds};

/// What a load did. Sizes are bytes, rates GB (10^9 bytes) a second.
#[derive(Debug, Serialize)]
pub(crate) struct LoadReport {
    pub(crate) model: String,
    pub(crate) format: &'static str,
    pub(crate) device: DeviceName,
    pub(crate) tensors: usize,
    /// Tensors that `--shard` left whole because they lack the dimension.
    pub(crate) tensors_unsharded: usize,
    /// Payload bytes of one load.
    pub(crate) bytes: u64,
    /// Finding the files, reading and checking their headers.
    pub(crate) open_seconds: f64,
    /// Allocating the memory of the tensors.
    pub(crate) allocate_seconds: f64,
    /// One entry a load, `--repeat` of them.
    pub(crate) loads: Vec<Run>,
    /// The limit of the way into the device's memory, measured after the load.
    pub(crate) limit: Option<Limit>,
    /// Why there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit_unknown: Option<String>,
    /// On a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_memory: Option<DeviceMemory>,
    pub(crate) verified: Vec<String>,
    pub(crate) not_verified: Vec<String>,
    pub(crate) warnings: Vec<String>,
    /// With `--digest`: what arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) arrived: Option<Vec<Arrived>>,
}

/// Where the bytes went.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceName {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) product: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
}

/// One load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) bytes: u64,
    /// Payload and the gaps between that were read through.
    pub(crate) read_bytes: u64,
    /// From the start of the engine's session to the last byte.
    pub(crate) seconds: f64,
    pub(crate) gb_per_s: f64,
    /// `gb_per_s` over the limit's.
    pub(crate) share_of_limit: Option<f64>,
    /// CPU time of the whole process during the load.
    pub(crate) cpu_seconds: f64,
    pub(crate) cpu_ms_per_gb: Option<f64>,
    pub(crate) threads: usize,
    pub(crate) paths: Vec<Part>,
    /// Bytes of blocks whose checksums were right: compared by the GPU in its memory, by the CPU on their way.
    pub(crate) verified_gpu_bytes: u64,
    pub(crate) verified_cpu_bytes: u64,
    pub(crate) refusals: Vec<String>,
    pub(crate) arena_peak_bytes: u64,
    pub(crate) arena_touched_bytes: u64,
    pub(crate) arena_limit_bytes: u64,
    pub(crate) registered_peak_bytes: u64,
    pub(crate) registered_limit_bytes: u64,
    pub(crate) files_unchanged: usize,
}

/// What went one way.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Part {
    pub(crate) path: &'static str,
    pub(crate) bytes: u64,
    pub(crate) pieces: u64,
    pub(crate) reasons: Vec<String>,
}

/// Memory of the GPU as its driver sees it, other processes included.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceMemory {
    pub(crate) total_bytes: u64,
    /// Free before the tensors' memory was allocated.
    pub(crate) free_before_bytes: u64,
    /// Free after the load, with the tensors in place.
    pub(crate) free_after_bytes: u64,
    /// Most in use at one time since before, looked at ten times a second.
    pub(crate) peak_bytes: u64,
    /// Of that, the tensors.
    pub(crate) tensors_bytes: u64,
    /// The rest of it.
    pub(crate) beyond_tensors_bytes: u64,
}

/// One tensor, or part of one, as it is in memory.
#[derive(Debug, Serialize)]
pub(crate) struct Arrived {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    /// Of the part that was loaded.
    pub(crate) shape: Vec<u64>,
    /// Where the part starts in the tensor, if it is not all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) start: Option<Vec<u64>>,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
}

impl Run {
    pub(crate) fn new(report: Report, cpu_seconds: f64) -> Self {
        Self {
            bytes: report.bytes,
            read_bytes: report.read_bytes,
            seconds: report.seconds,
            gb_per_s: gb_per_s(report.bytes, report.seconds),
            share_of_limit: None,
            cpu_seconds,
            cpu_ms_per_gb: ms_per_gb(cpu_seconds, report.bytes),
            threads: report.threads,
            paths: report
                .paths
                .into_iter()
                .map(|share| Part {
                    path: share.path.as_str(),
                    bytes: share.bytes,
                    pieces: share.pieces,
                    reasons: share.reasons,
                })
                .collect(),
            verified_gpu_bytes: report.verified_gpu_bytes,
            verified_cpu_bytes: report.verified_cpu_bytes,
            refusals: report.refusals,
            arena_peak_bytes: report.arena.peak_bytes as u64,
            arena_touched_bytes: report.arena.touched_bytes as u64,
            arena_limit_bytes: report.arena.size_bytes as u64,
            registered_peak_bytes: report.registered_peak_bytes,
            registered_limit_bytes: report.registered_limit_bytes,
            files_unchanged: report.files_unchanged,
        }
    }
}

/// Writes the report for people.
pub(crate) fn print(out: &mut dyn Write, report: &LoadReport) -> io::Result<()> {
    let device = &report.device;
    let product = device.product.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    writeln!(
        out,
        "{} of {} loaded to {}{}",
        decimal(report.bytes),
        count(report.tensors, "tensor"),
        device.name,
        clean(&product),
    )?;
    if report.tensors_unsharded > 0 {
        line(
            out,
            "",
            &format!("{} of them whole: they lack the dimension", report.tensors_unsharded),
        )?;
    }
    print_rates(out, report)?;
    if let Some(run) = report.loads.last() {
        print_paths(out, run)?;
        let large = |_: &f64| run.bytes >= crate::limits::WORTH_BYTES;
        let cost = run
            .cpu_ms_per_gb
            .filter(large)
            .map(|ms| format!(", {ms:.0} ms a GB"))
            .unwrap_or_default();
        let threads = count(run.threads, "worker thread");
        line(out, "cpu", &format!("{}{cost}, {threads}", seconds(run.cpu_seconds)))?;
        print_memory(out, run, report.device_memory.as_ref())?;
        for refusal in &run.refusals {
            line(out, "refused", refusal)?;
        }
    }
    for text in &report.verified {
        line(out, "verified", text)?;
    }
    for text in &report.not_verified {
        line(out, "not verified", text)?;
    }
    for arrived in report.arrived.iter().flatten() {
        let start =
            arrived.start.as_ref().map(|start| format!(" from {start:?}")).unwrap_or_default();
        writeln!(
            out,
            "{}  {}  {:?}{start}  {}",
            arrived.sha256,
            arrived.dtype,
            arrived.shape,
            clean(&arrived.name)
        )?;
    }
    Ok(())
}

fn print_rates(out: &mut dyn Write, report: &LoadReport) -> io::Result<()> {
    let share = |run: &Run| match (&report.limit, run.share_of_limit) {
        (Some(limit), Some(share)) => {
            format!(
                ", {share:.2} of the {} limit of {} ({})",
                limit.what,
                rate(limit.gb_per_s),
                limit.how
            )
        }
        _ => String::new(),
    };
    match report.loads.as_slice() {
        [run] => line(
            out,
            "rate",
            &format!("{} in {}{}", rate(run.gb_per_s), seconds(run.seconds), share(run)),
        )?,
        runs => {
            if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
                line(
                    out,
                    "first load",
                    &format!("{} in {}", rate(first.gb_per_s), seconds(first.seconds)),
                )?;
                let text =
                    format!("{} in {}{}", rate(last.gb_per_s), seconds(last.seconds), share(last));
                line(out, "last load", &text)?;
            }
            let stats = Spread::of(runs.iter().map(|run| run.gb_per_s));
            let text = format!(
                "median {} of {} loads, from {} to {}",
                rate(stats.median),
                runs.len(),
                rate(stats.min),
                rate(stats.max)
            );
            line(out, "all loads", &text)?;
        }
    }
    if let Some(why) = &report.limit_unknown {
        line(out, "limit", &format!("not measured: {why}"))?;
    }
    let before = format!(
        "opening and checking headers {}, allocating {}",
        seconds(report.open_seconds),
        seconds(report.allocate_seconds)
    );
    line(out, "before that", &before)
}

fn print_paths(out: &mut dyn Write, run: &Run) -> io::Result<()> {
    for part in &run.paths {
        let share = 100.0 * part.bytes as f64 / run.bytes.max(1) as f64;
        let text = format!(
            "{}: {}, {share:.0} %, {}",
            part.path,
            decimal(part.bytes),
            count(part.pieces as usize, "piece"),
        );
        line(out, "path", &text)?;
        for reason in &part.reasons {
            line(out, "", &format!("because {reason}"))?;
        }
    }
    if run.read_bytes > run.bytes {
        line(out, "", &format!("{} of gaps read through", decimal(run.read_bytes - run.bytes)))?;
    }
    Ok(())
}

fn print_memory(out: &mut dyn Write, run: &Run, device: Option<&DeviceMemory>) -> io::Result<()> {
    let arena = match run.arena_limit_bytes {
        0 => "arena not needed".to_owned(),
        limit => {
            format!("arena {} at its peak, limit {}", binary(run.arena_peak_bytes), binary(limit))
        }
    };
    line(out, "memory", &arena)?;
    let Some(device) = device else { return Ok(()) };
    let registered = format!(
        "registered page cache {} at its peak, limit {}",
        binary(run.registered_peak_bytes),
        binary(run.registered_limit_bytes)
    );
    line(out, "", &registered)?;
    let text = format!(
        "device {} free before, {} after; {} in use at the peak, {} beyond the tensors",
        binary(device.free_before_bytes),
        binary(device.free_after_bytes),
        binary(device.peak_bytes),
        binary(device.beyond_tensors_bytes)
    );
    line(out, "", &text)
}

fn line(out: &mut dyn Write, head: &str, text: &str) -> io::Result<()> {
    writeln!(out, "  {head:<13} {}", clean(text))
}
