//! Copies of what is on this node's drives on those of buddies: sent, taken, shown.
//!
//! What a copy is, whose goes where and what is believed of whom says [`forebay_tier::copies`]; here are the threads
//! and the way between two agents:
//!
//! ```text
//! GET /api/v1/peers/JOB/steps/STEP          {"drive", "files": [{"name", "bytes"}], "landed", "room", "busy"}
//! PUT /api/v1/peers/JOB/steps/STEP/FILE     the file, of the drive `forebay-drive`, for the drive `forebay-to`
//! ```
//!
//! Where an announced address leads is not known: hosts may have one name, a balancer may stand before several, and
//! behind one on loopback is always who asks. So each answer says of which drive it is, and each file for which.
//!
//! | module | what it does |
//! | --- | --- |
//! | `drive` | a job's drive: what is known of its copies, and its two threads |
//! | `keeper` | the thread that says who has the drive, and removes copies that nobody needs |
//! | `giver` | the thread that sends copies |
//! | `client` | requests to another agent |
//! | `take` | a copy that comes |
//!
//! Both threads take what is to be done from what the job's runner has seen and from the records, and remember nothing
//! that is not there: an agent that is killed goes on at its next start.

mod client;
mod drive;
mod giver;
mod keeper;
mod rest;
mod take;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use forebay_error::Result;
use forebay_tier::runner::Runner;

use crate::work::Work;
pub(crate) use drive::Drive;
pub(crate) use take::Answered;

/// The header that says whose drive a file is of.
pub(crate) const DRIVE_HEADER: &str = "forebay-drive";
/// The header that says for which drive it is.
pub(crate) const TO_HEADER: &str = "forebay-to";

/// What is configured.
#[derive(Clone, Debug)]
pub(crate) struct CopySettings {
    /// Copies of each file.
    pub(crate) copies: usize,
    /// See [`forebay_tier::copies::buddies`].
    pub(crate) jump: u64,
    /// How long this node may not be heard of until others bring what they have of it.
    pub(crate) gone: Duration,
    /// How other agents are reached, and this one; nothing is copied either way without.
    pub(crate) peer: Option<PeerSettings>,
}

/// See there.
#[derive(Clone, Debug)]
pub(crate) struct PeerSettings {
    /// The token that all agents of a job have.
    pub(crate) token_file: PathBuf,
    /// Where others reach this agent, where that is not its host's name.
    pub(crate) url: Option<String>,
    /// Who vouches for the others, where that is not whom this machine trusts.
    pub(crate) ca_file: Option<PathBuf>,
}

impl PeerSettings {
    /// Errors: `usage` for a URL that is none, or by which no token may go; those of the certificates.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(url) = &self.url {
            client::check_url(url).map_err(|error| error.hint("it is agent.peer_url"))?;
        }
        self.ca_file.as_deref().map_or(Ok(()), |path| client::certificates(path).map(drop))
    }
}

impl Default for CopySettings {
    /// No copies.
    fn default() -> Self {
        Self { copies: 0, jump: 1, gone: Duration::from_secs(120), peer: None }
    }
}

/// The drives of an agent's jobs.
#[derive(Default)]
pub(crate) struct Copies {
    settings: CopySettings,
    /// Where this agent is reached, and whether it listens on loopback, without TLS.
    at: OnceLock<(String, bool)>,
    drives: Mutex<BTreeMap<String, Arc<Drive>>>,
}

impl Copies {
    pub(crate) fn new(settings: CopySettings) -> Self {
        Self { settings, at: OnceLock::new(), drives: Mutex::default() }
    }

    /// Where this agent listens, once it does.
    pub(crate) fn listens_at(&self, address: std::net::SocketAddr, is_tls: bool) {
        let is_near = address.ip().to_canonical().is_loopback();
        let own = self.settings.peer.as_ref().and_then(|peer| peer.url.clone());
        let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        let url = own.unwrap_or_else(|| match is_tls {
            true if !is_near => {
                format!("https://{}:{}", host(), address.port())
            }
            true => format!("https://localhost:{}", address.port()),
            false => format!("http://{address}"),
        });
        let _ = self.at.set((url, is_near && !is_tls));
    }

    /// A job has begun: what shows it. If its first tier is on drives of nodes, copies are made and shown too.
    ///
    /// Errors: no threads.
    pub(crate) fn add(&self, job: &str, runner: &Arc<Runner>) -> Result<Arc<dyn Work>> {
        let tiers = runner.tiers();
        let has_records = tiers.config().tiers.first().is_some_and(|tier| tier.records.is_some());
        // What is configured may not be reached now.
        let is_drive = has_records || tiers.side(0).is_ok_and(|side| !side.root.store.sees_all());
        let (true, Some(peer), Some(at)) = (is_drive, &self.settings.peer, self.at.get()) else {
            return Ok(Arc::clone(runner) as Arc<dyn Work>);
        };
        let drive = Drive::start(job, Arc::clone(runner), &self.settings, peer, at)?;
        self.lock().insert(job.to_owned(), Arc::clone(&drive));
        Ok(drive)
    }

    /// The drive of a job.
    pub(crate) fn find(&self, job: &str) -> Option<Arc<Drive>> {
        self.lock().get(job).cloned()
    }

    /// A job ends: to be called before its runner is stopped.
    pub(crate) fn remove(&self, job: &str) {
        let drive = self.lock().remove(job);
        if let Some(drive) = drive {
            drive.stop();
        }
    }

    /// The same of a job that is not moved any more: others bring what they have of it.
    pub(crate) fn leave(&self, job: &str) {
        let drive = self.find(job);
        self.remove(job);
        if let Some(drive) = drive {
            drive.withdraw();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Drive>>> {
        self.drives.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let drives = std::mem::take(&mut *self.lock());
        drives.values().for_each(|drive| drive.stop());
    }
}
