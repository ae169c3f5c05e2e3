//! Direct reads through io_uring. **unsafe**: it hands staging memory to the kernel and queues copies to a GPU.
//!
//! One thread keeps a deep queue of reads into its staging slots. A read that completes is queued to the GPU at once
//! (or copied to its host target), and its slot takes the next read when that is done. The buffers belong to the slots
//! held here, from submission to completion, whatever becomes of the load: a cancelled load's reads are waited for
//! before a slot goes back.
//!
//! The ring's fixed buffers save the kernel pinning 4 MiB for each read; where the limit on locked memory (8 MiB is
//! common) forbids them, plain reads do the same.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use forebay_device::cuda::{CudaDevice, Event, Stream};
use forebay_device::{Device, Slot};
use forebay_error::{Error, Result};
use io_uring::{IoUring, opcode, types};

use super::copy::refuse_direct;
use super::scatter::{self, GpuScatter};
use crate::report::Path;
use crate::route::{Cold, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, read_exact_at};

/// How long the ring is waited for before the worker looks whether it is to stop.
const WAIT_MS: u32 = 100;

/// What a lane is busy with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// The kernel writes to the slot.
    Reading {
        piece: u32,
    },
    /// The GPU reads from the slot.
    Copying {
        piece: u32,
    },
}

struct Lane {
    slot: Slot,
    done: Option<Event>,
    state: State,
}

/// The GPU's side of the worker.
struct Gpu<'a> {
    device: &'a Arc<CudaDevice>,
    stream: Stream,
    fences_seen: usize,
}

struct Worker<'a> {
    shared: &'a Arc<Shared>,
    ring: IoUring,
    lanes: Vec<Lane>,
    fixed: bool,
    gpu: Option<Gpu<'a>>,
}

/// Works until nothing is left. The ring is made when the first cold piece comes.
pub(crate) fn run(shared: &Arc<Shared>) -> Result<()> {
    let Some(first) = shared.queue.take_cold(true) else { return Ok(()) };
    shared.queue.push_cold(&[first]);
    let depth = shared.engine.config().tuning.direct_depth.clamp(1, 1024);
    let ring = match IoUring::new(depth.next_power_of_two() as u32) {
        Ok(ring) => ring,
        Err(error) => {
            hand_over(shared, &error);
            return Ok(());
        }
    };
    let mut worker = Worker::new(shared, ring, depth)?;
    let result = worker.work();
    let settled = worker.settle();
    result.and(settled)
}

/// Gives the cold row to the copying workers, for the rest of the process.
fn hand_over(shared: &Shared, error: &std::io::Error) {
    refuse(Refused::Ring, 0, &format!("refused: {error}"));
    shared.tally.refusal(&format!("io_uring: {error}; direct reads by threads instead"));
    shared.tally.reason(Path::DirectThreads, "not resident; io_uring refused");
    for route in shared.routes.iter().filter(|route| route.cold() == Cold::Ring) {
        route.set_cold(Cold::Threads);
    }
    shared.queue.serve_cold_by_threads();
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Arc<Shared>, ring: IoUring, depth: usize) -> Result<Self> {
        let gpu = match shared.engine.device() {
            Device::Host => None,
            Device::Cuda(device) => {
                Some(Gpu { device, stream: Stream::new(device)?, fences_seen: 0 })
            }
        };
        let slots = shared.engine.arena()?.acquire(depth, &|| shared.is_stopped())?;
        let buffers: Vec<_> = slots
            .iter()
            .map(|slot| libc::iovec { iov_base: slot.address() as *mut _, iov_len: slot.len() })
            .collect();
        // SAFETY: the slots are mapped, and held by `lanes` for longer than the ring lives (field order).
        let fixed = match unsafe { ring.submitter().register_buffers(&buffers) } {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "no fixed buffers");
                false
            }
        };
        let mut lanes = Vec::with_capacity(slots.len());
        for slot in slots {
            let done = gpu.as_ref().map(|gpu| Event::new(gpu.device)).transpose()?;
            lanes.push(Lane { slot, done, state: State::Free });
        }
        Ok(Self { shared, ring, lanes, fixed, gpu })
    }

    fn work(&mut self) -> Result<()> {
        while !self.shared.is_stopped() {
            self.land_copies(false)?;
            self.fill()?;
            if self.any(|state| matches!(state, State::Reading { .. })) {
                self.reap()?;
            } else if self.any(|state| matches!(state, State::Copying { .. })) {
                self.land_copies(true)?;
            } else {
                // Nothing in flight: sleep until there is something, or nothing ever again.
                let Some(piece) = self.shared.queue.take_cold(true) else { return Ok(()) };
                self.submit(piece)?;
            }
        }
        Ok(())
    }

    fn any(&self, test: impl Fn(State) -> bool) -> bool {
        self.lanes.iter().any(|lane| test(lane.state))
    }

    /// Gives each free lane a piece.
    fn fill(&mut self) -> Result<()> {
        while self.any(|state| state == State::Free) {
            let Some(piece) = self.shared.queue.take_cold(false) else { break };
            self.submit(piece)?;
        }
        Ok(())
    }

    fn submit(&mut self, index: u32) -> Result<()> {
        let shared = self.shared;
        let piece = shared.piece(index)?;
        let Some(direct) = direct_of(shared, piece.object)? else {
            refuse_direct(shared, piece)?;
            shared.queue.leave_to_copy(&[index]);
            return Ok(());
        };
        let free = self.lanes.iter().position(|lane| lane.state == State::Free);
        let Some(number) = free else {
            shared.queue.push_cold(&[index]);
            return Ok(());
        };
        let (start, _, len) = aligned(direct, piece.offset, piece.len);
        let Some(lane) = self.lanes.get_mut(number) else { return Err(internal("no lane")) };
        if len > lane.slot.len() {
            return Err(internal("direct read leaves its slot"));
        }
        let fd = types::Fd(direct.file.as_raw_fd());
        let address = lane.slot.address() as *mut u8;
        let entry = if self.fixed {
            opcode::ReadFixed::new(fd, address, len as u32, number as u16).offset(start).build()
        } else {
            opcode::Read::new(fd, address, len as u32).offset(start).build()
        };
        lane.state = State::Reading { piece: index };
        let entry = entry.user_data(number as u64);
        // SAFETY: the slot is as long as the read and belongs to its lane until the completion is reaped; the file is
        // kept open by the load's sources.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            lane.state = State::Free;
            return Err(internal("submission queue is full"));
        }
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if is_busy(&error) => {}
                Err(error) => return Err(Error::io("cannot submit to io_uring", error)),
            }
        }
    }

    /// Waits for completions, a while, and handles them.
    fn reap(&mut self) -> Result<()> {
        let timeout = types::Timespec::new().nsec(WAIT_MS * 1_000_000);
        let args = types::SubmitArgs::new().timespec(&timeout);
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(_) => {}
            Err(error) if is_busy(&error) || error.raw_os_error() == Some(libc::ETIME) => {}
            Err(error) => return Err(Error::io("cannot wait for io_uring", error)),
        }
        let completed: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        let mut result = Ok(());
        for (number, outcome) in completed {
            result = result.and(self.complete(number as usize, outcome));
        }
        result
    }

    fn complete(&mut self, number: usize, outcome: i32) -> Result<()> {
        let shared = self.shared;
        let Some(lane) = self.lanes.get_mut(number) else { return Err(internal("no lane")) };
        let State::Reading { piece: index } = lane.state else {
            return Err(internal("completion of an idle lane"));
        };
        lane.state = State::Free;
        let piece = shared.piece(index)?;
        let source = shared.source(piece.object)?.as_ref();
        let Some(direct) = direct_of(shared, piece.object)? else {
            return Err(internal("direct read without a file"));
        };
        let (start, head, _) = aligned(direct, piece.offset, piece.len);
        if outcome < 0 {
            let error = std::io::Error::from_raw_os_error(-outcome);
            if is_busy(&error) {
                shared.queue.push_cold(&[index]);
                return Ok(());
            }
            if outcome == -libc::EINVAL || outcome == -libc::EOPNOTSUPP {
                refuse_direct(shared, piece)?;
                shared.queue.leave_to_copy(&[index]);
                return Ok(());
            }
            let what = format!("cannot read {} bytes at byte {start} directly", piece.len);
            return Err(Error::io(what, error).at(source.name()));
        }
        let wanted = head + piece.len as usize;
        let got = (outcome as usize).max(head);
        if got < wanted
            && let Some(rest) = lane.slot.bytes_mut(wanted).get_mut(got..)
        {
            // Short: the rest through the page cache, which also finds an early end.
            read_exact_at(source, rest, start + got as u64)?;
        }
        self.deliver(number, index, head)
    }

    /// From the slot to the targets.
    fn deliver(&mut self, number: usize, index: u32, head: usize) -> Result<()> {
        let shared = self.shared;
        let piece = shared.piece(index)?;
        let Some(lane) = self.lanes.get_mut(number) else { return Err(internal("no lane")) };
        let base = lane.slot.address() + head;
        let (Some(gpu), Some(done)) = (&mut self.gpu, &lane.done) else {
            // SAFETY: the slot holds the piece from `head` on.
            unsafe { scatter::to_host(shared, piece, base)? };
            return shared.finish_piece(index, Path::Direct);
        };
        shared.wait_fences(&gpu.stream, &mut gpu.fences_seen)?;
        lane.state = State::Copying { piece: index };
        let mut scatter = GpuScatter::new(&gpu.stream, u64::MAX);
        for op in shared.plan.ops_of(piece) {
            let from = base + op.staged as usize;
            // SAFETY: the rows lie in the slot, which is pinned and stays this lane's until `done` has come.
            unsafe { scatter.add(shared, &op.part, from, op.staged_stride)? };
        }
        scatter.flush()?;
        done.record(&gpu.stream)
    }

    /// Frees the lanes whose copies are done; `wait`s for one.
    fn land_copies(&mut self, wait: bool) -> Result<()> {
        let mut waited = !wait;
        for lane in &mut self.lanes {
            let (State::Copying { piece }, Some(done)) = (lane.state, &lane.done) else { continue };
            if !waited {
                done.wait()?;
                waited = true;
            } else if !done.is_done()? {
                continue;
            }
            lane.state = State::Free;
            self.shared.finish_piece(piece, Path::Direct)?;
        }
        Ok(())
    }

    /// Waits until neither kernel nor GPU uses a slot. Blocks for as long as the kernel takes; a cancelled load does
    /// not wait for this thread longer than its second.
    fn settle(&mut self) -> Result<()> {
        let mut result = Ok(());
        while self.any(|state| matches!(state, State::Reading { .. })) {
            let before = result.is_ok();
            result = result.and(self.reap());
            if !before && result.is_err() && self.shared.is_stopped() {
                // Errors of reads that nobody wants any more.
                continue;
            }
        }
        if let Some(gpu) = &self.gpu {
            result = result.and(gpu.stream.synchronize());
        }
        result.and(self.land_copies(false))
    }
}

/// The descriptor for direct reads of an object.
fn direct_of(shared: &Shared, object: u32) -> Result<Option<&DirectFile>> {
    Ok(shared.source(object)?.local().and_then(|file| file.direct()))
}

/// A range widened to the file's blocks: (start, bytes before the wanted ones, length).
fn aligned(direct: &DirectFile, offset: u64, len: u64) -> (u64, usize, usize) {
    let align = u64::from(direct.align.offset_bytes.max(1));
    let start = offset / align * align;
    let head = offset - start;
    (start, head as usize, (head + len).next_multiple_of(align) as usize)
}

fn is_busy(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
