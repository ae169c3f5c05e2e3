//! The command line. Every flag says here what it means; how a value is spelled is the business of its type.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use forebay_engine::{CacheChoice, PathChoice, THREADS_MAX};
use serde::Serialize;

use crate::agent::AgentArgs;
use crate::ckpt::Ckpt;
use crate::select::{NamedRegion, ShardSpec};
use crate::tier::{ConfigArgs, Tier};
use crate::top::TopArgs;
use crate::units::parse_size;
use crate::verify::Expected;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the data or the system is at fault: a damaged or missing file, no memory, no device
  2  wrong usage: an unknown flag, a name that no tensor has, a slice outside of its tensor
  128 + N  ended by signal N (130: Ctrl-C)

Errors are one line on stderr, `error[code]: what, where`, and `hint:` lines that say what to do.
With --json, stdout holds one line of JSON, or nothing after an error.

Environment:
  FOREBAY_DEVICE, FOREBAY_THREADS, FOREBAY_PATH, FOREBAY_CACHE, FOREBAY_ARENA, FOREBAY_DMA_WINDOW
             the flags of the same name for `load` (`bench` takes the device alone); a flag wins
  FOREBAY_CONFIG  the configuration of tiers; FOREBAY_TIERS_*, FOREBAY_TIER_NAME_* and
             FOREBAY_AGENT_* are its values, see `forebay config`
  FOREBAY_LOG  what to log to stderr, such as `forebay_engine=debug`; wins over --verbose
  NO_COLOR   if set and not empty: no colours";

/// Loads model weights from storage into GPU or host memory, at the speed of the slowest link.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct Global {
    /// Print one line of JSON on stdout
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// No progress bar and no text on success; warnings and errors stay
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// Log to stderr what is done; twice: everything
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Load a model and report: rate, paths and why, what it cost, what was verified
    Load(Box<LoadArgs>),
    /// Show what a model holds: format, metadata, tensors
    Inspect(InspectArgs),
    /// Checkpoints: list, check, write out, clean up
    #[command(subcommand)]
    Ckpt(Ckpt),
    /// Tiers: see them, drain them, say what stays
    #[command(subcommand)]
    Tier(Box<Tier>),
    /// Show every value of the configuration and where it came from
    Config(ConfigArgs),
    /// Move checkpoints between tiers, until told to end: the daemon of a node
    #[command(after_help = EXIT_CODES)]
    Agent(Box<AgentArgs>),
    /// Show what the agent does, live
    #[command(after_help = EXIT_CODES)]
    Top(TopArgs),
    /// Measure this machine
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Load rates for numbers of threads and paths, beside the raw limits measured in the same run
    Load(BenchArgs),
}

/// `forebay load`
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct LoadArgs {
    /// A safetensors or torch.save file, an index, or a folder that holds a model or a checkpoint; or
    /// the URL of one in a bucket: s3://BUCKET/PREFIX, gs://, az://
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// Where to: cuda:N, GPU-UUID or host [default: cuda:0 if there is a GPU, else host]
    #[arg(long, env = "FOREBAY_DEVICE")]
    pub(crate) device: Option<String>,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// SHA-256 that a file of the model must have, checked before anything is loaded; without
    /// FILE= for a model of one file. May be repeated
    #[arg(long, value_name = "[FILE=]HEX")]
    pub(crate) expect_sha256: Vec<Expected>,
    /// Load this many times, into the same memory
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) repeat: u32,
    /// Also give the SHA-256 of what arrived in memory, for each tensor
    #[arg(long)]
    pub(crate) digest: bool,
}

/// Which tensors.
#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SelectArgs {
    /// Only tensors whose name matches: * ? [a-z] {a,b}; * matches dots and slashes too. May be
    /// repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) names: Vec<String>,
    /// Only the part of one rank: dimension DIM is cut in WORLD parts as torch.chunk does. Tensors
    /// without that dimension load whole
    #[arg(long, value_name = "DIM:RANK/WORLD", conflicts_with = "region")]
    pub(crate) shard: Option<ShardSpec>,
    /// A part of one tensor, as in `w[0:128,:]`; dimensions that are left out are whole. May be
    /// repeated; with --names, beside what those match
    #[arg(long, value_name = "NAME[a:b,c:d]")]
    pub(crate) region: Vec<NamedRegion>,
}

/// How the engine works.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Which way bytes go; `auto` decides piece by piece
    #[arg(long, env = "FOREBAY_PATH", default_value = "auto", value_parser = path_choice())]
    pub(crate) path: PathChoice,
    /// Whether the page cache holds the files afterwards: as found, yes, or no
    #[arg(long, env = "FOREBAY_CACHE", default_value = "auto", value_parser = cache_choice())]
    pub(crate) cache: CacheChoice,
    /// Worker threads [default: what CPUs and cgroup allow, at most 16]
    #[arg(long, env = "FOREBAY_THREADS", value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Limit of pinned staging memory, as in 512MiB
    #[arg(long, env = "FOREBAY_ARENA", value_name = "SIZE", default_value = "1GiB")]
    #[arg(value_parser = parse_size)]
    pub(crate) arena: u64,
    /// Limit of page cache registered with the GPU at one time
    #[arg(long, env = "FOREBAY_DMA_WINDOW", value_name = "SIZE", default_value = "16GiB")]
    #[arg(value_parser = parse_size)]
    pub(crate) dma_window: u64,
}

/// `forebay inspect`
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct InspectArgs {
    /// A safetensors or torch.save file, an index, or a folder that holds a model or a checkpoint
    #[arg(value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// Add the SHA-256 of each tensor's row-major bytes (reads the whole model once)
    #[arg(long)]
    pub(crate) digest: bool,
    /// Only tensors whose name matches: * ? [a-z] {a,b}. May be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) names: Vec<String>,
}

/// The state of the page cache before each load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheState {
    /// Nothing of the model is in the page cache.
    Cold,
    /// All of it is.
    Warm,
}

/// `forebay bench load`
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchArgs {
    /// The model to load; without one a model of random bf16 numbers is made, and removed at the end
    #[arg(value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
    /// Where to: cuda:N, GPU-UUID or host [default: cuda:0 if there is a GPU, else host]
    #[arg(long, env = "FOREBAY_DEVICE")]
    pub(crate) device: Option<String>,
    /// Size of the model that is made, in GB (10^9 bytes)
    #[arg(long, default_value_t = 4.0, value_parser = gigabytes, conflicts_with = "model")]
    pub(crate) gb: f64,
    /// Folder to make it in [default: TMPDIR, else /var/tmp]
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) dir: Option<PathBuf>,
    /// State of the page cache before each load, enforced and verified
    #[arg(long, value_enum, default_value = "warm")]
    pub(crate) cache: CacheState,
    /// Loads of each combination; they take turns
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) repeat: u32,
    /// Numbers of threads to try, as in 1,2,4 [default: what a load takes]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = threads)]
    pub(crate) threads: Vec<usize>,
    /// Paths to try, as in auto,copy
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "auto")]
    #[arg(value_parser = path_choice())]
    pub(crate) paths: Vec<PathChoice>,
    /// Who compares stored checksums, as in auto,cpu,off: auto is what a load does (the GPU where it can), off no one.
    /// Plain safetensors have none
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "auto")]
    pub(crate) verify: Vec<VerifyChoice>,
}

/// Who compares stored checksums, in a benchmark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum VerifyChoice {
    /// As in every load.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// Nobody: for comparison.
    Off,
}

fn path_choice() -> impl TypedValueParser<Value = PathChoice> {
    PossibleValuesParser::new(PathChoice::NAMES).try_map(|name| PathChoice::parse(&name))
}

fn cache_choice() -> impl TypedValueParser<Value = CacheChoice> {
    PossibleValuesParser::new(CacheChoice::NAMES).try_map(|name| CacheChoice::parse(&name))
}

fn threads(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(threads @ 1..=THREADS_MAX) => Ok(threads),
        _ => Err(format!("not a number from 1 to {THREADS_MAX}")),
    }
}

fn gigabytes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gb) if (0.001..=100_000.0).contains(&gb) => Ok(gb),
        _ => Err("not a number from 0.001 to 100000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
