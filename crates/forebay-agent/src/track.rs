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
//! which is no error if it is the same folder. What was kept and cannot be taken up now (no descriptors, no threads,
//! too many jobs, a configuration that has nowhere to move to) stays kept and is tried again; only what is no folder
//! any more is forgotten.
//!
//! A folder that is the configured first tier itself is that job's, whatever a client calls it.
//!
//! Caps and pauses are the machine's: all jobs share those of the configured tiers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::{PosixStore, Store, drive_store, is_drive};
use forebay_tier::runner::{Duties, Reach, Runner, Tiers};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use serde_json::{Value, json};

use crate::copies::Copies;
use crate::job::{CONFIGURED, Jobs};
use crate::lead::Leading;
use crate::notify;
use crate::socket::Tracker;
use crate::socket::message::check_name;

/// Between the first two tries to take up what was kept; it doubles.
const RETRY: Duration = Duration::from_secs(30);
/// And in the end.
const RETRY_MAX: Duration = Duration::from_secs(600);

/// Folders and the names of their jobs.
pub(crate) type Folders = Vec<(String, OwnedFd)>;

/// All folders that were handed over.
pub(crate) struct Trackers {
    /// Those of the configured job.
    tiers: Arc<Tiers>,
    jobs: Arc<Jobs>,
    state: Mutex<State>,
    stopping: Condvar,
    retrying: Mutex<Option<JoinHandle<Folders>>>,
    copies: Arc<Copies>,
}

#[derive(Default)]
struct State {
    /// Nothing is taken any more.
    stopped: bool,
    tracked: BTreeMap<String, Place>,
}

/// What a name stands for.
enum Place {
    Moved(Tracked),
    /// Its runner ends; until it has, nobody else writes where it did.
    Ending,
}

struct Tracked {
    /// Of a drive of a node. Ends before the runner does.
    leading: Option<Leading>,
    runner: Arc<Runner>,
    folder: OwnedFd,
    /// Device and inode of the folder.
    id: (u64, u64),
    places: Vec<String>,
}

impl Trackers {
    pub(crate) fn new(tiers: Arc<Tiers>, jobs: Arc<Jobs>) -> Self {
        let (state, retrying) = (Mutex::default(), Mutex::default());
        let copies = Arc::default();
        Self { tiers, jobs, state, stopping: Condvar::new(), retrying, copies }
    }

    /// What is on drives of nodes is copied by these.
    pub(crate) fn with_copies(self, copies: Arc<Copies>) -> Self {
        Self { copies, ..self }
    }

    /// Goes on with the folders of an agent before, which the service manager has kept. Errors: no thread to try again
    /// what is not possible now.
    pub(crate) fn resume(self: &Arc<Self>, kept: Folders) -> Result<()> {
        let left = self.take_up(kept);
        if left.is_empty() {
            return Ok(());
        }
        let trackers = Arc::clone(self);
        let thread = std::thread::Builder::new().name("forebay-resume".to_owned());
        let thread = thread.spawn(move || trackers.retry(left));
        let thread = thread.map_err(|error| Error::io("cannot start a thread", error))?;
        *self.retrying.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Until all are taken up, or the end: then what is left.
    fn retry(&self, mut left: Folders) -> Folders {
        let mut pause = RETRY;
        while !left.is_empty() {
            let state = self.lock();
            let waited = self.stopping.wait_timeout_while(state, pause, |state| !state.stopped);
            if waited.unwrap_or_else(PoisonError::into_inner).0.stopped {
                break;
            }
            left = self.take_up(left);
            pause = (pause * 2).min(RETRY_MAX);
        }
        left
    }

    /// Takes up what is possible; what may be later is given back.
    fn take_up(&self, kept: Folders) -> Folders {
        let own = rustix::process::geteuid().as_raw();
        let mut left = Vec::new();
        for (job, folder) in kept {
            // A file system that does not answer now is another matter.
            let lost = check_name(&job).and_then(|()| still_there(&folder)).err();
            let lost = lost.filter(|error| matches!(error.code(), Code::Usage | Code::NotFound));
            if let Some(error) = lost {
                tracing::warn!(%error, job, "what was kept is forgotten");
                notify::forget(&job);
                continue;
            }
            let begun = again(&folder).and_then(|folder| self.begin(&job, folder, own, false));
            match begun {
                Ok(_) => {}
                // Its client was faster, with another folder: that one is kept under the name too.
                Err(error) if error.code() == Code::AlreadyExists => {
                    tracing::warn!(%error, job, "a folder that was kept is left");
                }
                Err(error) => {
                    tracing::warn!(%error, job, "a folder that was kept is tried again later");
                    left.push((job, folder));
                }
            }
        }
        left
    }

    /// Ends all, and takes no more. The folders are for who goes on with them.
    pub(crate) fn stop(&self) -> Folders {
        let all = {
            let mut state = self.lock();
            state.stopped = true;
            std::mem::take(&mut state.tracked)
        };
        self.stopping.notify_all();
        let thread = self.retrying.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut folders = thread.map_or(Vec::new(), |thread| {
            thread.join().unwrap_or_else(|_| {
                tracing::error!("the thread that takes up folders has panicked");
                Vec::new()
            })
        });
        std::thread::scope(|scope| {
            for (name, place) in all {
                let Place::Moved(tracked) = place else { continue };
                self.jobs.remove(&name);
                let Tracked { leading, runner, folder, .. } = tracked;
                scope.spawn({
                    let name = name.clone();
                    move || {
                        drop(leading);
                        self.copies.remove(&name);
                        runner.stop();
                    }
                });
                folders.push((name, folder));
            }
        });
        folders
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, job: &str, folder: OwnedFd, id: (u64, u64)) -> Result<Tracked> {
        let opened = again(&folder)?;
        let shown = shown_path(&folder);
        let mut config = self.tiers.config().clone();
        let [first, rest @ ..] = config.tiers.as_mut_slice() else {
            return Err(Error::new(Code::Usage, "the agent has no tiers").at(job));
        };
        if rest.is_empty() {
            let what = "the agent has one tier, so there is none to move to";
            return Err(Error::new(Code::Usage, what).at(job));
        }
        let handed = Arc::new(PosixStore::handed_over(opened, &shown)?) as Arc<dyn Store>;
        // No path that could be opened: what is open is all there is.
        first.place = format!("fd://{}", shown.display());
        first.records = match is_drive(&*handed)? {
            true => Some(records_of(job, first.records.as_deref())?),
            // It is whole, whatever the configured job's is.
            false => None,
        };
        let (store, reach) = match &first.records {
            Some(records) => (drive_store(records, handed, &first.store)?, Reach::OwnDrive),
            None => (handed, Reach::All),
        };
        let mut places = vec![first.place.clone()];
        for tier in rest {
            // Who is told it has another current folder.
            let place = absolute(&tier.place);
            tier.place = below(&place, job);
            places.push(tier.place.clone());
        }
        let tiers = self.tiers.beside(job, &config, vec![store])?;
        let runner = Arc::new(Runner::start_for(tiers, Duties::All, reach)?);
        let leading = (reach == Reach::OwnDrive).then(|| Leading::start(job, &runner));
        Ok(Tracked { leading: leading.transpose()?, runner, folder, id, places })
    }
}

impl Trackers {
    /// Starts to move what is in a folder. `keep`: has it kept for the next agent.
    fn begin(&self, job: &str, folder: OwnedFd, uid: u32, keep: bool) -> Result<Value> {
        check_name(job)?;
        let id = check_folder(&folder, uid)?;
        // Held until it is there for all to see, so that an end comes before or after it.
        let mut state = self.lock();
        if state.stopped {
            return Err(Error::new(Code::Cancelled, "the agent ends").at(job));
        }
        if let Some(known) = state.tracked.get(job) {
            let Place::Moved(known) = known else {
                let what = "a job of that name is ending";
                let hint = "hand it over again in a few seconds";
                return Err(Error::new(Code::AlreadyExists, what).at(job).hint(hint));
            };
            if known.id != id {
                let what = "another folder is moved under that name";
                return Err(Error::new(Code::AlreadyExists, what).at(job));
            }
            known.runner.wake();
            return Ok(json!({ "job": job, "places": known.places }));
        }
        if job == CONFIGURED {
            let what = "that is what the configured job is called";
            return Err(Error::new(Code::AlreadyExists, what).at(job));
        }
        let started = self.start(job, folder, id)?;
        // Where it finds no room it is stopped by its drop.
        let work = self.copies.add(job, &started.runner)?;
        self.jobs.add(job, work).inspect_err(|_| self.copies.remove(job))?;
        let places = started.places.clone();
        if keep {
            notify::keep(job, started.folder.as_fd());
        }
        tracing::info!(job, uid, places = places.join(" -> "), "a folder was handed over");
        state.tracked.insert(job.to_owned(), Place::Moved(started));
        Ok(json!({ "job": job, "places": places }))
    }
}

impl Trackers {
    /// Ends a job, and has its folder forgotten. Errors: `not_found`.
    fn leave(&self, job: &str) -> Result<()> {
        let tracked = {
            let mut state = self.lock();
            let none = || Error::new(Code::NotFound, "no such job was handed over").at(job);
            let place = state.tracked.get_mut(job).ok_or_else(none)?;
            let Place::Moved(tracked) = std::mem::replace(place, Place::Ending) else {
                return Err(none());
            };
            self.jobs.remove(job);
            // Before anybody can hand over another folder under the name, which this would forget.
            notify::forget(job);
            tracked
        };
        drop(tracked.leading);
        self.copies.leave(job);
        tracked.runner.stop();
        self.lock().tracked.remove(job);
        Ok(())
    }

    /// The number of the tier that a folder is.
    fn tier_at(&self, id: (u64, u64)) -> Option<usize> {
        self.tiers.config().tiers.iter().position(|tier| {
            let place = absolute(&tier.place);
            let stat = rustix::fs::stat(place.strip_prefix("file://").unwrap_or(&place));
            stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == id)
        })
    }

    /// The folder of the configured job is moved already, and must not be so twice; that of a later tier is where
    /// copies go.
    fn track_configured(&self, tier: usize) -> Result<Value> {
        let tiers = &self.tiers.config().tiers;
        if tier > 0 {
            let name = tiers.get(tier).map(|tier| tier.name.as_str()).unwrap_or_default();
            let what = format!("the folder is tier `{name}` of the agent: copies go there");
            return Err(Error::new(Code::Usage, what));
        }
        self.jobs.find(Some(CONFIGURED))?.wake();
        let places: Vec<String> = tiers.iter().map(|tier| absolute(&tier.place)).collect();
        Ok(json!({ "job": CONFIGURED, "places": places }))
    }

    /// Makes room for the folder of a job that was begun anew: where the one that is moved was removed.
    fn leave_if_removed(&self, job: &str) -> Result<()> {
        let known = match self.lock().tracked.get(job) {
            Some(Place::Moved(known)) => again(&known.folder)?,
            _ => return Ok(()),
        };
        match still_there(&known) {
            Err(error) if error.code() == Code::NotFound => {
                tracing::info!(%error, job, "another one is handed over");
                self.leave(job)
            }
            // What is wrong with it otherwise is told where it is moved.
            _ => Ok(()),
        }
    }
}

impl Tracker for Trackers {
    fn track(&self, job: &str, folder: OwnedFd, uid: u32) -> Result<Value> {
        check_name(job)?;
        let id = check_folder(&folder, uid)?;
        if let Some(tier) = self.tier_at(id) {
            return self.track_configured(tier);
        }
        self.leave_if_removed(job)?;
        self.begin(job, folder, uid, true)
    }

    fn untrack(&self, job: &str, uid: u32) -> Result<()> {
        check_user(uid)?;
        self.leave(job)?;
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

/// The place of a tier; of a folder from the root on.
fn absolute(place: &str) -> String {
    let is_path = !place.contains("://") && !place.starts_with("memory:");
    let path = std::path::absolute(place.strip_prefix("file:").unwrap_or(place));
    match path.ok().filter(|_| is_path) {
        Some(path) => path.display().to_string(),
        None => place.to_owned(),
    }
}

/// Where what is configured for all jobs is this one's.
fn below(place: &str, job: &str) -> String {
    format!("{}/{job}", place.trim_end_matches('/'))
}

/// Where the records of a job are whose folder is the drive of a node.
fn records_of(job: &str, configured: Option<&str>) -> Result<String> {
    let records = configured.ok_or_else(|| {
        let what = "the folder is the drive of a node, and the agent knows of no records";
        let hint = "`records` of its first tier is the folder or prefix above those of the jobs";
        Error::new(Code::Usage, what).at(job).hint(hint)
    })?;
    Ok(below(&absolute(records), job))
}

/// The same folder, open once more.
pub(crate) fn again(folder: &OwnedFd) -> Result<OwnedFd> {
    folder.try_clone().map_err(|error| Error::io("cannot open a folder once more", error))
}

/// Whether what was kept is a folder still. Errors: `usage`, `not_found`.
fn still_there(folder: &OwnedFd) -> Result<()> {
    let stat = stat(folder)?;
    if stat.st_nlink == 0 {
        let what = "the folder was removed";
        return Err(Error::new(Code::NotFound, what).at(shown_path(folder).display()));
    }
    Ok(())
}

fn stat(folder: &OwnedFd) -> Result<rustix::fs::Stat> {
    let stat = rustix::fs::fstat(folder)
        .map_err(|errno| Error::io("cannot stat what came", errno.into()))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Directory {
        let what = "what came is no folder";
        return Err(Error::new(Code::Usage, what).at(shown_path(folder).display()));
    }
    Ok(stat)
}

/// Whether a folder may be handed over; its device and inode.
pub(crate) fn check_folder(folder: &OwnedFd, uid: u32) -> Result<(u64, u64)> {
    check_user(uid)?;
    let stat = stat(folder)?;
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != own {
        let what =
            format!("the folder belongs to user {}, the agent is of user {own}", stat.st_uid);
        return Err(Error::new(Code::PermissionDenied, what).at(shown_path(folder).display()));
    }
    // Both are 64 bits wide, or less.
    Ok((stat.st_dev, stat.st_ino))
}

/// Where a folder is, for people: it may be somewhere else for the agent, or nowhere.
pub(crate) fn shown_path(folder: &OwnedFd) -> PathBuf {
    let link = format!("/proc/self/fd/{}", folder.as_raw_fd());
    std::fs::read_link(link).unwrap_or_else(|_| PathBuf::from("a folder"))
}

#[cfg(test)]
mod tests;
