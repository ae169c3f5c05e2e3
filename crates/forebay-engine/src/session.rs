//! One load, from its start to its report. **unsafe**: targets are given by address.
//!
//! The caller provides the targets' addresses in order, all at once or as it allocates; workers are busy from the first
//! address on, so that a framework's allocations overlap the transfers. Then it waits, for each target or for the end.
//! Everything here returns within its timeout: interrupts are the caller's to look for in between.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_device::Device;
use forebay_device::cuda::Event;
use forebay_error::{Code, Error, Result};

use crate::engine::Engine;
use crate::options::{CacheChoice, LoadOptions};
use crate::plan::Plan;
use crate::report::{Report, Tally};
use crate::route;
use crate::shared::{Progress, Shared, internal, lock};
use crate::source::RangeSource;
use crate::verify::Checks;
use crate::worker;

/// How long a cancelled load waits for its workers before it leaves them to themselves.
const CANCEL_WAIT: Duration = Duration::from_millis(800);

/// How long `finish` waits for registrations to be released before it drops pages: 16 GiB take 150 ms.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// Ranges that are dropped from the page cache are widened to this grid: the kernel drops no folio by halves, and
/// folios are of up to 4 MiB where files are written in large pieces.
const DROP_GRID: u64 = 4 << 20;

/// Host targets from this size on are worth huge pages.
const HUGE_TARGET_BYTES: u64 = 4 << 20;

/// A load under way.
pub struct Session {
    shared: Arc<Shared>,
    started: Instant,
    threads: usize,
    registered_limit: u64,
    feed: Mutex<Feed>,
    provided: AtomicUsize,
}

/// How much of the plan is runnable.
#[derive(Default)]
struct Feed {
    targets: usize,
    pieces: usize,
}

impl Session {
    pub(crate) fn start(
        engine: Arc<Engine>,
        plan: Plan,
        sources: Vec<Arc<dyn RangeSource>>,
        options: LoadOptions,
    ) -> Result<Self> {
        let started = Instant::now();
        if plan.pieces().iter().any(|piece| piece.object as usize >= sources.len()) {
            return Err(internal("plan names an object without a source"));
        }
        let remote = sources.iter().any(|source| source.local().is_none());
        let threads = engine.threads(&options, remote);
        let registered_limit = if engine.device().is_gpu() { engine.dma_limit() } else { 0 };
        let tally = Tally::default();
        let tuning = &engine.config().tuning;
        let checks = Checks::new(&engine, &plan, &tally);
        tracing::info!(
            files = sources.len(),
            bytes = plan.bytes(),
            pieces = plan.pieces().len(),
            threads,
            device = engine.device().name(),
            window_bytes = registered_limit,
            "load starts"
        );
        let routes = sources
            .iter()
            .enumerate()
            .map(|(object, source)| {
                let (source, device) = (source.as_ref(), engine.device());
                let may_dma = plan.leaves_the_cpu_out(object as u32, !checks.is_off());
                let limit = may_dma.then_some(registered_limit);
                let route = route::decide(source, device, &options, tuning, threads, limit, &tally);
                tracing::debug!(file = source.name(), ?route, "how a file is read");
                route
            })
            .collect();
        let slots = threads + tuning.slots_ahead;
        let shared = Shared::new(engine, plan, sources, routes, options, tally, checks, slots);
        let shared = Arc::new(shared);
        worker::spawn_all(&shared, threads, registered_limit)?;
        Ok(Self {
            shared,
            started,
            threads,
            registered_limit,
            feed: Mutex::new(Feed::default()),
            provided: AtomicUsize::new(0),
        })
    }

    /// Provides the memory of the next targets, in order: device addresses for a GPU, host addresses for the host.
    /// `stream` is the framework's stream that the memory was allocated on (its handle, 0 for the default stream):
    /// copies wait for what is queued there now. `owner` is kept until no worker can touch the memory any more, which
    /// after a cancelled load may be later than the session.
    ///
    /// Errors: `usage` for more addresses than targets or a null address of a target with bytes.
    ///
    /// # Safety
    /// Each address is valid for the bytes of its target for as long as `owner` lives (or until the session has been
    /// finished without error), and nobody reads or writes there before the target is ready. `stream`, if given, is a
    /// live stream of the device.
    pub unsafe fn provide(
        &self,
        addresses: &[u64],
        stream: Option<usize>,
        owner: Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        let shared = &self.shared;
        if let Some(owner) = owner {
            shared.keep_alive(owner);
        }
        if let (Some(stream), Device::Cuda(gpu)) = (stream, shared.engine.device()) {
            let fence = gpu.with_context(|| {
                let event = Event::new(gpu)?;
                // SAFETY: the stream is live by this function's contract.
                unsafe { event.record_foreign(stream)? };
                Ok(event)
            })?;
            shared.add_fence(fence);
        }
        let mut feed = lock(&self.feed);
        let sizes = shared.plan.target_bytes();
        if addresses.len() > sizes.len().saturating_sub(feed.targets) {
            return Err(Error::new(Code::Usage, "more addresses than the plan has targets"));
        }
        let mut ready = Vec::new();
        for (&address, target) in addresses.iter().zip(feed.targets..) {
            if shared.lacks_nothing(target) {
                ready.push(target as u32);
            } else if address == 0 {
                return Err(Error::new(Code::Usage, format!("target {target} has a null address")));
            } else if let (Device::Host, Some(&len)) = (shared.engine.device(), sizes.get(target))
                && len >= HUGE_TARGET_BYTES
            {
                // SAFETY: valid for `len` bytes by this function's contract; advice changes no contents.
                unsafe { forebay_device::advise_huge(address as usize, len) };
            }
            shared.set_address(target, address);
        }
        feed.targets += addresses.len();
        let pieces = shared.plan.pieces();
        let first = feed.pieces;
        while pieces.get(feed.pieces).is_some_and(|next| (next.last_target as usize) < feed.targets)
        {
            feed.pieces += 1;
        }
        let range = first as u32..feed.pieces as u32;
        self.provided.store(feed.targets, Ordering::Release);
        shared.note_fed(feed.targets == sizes.len());
        if !range.is_empty() {
            // While the feed is held, so that two feeders push in plan order.
            shared.queue.push(range);
        }
        drop(feed);
        if !ready.is_empty() {
            shared.progress().ready.extend(ready);
            shared.notify();
        }
        Ok(())
    }

    /// Targets provided so far.
    pub fn provided(&self) -> usize {
        self.provided.load(Ordering::Acquire)
    }

    /// Payload bytes that have arrived, of [`Self::bytes`].
    pub fn done_bytes(&self) -> u64 {
        self.shared.done_bytes()
    }

    /// Payload bytes of the load.
    pub fn bytes(&self) -> u64 {
        self.shared.plan.bytes()
    }

    /// Waits until targets are complete and returns them, in the order of their arrival; empty after `timeout`, or
    /// when all have been returned. Errors: what ended the load.
    pub fn next_ready(&self, timeout: Duration) -> Result<Vec<u32>> {
        let deadline = Instant::now() + timeout;
        let mut progress = self.shared.progress();
        loop {
            raise(&mut progress)?;
            if !progress.ready.is_empty() {
                return Ok(progress.ready.drain(..).collect());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || progress.complete {
                return Ok(Vec::new());
            }
            progress = self.shared.wait_progress(progress, left);
        }
    }

    /// Waits for the end, at most `timeout`; true once every byte is in its target. Errors: what ended the load.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        let mut progress = self.shared.progress();
        loop {
            raise(&mut progress)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if progress.complete || left.is_zero() {
                return Ok(progress.complete);
            }
            progress = self.shared.wait_progress(progress, left);
        }
    }

    /// Waits for the end, checks that no file changed meanwhile, and reports.
    ///
    /// Errors: what ended the load, or `file_changed`; then the targets hold garbage.
    pub fn finish(&self) -> Result<Report> {
        while !self.wait(Duration::from_secs(1))? {}
        let shared = &self.shared;
        let mut used = vec![false; shared.sources.len()];
        for piece in shared.plan.pieces() {
            if let Some(used) = used.get_mut(piece.object as usize) {
                *used = true;
            }
        }
        let mut files_unchanged = 0;
        for (source, _) in shared.sources.iter().zip(&used).filter(|(_, used)| **used) {
            source.check_unchanged()?;
            files_unchanged += 1;
        }
        if shared.options.cache == CacheChoice::Bypass {
            // Pages that are still registered or mapped would stay.
            self.wait_idle(RELEASE_WAIT);
            self.drop_cached();
        }
        shared.take_keepalive();
        tracing::info!(bytes = shared.plan.bytes(), "load ends");
        let ended = shared.progress().ended.unwrap_or(self.started);
        let (verified_gpu_bytes, verified_cpu_bytes) = shared.tally.verified_bytes();
        Ok(Report {
            bytes: shared.plan.bytes(),
            read_bytes: shared.plan.read_bytes(),
            seconds: ended.saturating_duration_since(self.started).as_secs_f64(),
            cpu_seconds: shared.tally.cpu_seconds(),
            threads: self.threads,
            paths: shared.tally.shares(),
            verified_gpu_bytes,
            verified_cpu_bytes,
            unverified_bytes: shared.plan.unchecked_bytes(),
            refusals: shared.tally.refusals(),
            arena: shared.engine.arena_stats(),
            registered_peak_bytes: shared.registered_peak(),
            registered_limit_bytes: self.registered_limit,
            registered_left_bytes: shared.engine.registered_now(),
            registering_bytes_per_s: shared.tally.registering_bytes_per_s(),
            dma_ended_early: shared.tally.dma_ended_early(),
            files_unchanged,
        })
    }

    /// Waits until every worker has gone home and staging is returned, and releases what the engine's ended loads have
    /// registered, at most `timeout`. Nobody has to: both end by themselves.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        self.wait_workers(timeout) && self.shared.engine.release(left())
    }

    fn wait_workers(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut progress = self.shared.progress();
        while self.shared.active_workers() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            progress = self.shared.wait_progress(progress, left);
        }
        true
    }

    /// Ends the load early and returns within a second. True: no worker touches the targets any more. False: some hang
    /// in the kernel; they keep their staging memory and the targets' owners until it answers.
    pub fn cancel(&self) -> bool {
        self.shared.fail(Error::new(Code::Cancelled, "the load was cancelled"));
        self.wait_workers(CANCEL_WAIT)
    }

    /// Drops the loaded ranges from the page cache.
    fn drop_cached(&self) {
        let mut ranges: Vec<(u32, u64, u64)> = Vec::new();
        for piece in self.shared.plan.pieces() {
            let end = piece.offset + piece.len;
            match ranges.last_mut() {
                Some(last) if last.0 == piece.object && last.2 >= piece.offset => last.2 = end,
                _ => ranges.push((piece.object, piece.offset, end)),
            }
        }
        for (object, start, end) in ranges {
            let Ok(source) = self.shared.source(object) else { continue };
            let Some(file) = source.local() else { continue };
            let start = start / DROP_GRID * DROP_GRID;
            let end = end.next_multiple_of(DROP_GRID);
            let len = std::num::NonZeroU64::new(end - start);
            let advice = rustix::fs::Advice::DontNeed;
            if let Err(error) = rustix::fs::fadvise(file.file(), start, len, advice) {
                tracing::debug!(%error, "pages not dropped");
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let complete = self.shared.progress().complete;
        if !complete && !self.cancel() {
            tracing::warn!("a cancelled load left workers that wait for the kernel");
        }
    }
}

/// The error that ended the load, if one did; it stays for the next caller.
fn raise(progress: &mut Progress) -> Result<()> {
    match progress.error.take() {
        Some(error) => {
            progress.error = Some(again(&error));
            Err(error)
        }
        None => Ok(()),
    }
}

/// The same error once more, for the next caller who asks; the cause goes with the first.
fn again(error: &Error) -> Error {
    let mut copy = Error::new(error.code(), error.what());
    if let Some(place) = error.place() {
        copy = copy.at(place);
    }
    for hint in error.hints() {
        copy = copy.hint(hint);
    }
    copy
}
