//! The pump's DMA: batches of page cache that the GPU reads itself. **unsafe**: it registers mappings and queues copies
//! from them.
//!
//! The GPU reads the page cache at the full rate of the link and at 20 to 30 ms of CPU a GB. Registering runs at 27 to
//! 50 GB/s, so alone it does not fill the link; what it leaves, readers fill. A batch is small (64 MiB, 1.4 ms) so that
//! slots do not wait long.
//!
//! # When it ends before the load
//!
//! - **A refusal** of the driver, or no room in the window.
//! - **Checksums that the GPU cannot compute**: no CPU sees these bytes, so all that is to be checked is copied then.
//! - **Slow registering.** It differs between machines of one kind, and below 38 GB/s the pump spends so long in it
//!   that slots wait and the link is not full: DMA and readers give 43 GB/s where copies alone give 50. Where there are
//!   threads enough to copy at that rate the pump measures each batch and stops when it is too slow (`pace`); the next
//!   loads know that from the start. Few threads gain by DMA at any pace, and who asks for it gets it.
//!
//! Either way the batches that are queued land as ever, the rest of the row is the readers', and those of them for whom
//! DMA left no room start now.
//!
//! # Release
//!
//! Registrations are released after the last byte has arrived (130 GB/s): releasing takes the lock too, and the caller
//! has its tensors by then. Until then they count against the window; when it is full, half of the spent ones go at
//! once.

use std::time::{Duration, Instant};

use forebay_device::cuda::Registration;
use forebay_error::{Code, Error, Result};

use super::{Cargo, FEED_QUIET, Flight, Pump};
use crate::pace;
use crate::paths::copy::range_is_resident;
use crate::paths::mapping::Mapping;
use crate::paths::scatter::GpuScatter;
use crate::route::{Cold, Known, Refused, Route, refuse};
use crate::shared::internal;
use crate::source::LocalFile;
use crate::window::{Batch, Share};
use crate::worker;

/// Why a batch was not registered.
enum Refusal {
    /// The window is full and nothing of ours can be released.
    NoWindow,
    /// The driver or the system said no to registering.
    Register(Error),
    /// Anything else that failed; no verdict on the file system.
    Other(Error),
}

impl Pump<'_> {
    pub(super) fn dma_has_room(&self) -> bool {
        let tuning = &self.shared.engine.config().tuning;
        self.task.dma
            && self.dma_bytes < tuning.dma_ahead_bytes
            && self.shared.is_fed(FEED_QUIET)
            && !self.shared.checks.is_loading()
    }

    /// Registers and queues the next batch of resident pieces; true if there was one.
    pub(super) fn queue_pages(&mut self) -> Result<bool> {
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
            Ok(()) => self.judge_pace(),
            Err(refusal) => {
                self.shared.queue.leave_to_copy(&group);
                self.note(&group, refusal)?;
                self.end_dma();
            }
        }
        Ok(true)
    }

    /// Ends DMA where registering is too slow, for this load and those that follow soon.
    fn judge_pace(&mut self) {
        if !self.task.may_give_up {
            return;
        }
        let slow = self.pace.too_slow(&self.shared.engine.config().tuning);
        if let Some((file_system, rate)) = slow {
            pace::remember(file_system, self.gpu.ordinal(), rate);
            self.shared.tally.dma_ends_early(&pace::slow(rate));
            self.end_dma();
        }
    }

    /// Ends DMA when the GPU checks nothing any more, and nothing else was for DMA.
    pub(super) fn end_dma_without_checks(&mut self) {
        let shared = self.shared;
        if !self.task.dma || !shared.checks.is_off() {
            return;
        }
        let unchecked = |(object, route): (usize, &Route)| {
            route.dma && shared.plan.leaves_the_cpu_out(object as u32, false)
        };
        if !shared.routes.iter().enumerate().any(unchecked) {
            self.end_dma();
        }
    }

    /// What is left goes to the readers, of whom there are more from now on.
    fn end_dma(&mut self) {
        self.task.dma = false;
        self.shared.queue.dma_ends();
        worker::add_readers(self.shared, std::mem::take(&mut self.task.spare_readers));
    }

    /// Neighbouring pieces of one object that may use DMA, from the front of the queue.
    fn take_group(&mut self) -> Vec<u32> {
        let shared = self.shared;
        let most = shared.engine.config().tuning.dma_batch_bytes;
        let mut start = None;
        let mut foreign = false;
        let group = shared.queue.take_front(|last, next| {
            let Ok(piece) = shared.piece(next) else { return false };
            if !shared.may_use_dma(piece) {
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
            // Pieces at the front that DMA may not touch: to the readers, and DMA goes on behind them.
            let others = shared.queue.take_front(|_, next| {
                shared.piece(next).is_ok_and(|piece| !shared.may_use_dma(piece))
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
        let (file_system, started) = (file.device(), Instant::now());
        let mapping = Mapping::new(file.file(), offset, len).map_err(said)?;
        // SAFETY: page-aligned and mapped; `Batch` drops the registration before the mapping, and a batch leaves its
        // flight only when its copies are done (or were never queued).
        let registration =
            unsafe { Registration::read_only(self.gpu, mapping.base(), mapping.len()) };
        let registration = registration.map_err(Refusal::Register)?;
        self.note_pace(file_system, mapping.len() as u64, started.elapsed());
        Ok(Batch { _registration: registration, mapping, _share: share })
    }

    fn note_pace(&mut self, file_system: u64, bytes: u64, took: Duration) {
        self.pace.add(&self.shared.engine.config().tuning, file_system, bytes, took);
        self.shared.tally.registered(bytes, took);
    }

    /// A share of the window; what is spent makes room for it, then flights that land.
    fn take_window(&mut self, len: u64) -> std::result::Result<Share, Refusal> {
        let window = self.shared.engine.window();
        let at_once = self.shared.engine.config().tuning.release_at_once;
        loop {
            if let Some(share) = window.take(len, self.task.window_limit) {
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
                // As for slots: pages that the GPU may still read stay registered.
                if let Err(lost) = self.stream.synchronize() {
                    std::mem::forget(batch);
                    shared.engine.window().give_up();
                    return Err(lost);
                }
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
