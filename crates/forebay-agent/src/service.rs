//! From a configuration to a running agent: the mover of the configured tiers, those of folders that clients hand over,
//! and what listens.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tier::config::Config;
use forebay_tier::runner::{Action, Duties, Reach, Runner, Tiers};
use forebay_tier::status::Status;
use serde_json::Value;

use crate::agent::Agent;
use crate::copies::{Copies, CopySettings, PeerSettings};
use crate::job::{CONFIGURED, Jobs};
use crate::lead::Leading;
use crate::metrics::Counts;
use crate::notify;
use crate::settings::Settings;
use crate::staged::{Saves, Times};
use crate::track::{Folders, Trackers};
use crate::work::Work;

impl Work for Runner {
    fn status(&self) -> Status {
        Runner::status(self)
    }

    fn wake(&self) {
        Runner::wake(self);
    }

    fn act(&self, action: &Value, who: &str) -> Result<Value> {
        // Without the source: it could quote what was sent.
        let action: Action = serde_json::from_value(action.clone()).map_err(|error| {
            Error::new(Code::Usage, format!("no such action: {error}"))
                .hint(r#"as in {"action": "pin", "step": 100, "name": "best"}"#)
        })?;
        let outcome = Runner::act(self, &action, who)?;
        serde_json::to_value(outcome).map_err(|error| {
            Error::new(Code::Internal, "cannot write the outcome as JSON").with_source(error)
        })
    }
}

/// A running agent with its movers. Dropping it stops all.
pub struct Service {
    // Dropped first: no requests to what has stopped.
    agent: Option<Agent>,
    leading: Option<Leading>,
    trackers: Arc<Trackers>,
    runner: Arc<Runner>,
    copies: Arc<Copies>,
    /// Goes on where the agent starts anew in this process.
    saves: Option<Arc<Saves>>,
    counts: Arc<Counts>,
    config: Config,
}

impl Service {
    /// Starts. `counts` are shown in the metrics; [`crate::Counts`] of the log's exporter among them.
    ///
    /// Errors: those of the tiers, of the settings, of what is bound.
    pub fn start(config: &Config, counts: Arc<Counts>) -> Result<Self> {
        // At once: until then they are open to all that this process starts.
        let mut kept = notify::kept();
        let saves = Saves::new(staged_limit(config), Times::default(), Arc::clone(&counts));
        Self::start_with(config, counts, &mut kept, &saves)
    }

    /// The same, and goes on with folders, which are taken once nothing can go wrong any more.
    fn start_with(
        config: &Config,
        counts: Arc<Counts>,
        kept: &mut Folders,
        saves: &Arc<Saves>,
    ) -> Result<Self> {
        let settings = settings(config)?;
        settings.check_http()?;
        let tiers = Tiers::open(config)?;
        let jobs = Arc::new(Jobs::default());
        let copies = Arc::new(Copies::new(settings.copies.clone()));
        let trackers = Trackers::new(Arc::clone(&tiers), Arc::clone(&jobs));
        let trackers = Arc::new(trackers.with_copies(Arc::clone(&copies)));
        // The socket first: where another agent has it, nothing is to move twice.
        let tracker = Arc::clone(&trackers);
        saves.set_limit(staged_limit(config));
        let (all, count) = (Arc::clone(&jobs), Arc::clone(&counts));
        let agent = Agent::start(&settings, all, count, tracker, &copies, Arc::clone(saves))?;
        let reach = reach_of(config);
        let runner = Arc::new(Runner::start_for(tiers, Duties::All, reach)?);
        let leading = (reach == Reach::OwnDrive).then(|| Leading::start(CONFIGURED, &runner));
        let leading = leading.transpose()?;
        jobs.add(CONFIGURED, copies.add(CONFIGURED, &runner)?)?;
        let (agent, saves, config) = (Some(agent), Some(Arc::clone(saves)), config.clone());
        let service = Self { agent, leading, trackers, runner, copies, saves, counts, config };
        service.trackers.resume(std::mem::take(kept))?;
        Ok(service)
    }

    /// Goes on with another configuration: ends as [`stop`](Self::stop) does, starts, and takes up the folders that
    /// were handed over. Where it cannot start it starts as it was.
    ///
    /// Errors: with what is wrong with the configuration, before anything has ended; with the reason, after it has been
    /// started as it was. `None` beside it: that was not possible either.
    pub fn restart(mut self, config: &Config) -> (Option<Self>, Result<()>) {
        if let Err(error) = check(config) {
            return (Some(self), Err(error));
        }
        let (counts, before) = (Arc::clone(&self.counts), self.config.clone());
        // They are let go by clients that were there before, and what is being finished goes on.
        let saves = self.saves.take();
        let saves = saves.unwrap_or_else(|| Saves::new(0, Times::default(), Arc::clone(&counts)));
        let mut folders = self.end();
        drop(self);
        match Self::start_with(config, Arc::clone(&counts), &mut folders, &saves) {
            Ok(service) => (Some(service), Ok(())),
            Err(error) => match Self::start_with(&before, counts, &mut folders, &saves) {
                Ok(service) => (Some(service), Err(error)),
                Err(again) => {
                    saves.stop();
                    (None, Err(error.hint(format!("nor does it start as before: {again}"))))
                }
            },
        }
    }

    /// Where HTTP listens, if it does.
    pub fn http(&self) -> Option<SocketAddr> {
        self.agent.as_ref().and_then(Agent::http)
    }

    /// Ends: requests, then transfers, each within one part. What was moved stays, the rest goes on at the next start.
    pub fn stop(&mut self) {
        self.end();
    }

    /// The same; the folders that were handed over.
    fn end(&mut self) -> Folders {
        (self.agent, self.leading) = (None, None);
        std::thread::scope(|scope| {
            if let Some(saves) = self.saves.take() {
                scope.spawn(move || saves.stop());
            }
            let trackers = scope.spawn(|| self.trackers.stop());
            self.copies.remove(CONFIGURED);
            self.runner.stop();
            trackers.join().unwrap_or_default()
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reads everything that a start would read, and starts nothing. Errors: those that a start would give.
pub fn check(config: &Config) -> Result<()> {
    settings(config)?.check_http()?;
    Tiers::open(config).map(drop)
}

/// What the configured job's runner begins with: of what is on the drives of nodes, this node's.
fn reach_of(config: &Config) -> Reach {
    match config.tiers.first().is_some_and(|tier| tier.records.is_some()) {
        true => Reach::OwnDrive,
        false => Reach::All,
    }
}

/// Bytes of staged saves that are kept: as configured, else half of the machine's memory.
fn staged_limit(config: &Config) -> u64 {
    config.agent.staged_limit.unwrap_or_else(|| {
        let info = rustix::system::sysinfo();
        // Both are 64 bits wide, or less.
        (info.totalram as u64).saturating_mul(u64::from(info.mem_unit)) / 2
    })
}

/// What the configuration says about listening.
fn settings(config: &Config) -> Result<Settings> {
    let agent = &config.agent;
    let listen = agent.listen.as_deref().map(address).transpose()?;
    Ok(Settings {
        socket: Some(agent.socket.clone()),
        socket_users: agent.socket_users.clone(),
        listen,
        token_file: agent.token_file.clone(),
        action_token_file: agent.action_token_file.clone(),
        tls_certificate: agent.tls_certificate.clone(),
        tls_key: agent.tls_key.clone(),
        copies: copies(config),
    })
}

/// What it says about copies on other nodes.
fn copies(config: &Config) -> CopySettings {
    let (agent, first) = (&config.agent, config.tiers.first());
    let peer = agent.peer_token_file.clone().map(|token_file| PeerSettings {
        token_file,
        url: agent.peer_url.clone(),
        ca_file: agent.peer_ca_file.clone(),
    });
    CopySettings {
        copies: first.map_or(0, |tier| usize::try_from(tier.copies).unwrap_or_default()),
        jump: first.map_or(1, |tier| tier.copies_jump),
        gone: first.map_or(CopySettings::default().gone, |tier| tier.copies_gone),
        peer,
    }
}

/// `HOST:PORT`, or `:PORT` on loopback.
fn address(text: &str) -> Result<SocketAddr> {
    let full = match text.strip_prefix(':') {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    let unusable = |why: String| {
        Error::new(Code::Usage, format!("no address to listen on: {why}"))
            .at(format!("agent.listen = {text:?}"))
            .hint("as in 127.0.0.1:9464")
    };
    let mut found = full.to_socket_addrs().map_err(|error| unusable(error.to_string()))?;
    found.next().ok_or_else(|| unusable("the name has none".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port() {
        assert_eq!(address(":9464").unwrap(), "127.0.0.1:9464".parse().unwrap());
        assert_eq!(address("[::1]:80").unwrap(), "[::1]:80".parse().unwrap());
        for bad in ["", "127.0.0.1", "127.0.0.1:99999", "9464"] {
            assert_eq!(address(bad).unwrap_err().code(), Code::Usage, "{bad}");
        }
    }
}
