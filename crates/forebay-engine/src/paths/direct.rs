//! Direct reads through io_uring. **unsafe**: it hands staging memory to the kernel.
//!
//! One thread keeps a deep queue of reads into its staging slots. A slot whose read has completed goes to its targets
//! (for a GPU by the pump), and a free slot takes the next read. A slot belongs to its lane from submission to
//! completion, whatever becomes of the load: a cancelled load's reads are waited for before a slot goes back.
//!
//! Reads are plain, not from fixed buffers: pinning 4 MiB of huge pages for a read takes microseconds beside the 600
//! that a fast drive needs for it, and fixed buffers would count against the limit on locked memory (often 8 MiB).

use std::os::fd::AsRawFd;
use std::sync::Arc;

use forebay_device::Slot;
use forebay_error::{Code, Error, Result};
use io_uring::{IoUring, opcode, types};

use super::copy::{deliver, refuse_direct};
use crate::pump::Loaded;
use crate::report::Path;
use crate::route::{Cold, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, read_exact_at};

/// How long the ring is waited for before the worker looks whether it is to stop.
const WAIT_MS: u32 = 100;

/// A read under way: the kernel writes to the slot.
struct Reading {
    slot: Slot,
    piece: u32,
}

struct Worker<'a> {
    shared: &'a Arc<Shared>,
    ring: IoUring,
    /// By the number that the completion carries.
    lanes: Vec<Option<Reading>>,
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
    shared.slots.allow(depth);
    let lanes = (0..depth).map(|_| None).collect();
    let mut worker = Worker { shared, ring, lanes };
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
            self.fill()?;
            if self.reading() > 0 {
                self.reap()?;
            }
        }
        Ok(())
    }

    fn reading(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_some()).count()
    }

    /// Gives each free lane a piece and a slot. Sleeps only while nothing is being read.
    fn fill(&mut self) -> Result<()> {
        let shared = self.shared;
        while self.reading() < self.lanes.len() {
            let idle = self.reading() == 0;
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
        let entry = opcode::Read::new(fd, slot.address() as *mut u8, len as u32)
            .offset(start)
            .build()
            .user_data(number as u64);
        *lane = Some(Reading { slot, piece: index });
        // SAFETY: the slot is as long as the read and stays in its lane until the completion is reaped; the file is
        // kept open by the load's sources.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            *lane = None;
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
        let reading = self.lanes.get_mut(number).and_then(Option::take);
        let Some(Reading { mut slot, piece: index }) = reading else {
            return Err(internal("completion of an idle lane"));
        };
        let piece = shared.piece(index)?;
        let source = shared.source(piece.object)?.as_ref();
        let Some(direct) = direct_of(shared, piece.object)? else {
            return Err(internal("direct read without a file"));
        };
        let (start, head, _) = aligned(direct, piece.offset, piece.len);
        if outcome < 0 {
            shared.slots.put(slot);
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
