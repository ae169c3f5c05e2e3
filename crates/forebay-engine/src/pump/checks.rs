//! The pump's checksums: blocks that have arrived are read by a kernel on the GPU, and compared here. **unsafe**: the
//! kernel is told device addresses.
//!
//! Copies are never waited for by copies: a piece goes in here when its copies are known to be done, so the kernel runs
//! on a stream of its own, beside the copies of what comes next. The link loses nothing but the lists (16 bytes a
//! block) and results (4 bytes). The kernel reads at some 1.4 TB/s (H200), 64 MiB in 45 us with 64 CTAs at work.
//!
//! What has landed is gathered and asked about together, since a question costs four calls of the driver (10 us or
//! so): when there is enough of it, when it has waited long, or when nothing else is on its way. Slots and
//! registrations do not wait for the answer, only pieces do: [`Shared::finish_piece`] comes after it.
//!
//! Memory: 640 KiB on either side for a question under way, of which there are [`ASKED_MAX`] at the most in a load and
//! 16 on a device; kept for the next.
//!
//! When a question is refused, all pieces that wait go back to the readers, who read them again and have the CPU check
//! them (`verify`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_device::cuda::{CudaDevice, Pending, Stream};
use forebay_error::{Code, Result};

use crate::report::Path;
use crate::shared::{Shared, internal};
use crate::verify;

/// Bytes that are worth a question: 0.6 ms of a link.
const ENOUGH_BYTES: u64 = 32 << 20;

/// Blocks that are: small ones cost more each.
const ENOUGH_BLOCKS: usize = 4096;

/// How long what has landed may wait for more.
const WAIT_MAX: Duration = Duration::from_millis(1);

/// Questions under way; what lands meanwhile makes the next one larger.
const ASKED_MAX: usize = 4;

/// A piece whose bytes are in their targets.
struct Landed {
    piece: u32,
    path: Path,
}

/// Pieces whose checksums the GPU computes.
struct Asked {
    pending: Pending,
    pieces: Vec<Landed>,
}

/// The pieces of one load between their landing and their verdict.
pub(super) struct Checker<'a> {
    shared: &'a Arc<Shared>,
    gpu: &'a Arc<CudaDevice>,
    /// Made at the first question.
    stream: Option<Stream>,
    landed: Vec<Landed>,
    landed_bytes: u64,
    landed_blocks: usize,
    /// When the first of `landed` came.
    since: Instant,
    asked: VecDeque<Asked>,
}

impl<'a> Checker<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, gpu: &'a Arc<CudaDevice>) -> Self {
        Self {
            shared,
            gpu,
            stream: None,
            landed: Vec::new(),
            landed_bytes: 0,
            landed_blocks: 0,
            since: Instant::now(),
            asked: VecDeque::new(),
        }
    }

    /// Takes a piece whose copies are done, and whose whole blocks nobody has checked.
    pub(super) fn add(&mut self, piece: u32, path: Path) -> Result<()> {
        let planned = self.shared.piece(piece)?;
        if self.landed.is_empty() {
            self.since = Instant::now();
        }
        self.landed_bytes += planned.bytes;
        self.landed_blocks += planned.checks.len();
        self.landed.push(Landed { piece, path });
        Ok(())
    }

    /// Whether pieces wait for a verdict.
    pub(super) fn is_busy(&self) -> bool {
        !self.landed.is_empty() || !self.asked.is_empty()
    }

    /// Hears verdicts and asks for more; `more`: copies are on their way.
    ///
    /// Errors: `checksum` for a block that is not what was written; what the driver says.
    pub(super) fn turn(&mut self, more: bool) -> Result<()> {
        while let Some(asked) = self.asked.front() {
            if !asked.pending.is_done()? {
                break;
            }
            self.hear()?;
        }
        if self.landed.is_empty() {
            return Ok(());
        }
        if !self.shared.checks.is_on() {
            self.give_back();
            return Ok(());
        }
        let enough = self.landed_bytes >= ENOUGH_BYTES
            || self.landed_blocks >= ENOUGH_BLOCKS
            || self.since.elapsed() >= WAIT_MAX;
        if self.asked.len() < ASKED_MAX && (enough || !more) {
            self.ask()?;
        }
        Ok(())
    }

    /// Waits until the GPU reads no target any more.
    pub(super) fn settle(&self) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), Stream::synchronize)
    }

    /// Compares the first answer, and finishes its pieces.
    fn hear(&mut self) -> Result<()> {
        let Some(Asked { pending, pieces }) = self.asked.pop_front() else { return Ok(()) };
        let shared = self.shared;
        let mut found = pending.wait()?.into_iter();
        for Landed { piece: index, path } in pieces {
            let piece = shared.piece(index)?;
            for (check, places) in shared.plan.landings_of(piece) {
                for _ in places {
                    let crc = found.next().ok_or_else(|| internal("a checksum is missing"))?;
                    verify::compare(shared, check, crc)?;
                }
            }
            verify::count(shared, piece, true);
            shared.finish_piece(index, path)?;
        }
        Ok(())
    }

    /// Has the GPU compute the checksums of all that has landed.
    fn ask(&mut self) -> Result<()> {
        let blocks = self.blocks()?;
        let kernel = self.shared.checks.kernel()?;
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => Stream::new(self.gpu)?,
        };
        let stream = self.stream.insert(stream);
        // SAFETY: the blocks lie in targets, which are valid for as long as a worker of the load is there (the contract
        // of `Session::provide`); this one ends when the stream was synchronized.
        match unsafe { kernel.queue(stream, &blocks) } {
            Ok(pending) => {
                let pieces = std::mem::take(&mut self.landed);
                self.asked.push_back(Asked { pending, pieces });
                self.forget();
            }
            // Other loads ask as much as there is room for.
            Err(error) if error.code() == Code::Usage => {}
            Err(error) => {
                // Part of the list may have been queued.
                stream.synchronize()?;
                self.shared.checks.end(self.gpu, &error, &self.shared.tally);
                self.give_back();
            }
        }
        Ok(())
    }

    /// Device address and length of every whole block that has landed.
    fn blocks(&self) -> Result<Vec<(u64, u64)>> {
        let shared = self.shared;
        let mut blocks = Vec::with_capacity(self.landed_blocks);
        for landed in &self.landed {
            let piece = shared.piece(landed.piece)?;
            for (check, places) in shared.plan.landings_of(piece) {
                for place in places {
                    blocks.push((shared.address(place.target)? + place.to, check.len));
                }
            }
        }
        Ok(blocks)
    }

    /// Leaves what has landed to the readers, who bring it again.
    fn give_back(&mut self) {
        let pieces: Vec<u32> = self.landed.drain(..).map(|landed| landed.piece).collect();
        self.shared.queue.leave_to_copy(&pieces);
        self.forget();
    }

    fn forget(&mut self) {
        self.landed_bytes = 0;
        self.landed_blocks = 0;
    }
}

impl Drop for Checker<'_> {
    /// Also after a panic: targets go only when the GPU is done with them.
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::warn!(%error, "checksums were not waited for");
        }
    }
}
