//! What the threads of one job share.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forebay_device::cuda::Event;
use forebay_device::{Arena, Device, Slot};
use forebay_error::{Error, Result};

use super::{MemoryRun, Place, StageConsumer, StagePiece, StageReport};
use crate::engine::Engine;
use crate::report::Tally;
use crate::shared::{internal, lock};

/// A piece on its way to a taker.
pub(super) struct Filled {
    pub(super) piece: usize,
    pub(super) len: usize,
    /// Where it lies; `None`: where it always was.
    pub(super) slot: Option<Slot>,
    /// When its copy has landed.
    pub(super) landed: Option<Event>,
}

#[derive(Default)]
pub(super) struct State {
    queue: VecDeque<Filled>,
    /// Pieces that do not lie in a slot yet, or whose memory is still needed.
    pub(super) unstaged: usize,
    /// Pieces that nobody has taken.
    pub(super) untaken: usize,
    /// Threads that run.
    threads: usize,
    error: Option<Error>,
    staged_at: Option<Instant>,
    done_at: Option<Instant>,
}

pub(super) struct Job {
    pub(super) engine: Arc<Engine>,
    pub(super) pool: Arc<Arena>,
    pub(super) pieces: Vec<StagePiece>,
    pub(super) runs: Vec<MemoryRun>,
    pub(super) consumer: Arc<dyn StageConsumer>,
    bytes: u64,
    taken: AtomicU64,
    next_host: AtomicUsize,
    stop: AtomicBool,
    started: Instant,
    tally: Tally,
    state: Mutex<State>,
    news: Condvar,
}

impl Job {
    pub(super) fn new(
        engine: &Arc<Engine>,
        pool: &Arc<Arena>,
        pieces: Vec<StagePiece>,
        runs: Vec<MemoryRun>,
        consumer: Arc<dyn StageConsumer>,
        bytes: u64,
    ) -> Self {
        let started = Instant::now();
        let over = pieces.is_empty().then_some(started);
        let count = pieces.len();
        let state = State {
            unstaged: count,
            untaken: count,
            staged_at: over,
            done_at: over,
            ..State::default()
        };
        Self {
            engine: engine.clone(),
            pool: pool.clone(),
            pieces,
            runs,
            consumer,
            bytes,
            taken: AtomicU64::new(0),
            next_host: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            started,
            tally: Tally::default(),
            state: Mutex::new(state),
            news: Condvar::new(),
        }
    }

    pub(super) fn has(&self, place: Place) -> bool {
        self.pieces.iter().any(|piece| piece.place == place)
    }

    pub(super) fn runs_of(&self, piece: &StagePiece) -> &[MemoryRun] {
        self.runs.get(piece.runs.clone()).unwrap_or_default()
    }

    /// The next piece of host memory, by number.
    pub(super) fn next_host(&self) -> Option<usize> {
        loop {
            let number = self.next_host.fetch_add(1, Ordering::Relaxed);
            let piece = self.pieces.get(number)?;
            if piece.place == Place::Host {
                return Some(number);
            }
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends the job; the first error stays, and none comes after the last piece was taken.
    pub(super) fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        if state.untaken > 0 && state.error.is_none() {
            state.error = Some(error);
        }
        self.stop.store(true, Ordering::Relaxed);
        drop(state);
        self.news.notify_all();
    }

    pub(super) fn push(&self, filled: Filled) {
        lock(&self.state).queue.push_back(filled);
        self.news.notify_all();
    }

    /// Counts pieces whose memory is not needed any more.
    pub(super) fn count_staged(&self, pieces: usize) {
        let mut state = lock(&self.state);
        state.unstaged -= pieces.min(state.unstaged);
        if state.unstaged == 0 {
            state.staged_at.get_or_insert_with(Instant::now);
        }
        drop(state);
        self.news.notify_all();
    }

    pub(super) fn count_taken(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        self.tally.settle_cpu();
        let mut state = lock(&self.state);
        state.untaken -= 1;
        if state.untaken == 0 {
            state.done_at = Some(Instant::now());
            self.stop.store(true, Ordering::Relaxed);
        }
        drop(state);
        self.news.notify_all();
    }

    /// The next filled piece; waits for one. `None`: the job is over.
    pub(super) fn next_filled(&self) -> Option<Filled> {
        let mut state = lock(&self.state);
        loop {
            if self.is_over() {
                return None;
            }
            if let Some(filled) = state.queue.pop_front() {
                return Some(filled);
            }
            state = self.sleep(state, Duration::from_millis(100));
        }
    }

    /// Takes what nobody will take any more.
    pub(super) fn take_rest(&self) -> VecDeque<Filled> {
        std::mem::take(&mut lock(&self.state).queue)
    }

    pub(super) fn wait(&self, timeout: Duration, is_so: impl Fn(&State) -> bool) -> Result<bool> {
        let until = Instant::now() + timeout;
        let mut state = lock(&self.state);
        loop {
            if let Some(error) = &state.error {
                return Err(error.again());
            }
            if is_so(&state) {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.sleep(state, left);
        }
    }

    /// Whether every thread has ended; waits a while for it.
    pub(super) fn settled(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let state = if state.threads > 0 { self.sleep(state, timeout) } else { state };
        state.threads == 0
    }

    pub(super) fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn report(&self) -> StageReport {
        let state = lock(&self.state);
        let since = |at: Option<Instant>| {
            at.unwrap_or_else(Instant::now).saturating_duration_since(self.started).as_secs_f64()
        };
        StageReport {
            bytes: self.bytes,
            staged_seconds: since(state.staged_at),
            seconds: since(state.done_at),
            cpu_seconds: self.tally.cpu_seconds(),
        }
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>, timeout: Duration) -> MutexGuard<'a, State> {
        match self.news.wait_timeout(state, timeout) {
            Ok((guard, _)) => guard,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }
}

/// Starts a thread of the job. What it fails with ends the job.
pub(super) fn spawn(
    job: &Arc<Job>,
    name: &str,
    work: impl FnOnce(&Job) -> Result<()> + Send + 'static,
) -> Result<()> {
    lock(&job.state).threads += 1;
    let own = job.clone();
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Device::Cuda(gpu) = own.engine.device() {
                gpu.bind_thread()?;
            }
            work(&own)
        }));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => own.fail(error),
            Err(_) => own.fail(internal("a thread of a save panicked")),
        }
        own.tally.settle_cpu();
        thread_ended(&own);
    });
    if let Err(error) = spawned {
        thread_ended(job);
        let error = Error::io("cannot start a thread", error).hint("raise the limit on processes");
        job.fail(internal("not all threads of the save started"));
        return Err(error);
    }
    Ok(())
}

/// The last thread lets go of what nobody took: its slots go to other saves, even if the caller keeps the job.
fn thread_ended(job: &Job) {
    let mut state = lock(&job.state);
    state.threads -= 1;
    let rest = if state.threads == 0 { std::mem::take(&mut state.queue) } else { VecDeque::new() };
    drop(state);
    drop(rest);
    job.news.notify_all();
}
