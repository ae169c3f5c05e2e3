//! From memory into slots. **unsafe**: it reads memory by address.

use forebay_device::cuda::{CudaDevice, Event, Stream};
use forebay_device::{Device, Slot};
use forebay_error::{Code, Error, Result};
use std::sync::Arc;

use super::job::{Filled, Job};
use super::{Place, StagePiece};
use crate::shared::internal;

/// Queues the copies of every piece of device memory, in order, and returns when they have landed.
pub(super) fn from_device(job: &Job, fence: Option<&Event>) -> Result<()> {
    let Device::Cuda(gpu) = job.engine.device() else { return Err(internal("no GPU")) };
    let stream = Stream::new(gpu)?;
    if let Some(fence) = fence {
        stream.wait_for(fence)?;
    }
    let mut copies = Copies { job, stream: &stream, slot: None, settled: false };
    let queued = copies.queue_all(gpu);
    // Whatever happened: nobody may touch memory or slots before the GPU is done with them.
    copies.settle()?;
    job.count_staged(queued?);
    Ok(())
}

/// The copies of a job on their way. Dropped, also by a panic, it waits until the GPU is done with all slots that this
/// thread has touched: the one at hand, and those that wait in the queue.
struct Copies<'a> {
    job: &'a Job,
    stream: &'a Stream,
    /// The slot that copies are being queued into. It is not in the queue before all of them are, with their event.
    slot: Option<Slot>,
    settled: bool,
}

impl Copies<'_> {
    /// Queues copies until the job ends or nothing is left; returns how many pieces.
    fn queue_all(&mut self, gpu: &Arc<CudaDevice>) -> Result<usize> {
        let mut queued = 0;
        for (number, piece) in self.job.pieces.iter().enumerate() {
            if piece.place != Place::Device {
                continue;
            }
            let Some(slot) = slot(self.job)? else { return Ok(0) };
            let address = self.slot.insert(slot).address();
            let landed = Event::new(gpu)?;
            let mut at = 0;
            for run in self.job.runs_of(piece) {
                // SAFETY: the run is valid until the job is staged by the contract of `Engine::stage`, and the pieces
                // were checked to fit their slots; the slot is kept here until the copy has landed, or goes to its
                // taker with the event, which waits for it.
                unsafe { self.stream.copy_to_host(address + at, run.address, run.len)? };
                at += run.len as usize;
            }
            landed.record(self.stream)?;
            let slot = self.slot.take();
            self.job.push(Filled { piece: number, len: at, slot, landed: Some(landed) });
            queued += 1;
        }
        Ok(queued)
    }

    /// Waits for the GPU. Where it cannot be known whether it is done, the slots are given up for good.
    fn settle(&mut self) -> Result<()> {
        self.settled = true;
        let settled = self.stream.synchronize();
        let slot = self.slot.take();
        if let Err(error) = &settled {
            tracing::warn!(%error, "staging memory is given up, the GPU may still use it");
            std::mem::forget((slot, self.job.take_rest()));
        }
        settled
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        if !self.settled
            && let Err(error) = self.settle()
        {
            tracing::debug!(%error, "a thread that staged has panicked");
        }
    }
}

/// Copies pieces of host memory until nothing is left.
pub(super) fn from_host(job: &Job) -> Result<()> {
    while let Some(number) = job.next_host() {
        let Some(piece) = job.pieces.get(number) else { return Err(internal("no such piece")) };
        let Some(mut slot) = slot(job)? else { return Ok(()) };
        let len = gather(job, piece, &mut slot)?;
        job.push(Filled { piece: number, len, slot: Some(slot), landed: None });
        job.count_staged(1);
    }
    Ok(())
}

fn gather(job: &Job, piece: &StagePiece, slot: &mut Slot) -> Result<usize> {
    let mut at = 0;
    let whole = slot.len();
    let bytes = slot.bytes_mut(whole);
    for run in job.runs_of(piece) {
        let len = run.len as usize;
        let Some(into) = bytes.get_mut(at..at + len) else {
            return Err(internal("a piece leaves its slot"));
        };
        if len > 0 {
            let from = run.address as *const u8;
            // SAFETY: the run is valid for `len` bytes by the contract of `Engine::stage`, `into` has as many, and it
            // lies in the slot, which is ours alone. No reference is made to the run: another process may write to it.
            unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), len) };
        }
        at += len;
    }
    Ok(at)
}

/// Queues every piece of host memory to be taken where it lies; those of several runs are gathered by their takers.
pub(super) fn in_place(job: &Job) {
    while let Some(number) = job.next_host() {
        let runs = job.pieces.get(number).map(|piece| job.runs_of(piece)).unwrap_or_default();
        let len = runs.iter().map(|run| run.len as usize).sum();
        job.push(Filled { piece: number, len, slot: None, landed: None });
    }
}

/// A slot of the pool; waits for one. `None`: the job is over.
fn slot(job: &Job) -> Result<Option<Slot>> {
    if job.is_over() {
        return Ok(None);
    }
    match job.pool.acquire(1, &|| job.is_over()) {
        Ok(mut slots) => Ok(slots.pop()),
        Err(error) if error.code() == Code::Cancelled => Ok(None),
        Err(error) => Err(with_hint(error)),
    }
}

fn with_hint(error: Error) -> Error {
    error.hint("make the staging pool smaller, or leave more memory to it")
}

/// Bytes of a piece in place: where it is one run they are borrowed, else gathered.
pub(super) fn with_bytes<T>(
    job: &Job,
    piece: &StagePiece,
    work: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<T> {
    let runs = job.runs_of(piece);
    if let [run] = runs
        && run.len > 0
    {
        // SAFETY: valid and unchanging until the job is done by the contract of `StageOptions::in_place`.
        return work(unsafe {
            std::slice::from_raw_parts(run.address as *const u8, run.len as usize)
        });
    }
    let mut bytes = Vec::with_capacity(runs.iter().map(|run| run.len as usize).sum());
    for run in runs.iter().filter(|run| run.len > 0) {
        // SAFETY: as above.
        bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts(run.address as *const u8, run.len as usize)
        });
    }
    work(&bytes)
}
