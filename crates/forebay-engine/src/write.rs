//! Saves: from the device's memory to sinks. **unsafe**: it reads memory by address and queues copies from a GPU.
//!
//! Ranges of memory are cut in pieces, and threads take piece after piece. From host memory a piece is written as it
//! lies. From a GPU each thread has two staging slots: while one is on its way from the GPU, the other is written, so
//! that link and drive work at the same time. The drive is the slower by far, so a few threads are enough, and nothing
//! here needs the pump.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use forebay_device::cuda::{CudaDevice, Event, Stream};
use forebay_device::{Device, Slot};
use forebay_error::{Code, Error, Result};

use crate::engine::Engine;
use crate::report::Tally;
use crate::shared::{internal, lock};
use crate::sink::{RangeSink, write_all_at};

/// Bytes of one write from host memory: large enough for any file system, small enough to share among threads and to
/// stop soon.
const HOST_PIECE_BYTES: u64 = 8 << 20;

/// Writing threads by default, at the most: more do not help one drive.
const THREADS_DEFAULT_MAX: usize = 8;

/// Memory that goes to a range of a sink.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Index of the sink.
    pub sink: usize,
    /// Where it goes, in bytes.
    pub offset: u64,
    /// Where the memory starts: an address of the engine's device.
    pub address: u64,
    /// Its bytes.
    pub len: u64,
}

/// How one save is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// Threads; `None`: what the machine allows, at most 8.
    pub threads: Option<usize>,
    /// The framework's stream that the memory was last written on (its handle, 0 for the default stream): copies from
    /// the GPU wait for what is queued there now.
    pub stream: Option<usize>,
}

/// What a save did.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteReport {
    /// Bytes written.
    pub bytes: u64,
    /// Seconds until the last write returned; making it durable comes after.
    pub seconds: f64,
    /// CPU seconds of the writing threads.
    pub cpu_seconds: f64,
    /// Those threads.
    pub threads: usize,
}

struct Job<'a> {
    engine: &'a Engine,
    pieces: Vec<Part>,
    next: AtomicUsize,
    sinks: &'a [&'a dyn RangeSink],
    stop: &'a AtomicBool,
    failed: std::sync::Mutex<Option<Error>>,
    tally: Tally,
}

impl Engine {
    /// Writes parts of the device's memory to sinks, and returns when the last write has. Setting `stop` ends it early.
    ///
    /// Errors: `cancelled` after `stop`; what a write says, naming object and byte; `device`.
    ///
    /// # Safety
    /// Each part's memory is valid, and written by nobody, until this returns. `stream`, if given, is a live stream of
    /// the device.
    pub unsafe fn write(
        &self,
        parts: &[Part],
        sinks: &[&dyn RangeSink],
        options: WriteOptions,
        stop: &AtomicBool,
    ) -> Result<WriteReport> {
        let started = Instant::now();
        let piece_bytes = match self.device() {
            Device::Host => HOST_PIECE_BYTES,
            Device::Cuda(_) => self.config().piece_bytes,
        };
        let pieces = cut(parts, sinks.len(), piece_bytes)?;
        let threads = options
            .threads
            .unwrap_or_else(|| forebay_topology::worker_cpus().clamp(1, THREADS_DEFAULT_MAX));
        let threads = threads.clamp(1, crate::THREADS_MAX).min(pieces.len());
        let fence = match (self.device(), options.stream) {
            (Device::Cuda(gpu), Some(stream)) => Some(gpu.with_context(|| {
                let event = Event::new(gpu)?;
                // SAFETY: the stream is live by this function's contract.
                unsafe { event.record_foreign(stream)? };
                Ok(event)
            })?),
            _ => None,
        };
        let bytes = parts.iter().map(|part| part.len).sum();
        let job = Job {
            engine: self,
            pieces,
            next: AtomicUsize::new(0),
            sinks,
            stop,
            failed: std::sync::Mutex::new(None),
            tally: Tally::default(),
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    match catch_unwind(AssertUnwindSafe(|| job.work(fence.as_ref()))) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => job.fail(error),
                        Err(_) => job.fail(internal("a writing thread panicked")),
                    }
                    job.tally.settle_cpu();
                });
            }
        });
        if let Some(error) = lock(&job.failed).take() {
            return Err(error);
        }
        let seconds = started.elapsed().as_secs_f64();
        Ok(WriteReport { bytes, seconds, cpu_seconds: job.tally.cpu_seconds(), threads })
    }
}

fn cut(parts: &[Part], sinks: usize, piece_bytes: u64) -> Result<Vec<Part>> {
    let mut pieces = Vec::new();
    for part in parts {
        if part.sink >= sinks || part.offset.checked_add(part.len).is_none() {
            return Err(internal("part without a place to go"));
        }
        let mut done = 0;
        while done < part.len {
            let (offset, address) = (part.offset + done, part.address + done);
            // On a grid of the file: a piece that shared a page with the one before would wait for its writeback.
            let len = (piece_bytes - offset % piece_bytes).min(part.len - done);
            pieces.push(Part { sink: part.sink, offset, address, len });
            done += len;
        }
    }
    Ok(pieces)
}

impl Job<'_> {
    fn fail(&self, error: Error) {
        lock(&self.failed).get_or_insert(error);
    }

    /// The next piece; none when all are taken or somebody failed.
    fn take(&self) -> Result<Option<Part>> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Cancelled, "the save was cancelled"));
        }
        if lock(&self.failed).is_some() {
            return Ok(None);
        }
        Ok(self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)).copied())
    }

    fn write(&self, piece: &Part, bytes: &[u8]) -> Result<()> {
        let Some(sink) = self.sinks.get(piece.sink) else { return Err(internal("no such sink")) };
        write_all_at(*sink, bytes, piece.offset)?;
        sink.flush_soon(piece.offset, piece.len);
        Ok(())
    }

    fn work(&self, fence: Option<&Event>) -> Result<()> {
        match self.engine.device() {
            Device::Host => self.work_host(),
            Device::Cuda(gpu) => {
                gpu.bind_thread()?;
                let stream = Stream::new(gpu)?;
                if let Some(fence) = fence {
                    stream.wait_for(fence)?;
                }
                // Waits for the GPU when it goes, whatever happens: a panic too.
                let mut lanes = Lanes { stream: &stream, lanes: Vec::new() };
                self.work_gpu(gpu, &stream, &mut lanes.lanes)
            }
        }
    }

    fn work_host(&self) -> Result<()> {
        while let Some(piece) = self.take()? {
            // SAFETY: valid and unchanging until `Engine::write` returns, by its contract.
            let bytes = unsafe {
                std::slice::from_raw_parts(piece.address as *const u8, piece.len as usize)
            };
            self.write(&piece, bytes)?;
        }
        Ok(())
    }

    fn work_gpu(
        &self,
        gpu: &Arc<CudaDevice>,
        stream: &Stream,
        lanes: &mut Vec<Lane>,
    ) -> Result<()> {
        let arena = self.engine.arena()?;
        let give_up = || self.stop.load(Ordering::Relaxed) || lock(&self.failed).is_some();
        for slot in arena.acquire(2, &give_up)? {
            lanes.push(Lane { slot, done: Event::new(gpu)?, piece: None });
        }
        let mut next = 0;
        loop {
            let count = lanes.len();
            let Some(lane) = lanes.get_mut(next) else { return Err(internal("no lane")) };
            // The copy that was queued a round ago has had the other lane's write to run in.
            let landed = self.drain(lane)?;
            match self.take()? {
                Some(piece) => {
                    // SAFETY: the slot is pinned, as long as the piece, and this lane's until `done` has come; the
                    // device memory is valid by the contract of `Engine::write`.
                    unsafe {
                        stream.copy_to_host(lane.slot.address(), piece.address, piece.len)?;
                    }
                    lane.done.record(stream)?;
                    lane.piece = Some(piece);
                }
                None if !landed && lanes.iter().all(|lane| lane.piece.is_none()) => return Ok(()),
                None => {}
            }
            next = (next + 1) % count;
        }
    }

    /// Waits for a lane's copy and writes it; false if there was none.
    fn drain(&self, lane: &mut Lane) -> Result<bool> {
        let Some(piece) = lane.piece.take() else { return Ok(false) };
        lane.done.wait()?;
        self.write(&piece, lane.slot.bytes(piece.len as usize))?;
        Ok(true)
    }
}

/// The slots of a thread. Dropped, they go back when the GPU is done with its copies; where that cannot be known they
/// are given up for good.
struct Lanes<'a> {
    stream: &'a Stream,
    lanes: Vec<Lane>,
}

impl Drop for Lanes<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "staging memory is given up, the GPU may still use it");
            std::mem::forget(std::mem::take(&mut self.lanes));
        }
    }
}

/// A slot and the piece that is on its way into it.
struct Lane {
    slot: Slot,
    done: Event,
    piece: Option<Part>,
}
