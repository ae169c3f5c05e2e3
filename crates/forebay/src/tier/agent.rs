//! The agent of this machine, if one answers at the socket of the configuration.

use forebay_agent::Client;
use forebay_error::{Code, Error, Result};
use forebay_tier::config::Config;
use forebay_tier::runner::{Action, Outcome};
use forebay_tier::status::Status;

use super::args::ConfigArgs;

/// A connection to it.
pub(super) struct Agent {
    client: Client,
    job: Option<String>,
}

/// Connects; `None` where none listens, or none is to be asked. Errors: one listens and refuses.
pub(super) fn find(args: &ConfigArgs, config: &Config) -> Result<Option<Agent>> {
    if args.no_agent {
        return Ok(None);
    }
    match Client::connect(&config.agent.socket) {
        Ok(client) => Ok(Some(Agent { client, job: args.job.clone() })),
        Err(error) if error.code() == Code::NotFound && args.job.is_none() => Ok(None),
        // Only an agent has jobs of that name.
        Err(error) if args.job.is_some() => Err(error),
        Err(error) => Err(error.hint("--no-agent does it in this process")),
    }
}

impl Agent {
    /// How its tiers stand.
    pub(super) fn status(&mut self) -> Result<Status> {
        self.client.status(self.job.as_deref())
    }

    /// Has it look at its tiers now.
    pub(super) fn wake(&mut self) -> Result<()> {
        self.client.wake(self.job.as_deref())
    }

    /// Has it done there.
    pub(super) fn act(&mut self, action: &Action) -> Result<Outcome> {
        let odd = |what: &str, error: serde_json::Error| {
            Error::new(Code::Internal, what.to_owned()).with_source(error)
        };
        let action =
            serde_json::to_value(action).map_err(|error| odd("cannot write an action", error))?;
        let outcome = self.client.act(self.job.as_deref(), &action)?;
        serde_json::from_value(outcome)
            .map_err(|error| odd("the agent's answer is not understood", error))
    }
}
