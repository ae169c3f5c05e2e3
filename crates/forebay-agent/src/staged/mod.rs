//! Saves that were staged and outlive their processes.
//!
//! A trainer copies its state into a memfd and goes on; its save writes from there. With the memory it hands over its
//! *bequest* ([`forebay_checkpoint::save::Bequest`]): what is to be written, and where each tensor lies. The connection
//! stays open until the save has ended, so its end without a word says that the process has died. Then the agent
//! finishes the save, as the [successor](forebay_checkpoint::commit::AttemptId::successor) of the attempt: each agent
//! that of its node's ranks, by the same protocol among one another as the ranks would have had.
//!
//! ```text
//! stage ---> kept --- let go ---> forgotten
//!              \--- connection ends ---> finishing ---> committed, failed, or not needed after all
//! ```
//!
//! - **What a client can reach.** The agent opens no path: it writes below the folder whose descriptor came with the
//!   request, with the checks of `track`: the client and the folder are of the agent's own user (or the client is
//!   root's). Names of files are made here, from numbers; those of side files end in what the bequest calls them,
//!   which has no `/`.
//! - **What it can do to the agent.** Memory that cannot shrink (a seal), all of it there, of pages that the kernel
//!   makes anew where their owner gives them back while they are read: so reading it is no SIGBUS. A bequest that
//!   nobody can change any more; counts and bytes with limits. Who writes to the memory while it is read spoils the
//!   own save: checksums are made of what is written.
//! - **What it cannot undo.** A newer epoch of the folder fences a save that is being finished, as any; where a newer
//!   save of the same step is committed, it is not needed. One that misses other ranks, because they died before they
//!   had staged theirs, times out and leaves nothing.
//!
//! | module | what |
//! | --- | --- |
//! | `memory` | the descriptors: what is checked, the mapping |
//! | `finish` | the thread that finishes a save |

mod finish;
mod memory;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_checkpoint::save::Bequest;
use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use rustix::fs::AtFlags;
use rustix::io::Errno;

use crate::metrics::Counts;
use crate::socket::message::{StagedSave, check_name};
use crate::track::{check_folder, shown_path};
use memory::Memory;

/// Saves at a time, kept or being finished: more than a node has GPUs. Each that is kept has a connection.
const SAVES_MAX: usize = 32;

/// What the drive of a node has, and its records.
const PLACE: &str = ".forebay/place";

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// From the death of a process until its save is begun here: others may commit it still.
    pub(crate) settle: Duration,
    /// How long a save that is done here waits for those of other nodes to begin: ranks of a job may live on for a
    /// while before they give up.
    pub(crate) appear: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { settle: Duration::from_secs(1), appear: Duration::from_secs(300) }
    }
}

/// All staged saves of an agent. They outlive a change of its configuration.
pub(crate) struct Saves {
    /// Most bytes of memory, and of bequests.
    limit: AtomicU64,
    times: Times,
    counts: Arc<Counts>,
    state: Mutex<State>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct State {
    next: u64,
    saves: BTreeMap<u64, Arc<Save>>,
    threads: Vec<JoinHandle<()>>,
}

/// One staged save.
struct Save {
    job: String,
    folder: OwnedFd,
    folder_id: (u64, u64),
    memory: Memory,
    /// As a list shows it; what changes is beside it.
    shown: StagedSave,
    progress: Mutex<Progress>,
}

/// What changes of a save.
struct Progress {
    since: Instant,
    finishing: bool,
    written: u64,
    begun: u32,
}

/// A save that a connection has staged. Dropped without [`let_go`](Self::let_go) it is finished.
pub(crate) struct Held {
    saves: Arc<Saves>,
    number: u64,
}

impl Saves {
    pub(crate) fn new(limit: u64, times: Times, counts: Arc<Counts>) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicU64::new(limit),
            times,
            counts,
            state: Mutex::default(),
            stopping: AtomicBool::new(false),
        })
    }

    /// How many bytes may be kept from now on; what is kept stays.
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Keeps a save of a process of user `uid`: its folder, its memory, its bequest.
    ///
    /// Errors: `usage` for a bad name, what is no folder, memory without its seals, a bequest that does not fit it;
    /// those of [`Bequest::decode`]; `permission_denied` for another user, or a folder of one; `unsupported` beyond the
    /// limits.
    pub(crate) fn stage(
        self: &Arc<Self>,
        job: &str,
        [folder, memory, bequest]: [OwnedFd; 3],
        uid: u32,
    ) -> Result<Held> {
        check_name(job)?;
        let folder_id = check_folder(&folder, uid)?;
        check_whole(&folder)?;
        let memory = Memory::new(memory, bequest)?;
        // Refused before anything is read, and once more when it is counted.
        self.check_room(&self.lock(), memory.bytes())?;
        let bequest = memory.bequest()?;
        let spec = bequest.spec;
        let shown = StagedSave {
            job: job.to_owned(),
            step: spec.step,
            attempt: spec.attempt.to_string(),
            rank: spec.rank,
            world: spec.world,
            bytes: memory.bytes(),
            finishing: false,
            seconds: 0.0,
            written: 0,
            begun: 0,
        };
        let progress = Progress { since: Instant::now(), finishing: false, written: 0, begun: 0 };
        let (job, progress) = (job.to_owned(), Mutex::new(progress));
        let save = Arc::new(Save { job, folder, folder_id, memory, shown, progress });
        let mut state = self.lock();
        self.check_room(&state, save.shown.bytes)?;
        let number = state.next;
        state.next += 1;
        tracing::debug!(job = %save.job, step = spec.step, rank = spec.rank, "a save is kept");
        state.saves.insert(number, save);
        self.count(&state);
        Ok(Held { saves: Arc::clone(self), number })
    }

    fn check_room(&self, state: &State, bytes: u64) -> Result<()> {
        let refused = |what: String| {
            let error = Error::new(Code::Unsupported, what);
            Err(error.hint("agent.staged_limit says how much is kept: half of memory by default"))
        };
        if self.stopping.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Cancelled, "the agent ends"));
        }
        if state.saves.len() >= SAVES_MAX {
            return refused(format!("{SAVES_MAX} staged saves are kept, that is the most"));
        }
        let limit = self.limit.load(Ordering::Relaxed);
        let total = state.bytes().saturating_add(bytes);
        match total > limit {
            true => refused(format!("{total} bytes of staged saves, {limit} is the most")),
            false => Ok(()),
        }
    }

    /// What is kept or being finished, of a folder or all. Errors: those of a folder that is none.
    pub(crate) fn list(&self, folder: Option<(&OwnedFd, u32)>) -> Result<Vec<StagedSave>> {
        let id = folder.map(|(folder, uid)| check_folder(folder, uid)).transpose()?;
        let state = self.lock();
        let wanted = state.saves.values().filter(|save| id.is_none_or(|id| id == save.folder_id));
        Ok(wanted.map(|save| save.show()).collect())
    }

    /// Ends: what is being finished is given up. Returns when that is so.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        let threads = std::mem::take(&mut self.lock().threads);
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread that finishes a save has panicked");
            }
        }
    }

    /// A process is gone without a word.
    fn orphaned(self: &Arc<Self>, number: u64) {
        let mut state = self.lock();
        let Some(save) = state.saves.get(&number).cloned() else { return };
        if self.stopping.load(Ordering::Relaxed) {
            let step = save.shown.step;
            tracing::warn!(job = %save.job, step, "a staged save is lost: the agent ends");
            self.forget(state, number);
            return;
        }
        let progress = Progress { since: Instant::now(), finishing: true, written: 0, begun: 0 };
        *lock(&save.progress) = progress;
        let saves = Arc::clone(self);
        let thread = std::thread::Builder::new().name("forebay-finish".to_owned());
        let started = thread.spawn(move || {
            finish::run(&saves, &save);
            drop(save);
            saves.forget(saves.lock(), number);
        });
        state.threads.retain(|thread| !thread.is_finished());
        match started {
            Ok(thread) => state.threads.push(thread),
            Err(error) => {
                tracing::error!(%error, "a staged save is lost: no thread can be started");
                self.forget(state, number);
            }
        }
    }

    fn forget(&self, mut state: MutexGuard<'_, State>, number: u64) {
        let forgotten = state.saves.remove(&number);
        self.count(&state);
        drop(state);
        // Not under the lock: giving memory back takes a while.
        drop(forgotten);
    }

    fn count(&self, state: &State) {
        self.counts.staged(state.saves.len(), state.bytes());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn bytes(&self) -> u64 {
        self.saves.values().fold(0, |sum, save| sum.saturating_add(save.shown.bytes))
    }
}

impl Save {
    fn show(&self) -> StagedSave {
        let progress = lock(&self.progress);
        StagedSave {
            finishing: progress.finishing,
            seconds: progress.since.elapsed().as_secs_f64(),
            written: progress.written,
            begun: progress.begun,
            ..self.shown.clone()
        }
    }

    /// The bequest, read again: between a request and the death of its client it would only take memory.
    fn bequest(&self) -> Result<Bequest> {
        self.memory.bequest().map_err(|error| error.at(shown_path(&self.folder).display()))
    }
}

impl Held {
    /// What it is.
    pub(crate) fn show(&self) -> Option<StagedSave> {
        self.saves.lock().saves.get(&self.number).map(|save| save.show())
    }

    /// The save has ended: nothing is left to do.
    pub(crate) fn let_go(self) {
        self.saves.forget(self.saves.lock(), self.number);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // One that was let go is not there.
        self.saves.orphaned(self.number);
    }
}

/// The drive of a node is no folder of steps: what is agreed on is elsewhere, where no descriptor leads.
fn check_whole(folder: &OwnedFd) -> Result<()> {
    match rustix::fs::statat(folder, PLACE, AtFlags::SYMLINK_NOFOLLOW) {
        // Any other error leaves it open.
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(errno) => {
            let error =
                Error::io("cannot look whether a folder is the drive of a node", errno.into());
            Err(error.at(shown_path(folder).display()))
        }
        Ok(_) => {
            let what = "saves to the drives of nodes are not finished by agents";
            Err(Error::new(Code::Unsupported, what).at(shown_path(folder).display()))
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
