//! Direct reads through io_uring. **unsafe**: it hands staging memory to the kernel.
//!
//! One thread keeps a queue of reads into its staging slots, as deep as pays on this drive (`pacer`). A slot whose
//! reads have completed goes to its targets (for a GPU by the pump), and a free slot takes the next piece, before any
//! bytes are copied on. A slot belongs to its lane from submission to the last completion, whatever becomes of the
//! load: a cancelled load's reads are waited for before a slot goes back.
//!
//! Reads are plain, not from fixed buffers: pinning 4 MiB of huge pages for a read takes microseconds beside the 600
//! that a fast drive needs for it, and fixed buffers would count against the limit on locked memory (often 8 MiB).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_device::Slot;
use forebay_error::{Code, Error, Result};
use io_uring::{opcode, types};

use super::copy::{deliver, refuse_direct, refused_at_read};
use super::pacer::Pacer;
use super::ring::{Ring, is_passing};
use crate::pump::Loaded;
use crate::report::Path;
use crate::route::{Cold, Refused, refuse};
use crate::shared::{Shared, internal};
use crate::source::{DirectFile, DirectRefusal, read_exact_at};
use crate::verify;

/// How long the ring is waited for before the worker looks whether it is to stop.
const WAIT: Duration = Duration::from_millis(100);

/// How long a worker rests when the kernel asks to come again: io_uring has no room or memory just now.
const AGAIN_NAP: Duration = Duration::from_millis(1);

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

/// The ring is dropped first, which waits for the kernel; then the slots in the lanes may go.
struct Worker<'a> {
    ring: Ring,
    shared: &'a Arc<Shared>,
    /// By the number that the completion carries.
    lanes: Vec<Option<Reading>>,
    pacer: Pacer,
    /// The kernel has refused the ring at its first use.
    refused: Option<io::Error>,
}

/// Works until nothing is left. The ring is made when the first cold piece comes.
pub(crate) fn run(shared: &Arc<Shared>) -> Result<()> {
    let Some(first) = shared.queue.take_cold(true) else { return Ok(()) };
    shared.queue.push_cold(&[first]);
    let depth = shared.engine.config().tuning.direct_depth.clamp(1, 256);
    // A piece and its alignment are at most so many reads.
    let requests = shared.engine.config().piece_bytes as usize / REQUEST_BYTES + 2;
    let ring = match Ring::new(depth * requests) {
        Ok(ring) => ring,
        Err(error) => {
            hand_over(shared, &error);
            return Ok(());
        }
    };
    shared.slots.allow(depth);
    let lanes = (0..depth).map(|_| None).collect();
    let mut worker = Worker { ring, shared, lanes, pacer: Pacer::new(depth), refused: None };
    if let Err(error) = worker.work() {
        // Told at once: waiting for reads that hang comes after.
        shared.fail(error);
    }
    Ok(())
}

/// Whether io_uring is refused for good: by a filter, or by a kernel that lacks it. Want of descriptors or memory
/// passes.
fn is_verdict(error: &io::Error) -> bool {
    let verdicts = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EINVAL, libc::EOPNOTSUPP];
    error.raw_os_error().is_some_and(|errno| verdicts.contains(&errno))
}

/// Gives the cold row to the readers; for the rest of the process, if io_uring is refused for good.
fn hand_over(shared: &Shared, error: &io::Error) {
    if is_verdict(error) {
        refuse(Refused::Ring, 0, &format!("refused: {error}"));
    }
    shared.tally.refusal(&format!("io_uring: {error}; direct reads by threads instead"));
    to_threads(shared, "not resident; io_uring refused");
}

/// The readers take the cold row, for want of a thread of its own.
pub(crate) fn without_worker(shared: &Shared) {
    to_threads(shared, "not resident; no thread for io_uring");
}

fn to_threads(shared: &Shared, reason: &str) {
    shared.tally.reason(Path::DirectThreads, reason);
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
            if let Some(error) = self.refused.take() {
                self.retreat(&error);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Puts everything back, none of which the kernel has seen.
    fn retreat(&mut self, error: &io::Error) {
        for reading in self.lanes.iter_mut().filter_map(Option::take) {
            self.shared.slots.put(reading.slot);
            self.shared.queue.push_cold(&[reading.piece]);
        }
        hand_over(self.shared, error);
    }

    /// Enters the kernel. A refusal at the very first time is noted; a later one ends the load.
    fn enter(&mut self, wait: Option<Duration>) -> Result<()> {
        match self.ring.enter(wait) {
            Ok(()) => Ok(()),
            Err(error) if self.ring.is_unused() => {
                self.refused = Some(error);
                Ok(())
            }
            Err(error) => Err(Error::io("io_uring failed", error)),
        }
    }

    fn reading(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_some()).count()
    }

    /// Gives each free lane a piece and a slot. Sleeps only if it `may_wait`, and only while nothing is being read.
    fn fill(&mut self, may_wait: bool) -> Result<()> {
        let shared = self.shared;
        while self.refused.is_none() && self.reading() < self.pacer.depth() {
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
        let direct = match direct_of(shared, piece.object)? {
            // Another piece has found out before.
            _ if shared.route(piece.object)?.cold() == Cold::Buffered => None,
            Ok(direct) => Some(direct),
            Err(refusal) => {
                refuse_direct(shared, piece, refusal)?;
                None
            }
        };
        let Some(direct) = direct else {
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
            if !unsafe { self.ring.push(&entry) } {
                return Err(internal("submission queue is full"));
            }
            if let Some(reading) = lane {
                reading.pending += 1;
            }
        }
        self.enter(None)
    }

    /// Waits for completions, a while, and handles them.
    fn reap(&mut self) -> Result<()> {
        let entered = self.enter(Some(WAIT));
        let mut ended = Vec::new();
        for (number, outcome) in self.ring.take() {
            let (lane, request) = ((number >> 32) as usize, (number & 0xffff_ffff) as usize);
            let Some(lane) = self.lanes.get_mut(lane) else { continue };
            match lane.as_mut().map(|reading| reading.note(request, outcome)) {
                Some(true) => ended.extend(lane.take()),
                Some(false) => {}
                None => return Err(internal("completion of an idle lane")),
            }
        }
        let now = Instant::now();
        for reading in &ended {
            self.pacer.completed(reading.len as u64, now);
        }
        let mut result = entered;
        for reading in ended {
            // The next reads first: what follows may copy megabytes, and the drive is not to wait for that.
            if result.is_ok() && !self.shared.is_over() {
                result = self.fill(false);
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
        let Ok(direct) = direct_of(shared, piece.object)? else {
            return Err(internal("direct read without a file"));
        };
        let (start, head, _) = aligned(direct, piece.offset, piece.len);
        if let Some(errno) = errno {
            shared.slots.put(slot);
            let error = std::io::Error::from_raw_os_error(errno);
            if is_passing(&error) {
                std::thread::sleep(AGAIN_NAP);
                shared.queue.push_cold(&[index]);
                return Ok(());
            }
            let refusal = match errno {
                libc::EINVAL | libc::EOPNOTSUPP => Some(refused_at_read()),
                // No memory to pin pages: the page cache needs none.
                libc::ENOMEM => Some(DirectRefusal {
                    by_file_system: false,
                    why: "no memory for direct reads".to_owned(),
                }),
                _ => None,
            };
            if let Some(refusal) = refusal {
                refuse_direct(shared, piece, &refusal)?;
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
        let by_gpu = shared.checks.take_from(&shared.plan, piece);
        let bytes = slot.bytes(wanted).get(head..).unwrap_or_default();
        verify::staged(shared, piece, bytes, by_gpu)?;
        deliver(shared, Loaded { slot, piece: index, head, path: Path::Direct, by_gpu })
    }
}

/// The descriptor for direct reads of an object, or why there is none.
fn direct_of(
    shared: &Shared,
    object: u32,
) -> Result<std::result::Result<&DirectFile, &DirectRefusal>> {
    let local = shared.source(object)?.local();
    local.map(|file| file.direct()).ok_or_else(|| internal("direct read without a file"))
}

/// A range widened to the file's blocks: (start, bytes before the wanted ones, length).
fn aligned(direct: &DirectFile, offset: u64, len: u64) -> (u64, usize, usize) {
    let align = u64::from(direct.align.offset_bytes.max(1));
    let start = offset / align * align;
    let head = offset - start;
    (start, head as usize, (head + len).next_multiple_of(align) as usize)
}
