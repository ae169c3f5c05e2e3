//! Copies by the CPU: page-cache copy, buffered and direct-by-threads. **unsafe**: it queues copies to a GPU and writes
//! to host targets.
//!
//! A worker owns a few staging slots (lanes). It fills one with `pread`, queues the copy to the GPU, and fills the next
//! while the first is on its way; an event tells when a lane is free again. On the host there is nothing to overlap:
//! whole runs are read straight into their targets, and only short rows go through a slot.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_device::cuda::{CudaDevice, Event, Stream};
use forebay_device::{Device, Slot};
use forebay_error::Result;

use super::scatter::{self, GpuScatter};
use crate::plan::{GAP_BYTES, Piece};
use crate::queue::Work;
use crate::report::Path;
use crate::route::{Cold, Known, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, LocalFile, RangeSource, read_exact_at};

/// Works until nothing is left.
pub(crate) fn run(shared: &Arc<Shared>) -> Result<()> {
    match shared.engine.device() {
        Device::Host => run_host(shared),
        Device::Cuda(gpu) => {
            let mut worker = GpuWorker::new(shared, gpu)?;
            let result = worker.work();
            // The GPU is done with the slots before they go back.
            let settled = worker.settle_all();
            result.and(settled)
        }
    }
}

/// Whether the page cache holds the pieces' whole range.
pub(crate) fn range_is_resident(shared: &Shared, file: &LocalFile, pieces: &[u32]) -> Result<bool> {
    let (Some(&first), Some(&last)) = (pieces.first(), pieces.last()) else { return Ok(true) };
    let (first, last) = (shared.piece(first)?, shared.piece(last)?);
    let len = last.offset + last.len - first.offset;
    match forebay_topology::residency::probe(file.file(), first.offset, len) {
        Ok(resident) => Ok(resident.is_resident()),
        Err(error) => {
            tracing::debug!(%error, "residency unknown, taken for resident");
            Ok(true)
        }
    }
}

/// The way a piece is read.
#[derive(Clone, Copy)]
struct Way<'a> {
    path: Path,
    direct: Option<&'a DirectFile>,
}

/// Decides for a piece that was taken; `None` when it went to the cold row instead.
fn way_of<'a>(shared: &'a Shared, work: Work) -> Result<Option<(u32, &'a Piece, Way<'a>)>> {
    let (Work::Warm(index) | Work::Cold(index)) = work;
    let piece = shared.piece(index)?;
    let route = shared.route(piece.object)?;
    let Some(file) = shared.source(piece.object)?.local() else {
        return Ok(Some((index, piece, Way { path: route.warm_path, direct: None })));
    };
    let warm = match (work, route.known) {
        (Work::Warm(_), Known::Resident) => true,
        (Work::Warm(_), Known::No) => range_is_resident(shared, file, &[index])?,
        _ => false,
    };
    let buffered = Way { path: Path::Buffered, direct: None };
    let way = match route.cold() {
        _ if warm => Way { path: route.warm_path, direct: None },
        // Packed rows are too short for direct reads.
        _ if piece.packed => buffered,
        Cold::Ring => {
            shared.queue.push_cold(&[index]);
            return Ok(None);
        }
        Cold::Threads => match file.direct() {
            Some(direct) => Way { path: Path::DirectThreads, direct: Some(direct) },
            None => buffered,
        },
        Cold::Buffered => buffered,
    };
    Ok(Some((index, piece, way)))
}

/// Reads a piece into a slot; returns where in the slot its first byte lies.
fn read_staged(shared: &Shared, piece: &Piece, way: Way<'_>, slot: &mut Slot) -> Result<usize> {
    let source = shared.source(piece.object)?.as_ref();
    if piece.packed {
        for op in shared.plan.ops_of(piece) {
            for row in 0..op.part.rows {
                let at = (op.staged + row * op.staged_stride) as usize;
                let bytes = slot.bytes_mut(at + op.part.run as usize);
                let Some(into) = bytes.get_mut(at..) else {
                    return Err(internal("packed row leaves its slot"));
                };
                read_exact_at(source, into, op.part.from + row * op.part.from_stride)?;
            }
        }
        return Ok(0);
    }
    if let Some(direct) = way.direct {
        match read_direct(source, piece, direct, slot)? {
            Some(head) => return Ok(head),
            None => refuse_direct(shared, piece)?,
        }
    }
    read_exact_at(source, slot.bytes_mut(piece.len as usize), piece.offset)?;
    Ok(0)
}

/// One direct read by this thread. `None`: O_DIRECT is refused after all.
fn read_direct(
    source: &dyn RangeSource,
    piece: &Piece,
    direct: &DirectFile,
    slot: &mut Slot,
) -> Result<Option<usize>> {
    let align = u64::from(direct.align.offset_bytes.max(1));
    let start = piece.offset / align * align;
    let head = (piece.offset - start) as usize;
    let len = (head as u64 + piece.len).next_multiple_of(align) as usize;
    let wanted = head + piece.len as usize;
    if len > slot.len() {
        return Err(internal("direct read leaves its slot"));
    }
    let bytes = slot.bytes_mut(len);
    let got = match direct.file.read_at(bytes, start) {
        Ok(got) => got,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
        Err(error) => {
            let what = format!("cannot read {len} bytes at byte {start} directly");
            return Err(forebay_error::Error::io(what, error).at(source.name()));
        }
    };
    if got < wanted {
        // Short: the rest through the page cache, which also finds an early end.
        let rest = got.max(head);
        if let Some(into) = bytes.get_mut(rest..wanted) {
            read_exact_at(source, into, start + rest as u64)?;
        }
    }
    Ok(Some(head))
}

/// Switches an object to buffered reads, and its file system with it.
pub(crate) fn refuse_direct(shared: &Shared, piece: &Piece) -> Result<()> {
    shared.route(piece.object)?.set_cold(Cold::Buffered);
    let source = shared.source(piece.object)?;
    if let Some(file) = source.local() {
        refuse(Refused::Direct, file.device(), "EINVAL at the first read");
        let kind = &file.profile().kind;
        let text = format!("{kind}: direct reads refused; reading through the page cache");
        shared.tally.refusal(&text);
        shared.tally.reason(Path::Buffered, "not resident; direct reads refused");
    }
    Ok(())
}

fn run_host(shared: &Arc<Shared>) -> Result<()> {
    let mut slot = None;
    while let Some(work) = shared.queue.take_copy(true) {
        let Some((index, piece, way)) = way_of(shared, work)? else { continue };
        if way.direct.is_none() && is_read_in_place(shared, piece) {
            read_in_place(shared, piece)?;
        } else {
            let slot = match &mut slot {
                Some(slot) => slot,
                None => slot.insert(one_slot(shared)?),
            };
            let head = read_staged(shared, piece, way, slot)?;
            // SAFETY: the slot holds the piece from `head` on.
            unsafe { scatter::to_host(shared, piece, slot.address() + head)? };
        }
        shared.finish_piece(index, way.path)?;
    }
    Ok(())
}

fn one_slot(shared: &Shared) -> Result<Slot> {
    let mut slots = shared.engine.arena()?.acquire(1, &|| shared.is_stopped())?;
    slots.pop().ok_or_else(|| internal("arena gave no slot"))
}

/// Whether every run is long enough to be read by itself, straight into its target.
fn is_read_in_place(shared: &Shared, piece: &Piece) -> bool {
    let long = |run: u64, rows: u64| rows == 1 || run >= GAP_BYTES;
    shared.plan.ops_of(piece).iter().all(|op| long(op.part.run, op.part.rows))
}

/// Reads each run of a piece into its host target.
fn read_in_place(shared: &Shared, piece: &Piece) -> Result<()> {
    let source = shared.source(piece.object)?.as_ref();
    for op in shared.plan.ops_of(piece) {
        let part = &op.part;
        let target = shared.address(part.target)? + part.to;
        for row in 0..part.rows {
            let to = (target + row * part.to_stride) as *mut u8;
            // SAFETY: the plan checked that the row lies in its target, which is valid and unused by the contract of
            // `Session::provide`; bytes need no initialisation to be written.
            let into = unsafe { std::slice::from_raw_parts_mut(to, part.run as usize) };
            read_exact_at(source, into, part.from + row * part.from_stride)?;
        }
    }
    Ok(())
}

/// A slot and the copy that it is busy with.
struct Lane {
    slot: Slot,
    done: Event,
    busy: Option<(u32, Path)>,
}

struct GpuWorker<'a> {
    shared: &'a Arc<Shared>,
    stream: Stream,
    fences_seen: usize,
    lanes: Vec<Lane>,
    next: usize,
}

impl<'a> GpuWorker<'a> {
    fn new(shared: &'a Arc<Shared>, gpu: &Arc<CudaDevice>) -> Result<Self> {
        let stream = Stream::new(gpu)?;
        let wanted = shared.engine.config().tuning.slots_per_worker.max(1);
        Ok(Self { shared, stream, fences_seen: 0, lanes: Vec::with_capacity(wanted), next: 0 })
    }

    fn work(&mut self) -> Result<()> {
        loop {
            let mut work = self.shared.queue.take_copy(false);
            if work.is_none() {
                // Finished tensors are not held back by an empty queue.
                self.settle_all()?;
                work = self.shared.queue.take_copy(true);
            }
            let Some(work) = work else { return Ok(()) };
            let Some((index, piece, way)) = way_of(self.shared, work)? else { continue };
            self.move_piece(index, piece, way)?;
        }
    }

    fn move_piece(&mut self, index: u32, piece: &Piece, way: Way<'_>) -> Result<()> {
        let shared = self.shared;
        let lane = self.free_lane()?;
        let head = read_staged(shared, piece, way, &mut lane.slot)?;
        let base = lane.slot.address() + head;
        let lane_index = self.next;
        shared.wait_fences(&self.stream, &mut self.fences_seen)?;
        let Some(lane) = self.lanes.get_mut(lane_index) else {
            return Err(internal("no lane"));
        };
        // Busy from the first queued copy on, so that an error cannot free the slot under it.
        lane.busy = Some((index, way.path));
        let mut scatter = GpuScatter::new(&self.stream, u64::MAX);
        let mut queue_all = || {
            for op in shared.plan.ops_of(piece) {
                let from = base + op.staged as usize;
                // SAFETY: the rows lie in the slot, which is pinned and stays ours until `done` has come.
                unsafe { scatter.add(shared, &op.part, from, op.staged_stride)? };
            }
            scatter.flush()?;
            lane.done.record(&self.stream)
        };
        if let Err(error) = queue_all() {
            lane.busy = None;
            self.stream.synchronize()?;
            return Err(error);
        }
        self.next = (self.next + 1) % self.lanes.capacity().max(1);
        Ok(())
    }

    /// The next lane, its former copy done. Lanes are made as they are first needed: a small model needs one.
    fn free_lane(&mut self) -> Result<&mut Lane> {
        let shared = self.shared;
        if self.next >= self.lanes.len() {
            let may_wait = self.lanes.is_empty();
            let slots = shared.engine.arena()?.acquire(1, &|| !may_wait || shared.is_stopped());
            match slots {
                Ok(slots) => {
                    for slot in slots {
                        let done = Event::new(gpu_of(shared)?)?;
                        self.lanes.push(Lane { slot, done, busy: None });
                    }
                    self.next = self.lanes.len() - 1;
                }
                // The arena is all out: go on with the lanes that there are.
                Err(_) if !may_wait => self.next = 0,
                Err(error) => return Err(error),
            }
        }
        let next = self.next;
        let lane = self.lanes.get_mut(next).ok_or_else(|| internal("no lane"))?;
        settle(shared, lane)?;
        Ok(lane)
    }

    fn settle_all(&mut self) -> Result<()> {
        let mut result = Ok(());
        for lane in &mut self.lanes {
            result = result.and(settle(self.shared, lane));
        }
        result
    }
}

fn gpu_of(shared: &Shared) -> Result<&Arc<CudaDevice>> {
    match shared.engine.device() {
        Device::Cuda(gpu) => Ok(gpu),
        Device::Host => Err(internal("no GPU")),
    }
}

/// Waits for a lane's copy and counts its piece.
fn settle(shared: &Shared, lane: &mut Lane) -> Result<()> {
    if let Some((index, path)) = lane.busy.take() {
        lane.done.wait()?;
        shared.finish_piece(index, path)?;
    }
    Ok(())
}
