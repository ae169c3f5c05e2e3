//! `forebay tier`: tiers seen, drained, and told what stays.
//!
//! | module | command |
//! | --- | --- |
//! | [`args`] | the command line of all of them |
//! | [`status`] | `status` |
//! | [`drain`] | `drain` |
//! | [`drain_job`] | the same of a job of the agent |
//! | [`act`] | everything that is an action of the runner |
//! | [`track`] | `track`, `untrack`: folders for the agent |
//! | [`jobs`] | `jobs`: what it works for |
//! | [`agent`] | whether an agent answers, and what it says |
//! | [`here`] | the tiers opened in this process |

mod act;
mod agent;
mod args;
mod drain;
mod drain_job;
mod here;
mod jobs;
mod status;
mod track;

use std::path::Path;

use forebay_error::Result;
use forebay_tier::config::{Beside, Config};

use args::SocketArgs;
pub(crate) use args::{ConfigArgs, Tier};

use crate::ckpt::Outcome;
use crate::console::Console;

/// Runs one of them.
pub(crate) fn run(command: &Tier, console: &Console) -> Result<Outcome> {
    match command {
        Tier::Status(args) => status::run(args, console),
        Tier::Drain(args) => drain::run(args, console),
        Tier::Jobs(args) => jobs::run(args, console),
        Tier::Track(args) => track::track(args, console),
        Tier::Untrack(args) => track::untrack(args, console),
        other => act::run(other, console),
    }
}

impl ConfigArgs {
    /// Reads the configuration that counts.
    pub(crate) fn load(&self) -> Result<Config> {
        load(self.config.as_deref(), &self.set)
    }
}

impl SocketArgs {
    /// Reads the configuration that counts.
    fn load(&self) -> Result<Config> {
        load(self.config.as_deref(), &self.set)
    }
}

fn load(file: Option<&Path>, set: &[String]) -> Result<Config> {
    let beside = Beside::of_process(set.iter().map(String::as_str))?;
    Config::load(file, &beside)
}
