//! The results of a benchmark. As JSON it is [`BenchReport`], field by field; [`print()`] is a table.

use std::io::{self, Write};

use forebay_engine::PathChoice;
use serde::Serialize;

use super::Setting;
use super::cache::Found;
use crate::args::VerifyChoice;
use crate::console::clean;
use crate::limits::Limit;
use crate::report::{DeviceName, Run};
use crate::spread::Spread;
use crate::units::{count, decimal, rate};

/// Everything that a benchmark found. Rates are GB (10^9 bytes) a second.
#[derive(Debug, Serialize)]
pub(crate) struct BenchReport {
    pub(crate) bench: &'static str,
    pub(crate) version: &'static str,
    pub(crate) device: DeviceName,
    pub(crate) cpus: usize,
    pub(crate) model: ModelFacts,
    pub(crate) cache: Found,
    pub(crate) limits: Vec<Limit>,
    /// The one of `limits` that no load can beat in this state of the page cache.
    pub(crate) limit: Option<Limit>,
    pub(crate) results: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelFacts {
    pub(crate) path: String,
    /// Whether it was made for the benchmark.
    pub(crate) made: bool,
    pub(crate) bytes: u64,
    pub(crate) tensors: usize,
    pub(crate) files: usize,
    pub(crate) file_system: String,
}

/// One setting's loads.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) setting: Setting,
    pub(crate) gb_per_s: Spread,
    /// Of the first load, which may pay for pinning the arena.
    pub(crate) first_gb_per_s: f64,
    pub(crate) cpu_ms_per_gb: Spread,
    /// Median over the limit.
    pub(crate) ratio_to_limit: Option<f64>,
    pub(crate) loads: Vec<Run>,
}

impl Row {
    pub(crate) fn new(setting: &Setting, mut loads: Vec<Run>, limit: Option<&Limit>) -> Self {
        for run in &mut loads {
            run.share_of_limit = limit.map(|limit| run.gb_per_s / limit.gb_per_s);
        }
        let gb_per_s = Spread::of(loads.iter().map(|run| run.gb_per_s));
        Self {
            setting: setting.clone(),
            gb_per_s,
            first_gb_per_s: loads.first().map_or(0.0, |run| run.gb_per_s),
            cpu_ms_per_gb: Spread::of(loads.iter().filter_map(|run| run.cpu_ms_per_gb)),
            ratio_to_limit: limit.map(|limit| gb_per_s.median / limit.gb_per_s),
            loads,
        }
    }
}

/// The name that the command line has for a path.
pub(crate) fn path_name(choice: PathChoice) -> &'static str {
    let is_choice = |name: &&&str| PathChoice::parse(name).is_ok_and(|named| named == choice);
    PathChoice::NAMES.iter().find(is_choice).copied().unwrap_or("unknown")
}

/// Writes the table.
pub(crate) fn print(out: &mut dyn Write, report: &BenchReport) -> io::Result<()> {
    let (model, cache) = (&report.model, &report.cache);
    writeln!(
        out,
        "{} in {} on {}, to {}, page cache {} ({:.1} % resident, {})",
        decimal(model.bytes),
        count(model.files, "file"),
        clean(&model.file_system),
        report.device.name,
        cache.state,
        cache.resident_share * 100.0,
        if cache.verified { cache.method } else { "not verified: the kernel cannot be asked" },
    )?;
    for limit in &report.limits {
        writeln!(out, "limit: {} {} ({})", limit.what, rate(limit.gb_per_s), limit.how)?;
    }
    writeln!(out)?;
    writeln!(
        out,
        "{:<10} {:>7} {:>8} {:>8} {:>8} {:>8} {:>10} {:>8}  {:<14} ways",
        "path", "threads", "median", "min", "max", "first", "CPU ms/GB", "of limit", "verified by"
    )?;
    for row in &report.results {
        let threads = row.loads.last().map_or(0, |run| run.threads);
        let ratio = row.ratio_to_limit.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        writeln!(
            out,
            "{:<10} {threads:>7} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>10.0} {ratio:>8}  {:<14} {}",
            row.setting.path,
            row.gb_per_s.median,
            row.gb_per_s.min,
            row.gb_per_s.max,
            row.first_gb_per_s,
            row.cpu_ms_per_gb.median,
            verifiers(row),
            ways(row.loads.last()),
        )?;
    }
    writeln!(out, "\nrates in GB/s; CPU is the whole process; medians of {}", repeats(report))
}

fn repeats(report: &BenchReport) -> String {
    count(report.results.first().map_or(0, |row| row.loads.len()), "load")
}

/// Who compared checksums in the last load, with the shares of the blocks' bytes: `GPU 98 CPU 2 %`.
fn verifiers(row: &Row) -> String {
    let (gpu, cpu) =
        row.loads.last().map_or((0, 0), |run| (run.verified_gpu_bytes, run.verified_cpu_bytes));
    let percent = |bytes: u64| 100.0 * bytes as f64 / (gpu + cpu).max(1) as f64;
    match (gpu, cpu) {
        (0, 0) if row.setting.verify == VerifyChoice::Off => "off".to_owned(),
        (0, 0) => "-".to_owned(),
        (0, _) => "CPU".to_owned(),
        (_, 0) => "GPU".to_owned(),
        _ => format!("GPU {:.0} CPU {:.0} %", percent(gpu), percent(cpu)),
    }
}

/// `page-cache-dma 62 %, page-cache-copy 38 %`
fn ways(run: Option<&Run>) -> String {
    let Some(run) = run else { return String::new() };
    let share = |bytes: u64| 100.0 * bytes as f64 / run.bytes.max(1) as f64;
    let ways: Vec<String> =
        run.paths.iter().map(|part| format!("{} {:.0} %", part.path, share(part.bytes))).collect();
    ways.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_names() {
        assert_eq!(path_name(PathChoice::Fallback), "fallback");
    }
}
