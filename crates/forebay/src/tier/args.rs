//! The command line of `forebay tier` and `forebay config`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::units::parse_seconds;

const HELP: &str = "\
Tiers are configured in forebay.toml: the file that --config or FOREBAY_CONFIG names, else the
first of ./forebay.toml, ~/.config/forebay/forebay.toml, /etc/forebay/forebay.toml. Each value can
be given as --set tier.local.capacity=1TB or as a variable (FOREBAY_TIER_LOCAL_CAPACITY).

Where an agent of this machine answers, it is asked; else this process does the work.

Exit codes: 0 done; 1 something is wrong or not done, or the system is at fault; 2 wrong usage.";

const TRACK_HELP: &str = "\
The folder takes the place of the agent's first tier; copies go below the job's name in the others.
The agent has it open from then on, and goes on when whoever saves there is gone. It must belong to
the agent's user, and it is no error to hand it over again.

Exit codes: 0 done; 1 refused, or no agent answers; 2 wrong usage.";

/// Tiers: see them, drain them, say what stays.
#[derive(Debug, Subcommand)]
pub(crate) enum Tier {
    /// Show tiers, checkpoints with their copies, transfers, errors
    Status(StatusArgs),
    /// Move every step to where it should be, then end
    Drain(DrainArgs),
    /// Give a step a name: it goes to every tier, and no rule removes it
    Pin(PinArgs),
    /// Take a name away
    Unpin(UnpinArgs),
    /// Hold a step: it can be neither removed nor replaced anywhere
    Hold(HoldArgs),
    /// End a hold
    Release(ReleaseArgs),
    /// Copy a step to a folder with a name, which no rule removes
    Promote(PromoteArgs),
    /// Let nothing in or out of a tier, or of all; needs an agent
    Pause(PauseArgs),
    /// Go on; needs an agent
    Resume(PauseArgs),
    /// Change the caps of a tier; needs an agent
    Limit(LimitArgs),
    /// Remove what the rules let go
    Prune(PruneArgs),
    /// Show what the agent works for: jobs, their folders, what is left to move
    Jobs(SocketArgs),
    /// Hand a folder of steps to the agent: what is saved there goes to its tiers after the first
    #[command(after_help = TRACK_HELP)]
    Track(TrackArgs),
    /// Take it back: nothing of it is moved any more; what is in the tiers stays
    Untrack(UntrackArgs),
}

/// Which configuration.
#[derive(Debug, Args)]
#[command(next_help_heading = "Configuration", after_help = HELP)]
pub(crate) struct ConfigArgs {
    /// The configuration [default: see below]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// A value that goes before the file and variables. May be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Ask no agent: do it in this process
    #[arg(long)]
    pub(crate) no_agent: bool,
    /// Which of the agent's jobs [default: the configured one]
    #[arg(long, value_name = "NAME", conflicts_with = "no_agent")]
    pub(crate) job: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show the last so many steps
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) last: usize,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Give up after that time, as in 10min [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PinArgs {
    /// The step
    #[arg(value_name = "STEP")]
    pub(crate) step: u64,
    /// Its name: letters, digits, `.`, `-`, `_`
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UnpinArgs {
    /// The name
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct HoldArgs {
    /// The step
    #[arg(value_name = "STEP")]
    pub(crate) step: u64,
    /// Why, for people
    #[arg(long, value_name = "TEXT")]
    pub(crate) why: Option<String>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReleaseArgs {
    /// The step
    #[arg(value_name = "STEP")]
    pub(crate) step: u64,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PromoteArgs {
    /// The step
    #[arg(value_name = "STEP")]
    pub(crate) step: u64,
    /// The folder's name
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Where that folder is made: the name of a tier, a path or a URL [default: the last tier]
    #[arg(long, value_name = "PLACE")]
    pub(crate) to: Option<String>,
    /// Also write safetensors, to NAME-safetensors beside it
    #[arg(long)]
    pub(crate) export: bool,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// The tier [default: all]
    #[arg(value_name = "TIER")]
    pub(crate) tier: Option<String>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// The tier
    #[arg(value_name = "TIER")]
    pub(crate) tier: String,
    /// Bytes a second out of it, as in 100MB; 0 for no limit
    #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_size)]
    pub(crate) read: Option<u64>,
    /// Bytes a second into it
    #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_size)]
    pub(crate) write: Option<u64>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// Only say what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

/// Which agent.
#[derive(Debug, Args)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct SocketArgs {
    /// The agent's socket [default: agent.socket of the configuration]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// The configuration [default: as for all commands of tiers]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// A value that goes before the file and variables. May be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TrackArgs {
    /// The folder
    #[arg(value_name = "FOLDER")]
    pub(crate) folder: PathBuf,
    /// What the job is called: letters, digits, `.`, `-`, `_` [default: as the folder]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) agent: SocketArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UntrackArgs {
    /// The job
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) agent: SocketArgs,
}
