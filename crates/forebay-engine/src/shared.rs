//! What the workers of one load share.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::cuda::{Event, Stream};
use forebay_error::{Code, Error, Result};

use crate::engine::Engine;
use crate::options::LoadOptions;
use crate::plan::{Piece, Plan};
use crate::queue::Queue;
use crate::records::Found;
use crate::report::{Path, Tally};
use crate::route::Route;
use crate::slots::Slots;
use crate::source::RangeSource;
use crate::verify::Checks;

/// One load: plan, sources, targets, and how far it is.
pub(crate) struct Shared {
    pub(crate) engine: Arc<Engine>,
    pub(crate) plan: Plan,
    pub(crate) sources: Vec<Arc<dyn RangeSource>>,
    pub(crate) routes: Vec<Route>,
    pub(crate) options: LoadOptions,
    pub(crate) queue: Queue,
    pub(crate) slots: Slots,
    pub(crate) tally: Tally,
    pub(crate) checks: Checks,
    pub(crate) records: Found,
    /// Address of each target; 0 until provided.
    addresses: Vec<AtomicU64>,
    /// Payload bytes that each target still lacks.
    lacking: Vec<AtomicU64>,
    fences: Mutex<Vec<Arc<Event>>>,
    fence_count: AtomicUsize,
    stop: AtomicBool,
    /// Whether the window counts this load as one that runs.
    counted: AtomicBool,
    done_bytes: AtomicU64,
    /// When targets were last provided, and whether all are.
    fed: Mutex<(Instant, bool)>,
    /// Callers that wait for news.
    waiters: AtomicUsize,
    /// Most page cache registered when this load took some, its own and others'.
    registered_peak: AtomicU64,
    progress: Mutex<Progress>,
    progressed: Condvar,
    /// Worker threads that may still touch targets or staging memory.
    active: AtomicUsize,
    /// What owns the targets' memory; let go when the last worker has.
    keepalive: Mutex<Vec<Box<dyn Any + Send>>>,
}

/// How far a load is.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) ready: VecDeque<u32>,
    pub(crate) complete: bool,
    pub(crate) ended: Option<Instant>,
    pub(crate) error: Option<Error>,
}

impl Shared {
    #[expect(clippy::too_many_arguments, reason = "a load's parts, each once")]
    pub(crate) fn new(
        engine: Arc<Engine>,
        plan: Plan,
        sources: Vec<Arc<dyn RangeSource>>,
        routes: Vec<Route>,
        options: LoadOptions,
        tally: Tally,
        checks: Checks,
        slot_limit: usize,
    ) -> Self {
        let pieces = plan.pieces().len();
        let mut lacking = vec![0_u64; plan.target_bytes().len()];
        for op in plan.pieces().iter().flat_map(|piece| plan.ops_of(piece)) {
            if let Some(bytes) = lacking.get_mut(op.part.target as usize) {
                *bytes += op.part.bytes();
            }
        }
        let complete = pieces == 0;
        let ended = complete.then(Instant::now);
        if !complete {
            engine.window().load_begins();
        }
        Self {
            engine,
            sources,
            routes,
            options,
            queue: Queue::new(pieces),
            slots: Slots::new(slot_limit),
            tally,
            checks,
            records: Found::new(&plan),
            addresses: plan.target_bytes().iter().map(|_| AtomicU64::new(0)).collect(),
            lacking: lacking.into_iter().map(AtomicU64::new).collect(),
            plan,
            fences: Mutex::new(Vec::new()),
            fence_count: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            counted: AtomicBool::new(!complete),
            done_bytes: AtomicU64::new(0),
            fed: Mutex::new((Instant::now(), false)),
            waiters: AtomicUsize::new(0),
            registered_peak: AtomicU64::new(0),
            progress: Mutex::new(Progress { complete, ended, ..Progress::default() }),
            progressed: Condvar::new(),
            active: AtomicUsize::new(0),
            keepalive: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn piece(&self, index: u32) -> Result<&Piece> {
        self.plan.pieces().get(index as usize).ok_or_else(|| internal("piece out of the plan"))
    }

    /// Offset and length of what holds all of these pieces of one object. They come in order of their offsets, but rows
    /// of two targets may lie between each other: the last piece is not always the one that ends last.
    pub(crate) fn span(&self, pieces: &[u32]) -> Result<(u64, u64)> {
        let (mut start, mut end) = (u64::MAX, 0);
        for &index in pieces {
            let piece = self.piece(index)?;
            start = start.min(piece.offset);
            end = end.max(piece.offset + piece.len);
        }
        Ok((start, end.saturating_sub(start)))
    }

    /// Whether a piece may come by DMA: its object's pages can be registered, and the CPU has nothing of it to check.
    pub(crate) fn may_use_dma(&self, piece: &Piece) -> bool {
        let unchecked = piece.checks.is_empty();
        self.route(piece.object).is_ok_and(|route| route.dma)
            && (unchecked || self.checks.is_on() && self.plan.lands_whole(piece))
    }

    pub(crate) fn source(&self, object: u32) -> Result<&Arc<dyn RangeSource>> {
        self.sources.get(object as usize).ok_or_else(|| internal("object out of the plan"))
    }

    pub(crate) fn route(&self, object: u32) -> Result<&Route> {
        self.routes.get(object as usize).ok_or_else(|| internal("object out of the plan"))
    }

    /// The address of a target, which has been provided when a piece of it is runnable.
    pub(crate) fn address(&self, target: u32) -> Result<u64> {
        match self.addresses.get(target as usize).map(|address| address.load(Ordering::Acquire)) {
            Some(address) if address != 0 => Ok(address),
            _ => Err(internal("target not provided")),
        }
    }

    pub(crate) fn set_address(&self, target: usize, address: u64) {
        if let Some(slot) = self.addresses.get(target) {
            slot.store(address, Ordering::Release);
        }
    }

    /// Whether a target without bytes is complete the moment it is provided.
    pub(crate) fn lacks_nothing(&self, target: usize) -> bool {
        self.lacking.get(target).is_none_or(|bytes| bytes.load(Ordering::Relaxed) == 0)
    }

    /// Notes that targets were provided; `all`: the last of them.
    pub(crate) fn note_fed(&self, all: bool) {
        *lock(&self.fed) = (Instant::now(), all);
    }

    /// Whether the caller has provided everything, waits for news, or has provided nothing for `quiet`: then it is not
    /// allocating now.
    pub(crate) fn is_fed(&self, quiet: Duration) -> bool {
        let (last, all) = *lock(&self.fed);
        all || self.waiters.load(Ordering::Relaxed) > 0 || last.elapsed() >= quiet
    }

    pub(crate) fn add_fence(&self, fence: Event) {
        let mut fences = lock(&self.fences);
        fences.push(Arc::new(fence));
        self.fence_count.store(fences.len(), Ordering::Release);
    }

    /// Makes `stream` wait for what the framework had queued when it provided its memory. `seen` is how many fences the
    /// stream waits for already.
    pub(crate) fn wait_fences(&self, stream: &Stream, seen: &mut usize) -> Result<()> {
        if self.fence_count.load(Ordering::Acquire) == *seen {
            return Ok(());
        }
        let fences: Vec<_> = lock(&self.fences).iter().skip(*seen).cloned().collect();
        for fence in fences {
            stream.wait_for(&fence)?;
            *seen += 1;
        }
        Ok(())
    }

    pub(crate) fn keep_alive(&self, owner: Box<dyn Any + Send>) {
        lock(&self.keepalive).push(owner);
    }

    pub(crate) fn take_keepalive(&self) -> Vec<Box<dyn Any + Send>> {
        std::mem::take(&mut *lock(&self.keepalive))
    }

    /// Whether nothing is left to do: every byte arrived, or the load ended early.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends the load early; the first error stays.
    pub(crate) fn fail(&self, error: Error) {
        let mut progress = lock(&self.progress);
        if progress.error.is_none() && !progress.complete {
            progress.error = Some(error);
            progress.ended = Some(Instant::now());
        }
        drop(progress);
        self.stop.store(true, Ordering::Relaxed);
        self.queue.stop();
        self.progressed.notify_all();
        self.uncount();
    }

    /// The load is over, and the caller has been told: registrations may be released.
    fn uncount(&self) {
        if self.counted.swap(false, Ordering::AcqRel) {
            self.engine.window().load_ends();
        }
    }

    /// Counts a piece whose bytes are in their targets.
    pub(crate) fn finish_piece(&self, index: u32, path: Path) -> Result<()> {
        let piece = self.piece(index)?;
        let mut ready = Vec::new();
        for op in self.plan.ops_of(piece) {
            let bytes = op.part.bytes();
            let Some(lacking) = self.lacking.get(op.part.target as usize) else { continue };
            if lacking.fetch_sub(bytes, Ordering::AcqRel) == bytes {
                ready.push(op.part.target);
            }
        }
        self.tally.count(path, piece.bytes);
        self.tally.settle_cpu();
        self.done_bytes.fetch_add(piece.bytes, Ordering::Relaxed);
        // Under the lock: when the load is seen complete, every target has been seen ready.
        let mut progress = lock(&self.progress);
        let news = !ready.is_empty();
        progress.ready.extend(ready);
        let last = self.queue.finished();
        if last {
            progress.complete = true;
            progress.ended = Some(Instant::now());
            self.stop.store(true, Ordering::Relaxed);
        }
        drop(progress);
        if last || news {
            self.progressed.notify_all();
        }
        if last {
            self.uncount();
        }
        Ok(())
    }

    pub(crate) fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// Waits for news, at most `timeout`.
    pub(crate) fn wait_progress<'a>(
        &self,
        progress: MutexGuard<'a, Progress>,
        timeout: Duration,
    ) -> MutexGuard<'a, Progress> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let progress = match self.progressed.wait_timeout(progress, timeout) {
            Ok((guard, _)) => guard,
            Err(poisoned) => poisoned.into_inner().0,
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        progress
    }

    /// Gives idle slots to other loads that wait for the arena. A load whose consumer has stopped holds none.
    pub(crate) fn yield_slots(&self) {
        if self.engine.arena_is_wanted() {
            self.slots.give_back();
        }
    }

    pub(crate) fn note_registered(&self, bytes: u64) {
        self.registered_peak.fetch_max(bytes, Ordering::Relaxed);
    }

    pub(crate) fn registered_peak(&self) -> u64 {
        self.registered_peak.load(Ordering::Relaxed)
    }

    pub(crate) fn notify(&self) {
        self.progressed.notify_all();
    }

    pub(crate) fn worker_started(&self) {
        self.active.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn worker_ended(&self) {
        // Under the progress lock, so that a waiter cannot miss the last one.
        let _progress = lock(&self.progress);
        if self.active.load(Ordering::Acquire) == 1 {
            // The last: staging goes to other loads now, even if the caller keeps the session.
            drop(self.queue.take_loaded());
            self.slots.give_back();
        }
        self.active.fetch_sub(1, Ordering::AcqRel);
        self.progressed.notify_all();
    }

    pub(crate) fn active_workers(&self) -> usize {
        self.active.load(Ordering::Acquire)
    }
}

pub(crate) fn internal(what: &str) -> Error {
    Error::new(Code::Internal, what).hint("this is a fault in Forebay, please report it")
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
