//! From staging memory (or a registered mapping) to the targets. **unsafe**: raw addresses, vouched for by the plan
//! (its moves lie inside their targets) and by whoever provided the targets.

use std::ops::Range;

use forebay_device::copy_rows;
use forebay_device::cuda::{CudaDevice, Stream};
use forebay_error::Result;

use crate::plan::{Move, Piece};
use crate::shared::Shared;

/// A copy of contiguous bytes that grows while its neighbours follow on both sides.
#[derive(Clone, Copy)]
struct Run {
    from: usize,
    to: u64,
    len: u64,
}

/// Allocations of the targets, as far as copies are to be joined: the driver refuses a copy that spans two, even where
/// they lie side by side (seen with a framework that allocates each large tensor by itself).
#[derive(Default)]
pub(crate) struct Allocations {
    last: Range<u64>,
}

impl Allocations {
    /// Whether two addresses lie in one allocation.
    fn are_one(&mut self, gpu: &CudaDevice, first: u64, second: u64) -> bool {
        if !self.last.contains(&first) {
            // Without an answer nothing is joined, which is slower and right.
            self.last = gpu.allocation_of(first).unwrap_or_default();
        }
        self.last.contains(&first) && self.last.contains(&second)
    }
}

/// Queues copies to a GPU, joining neighbours: twenty thousand small tensors that a framework's allocator laid side by
/// side then go in megabytes, not in 64 KiB each (2.8 us a call).
pub(crate) struct GpuScatter<'a> {
    gpu: &'a CudaDevice,
    stream: &'a Stream,
    allocations: &'a mut Allocations,
    run: Option<Run>,
}

impl<'a> GpuScatter<'a> {
    pub(crate) fn new(
        gpu: &'a CudaDevice,
        stream: &'a Stream,
        allocations: &'a mut Allocations,
    ) -> Self {
        Self { gpu, stream, allocations, run: None }
    }

    /// Queues one part, whose first run lies at `from` and whose runs are `from_stride` bytes apart.
    ///
    /// # Safety
    /// The source rows are registered memory that stays valid and unchanged until the stream has run the copies; the
    /// target is valid by the contract of `Session::provide`.
    pub(crate) unsafe fn add(
        &mut self,
        shared: &Shared,
        part: &Move,
        from: usize,
        from_stride: u64,
    ) -> Result<()> {
        let to = shared.address(part.target)? + part.to;
        if part.rows > 1 {
            self.flush()?;
            // SAFETY: by this function's contract; the plan checked that every row lies in its target.
            return unsafe {
                self.stream.copy_rows_to_device(
                    (to, part.to_stride),
                    (from, from_stride),
                    part.run,
                    part.rows,
                )
            };
        }
        if let Some(run) = &mut self.run
            && run.from + run.len as usize == from
            && run.to + run.len == to
            && self.allocations.are_one(self.gpu, run.to, to)
        {
            run.len += part.run;
        } else {
            self.flush()?;
            self.run = Some(Run { from, to, len: part.run });
        }
        Ok(())
    }

    /// Queues what is left; must be called before the event that marks the end is recorded.
    pub(crate) fn flush(&mut self) -> Result<()> {
        match self.run.take() {
            Some(run) if run.len > 0 => self.queue(run),
            _ => Ok(()),
        }
    }

    fn queue(&self, run: Run) -> Result<()> {
        // SAFETY: the run consists of parts that `add` was given under its contract.
        unsafe { self.stream.copy_to_device(run.to, run.from, run.len) }
    }
}

/// Copies a staged piece to its host targets. `staged` is where the piece's first byte lies.
///
/// # Safety
/// `staged` holds the piece; the targets are valid by the contract of `Session::provide`.
pub(crate) unsafe fn to_host(shared: &Shared, piece: &Piece, staged: usize) -> Result<()> {
    for op in shared.plan.ops_of(piece) {
        let part = &op.part;
        let to = (shared.address(part.target)? + part.to) as usize;
        let from = staged + op.staged as usize;
        // SAFETY: by this function's contract; the plan checked rows against target and piece.
        unsafe {
            copy_rows((to, part.to_stride), (from, op.staged_stride), part.run, part.rows);
        }
    }
    Ok(())
}
