//! Direct reads through io_uring. **unsafe**: it hands staging memory to the kernel.
//!
//! One thread keeps a queue of reads into its staging slots, as deep as pays on this drive (`pacer`). A slot whose
//! reads have completed goes to its targets (for a GPU by the pump), and a free slot takes the next piece, before any
//! bytes are copied on. A slot belongs to its lane from submission to the last completion, whatever becomes of the
//! load: a cancelled load's reads are waited for before a slot goes back.
//!
//! Reads are plain, not from fixed buffers: pinning 4 MiB of huge pages for a read takes microseconds beside the 600
//! that a fast drive needs for it, and fixed buffers would count against the limit on locked memory (often 8 MiB).

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use forebay_device::Slot;
use forebay_error::{Code, Error, Result};
use io_uring::{IoUring, opcode, types};

use super::copy::{deliver, refuse_direct};
use super::pacer::Pacer;
use crate::pump::Loaded;
use crate::report::Path;
use crate::route::{Cold, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, read_exact_at};

/// How long the ring is waited for before the worker looks whether it is to stop.
const WAIT_MS: u32 = 100;

/// Bytes of one read; a piece is several. Drives take a megabyte at a time better than four (seen on a virtual disk:
/// 1.8 GB/s against 1.5), and an NVMe drive splits requests beyond its own limit anyway.
const REQUEST_BYTES: usize = 1 << 20;

/// A piece under way: the kernel writes to the slot.
struct Reading {
    slot: Slot,
    piece: u32,
    /// Reads that have not completed.
    pending: usize,
    /// Bytes of all of them together.
    len: usize,
    /// Bytes from the start that arrived for sure.
    got: usize,
    /// The first error.
    errno: Option<i32>,
}

impl Reading {
    /// Notes one read's outcome; true when it was the last.
    fn note(&mut self, request: usize, outcome: i32) -> bool {
        self.pending = self.pending.saturating_sub(1);
        let start = request * REQUEST_BYTES;
        let wanted = REQUEST_BYTES.min(self.len.saturating_sub(start));
        match usize::try_from(outcome) {
            Err(_) => {
                self.errno.get_or_insert(-outcome);
            }
            Ok(count) if count < wanted => self.got = self.got.min(start + count),
            Ok(_) => {}
        }
        self.pending == 0
    }
}

struct Worker<'a> {
    shared: &'a Arc<Shared>,
    ring: IoUring,
    /// By the number that the completion carries.
    lanes: Vec<Option<Reading>>,
    pacer: Pacer,
}

/// Works until nothing is left. The ring is made when the first cold piece comes.
pub(crate) fn run(shared: &Arc<Shared>) -> Result<()> {
    let Some(first) = shared.queue.take_cold(true) else { return Ok(()) };
    shared.queue.push_cold(&[first]);
    let depth = shared.engine.config().tuning.direct_depth.clamp(1, 256);
    // A piece and its alignment are at most so many reads.
    let requests = shared.engine.config().piece_bytes as usize / REQUEST_BYTES + 2;
    let ring = match IoUring::new((depth * requests).next_power_of_two().min(4096) as u32) {
        Ok(ring) => ring,
        Err(error) => {
            hand_over(shared, &error);
            return Ok(());
        }
    };
    shared.slots.allow(depth);
    let lanes = (0..depth).map(|_| None).collect();
    let mut worker = Worker { shared, ring, lanes, pacer: Pacer::new(depth) };
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

impl Worker<'_> {
    fn work(&mut self) -> Result<()> {
        while !self.shared.is_over() {
            self.fill(true)?;
            if self.reading() > 0 {
                self.reap()?;
            }
        }
        Ok(())
    }

    fn reading(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_some()).count()
    }

    /// Gives each free lane a piece and a slot. Sleeps only if it `may_wait`, and only while nothing is being read.
    fn fill(&mut self, may_wait: bool) -> Result<()> {
        let shared = self.shared;
        while self.reading() < self.pacer.depth() {
            let idle = may_wait && self.reading() == 0;
            let Some(piece) = shared.queue.take_cold(idle) else { break };
            let arena = shared.engine.arena()?;
            let slot = if idle {
                shared.slots.take(arena, &|| shared.is_over()).map(Some)
            } else {
                shared.slots.try_take(arena)
            };
            match slot {
                Ok(Some(slot)) => self.submit(piece, slot)?,
                Ok(None) => {
                    shared.queue.push_cold(&[piece]);
                    break;
                }
                Err(error) if error.code() == Code::Cancelled => {
                    shared.queue.push_cold(&[piece]);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn submit(&mut self, index: u32, slot: Slot) -> Result<()> {
        let shared = self.shared;
        let piece = shared.piece(index)?;
        let Some(direct) = direct_of(shared, piece.object)? else {
            refuse_direct(shared, piece)?;
            shared.slots.put(slot);
            shared.queue.leave_to_copy(&[index]);
            return Ok(());
        };
        let free = self.lanes.iter_mut().enumerate().find(|(_, lane)| lane.is_none());
        let Some((number, lane)) = free else { return Err(internal("no free lane")) };
        let (start, _, len) = aligned(direct, piece.offset, piece.len);
        if len > slot.len() {
            return Err(internal("direct read leaves its slot"));
        }
        let fd = types::Fd(direct.file.as_raw_fd());
        let requests = len.div_ceil(REQUEST_BYTES);
        let address = slot.address();
        *lane = Some(Reading { slot, piece: index, pending: 0, len, got: len, errno: None });
        for request in 0..requests {
            let at = request * REQUEST_BYTES;
            let count = REQUEST_BYTES.min(len - at);
            let entry = opcode::Read::new(fd, (address + at) as *mut u8, count as u32)
                .offset(start + at as u64)
                .build()
                .user_data((number as u64) << 32 | request as u64);
            // SAFETY: the range lies in the slot, which stays in its lane until every read of it was reaped; the file
            // is kept open by the load's sources.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                // The ring holds all reads of all lanes; should it not, what is in it is waited for.
                return Err(internal("submission queue is full"));
            }
            if let Some(reading) = lane {
                reading.pending += 1;
            }
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
        let mut ended = Vec::with_capacity(completed.len());
        for (number, outcome) in completed {
            let (lane, request) = ((number >> 32) as usize, (number & 0xffff_ffff) as usize);
            let Some(lane) = self.lanes.get_mut(lane) else { continue };
            match lane.as_mut().map(|reading| reading.note(request, outcome)) {
                Some(true) => ended.extend(lane.take()),
                Some(false) => {}
                None => result = Err(internal("completion of an idle lane")),
            }
        }
        let now = Instant::now();
        for reading in &ended {
            self.pacer.completed(reading.len as u64, now);
        }
        for reading in ended {
            // The next reads first: what follows may copy megabytes, and the drive is not to wait for that.
            if !self.shared.is_over() {
                result = result.and(self.fill(false));
            }
            result = result.and(self.complete(reading));
        }
        result
    }

    fn complete(&mut self, reading: Reading) -> Result<()> {
        let shared = self.shared;
        let Reading { mut slot, piece: index, got, errno, .. } = reading;
        let piece = shared.piece(index)?;
        let source = shared.source(piece.object)?.as_ref();
        let Some(direct) = direct_of(shared, piece.object)? else {
            return Err(internal("direct read without a file"));
        };
        let (start, head, _) = aligned(direct, piece.offset, piece.len);
        if let Some(errno) = errno {
            shared.slots.put(slot);
            let error = std::io::Error::from_raw_os_error(errno);
            if is_busy(&error) {
                shared.queue.push_cold(&[index]);
                return Ok(());
            }
            if errno == libc::EINVAL || errno == libc::EOPNOTSUPP {
                refuse_direct(shared, piece)?;
                shared.queue.leave_to_copy(&[index]);
                return Ok(());
            }
            let what = format!("cannot read {} bytes at byte {start} directly", piece.len);
            return Err(Error::io(what, error).at(source.name()));
        }
        let wanted = head + piece.len as usize;
        let got = got.max(head);
        if got < wanted
            && let Some(rest) = slot.bytes_mut(wanted).get_mut(got..)
        {
            // Short: the rest through the page cache, which also finds an early end.
            read_exact_at(source, rest, start + got as u64)?;
        }
        deliver(shared, Loaded { slot, piece: index, head, path: Path::Direct })
    }

    /// Waits until the kernel writes to no slot any more. Blocks for as long as the kernel takes; a cancelled load does
    /// not wait for this thread longer than its second.
    fn settle(&mut self) -> Result<()> {
        let mut result = Ok(());
        while self.reading() > 0 {
            // Errors of reads that nobody wants any more do not matter.
            let reaped = self.reap();
            if !self.shared.is_over() {
                result = result.and(reaped);
            }
        }
        result
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
