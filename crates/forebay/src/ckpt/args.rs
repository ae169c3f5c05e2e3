//! The command line of `forebay ckpt`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use forebay_checkpoint::export::Rename;

use super::audit::AuditArgs;
use crate::units::parse_size;

const STEPS: &str = "\
ROOT is the folder that holds the steps (`step-100`, `step-200`, ...), or its URL in a bucket:
s3://BUCKET/PREFIX, gs://, az://. The provider's own variables say how that is reached.

The latest step is the last commit of the job that claimed ROOT last, or of the steps that it
went on from; so is what a restore of the latest takes. Steps without records (copied without
`.forebay`, or written by other programs) are of no job: they count, by their numbers, where no
job has committed. A link to a folder is no step.

Exit codes: 0 done; 1 the data or the system is at fault; 2 wrong usage.";

const LIST: &str = "\
ROOT is the folder that holds the steps (`step-100`, `step-200`, ...).

RANKS of a commit is how many ranks saved it. Of an attempt that is no commit, `2/4` says that 2
of its 4 ranks had contributed their parts; `?` where nothing tells how many it should have been.
STATE is `committed`, `pending` (may be under way), `dead`, `replaced` (by a later save of the
step), `removed` (its files go when the grace time is over) or `lost` (it was committed, and its
`.metadata` is missing). AGE is by the clock of the storage.

The latest step is the last commit of the job that claimed ROOT last, or of the steps that it
went on from; so is what a restore of the latest takes. Steps without records (copied without
`.forebay`, or written by other programs) are of no job: they count, by their numbers, where no
job has committed. A link to a folder is no step. In a bucket commits are listed and not
read: damage of their records is found by `ckpt verify --all`, and not shown here.

Exit codes: 0 done; 1 the data or the system is at fault; 2 wrong usage.";

const ONE_STEP: &str = "\
PATH is the folder of one step, any folder with a `.metadata` in it, or a root of steps: then
the latest step is meant, or the one that --step names. It may be a URL: s3://BUCKET/PREFIX.

Exit codes: 0 done; 1 the data or the system is at fault; 2 wrong usage.";

const VERIFY: &str = "\
PATH is the folder of one step, any folder with a `.metadata` in it, or a root of steps: then
the latest step is meant, or the one that --step names, or with --all every one that is
committed.

Exit codes: 0 sound, maybe with `warning:` lines for leftovers; 1 damaged: one `error[code]:`
line for each damaged file, and how many faults more it has; 2 wrong usage. With --json stdout
lists every fault, up to 1000.";

const EXPORT: &str = "\
PATH is the folder of one step, a root of steps (the latest is taken, or --step), or any model.

Two names for one tensor: safetensors hold it under the first of the names, and the metadata of
each file says which others there were, as `save_model` of that library does; `--aliases copy`
writes each. In a file of torch both names share one storage. What is no tensor goes to files of
torch alone, as far as it is plain data.

Rules for names: OLD=NEW, where OLD is a name, or ends in a dot and starts names, or has stars
for any text; the stars of NEW take those texts in order. The first that fits counts:
  --rename model.=   --rename 'layers.*.attn.*=h.*.attention.*'

Every checksum is compared on the way. The output appears whole at the end, or not at all.

Exit codes: 0 done; 1 the data or the system is at fault; 2 wrong usage.";

const DIFF: &str = "\
A and B are folders of steps, roots (the latest step of each), or any models. Elements are equal
if their bits are.

Exit codes: 0 equal; 1 different, or the data or the system is at fault; 2 wrong usage.";

const PRUNE: &str = "\
ROOT is the folder that holds the steps. Only what Forebay wrote is removed, never the newest
commit, and nothing that a restore is reading. Links to folders are no steps, and nothing is
removed through them. A pruned step is no commit any more (`unpublished`): nothing finds it. Its
data go when the grace time is over: with --wait in the same call, else by a later prune or gc.
It is for readers that take no leases, other programs among them, so it is 900 s here;
`Checkpointer`, which prunes between saves, takes 60 s.

Exit codes: 0 done; 1 something could not be removed, or the system is at fault; 2 wrong usage.";

const GC: &str = "\
Only what Forebay wrote is removed, no commit, and nothing that a restore is reading: what is left
of saves that did not end, and of steps that were replaced or pruned longer ago than the grace
time. Links to folders are no steps, and nothing is removed through them. The grace time is for
saves that are slow, and readers that take no leases, other programs among them.

Exit codes: 0 done; 1 something could not be removed, or the system is at fault; 2 wrong usage.";

/// Checkpoints: list, check, write out, clean up.
#[derive(Debug, Subcommand)]
pub(crate) enum Ckpt {
    /// Show what steps there are: committed, pending and dead, with age, size, ranks
    List(ListArgs),
    /// Print the number of the newest step that can be restored
    Latest(RootArgs),
    /// Show what a step holds: who wrote it, files, tensors, objects, warnings
    Show(StepArgs),
    /// Show how many bytes each step takes
    Du(RootArgs),
    /// Read every byte and name what is damaged
    Verify(VerifyArgs),
    /// Write a step as safetensors or as a file of torch
    Export(Box<ExportArgs>),
    /// Compare two steps, tensor by tensor
    Diff(DiffArgs),
    /// Remove old steps
    Prune(PruneArgs),
    /// Remove what saves left that did not end
    Gc(GcArgs),
    /// Print an audit log of tiers, and check that nothing in it was changed
    Audit(AuditArgs),
}

#[derive(Debug, Args)]
#[command(after_help = STEPS)]
pub(crate) struct RootArgs {
    /// The folder that holds the steps
    #[arg(value_name = "ROOT")]
    pub(crate) root: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = LIST)]
pub(crate) struct ListArgs {
    /// The folder that holds the steps
    #[arg(value_name = "ROOT")]
    pub(crate) root: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = ONE_STEP)]
pub(crate) struct StepArgs {
    /// A step's folder, or a root
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Which step of a root
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u64>,
}

/// `forebay ckpt verify`
#[derive(Debug, Args)]
#[command(after_help = VERIFY)]
pub(crate) struct VerifyArgs {
    /// A step's folder, or a root
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Which step of a root
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u64>,
    /// Every committed step of a root
    #[arg(long, conflicts_with = "step")]
    pub(crate) all: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// A folder with an index, or one file where OUT ends in .safetensors.
    Safetensors,
    /// One file of torch.save.
    Torch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// bfloat16
    Bf16,
    /// float16
    F16,
    /// float32
    F32,
    /// float64
    F64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AliasesArg {
    /// One name is written, the metadata names the others.
    Note,
    /// Each name is written.
    Copy,
}

/// `forebay ckpt export`
#[derive(Debug, Args)]
#[command(after_help = EXPORT)]
pub(crate) struct ExportArgs {
    /// A step's folder, a root, or a model
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Which step of a root
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u64>,
    /// Where to: a folder, or a file
    #[arg(long, value_name = "OUT")]
    pub(crate) to: PathBuf,
    /// What to write [default: torch where OUT ends in .pt, .pth or .bin, else safetensors]
    #[arg(long, value_enum)]
    pub(crate) format: Option<FormatArg>,
    /// What floats of 16, 32 and 64 bits become; all else stays
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<DtypeArg>,
    /// A rule that gives other names. May be repeated. A file of torch has flat names then
    #[arg(long, value_name = "OLD=NEW")]
    pub(crate) rename: Vec<Rename>,
    /// Only names that match: * ? [a-z] {a,b}; * matches dots and slashes too. May be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) select: Vec<String>,
    /// Bytes of tensors in one file of safetensors, at the most
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    pub(crate) max_shard_bytes: u64,
    /// What becomes of tensors with two names in safetensors
    #[arg(long, value_enum, default_value = "note")]
    pub(crate) aliases: AliasesArg,
    /// In a file of torch: names as they are, not nested dicts and lists
    #[arg(long)]
    pub(crate) flat: bool,
    /// Replace what is at OUT
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// `forebay ckpt diff`
#[derive(Debug, Args)]
#[command(after_help = DIFF)]
pub(crate) struct DiffArgs {
    /// The first
    #[arg(value_name = "A")]
    pub(crate) a: PathBuf,
    /// The second
    #[arg(value_name = "B")]
    pub(crate) b: PathBuf,
    /// Only names that match: * ? [a-z] {a,b}. May be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) select: Vec<String>,
}

/// `forebay ckpt prune`
#[derive(Debug, Args)]
#[command(after_help = PRUNE)]
#[command(group = ArgGroup::new("rules").required(true).multiple(true))]
pub(crate) struct PruneArgs {
    /// The folder that holds the steps
    #[arg(value_name = "ROOT")]
    pub(crate) root: PathBuf,
    /// Keep the last so many commits, in the order they were made [default: 1, with --keep-every]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          group = "rules")]
    pub(crate) keep_last: Option<u32>,
    /// And every step that this divides
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..),
          group = "rules")]
    pub(crate) keep_every: Option<u64>,
    /// And this step. May be repeated
    #[arg(long, value_name = "S")]
    pub(crate) pin: Vec<u64>,
    /// How long a step's data stay after it is no commit any more, for readers without leases
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub(crate) grace: u64,
    /// Wait for that and remove the data too; else a later prune or gc does
    #[arg(long)]
    pub(crate) wait: bool,
    /// Only say what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `forebay ckpt gc`
#[derive(Debug, Args)]
#[command(after_help = GC)]
pub(crate) struct GcArgs {
    /// The folder that holds the steps, or one that is a checkpoint by itself
    #[arg(value_name = "ROOT")]
    pub(crate) root: PathBuf,
    /// How old, by the storage's clock, everything of a save must be to be left over
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub(crate) grace: u64,
    /// Only say what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
}
