//! Saves in two steps: memory is *staged* in a pool, and handed from there to whoever writes it. **unsafe**: it reads
//! memory by address and queues copies from a GPU.
//!
//! # Why two steps
//!
//! A training loop stands still while its parameters are copied, so the copy must not wait for a drive. The job cuts
//! the memory in pieces that fit a slot of the pool. *Fillers* copy piece after piece into slots, one thread for a GPU
//! (it queues copies at the rate of the link), a few for host memory. *Takers* pass each filled slot to the
//! [`StageConsumer`] (which makes checksums and writes) and give the slot back. When the last piece lies in a slot the
//! job is *staged*: the memory may change. When the last piece was taken it is *done*.
//!
//! - A pool as large as the memory: staging runs at the rate of the link and never waits.
//! - A smaller pool: it is a ring. Staging takes `pool / link + (bytes - pool) / drive`.
//! - Host memory that stays as it is until the end ([`StageOptions::in_place`]) needs no pool.
//!
//! Slots travel in one queue, in the order in which their copies were queued; a slot from a GPU travels with the event
//! of its copy, and the taker waits for it. So nobody polls, and a full pool cannot block: each slot that is out lies
//! in the queue or with a taker, and a taker needs nothing more to finish with it.
//!
//! A slot goes back to the pool only when its copy has landed; if the device fails so that nobody can know, it is given
//! up for good.

mod fill;
mod job;
mod take;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_device::cuda::Event;
use forebay_device::{Arena, Device};
use forebay_error::{Code, Error, Result};

use crate::engine::Engine;
use crate::shared::internal;
use job::Job;

/// Threads that copy host memory to the pool: two reach what one socket's memory gives to copies, more crowd out
/// training.
const HOST_FILLERS_MAX: usize = 4;

/// Threads that take pieces, by default and at the most.
const TAKERS_DEFAULT_MAX: usize = 8;

/// How long a job that has ended waits between two looks at its threads.
const SETTLE_NAP: Duration = Duration::from_millis(200);

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the engine's GPU.
    Device,
    /// In the host's memory.
    Host,
}

/// Bytes of memory, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRun {
    /// The address of the first.
    pub address: u64,
    /// How many.
    pub len: u64,
}

/// What is staged at a time: runs of one place, gathered one after the other in one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePiece {
    /// Where the runs are.
    pub place: Place,
    /// The runs, as a range of the job's.
    pub runs: std::ops::Range<usize>,
}

/// Who gets the pieces: called by several threads at once, in no particular order, once for each piece.
pub trait StageConsumer: Send + Sync {
    /// Takes the bytes of piece number `piece`; they are gone when this returns. An error ends the job.
    fn take(&self, piece: usize, bytes: &[u8]) -> Result<()>;
}

/// How a job is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageOptions {
    /// Threads that take pieces; `None`: what the machine allows, at most 8.
    pub takers: Option<usize>,
    /// The framework's stream that device memory was last written on (its handle, 0 for the default stream): copies
    /// wait for what is queued there now.
    pub stream: Option<usize>,
    /// Host memory stays as it is until the job is done: pieces of it are taken where they lie, without a slot.
    pub in_place: bool,
}

/// What a job did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageReport {
    /// Bytes.
    pub bytes: u64,
    /// Seconds from the start until the memory was free to change.
    pub staged_seconds: f64,
    /// Seconds from the start until the last piece was taken.
    pub seconds: f64,
    /// CPU seconds of the job's threads.
    pub cpu_seconds: f64,
}

/// A job that runs. Dropping it cancels what has not been done, and waits until nobody reads the memory any more.
pub struct Staging {
    job: Arc<Job>,
}

impl Engine {
    /// Starts to stage `pieces` of `runs` through `pool`, each to be taken by `consumer`.
    ///
    /// Errors: `usage` when a piece is larger than a slot; `device`; `io` when no thread can be started.
    ///
    /// # Safety
    /// Every run is valid memory of its place, and written by nobody, until the job is staged, or with
    /// [`StageOptions::in_place`] done, or dropped. Without `in_place` another process may write to it all the same: it
    /// is only copied from, and what is copied then is anybody's guess. `options.stream`, if given, is a live stream of
    /// the device.
    pub unsafe fn stage(
        self: &Arc<Self>,
        pool: &Arc<Arena>,
        pieces: Vec<StagePiece>,
        runs: Vec<MemoryRun>,
        consumer: Arc<dyn StageConsumer>,
        options: StageOptions,
    ) -> Result<Staging> {
        let bytes = check(&pieces, &runs, pool.slot_bytes() as u64, self.device())?;
        let fence = match (self.device(), options.stream) {
            (Device::Cuda(gpu), Some(stream)) => Some(gpu.with_context(|| {
                let event = Event::new(gpu)?;
                // SAFETY: the stream is live by this function's contract.
                unsafe { event.record_foreign(stream)? };
                Ok(event)
            })?),
            _ => None,
        };
        let job = Arc::new(Job::new(self, pool, pieces, runs, consumer, bytes));
        // The only handle beside those of its threads: its drop waits for theirs.
        let staging = Staging { job };
        let job = &staging.job;
        let workers = forebay_topology::worker_cpus();
        let takers = options.takers.unwrap_or_else(|| workers.clamp(1, TAKERS_DEFAULT_MAX));
        let takers = takers.clamp(1, crate::THREADS_MAX).min(job.pieces.len());
        for _ in 0..takers {
            job::spawn(job, "forebay-take", take::run)?;
        }
        if job.has(Place::Device) {
            job::spawn(job, "forebay-stage", move |job| fill::from_device(job, fence.as_ref()))?;
        }
        if job.has(Place::Host) && !options.in_place {
            for _ in 0..workers.clamp(1, HOST_FILLERS_MAX) {
                job::spawn(job, "forebay-stage", fill::from_host)?;
            }
        } else if job.has(Place::Host) {
            fill::in_place(job);
        }
        Ok(staging)
    }
}

/// Checks that pieces fit slots and runs exist; returns the bytes of all.
fn check(pieces: &[StagePiece], runs: &[MemoryRun], slot: u64, device: &Device) -> Result<u64> {
    let mut total = 0_u64;
    for piece in pieces {
        let Some(own) = runs.get(piece.runs.clone()) else {
            return Err(internal("piece without its runs"));
        };
        let len = own.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.len));
        let Some(len) = len.filter(|&len| len <= slot) else {
            return Err(Error::new(
                Code::Usage,
                format!("a piece is larger than a slot of {slot}"),
            ));
        };
        if piece.place == Place::Device && !device.is_gpu() {
            return Err(internal("memory of a GPU on an engine without one"));
        }
        total = total.saturating_add(len);
    }
    Ok(total)
}

impl Staging {
    /// Waits until the memory may change, at most `timeout`: true then. Errors: what ended the job.
    pub fn wait_staged(&self, timeout: Duration) -> Result<bool> {
        self.job.wait(timeout, |state| state.unstaged == 0)
    }

    /// Waits until the last piece was taken, at most `timeout`: true then. Errors: what ended the job.
    pub fn wait_done(&self, timeout: Duration) -> Result<bool> {
        self.job.wait(timeout, |state| state.untaken == 0)
    }

    /// Ends the job early; it fails with `cancelled`, unless it was done.
    pub fn cancel(&self) {
        self.job.fail(Error::new(Code::Cancelled, "the save was cancelled"));
    }

    /// Waits until no thread of the job touches the memory any more, at most `timeout`: true then. That is soon after
    /// the end of the job, however it ended, unless storage or device hang.
    pub fn wait_settled(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.job.settled(left.min(SETTLE_NAP)) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Bytes that were taken so far.
    pub fn taken_bytes(&self) -> u64 {
        self.job.taken_bytes()
    }

    /// What it did so far.
    pub fn report(&self) -> StageReport {
        self.job.report()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.cancel();
        let mut told = Instant::now();
        while !self.job.settled(SETTLE_NAP) {
            if told.elapsed() > Duration::from_secs(10) {
                tracing::warn!("a save was given up, and still waits for its storage or device");
                told = Instant::now();
            }
        }
        // A thread says that it has ended a moment before it lets go of the job, and with that of the consumer. This
        // one holds the last handle then, and has let go of all when it returns.
        while Arc::strong_count(&self.job) > 1 {
            std::thread::yield_now();
        }
    }
}
