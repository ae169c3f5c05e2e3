//! The one thread of a load that talks to the GPU's driver. **unsafe**: it registers mappings and queues copies.
//!
//! # Why one thread
//!
//! Registering page cache holds a lock of the driver for as long as it takes (2.7 ms for 128 MiB), and every other call
//! to the driver waits behind it. Copying workers that queued their own copies got a turn every 16 ms, and a load in
//! which DMA and copies were to add up to the link's 55 GB/s ran at 33 to 42. So the other workers only read: they fill
//! a slot of staging memory and leave it in the queue's inbox, and the pump, between two registrations, queues
//! everything that lies there. Nobody waits for a lock, and streams, events and fences exist once.
//!
//! # The loop
//!
//! 1. Land what the GPU has done: slots go back to the readers, registrations are kept, pieces count as finished, or
//!    wait for the GPU to check them (`checks`).
//! 2. Queue copies for every slot in the inbox.
//! 3. If few enough DMA bytes are on their way, take the next batch of resident pieces from the front of the queue,
//!    map and register it, and queue copies from it.
//! 4. With nothing to do, sleep until a reader brings a slot, or for a moment while copies are in flight.
//!
//! All copies go to one stream, so flights land in order and one event each is enough. Checks have another.
//!
//! How batches are made and registered, and when DMA ends before the load does, is in `dma`.

mod checks;
mod dma;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::cuda::{CudaDevice, Event, Stream};
use forebay_device::{Device, Slot};
use forebay_error::Result;

use crate::pace::Pace;
use crate::paths::scatter::{Allocations, GpuScatter};
use crate::report::Path;
use crate::shared::{Shared, internal};
use crate::verify;
use crate::window::Batch;
use checks::Checker;

/// How long the pump sleeps while copies are in flight: they take 76 us for 4 MiB, and readers have other slots.
const FLIGHT_NAP: Duration = Duration::from_micros(50);

/// A caller that has provided nothing for so long is not allocating any more. Until then no DMA: each allocation of a
/// framework's takes the driver's lock too, and 300 of them (25 ms alone) would wait for a registration each.
const FEED_QUIET: Duration = Duration::from_millis(20);

/// How often the pump looks whether the caller is done allocating.
const FEED_NAP: Duration = Duration::from_millis(1);

/// How long it sleeps with nothing in flight; readers wake it.
const IDLE_NAP: Duration = Duration::from_millis(200);

/// A slot that a reader has filled.
pub(crate) struct Loaded {
    pub(crate) slot: Slot,
    pub(crate) piece: u32,
    /// Where in the slot the piece's first byte lies.
    pub(crate) head: usize,
    pub(crate) path: Path,
    /// Its whole blocks are for the GPU to check, once they have arrived.
    pub(crate) by_gpu: bool,
}

/// Copies that are queued.
enum Cargo {
    Slots(Vec<Loaded>),
    Pages { pieces: Vec<u32>, batch: Batch, bytes: u64 },
}

struct Flight {
    cargo: Cargo,
    done: Event,
}

/// What a pump is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PumpTask {
    /// Whether there may be pieces for DMA.
    pub(crate) dma: bool,
    /// Page cache that may be registered at one time, in bytes.
    pub(crate) window_limit: u64,
    /// Whether DMA ends where registering is slow.
    pub(crate) may_give_up: bool,
    /// Readers to start when DMA ends before the load does.
    pub(crate) spare_readers: usize,
}

struct Pump<'a> {
    shared: &'a Arc<Shared>,
    gpu: &'a Arc<CudaDevice>,
    stream: Stream,
    events: Vec<Event>,
    allocations: Allocations,
    fences_seen: usize,
    flights: VecDeque<Flight>,
    /// DMA bytes in flight.
    dma_bytes: u64,
    pace: Pace,
    task: PumpTask,
    checker: Checker<'a>,
}

/// Pumps until every byte has arrived, or the load ends early.
pub(crate) fn run(shared: &Arc<Shared>, task: PumpTask) -> Result<()> {
    let Device::Cuda(gpu) = shared.engine.device() else {
        return Err(internal("pump without a GPU"));
    };
    let mut pump = Pump {
        shared,
        gpu,
        stream: Stream::new(gpu)?,
        events: Vec::new(),
        allocations: Allocations::default(),
        fences_seen: 0,
        flights: VecDeque::new(),
        dma_bytes: 0,
        pace: Pace::default(),
        task,
        checker: Checker::new(shared, gpu),
    };
    let result = pump.work();
    shared.queue.dma_ends();
    // Whatever happened: slots and mappings go only when the GPU is done with them.
    let settled = pump.stream.synchronize();
    result.and(settled).and_then(|()| pump.checker.settle())
}

impl Drop for Pump<'_> {
    /// Also after a panic: slots and mappings go only when the GPU is done with them, and where that cannot be known
    /// they stay for ever.
    fn drop(&mut self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "staging memory is given up, the GPU may still use it");
            std::mem::forget(std::mem::take(&mut self.flights));
            self.shared.engine.window().give_up();
        }
        for flight in self.flights.drain(..) {
            if let Cargo::Pages { batch, .. } = flight.cargo {
                self.shared.engine.window().hand_over(batch);
            }
        }
    }
}

impl Pump<'_> {
    fn work(&mut self) -> Result<()> {
        while !self.shared.is_over() {
            self.land()?;
            self.checker.turn(!self.flights.is_empty())?;
            self.end_dma_without_checks();
            let queued = self.queue_slots()?;
            let registered = self.task.dma && self.queue_pages()?;
            if !queued && !registered {
                self.shared.yield_slots();
                self.shared.queue.wait_for_pump(self.nap(), self.dma_has_room());
            }
        }
        Ok(())
    }

    fn nap(&self) -> Duration {
        if !self.flights.is_empty() || self.checker.is_busy() {
            FLIGHT_NAP
        } else if self.task.dma
            && (!self.shared.is_fed(FEED_QUIET) || self.shared.checks.is_loading())
        {
            FEED_NAP
        } else {
            IDLE_NAP
        }
    }

    /// Finishes the flights that have landed.
    fn land(&mut self) -> Result<()> {
        while let Some(flight) = self.flights.front() {
            if !flight.done.is_done()? {
                break;
            }
            self.land_first()?;
        }
        Ok(())
    }

    fn land_first(&mut self) -> Result<()> {
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let shared = self.shared;
        self.events.push(flight.done);
        match flight.cargo {
            Cargo::Slots(slots) => {
                for loaded in slots {
                    // The slot first: a reader can fill it while the piece is counted.
                    shared.slots.put(loaded.slot);
                    self.arrived(loaded.piece, loaded.path, loaded.by_gpu)?;
                }
            }
            Cargo::Pages { pieces, batch, bytes } => {
                self.dma_bytes -= bytes;
                shared.engine.window().hand_over(batch);
                for piece in pieces {
                    let by_gpu = !shared.piece(piece)?.checks.is_empty();
                    self.arrived(piece, Path::PageCacheDma, by_gpu)?;
                }
            }
        }
        Ok(())
    }

    /// A piece's bytes are in their targets: it is done, unless the GPU is to check them.
    fn arrived(&mut self, index: u32, path: Path, by_gpu: bool) -> Result<()> {
        if by_gpu {
            return self.checker.add(index, path);
        }
        verify::count(self.shared, self.shared.piece(index)?, false);
        self.shared.finish_piece(index, path)
    }

    fn event(&mut self) -> Result<Event> {
        self.events.pop().map_or_else(|| Event::new(self.gpu), Ok)
    }

    /// Queues copies for the slots in the inbox; true if there were any.
    fn queue_slots(&mut self) -> Result<bool> {
        let shared = self.shared;
        let slots = shared.queue.take_loaded();
        if slots.is_empty() {
            return Ok(false);
        }
        let done = self.event()?;
        shared.wait_fences(&self.stream, &mut self.fences_seen)?;
        let mut queue_all = || {
            let mut scatter = GpuScatter::new(self.gpu, &self.stream, &mut self.allocations);
            for loaded in &slots {
                let base = loaded.slot.address() + loaded.head;
                for op in shared.plan.ops_of(shared.piece(loaded.piece)?) {
                    let from = base + op.staged as usize;
                    // SAFETY: the rows lie in the slot, which is pinned, and stays in the flight until `done` came.
                    unsafe { scatter.add(shared, &op.part, from, op.staged_stride)? };
                }
            }
            scatter.flush()?;
            done.record(&self.stream)
        };
        if let Err(error) = queue_all() {
            // Copies may be on their way: they end before the slots go. Where that cannot be known the slots stay out.
            if self.stream.synchronize().is_err() {
                std::mem::forget(slots);
            }
            return Err(error);
        }
        self.flights.push_back(Flight { cargo: Cargo::Slots(slots), done });
        Ok(true)
    }
}
