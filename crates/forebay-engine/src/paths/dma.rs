//! Page-cache DMA: the GPU reads the page cache itself. **unsafe**: it registers mappings and queues copies from them.
//!
//! One thread maps a batch of a file's pages, registers it read-only, queues copies from it and goes on with the next
//! batch. Why one: registering takes one lock of the driver, and more threads only wait for it. Why registrations are
//! released last: releasing takes the same lock, and while copies run it costs a third of the rate. So they are kept
//! until the copies are done, up to the window, and the release itself (140 GB/s) happens after the last byte has
//! arrived, when the caller has its tensors already.
//!
//! A batch is registered at 40 to 55 GB/s, about the rate of the link, with 25 to 35 ms of CPU a GB. What that leaves of
//! the link, copying workers fill. To share the copy engine with them, copies are cut (`dma_copy_bytes`); to share the
//! work, only `dma_batches_ahead` batches are registered ahead of their copies.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_device::Device;
use forebay_device::cuda::{CudaDevice, Event, Registration, Stream};
use forebay_error::{Code, Result};

use super::copy;
use super::mapping::Mapping;
use super::scatter::GpuScatter;
use crate::report::Path;
use crate::route::{Cold, Known, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::LocalFile;

/// A registered batch. Fields drop in order: registration, then mapping, then its share of the window.
struct Batch {
    _registration: Registration,
    mapping: Mapping,
    _window: Window,
}

/// A share of the engine's window.
struct Window {
    shared: Arc<Shared>,
    len: u64,
}

impl Drop for Window {
    fn drop(&mut self) {
        self.shared.engine.give_window(self.len);
    }
}

/// A batch whose copies are queued.
struct Flight {
    pieces: Vec<u32>,
    done: Event,
    batch: Batch,
}

struct Worker<'a> {
    shared: &'a Arc<Shared>,
    gpu: &'a Arc<CudaDevice>,
    limit: u64,
    stream: Stream,
    fences_seen: usize,
    flights: VecDeque<Flight>,
    /// Batches whose copies are done, released at the end or when the window is full.
    spent: VecDeque<Batch>,
}

/// Why a batch was not registered.
enum Refusal {
    /// The window is full and nothing of ours can be released.
    NoWindow,
    /// The driver or the system said no.
    Said(forebay_error::Error),
}

/// Moves pieces until none is left, or until refused; then copies like the others.
pub(crate) fn run(shared: &Arc<Shared>, limit: u64) -> Result<()> {
    let Device::Cuda(gpu) = shared.engine.device() else {
        return Err(internal("DMA without a GPU"));
    };
    let mut worker = Worker {
        shared,
        gpu,
        limit,
        stream: Stream::new(gpu)?,
        fences_seen: 0,
        flights: VecDeque::new(),
        spent: VecDeque::new(),
    };
    let result = worker.work();
    shared.queue.dma_ends();
    // Whatever happened, the GPU is done with the mappings before they go.
    let settled = worker.settle(0);
    result?;
    settled?;
    if shared.is_complete() {
        // The caller has its tensors; the registrations go now.
        return Ok(());
    }
    drop(worker);
    copy::run(shared)
}

impl Worker<'_> {
    /// Returns when DMA has nothing to do any more, whether or not others have.
    fn work(&mut self) -> Result<()> {
        let tuning = &self.shared.engine.config().tuning;
        loop {
            // Settle before sleeping, so that finished tensors are not held back by an empty queue.
            let mut group = self.take(tuning.dma_batch_bytes, false);
            if group.is_empty() {
                self.settle(0)?;
                group = self.take(tuning.dma_batch_bytes, true);
            }
            if group.is_empty() {
                return Ok(());
            }
            let group = self.resident_part(group)?;
            if group.is_empty() {
                continue;
            }
            match self.move_batch(&group) {
                Ok(()) => self.settle(tuning.dma_batches_ahead)?,
                Err(refusal) => {
                    self.shared.queue.leave_to_copy(&group);
                    self.note(&group, refusal)?;
                    return Ok(());
                }
            }
        }
    }

    /// Neighbouring pieces of one object that may use DMA, up to `most` bytes.
    fn take(&self, most: u64, wait: bool) -> Vec<u32> {
        let shared = self.shared;
        let mut start = None;
        shared.queue.take_front(wait, |last, next| {
            let Ok(piece) = shared.piece(next) else { return false };
            if !shared.route(piece.object).is_ok_and(|route| route.dma) {
                return false;
            }
            let first = *start.get_or_insert(piece.offset);
            let Some(last) = last.and_then(|last| shared.piece(last).ok()) else { return true };
            last.object == piece.object
                && piece.offset <= last.offset + last.len + crate::plan::GAP_BYTES
                && piece.offset + piece.len - first <= most
        })
    }

    /// Sends the pieces that are not resident to those who read them; the rest is for DMA.
    fn resident_part(&self, group: Vec<u32>) -> Result<Vec<u32>> {
        let Some(&first) = group.first() else { return Ok(group) };
        let object = self.shared.piece(first)?.object;
        let route = self.shared.route(object)?;
        if route.known == Known::Resident {
            return Ok(group);
        }
        let file = self.file(object)?;
        if copy::range_is_resident(self.shared, file, &group)? {
            return Ok(group);
        }
        let (mut warm, mut cold) = (Vec::new(), Vec::new());
        for piece in group {
            if copy::range_is_resident(self.shared, file, &[piece])? {
                warm.push(piece);
            } else {
                cold.push(piece);
            }
        }
        match route.cold() {
            Cold::Buffered => self.shared.queue.leave_to_copy(&cold),
            Cold::Ring | Cold::Threads => self.shared.queue.push_cold(&cold),
        }
        Ok(warm)
    }

    fn file(&self, object: u32) -> Result<&LocalFile> {
        self.shared.source(object)?.local().ok_or_else(|| internal("DMA from no file"))
    }

    /// Maps, registers, and queues the copies of a group of pieces of one object.
    fn move_batch(&mut self, group: &[u32]) -> std::result::Result<(), Refusal> {
        let batch = self.register(group)?;
        self.queue_copies(group, batch).map_err(Refusal::Said)
    }

    fn register(&mut self, group: &[u32]) -> std::result::Result<Batch, Refusal> {
        let said = Refusal::Said;
        let (Some(&first), Some(&last)) = (group.first(), group.last()) else {
            return Err(said(internal("empty DMA batch")));
        };
        let first = self.shared.piece(first).map_err(said)?;
        let last = self.shared.piece(last).map_err(said)?;
        let (offset, len) = (first.offset, last.offset + last.len - first.offset);
        let page = rustix::param::page_size() as u64;
        let window = self.take_window(len + 2 * page)?;
        let mapping = Mapping::new(self.file(first.object).map_err(said)?.file(), offset, len);
        let mapping = mapping.map_err(said)?;
        // SAFETY: page-aligned and mapped; `Batch` drops the registration before the mapping, and only after
        // `settle` saw its copies done (or never queued any).
        let registration =
            unsafe { Registration::read_only(self.gpu, mapping.base(), mapping.len()) };
        Ok(Batch { _registration: registration.map_err(said)?, mapping, _window: window })
    }

    /// A share of the window; releases spent batches for it, then waits for the oldest flight.
    fn take_window(&mut self, len: u64) -> std::result::Result<Window, Refusal> {
        loop {
            if self.shared.engine.take_window(len, self.limit) {
                return Ok(Window { shared: self.shared.clone(), len });
            }
            if !self.spent.is_empty() {
                // Half of them in one go: each release makes the copies in flight wait for the driver's lock.
                let keep = self.spent.len() / 2;
                let release = self.spent.len() - keep;
                self.spent.drain(..release);
            } else if let Some(flight) = self.flights.pop_front() {
                self.land(flight).map_err(Refusal::Said)?;
            } else {
                return Err(Refusal::NoWindow);
            }
        }
    }

    fn queue_copies(&mut self, group: &[u32], batch: Batch) -> Result<()> {
        let shared = self.shared;
        shared.wait_fences(&self.stream, &mut self.fences_seen)?;
        let most = shared.engine.config().tuning.dma_copy_bytes;
        let done = Event::new(self.gpu)?;
        let queued = || {
            let mut scatter = GpuScatter::new(&self.stream, most);
            for &index in group {
                for op in shared.plan.ops_of(shared.piece(index)?) {
                    let from = batch.mapping.address_of(op.part.from);
                    // SAFETY: the rows lie in the mapping, which is registered and kept until `done` has come.
                    unsafe { scatter.add(shared, &op.part, from, op.part.from_stride)? };
                }
            }
            scatter.flush()?;
            done.record(&self.stream)
        };
        if let Err(error) = queued() {
            // Copies may be on their way: they end before the batch goes.
            self.stream.synchronize()?;
            return Err(error);
        }
        self.flights.push_back(Flight { pieces: group.to_vec(), done, batch });
        Ok(())
    }

    /// Waits until at most `ahead` flights are left.
    fn settle(&mut self, ahead: usize) -> Result<()> {
        while self.flights.len() > ahead {
            let Some(flight) = self.flights.pop_front() else { break };
            self.land(flight)?;
        }
        Ok(())
    }

    fn land(&mut self, flight: Flight) -> Result<()> {
        flight.done.wait()?;
        for &piece in &flight.pieces {
            self.shared.finish_piece(piece, Path::PageCacheDma)?;
        }
        self.spent.push_back(flight.batch);
        Ok(())
    }

    /// Remembers a refusal; an error that is no refusal ends the load.
    fn note(&self, group: &[u32], refusal: Refusal) -> Result<()> {
        let text = match refusal {
            Refusal::NoWindow => "the window of registered page cache is taken".to_owned(),
            Refusal::Said(error) => match error.code() {
                Code::Device | Code::OutOfMemory | Code::Io | Code::NotFound => {
                    if let Some(&first) = group.first()
                        && error.code() == Code::Device
                    {
                        let device = self.file(self.shared.piece(first)?.object)?.device();
                        refuse(Refused::Dma, device, error.what());
                    }
                    error.to_string()
                }
                _ => return Err(error),
            },
        };
        self.shared.tally.refusal(&format!("page-cache DMA: {text}; copying instead"));
        Ok(())
    }
}
