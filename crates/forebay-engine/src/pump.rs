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
//! 1. Land what the GPU has done: pieces count as finished, slots go back to the readers, registrations are kept.
//! 2. Queue copies for every slot in the inbox.
//! 3. If few enough DMA bytes are on their way, take the next batch of resident pieces from the front of the queue,
//!    map and register it, and queue copies from it.
//! 4. With nothing to do, sleep until a reader brings a slot, or for a moment while copies are in flight.
//!
//! All copies go to one stream, so flights land in order and one event each is enough.
//!
//! # Page-cache DMA
//!
//! The GPU reads the page cache itself, at the full rate of the link and 20 to 30 ms of CPU a GB. Registering runs at
//! 30 to 50 GB/s, so alone it does not fill the link; what it leaves, readers fill. A batch is small (64 MiB, 1.4 ms)
//! so that slots do not wait long. Registrations are released after the last byte has arrived (130 GB/s): releasing
//! takes the lock too, and the caller has its tensors by then. Until then they count against the window; when it is
//! full, half of the spent ones go at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::cuda::{CudaDevice, Event, Registration, Stream};
use forebay_device::{Device, Slot};
use forebay_error::{Code, Error, Result};

use crate::paths::copy::range_is_resident;
use crate::paths::mapping::Mapping;
use crate::paths::scatter::{Allocations, GpuScatter};
use crate::report::Path;
use crate::route::{Cold, Known, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::LocalFile;
use crate::window::{Batch, Share};

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

/// Why a batch was not registered.
enum Refusal {
    /// The window is full and nothing of ours can be released.
    NoWindow,
    /// The driver or the system said no to registering.
    Register(Error),
    /// Anything else that failed; no verdict on the file system.
    Other(Error),
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
    /// Whether there may be pieces for DMA.
    dma: bool,
    window_limit: u64,
}

/// Pumps until every byte has arrived, or the load ends early.
pub(crate) fn run(shared: &Arc<Shared>, dma: bool, window_limit: u64) -> Result<()> {
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
        dma,
        window_limit,
    };
    let result = pump.work();
    shared.queue.dma_ends();
    // Whatever happened: slots and mappings go only when the GPU is done with them.
    let settled = pump.stream.synchronize();
    result.and(settled)
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
            let queued = self.queue_slots()?;
            let registered = self.dma && self.queue_pages()?;
            if !queued && !registered {
                self.shared.yield_slots();
                self.shared.queue.wait_for_pump(self.nap(), self.dma_has_room());
            }
        }
        Ok(())
    }

    fn nap(&self) -> Duration {
        if !self.flights.is_empty() {
            FLIGHT_NAP
        } else if self.dma && !self.shared.is_fed(FEED_QUIET) {
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
                    shared.finish_piece(loaded.piece, loaded.path)?;
                }
            }
            Cargo::Pages { pieces, batch, bytes } => {
                self.dma_bytes -= bytes;
                shared.engine.window().hand_over(batch);
                for piece in pieces {
                    shared.finish_piece(piece, Path::PageCacheDma)?;
                }
            }
        }
        Ok(())
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
            // Copies may be on their way: they end before the slots go.
            self.stream.synchronize()?;
            return Err(error);
        }
        self.flights.push_back(Flight { cargo: Cargo::Slots(slots), done });
        Ok(true)
    }

    fn dma_has_room(&self) -> bool {
        let tuning = &self.shared.engine.config().tuning;
        self.dma && self.dma_bytes < tuning.dma_ahead_bytes && self.shared.is_fed(FEED_QUIET)
    }

    /// Registers and queues the next batch of resident pieces; true if there was one.
    fn queue_pages(&mut self) -> Result<bool> {
        if !self.dma_has_room() {
            return Ok(false);
        }
        let group = self.take_group();
        if group.is_empty() {
            return Ok(false);
        }
        let group = self.resident_part(group)?;
        if group.is_empty() {
            return Ok(true);
        }
        match self.move_batch(&group) {
            Ok(()) => {}
            Err(refusal) => {
                self.shared.queue.leave_to_copy(&group);
                self.note(&group, refusal)?;
                self.dma = false;
                self.shared.queue.dma_ends();
            }
        }
        Ok(true)
    }

    /// Neighbouring pieces of one object that may use DMA, from the front of the queue.
    fn take_group(&mut self) -> Vec<u32> {
        let shared = self.shared;
        let most = shared.engine.config().tuning.dma_batch_bytes;
        let mut start = None;
        let mut foreign = false;
        let group = shared.queue.take_front(|last, next| {
            let Ok(piece) = shared.piece(next) else { return false };
            if !shared.route(piece.object).is_ok_and(|route| route.dma) {
                foreign = true;
                return false;
            }
            let first = *start.get_or_insert(piece.offset);
            let Some(last) = last.and_then(|last| shared.piece(last).ok()) else { return true };
            last.object == piece.object
                && piece.offset <= last.offset + last.len + crate::plan::GAP_BYTES
                && (piece.offset + piece.len).checked_sub(first).is_some_and(|len| len <= most)
        });
        if foreign && group.is_empty() {
            // Files at the front that DMA may not touch: to the readers, and DMA goes on behind them.
            let others = shared.queue.take_front(|_, next| {
                let route = shared.piece(next).and_then(|piece| shared.route(piece.object));
                route.is_ok_and(|route| !route.dma)
            });
            shared.queue.leave_to_copy(&others);
        }
        group
    }

    /// Sends the pieces that are not resident to those who read them; the rest is for DMA.
    fn resident_part(&self, group: Vec<u32>) -> Result<Vec<u32>> {
        let Some(&first) = group.first() else { return Ok(group) };
        let object = self.shared.piece(first)?.object;
        let route = self.shared.route(object)?;
        let file = self.file(object)?;
        if route.known == Known::Resident || range_is_resident(self.shared, file, &group)? {
            return Ok(group);
        }
        let (mut warm, mut cold) = (Vec::new(), Vec::new());
        for piece in group {
            if range_is_resident(self.shared, file, &[piece])? {
                warm.push(piece);
            } else {
                cold.push(piece);
            }
        }
        if route.cold() != Cold::Buffered {
            // Packed rows are too short for direct reads.
            let packed = |&piece: &u32| self.shared.piece(piece).is_ok_and(|piece| piece.packed);
            let (packed, direct): (Vec<u32>, Vec<u32>) = cold.into_iter().partition(packed);
            self.shared.queue.push_cold(&direct);
            cold = packed;
        }
        self.shared.queue.leave_to_copy(&cold);
        Ok(warm)
    }

    fn file(&self, object: u32) -> Result<&LocalFile> {
        self.shared.source(object)?.local().ok_or_else(|| internal("DMA from no file"))
    }

    /// Maps, registers, and queues the copies of a group of pieces of one object.
    fn move_batch(&mut self, group: &[u32]) -> std::result::Result<(), Refusal> {
        let batch = self.register(group)?;
        self.queue_batch(group, batch).map_err(Refusal::Other)
    }

    fn register(&mut self, group: &[u32]) -> std::result::Result<Batch, Refusal> {
        let said = Refusal::Other;
        let shared = self.shared;
        let Some(&first) = group.first() else {
            return Err(said(internal("empty DMA batch")));
        };
        let first = shared.piece(first).map_err(said)?;
        let (offset, len) = shared.span(group).map_err(said)?;
        let page = rustix::param::page_size() as u64;
        let share = self.take_window(len + 2 * page)?;
        let file = self.file(first.object).map_err(said)?;
        let mapping = Mapping::new(file.file(), offset, len).map_err(said)?;
        // SAFETY: page-aligned and mapped; `Batch` drops the registration before the mapping, and a batch leaves its
        // flight only when its copies are done (or were never queued).
        let registration =
            unsafe { Registration::read_only(self.gpu, mapping.base(), mapping.len()) };
        let registration = registration.map_err(Refusal::Register)?;
        Ok(Batch { _registration: registration, mapping, _share: share })
    }

    /// A share of the window; what is spent makes room for it, then flights that land.
    fn take_window(&mut self, len: u64) -> std::result::Result<Share, Refusal> {
        let window = self.shared.engine.window();
        let at_once = self.shared.engine.config().tuning.release_at_once;
        loop {
            if let Some(share) = window.take(len, self.window_limit) {
                self.shared.note_registered(window.registered());
                return Ok(share);
            }
            if self.shared.is_over() {
                return Err(Refusal::NoWindow);
            }
            if window.make_room(at_once) {
                continue;
            }
            if let Some(flight) = self.flights.front() {
                flight.done.wait().map_err(Refusal::Other)?;
                self.land_first().map_err(Refusal::Other)?;
            } else {
                return Err(Refusal::NoWindow);
            }
        }
    }

    fn queue_batch(&mut self, group: &[u32], batch: Batch) -> Result<()> {
        let shared = self.shared;
        let done = self.event()?;
        shared.wait_fences(&self.stream, &mut self.fences_seen)?;
        let mut queue_all = || {
            let mut bytes = 0;
            let mut scatter = GpuScatter::new(self.gpu, &self.stream, &mut self.allocations);
            for &index in group {
                let piece = shared.piece(index)?;
                bytes += piece.bytes;
                for op in shared.plan.ops_of(piece) {
                    let from = batch.mapping.address_of(op.part.from);
                    // SAFETY: the rows lie in the mapping, which is registered, and stays in the flight until `done`
                    // came.
                    unsafe { scatter.add(shared, &op.part, from, op.part.from_stride)? };
                }
            }
            scatter.flush()?;
            done.record(&self.stream)?;
            Ok(bytes)
        };
        match queue_all() {
            Ok(bytes) => {
                self.dma_bytes += bytes;
                let cargo = Cargo::Pages { pieces: group.to_vec(), batch, bytes };
                self.flights.push_back(Flight { cargo, done });
                Ok(())
            }
            Err(error) => {
                self.stream.synchronize()?;
                Err(error)
            }
        }
    }

    /// Remembers a refusal; an error that is no refusal ends the load.
    fn note(&self, group: &[u32], refusal: Refusal) -> Result<()> {
        let text = match refusal {
            Refusal::NoWindow => "the window of registered page cache is taken".to_owned(),
            Refusal::Register(error) => {
                // The driver's verdict on these pages; want of memory may pass.
                if let Some(&first) = group.first()
                    && error.code() == Code::Device
                {
                    let device = self.file(self.shared.piece(first)?.object)?.device();
                    refuse(Refused::Dma, device, error.what());
                }
                error.to_string()
            }
            Refusal::Other(error) => match error.code() {
                Code::Device | Code::OutOfMemory | Code::Io | Code::NoDevice => error.to_string(),
                _ => return Err(error),
            },
        };
        self.shared.tally.refusal(&format!("page-cache DMA: {text}; copying instead"));
        Ok(())
    }
}
