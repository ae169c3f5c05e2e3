//! Folders that clients hand over as open descriptors. What is saved there goes to the configured tiers after the
//! first, below the job's name there; the folder takes the place of the first tier.
//!
//! What a client may make an agent do is bounded by who it is. The agent opens no path for it: the folder is the
//! descriptor, and nothing outside of it is reached through links ([`PosixStore::handed_over`]), whatever the agent
//! itself could see. It takes folders of its own user alone, from processes of that user or root, so that every file it
//! reads or writes there is one that this user could: an agent of root does not read for others. Where several users
//! share a node, each runs an agent of its own.
//!
//! A job outlives its client. It outlives the agent where a service manager keeps the descriptor for the next one
//! ([`notify`]); elsewhere descriptors end with it, and who saves hands its folder over again when it connects again,
//! which is no error if it is the same folder.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_checkpoint::commit::SystemClock;
use forebay_error::{Code, Error, Result};
use forebay_store::{PosixStore, Store};
use forebay_tier::config::Config;
use forebay_tier::runner::{Runner, Tiers};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use serde_json::{Value, json};

use crate::job::{CONFIGURED, Jobs};
use crate::notify;
use crate::socket::Tracker;
use crate::socket::message::check_name;
use crate::work::Work;

/// All folders that were handed over.
pub(crate) struct Trackers {
    config: Config,
    jobs: Arc<Jobs>,
    tracked: Mutex<BTreeMap<String, Tracked>>,
}

struct Tracked {
    runner: Arc<Runner>,
    /// Device and inode of the folder.
    folder: (u64, u64),
    places: Vec<String>,
}

impl Trackers {
    pub(crate) fn new(config: Config, jobs: Arc<Jobs>) -> Self {
        Self { config, jobs, tracked: Mutex::default() }
    }

    /// Goes on with the folders that the service manager has kept of an agent before.
    pub(crate) fn resume(&self) {
        let own = rustix::process::geteuid().as_raw();
        for (job, folder) in notify::kept() {
            if let Err(error) = self.begin(&job, folder, own, false) {
                tracing::warn!(%error, job, "a folder that was kept is left");
                notify::forget(&job);
            }
        }
    }

    /// Ends all.
    pub(crate) fn stop(&self) {
        let all = std::mem::take(&mut *self.lock());
        std::thread::scope(|scope| {
            for (name, tracked) in &all {
                self.jobs.remove(name);
                scope.spawn(|| tracked.runner.stop());
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Tracked>> {
        self.tracked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, job: &str, folder: OwnedFd, id: (u64, u64)) -> Result<Tracked> {
        let shown = shown_path(&folder);
        let mut config = self.config.clone();
        let [first, rest @ ..] = config.tiers.as_mut_slice() else {
            return Err(Error::new(Code::Usage, "the agent has no tiers").at(job));
        };
        if rest.is_empty() {
            let what = "the agent has one tier, so there is none to move to";
            return Err(Error::new(Code::Usage, what).at(job));
        }
        // No path that could be opened: what is open is all there is.
        first.place = format!("fd://{}", shown.display());
        let mut places = vec![first.place.clone()];
        for tier in rest {
            tier.place = format!("{}/{job}", tier.place.trim_end_matches('/'));
            places.push(tier.place.clone());
        }
        let store = Arc::new(PosixStore::handed_over(folder, &shown)?) as Arc<dyn Store>;
        let tiers = Tiers::with_stores(&config, vec![store], Arc::new(SystemClock::default()))?;
        let runner = Arc::new(Runner::start(tiers)?);
        Ok(Tracked { runner, folder: id, places })
    }
}

impl Trackers {
    /// Starts to move what is in a folder. `keep`: has it kept for the next agent.
    fn begin(&self, job: &str, folder: OwnedFd, uid: u32, keep: bool) -> Result<Value> {
        check_name(job)?;
        let id = check_folder(&folder, uid)?;
        let mut tracked = self.lock();
        if let Some(known) = tracked.get(job) {
            if known.folder != id {
                let what = "another folder is moved under that name";
                return Err(Error::new(Code::AlreadyExists, what).at(job));
            }
            known.runner.wake();
            return Ok(json!({ "places": known.places }));
        }
        if job == CONFIGURED {
            let what = "that is what the configured job is called";
            return Err(Error::new(Code::AlreadyExists, what).at(job));
        }
        let kept = keep.then(|| folder.try_clone());
        let kept = kept.transpose();
        let kept = kept.map_err(|error| Error::io("cannot keep the folder open", error))?;
        let started = self.start(job, folder, id)?;
        // Where it finds no room it is stopped by its drop.
        self.jobs.add(job, Arc::clone(&started.runner) as Arc<dyn Work>)?;
        let places = started.places.clone();
        if let Some(folder) = kept {
            notify::keep(job, folder.as_fd());
        }
        tracing::info!(job, uid, places = places.join(" -> "), "a folder was handed over");
        tracked.insert(job.to_owned(), started);
        Ok(json!({ "places": places }))
    }
}

impl Tracker for Trackers {
    fn track(&self, job: &str, folder: OwnedFd, uid: u32) -> Result<Value> {
        self.begin(job, folder, uid, true)
    }

    fn untrack(&self, job: &str, uid: u32) -> Result<()> {
        check_user(uid)?;
        let Some(tracked) = self.lock().remove(job) else {
            return Err(Error::new(Code::NotFound, "no such job was handed over").at(job));
        };
        self.jobs.remove(job);
        tracked.runner.stop();
        notify::forget(job);
        tracing::info!(job, uid, "a folder is left");
        Ok(())
    }
}

fn check_user(uid: u32) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if uid == own || uid == 0 {
        return Ok(());
    }
    let what = format!("this agent moves files of user {own}, not of user {uid}");
    let hint = "run an agent as that user, with a socket of its own";
    Err(Error::new(Code::PermissionDenied, what).hint(hint))
}

/// Whether a folder may be handed over; its device and inode.
fn check_folder(folder: &OwnedFd, uid: u32) -> Result<(u64, u64)> {
    check_user(uid)?;
    let shown = shown_path(folder);
    let stat = rustix::fs::fstat(folder)
        .map_err(|errno| Error::io("cannot stat what came", errno.into()))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Directory {
        let what = "what came is no folder";
        return Err(Error::new(Code::Usage, what).at(shown.display()));
    }
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != own {
        let what =
            format!("the folder belongs to user {}, the agent is of user {own}", stat.st_uid);
        return Err(Error::new(Code::PermissionDenied, what).at(shown.display()));
    }
    // Both are 64 bits wide, or less.
    Ok((stat.st_dev, stat.st_ino))
}

/// Where a folder is, for people: it may be somewhere else for the agent, or nowhere.
fn shown_path(folder: &OwnedFd) -> PathBuf {
    let link = format!("/proc/self/fd/{}", folder.as_raw_fd());
    std::fs::read_link(link).unwrap_or_else(|_| PathBuf::from("a folder"))
}
