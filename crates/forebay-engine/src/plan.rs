//! Plans: what to move, as pure data.
//!
//! A [`Move`] says that equal runs of bytes of an object go to equal runs of a target; a whole tensor is one run, a
//! slice of an inner dimension is many rows. [`Plan::build`] turns moves into [`Piece`]s, the unit that a worker takes
//! at a time, without any I/O:
//!
//! - Pieces lie on a grid: no piece crosses a multiple of `piece_bytes` of its object. So pieces start aligned for
//!   direct reads, and two neighbours can be joined for DMA.
//! - Inside a cell, moves whose gap is at most [`GAP_BYTES`] share one read (the gap is read and thrown away); a wider
//!   gap starts another piece.
//! - Rows that lie further apart than that are not read as a span but one by one, packed in staging memory
//!   ([`Piece::packed`]). That is the choice between rows and ranges: whichever costs less.
//!
//! Pieces come out in the order of (object, offset), and so do targets when they are numbered that way; a feed of
//! target addresses in order makes a growing prefix of pieces runnable.

use std::ops::Range;

use forebay_error::{Code, Error, Result};

use crate::records;

/// The widest gap that is read through. One more request costs about 3 us of CPU and queue time (page cache: 0.7 us
/// for the call, 2.8 us for the extra copy to the GPU), and 3 us of copying at 5 GB/s are 15 KB.
pub const GAP_BYTES: u64 = 16 << 10;

/// Rows packed in one piece at the most: bounds the requests of one piece.
const PACKED_ROWS_MAX: u64 = 1024;

/// Moves `rows` runs of `run` bytes from an object to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Index of the object.
    pub object: u32,
    /// Index of the target.
    pub target: u32,
    /// Where the first run starts in the object, in bytes.
    pub from: u64,
    /// Bytes from run to run in the object; at least `run`.
    pub from_stride: u64,
    /// Where the first run goes in the target, in bytes.
    pub to: u64,
    /// Bytes from run to run in the target; at least `run`.
    pub to_stride: u64,
    /// Bytes of one run.
    pub run: u64,
    /// How many runs.
    pub rows: u64,
}

impl Move {
    /// One run.
    pub fn contiguous(object: u32, target: u32, from: u64, to: u64, len: u64) -> Self {
        Self { object, target, from, from_stride: len, to, to_stride: len, run: len, rows: 1 }
    }

    /// Payload bytes.
    pub fn bytes(&self) -> u64 {
        self.run * self.rows
    }

    /// End of the last run in the object.
    pub(crate) fn end_in_object(&self) -> u64 {
        if self.rows == 0 {
            self.from
        } else {
            self.from + (self.rows - 1) * self.from_stride + self.run
        }
    }
}

/// A part of a move that one piece carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// What moves: `from` is absolute in the object, `to` in the target.
    pub part: Move,
    /// Where the first run lies in the piece's staging memory.
    pub staged: u64,
    /// Bytes from run to run there.
    pub staged_stride: u64,
}

/// What a worker moves at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the object.
    pub object: u32,
    /// Where it starts in the object.
    pub offset: u64,
    /// Bytes from there to its end.
    pub len: u64,
    /// Staging memory that it needs.
    pub staged_len: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// Its operations: [`Plan::ops_of`].
    pub ops: Range<usize>,
    /// The greatest target index among its operations.
    pub last_target: u32,
    /// Rows are read one by one into packed staging memory, instead of the whole span.
    pub packed: bool,
    /// What is checked before its bytes go on: [`Plan::checks_of`].
    pub checks: Range<usize>,
}

/// A stretch of an object whose checksum is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Index of the object.
    pub object: u32,
    /// Where it starts there, in bytes.
    pub offset: u64,
    /// Its bytes; of a block at most those of a piece.
    pub len: u64,
    /// CRC-32 ([`forebay_format::crc`]) of them.
    pub crc: u32,
}

/// Where a block of a [`Check`] lies without gaps once it has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landing {
    pub(crate) target: u32,
    /// Bytes from the start of the target.
    pub(crate) to: u64,
}

/// Pieces in reading order.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) ops: Vec<Op>,
    pub(crate) checks: Vec<Check>,
    /// Those of the blocks that arrive as wholes, in the order of `checks`.
    pub(crate) landings: Vec<Landing>,
    /// Which of them are each check's: none for a block that arrives in parts, with gaps, or not all of it; several for
    /// one that several targets want, all of them the whole of it.
    pub(crate) landed: Vec<Range<usize>>,
    /// Records whose blocks `checks` are, where those have no checksums of their own: [`crate::records`].
    pub(crate) records: Vec<Check>,
    /// What it was cut by.
    pub(crate) piece_bytes: u64,
    pub(crate) bytes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) checked_bytes: u64,
    target_bytes: Vec<u64>,
    /// What targets are called in messages, by index.
    names: Vec<String>,
}

impl Plan {
    /// Cuts `moves` into pieces of at most `piece_bytes` (a power of two, at least 64 KiB). `target_bytes` is the size
    /// of each target. `batches` are the indices of targets, ascending, where a new batch starts: no piece holds bytes
    /// of two batches, so that a batch completes without the next one's memory.
    ///
    /// Errors: `internal` when a move leaves its target or runs overlap, which callers have checked.
    pub fn build(
        moves: Vec<Move>,
        target_bytes: Vec<u64>,
        piece_bytes: u64,
        batches: &[u32],
    ) -> Result<Self> {
        Self::build_checked(moves, target_bytes, piece_bytes, batches, Vec::new())
    }

    /// As [`Self::build`], for objects some of which have checksums: where an object has any, every byte that is
    /// wanted of it lies in one of its `blocks`, and pieces are made of whole blocks, checked before their bytes go
    /// to the targets.
    ///
    /// Errors: as [`Self::build`]; `internal` for blocks that overlap, are larger than a piece, or leave a wanted
    /// byte out.
    pub fn build_checked(
        moves: Vec<Move>,
        target_bytes: Vec<u64>,
        piece_bytes: u64,
        batches: &[u32],
        blocks: Vec<Check>,
    ) -> Result<Self> {
        let (moves, blocks) = (sorted(moves, &target_bytes)?, Checked::Blocks(blocks));
        Self::cut(moves, target_bytes, piece_bytes, batches, blocks)
    }

    /// As [`Self::build`], for objects of which stretches of any length have checksums (`records`, which do not
    /// overlap): those that are wanted as wholes are checked before the last piece of each goes to its target.
    ///
    /// Errors: as [`Self::build`].
    pub fn build_recorded(
        moves: Vec<Move>,
        target_bytes: Vec<u64>,
        piece_bytes: u64,
        batches: &[u32],
        records: Vec<Check>,
    ) -> Result<Self> {
        let moves = sorted(moves, &target_bytes)?;
        let records = Checked::Records(records::covered(records, &moves));
        Self::cut(moves, target_bytes, piece_bytes, batches, records)
    }

    fn cut(
        moves: Vec<Move>,
        target_bytes: Vec<u64>,
        piece_bytes: u64,
        batches: &[u32],
        checked: Checked,
    ) -> Result<Self> {
        if !piece_bytes.is_power_of_two() || piece_bytes < 64 << 10 {
            let text = format!("piece size {piece_bytes} is not a power of two of 64 KiB or more");
            return Err(Error::new(Code::Usage, text));
        }
        let (mut blocks, records) = match checked {
            Checked::Blocks(blocks) => (blocks, Vec::new()),
            Checked::Records(records) => (records::blocks(&records, piece_bytes), records),
        };
        blocks.retain(|block| block.len > 0);
        blocks.sort_by_key(|block| (block.object, block.offset));
        check_blocks(&blocks, piece_bytes)?;
        let is_checked = |part: &Move| match records.is_empty() {
            true => blocks.binary_search_by_key(&part.object, |block| block.object).is_ok(),
            false => records::holds(&records, part),
        };
        let (checked, plain): (Vec<Move>, Vec<Move>) = moves.into_iter().partition(is_checked);
        let plan = Self { target_bytes, records, piece_bytes, ..Self::default() };
        let mut builder = Builder { plan, piece_bytes, batches };
        for part in plain {
            builder.add(part);
        }
        let mut plan = builder.plan;
        crate::checked::add(&mut plan, &checked, &blocks, piece_bytes, batches)?;
        // Rows split at the grid come out after the whole rows of their move: back into reading order.
        plan.pieces.sort_by_key(|piece| (piece.object, piece.offset));
        Ok(plan)
    }

    /// The pieces.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The operations of a piece.
    pub fn ops_of(&self, piece: &Piece) -> &[Op] {
        self.ops.get(piece.ops.clone()).unwrap_or_default()
    }

    /// What is checked of a piece, in the order of the object.
    pub fn checks_of(&self, piece: &Piece) -> &[Check] {
        self.checks.get(piece.checks.clone()).unwrap_or_default()
    }

    /// Whether an object's bytes are checked.
    pub fn is_checked(&self, object: u32) -> bool {
        self.checks.binary_search_by_key(&object, |check| check.object).is_ok()
    }

    /// Bytes that are checked when they are read.
    pub fn checked_bytes(&self) -> u64 {
        self.checked_bytes
    }

    /// For each target, how many targets must have been provided before it can be complete: a piece is moved when all
    /// of its targets are there, and pieces become runnable in order.
    pub fn needs(&self) -> Vec<u32> {
        let mut needs: Vec<u32> = (1..=self.target_bytes.len() as u32).collect();
        let mut reached = 0;
        for piece in &self.pieces {
            reached = reached.max(piece.last_target + 1);
            for op in self.ops_of(piece) {
                if let Some(need) = needs.get_mut(op.part.target as usize) {
                    *need = reached.max(*need);
                }
            }
        }
        needs
    }

    /// Payload bytes that nothing is compared with.
    pub fn unchecked_bytes(&self) -> u64 {
        let unchecked = self.pieces.iter().filter(|piece| piece.checks.is_empty());
        unchecked.map(|piece| piece.bytes).sum()
    }

    /// Gives targets names, by index, for messages.
    #[must_use]
    pub fn with_names(mut self, names: Vec<String>) -> Self {
        self.names = names;
        self
    }

    /// The name of a target that bytes of a block go to; `None` where targets have no names. Goes through all pieces.
    pub(crate) fn name_of(&self, block: &Check) -> Option<&str> {
        let end = block.offset + block.len;
        let pieces = self.pieces.iter().filter(|piece| {
            piece.object == block.object
                && piece.offset < end
                && block.offset < piece.offset + piece.len
        });
        let mut parts = pieces.flat_map(|piece| self.ops_of(piece)).map(|op| &op.part);
        let part = parts.find(|part| part.from < end && block.offset < part.end_in_object())?;
        self.names.get(part.target as usize).map(String::as_str)
    }

    /// Bytes of each target.
    pub fn target_bytes(&self) -> &[u64] {
        &self.target_bytes
    }

    /// Payload bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that will be read: payload and gaps.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes
    }
}

/// What checksums are of.
enum Checked {
    /// Of blocks that fit into pieces, and cover all that is wanted of their objects.
    Blocks(Vec<Check>),
    /// Of records, all of which is wanted.
    Records(Vec<Check>),
}

/// Moves that fit their targets, in the order of the objects.
fn sorted(mut moves: Vec<Move>, target_bytes: &[u64]) -> Result<Vec<Move>> {
    moves.retain(|part| part.run > 0 && part.rows > 0);
    for part in &moves {
        check_move(part, target_bytes)?;
    }
    moves.sort_by_key(|part| (part.object, part.from));
    Ok(moves)
}

fn check_blocks(blocks: &[Check], piece_bytes: u64) -> Result<()> {
    let fits = |block: &Check| {
        block.len <= piece_bytes
            && block.offset.checked_add(block.len).is_some_and(|end| end <= i64::MAX as u64)
    };
    let apart = |pair: &[Check]| match pair {
        [a, b] => a.object != b.object || a.offset + a.len <= b.offset,
        _ => true,
    };
    if blocks.iter().all(fits) && blocks.windows(2).all(apart) {
        return Ok(());
    }
    Err(Error::new(Code::Internal, "checksum blocks overlap or are larger than a piece"))
}

fn check_move(part: &Move, target_bytes: &[u64]) -> Result<()> {
    let fits = (|| {
        let target = *target_bytes.get(part.target as usize)?;
        let last = part.rows.checked_sub(1)?;
        let to_end =
            last.checked_mul(part.to_stride)?.checked_add(part.to)?.checked_add(part.run)?;
        let from_end =
            last.checked_mul(part.from_stride)?.checked_add(part.from)?.checked_add(part.run)?;
        let apart = part.rows == 1 || part.from_stride >= part.run && part.to_stride >= part.run;
        (to_end <= target && from_end <= i64::MAX as u64 && apart).then_some(())
    })();
    fits.ok_or_else(|| {
        Error::new(Code::Internal, format!("move does not fit its target: {part:?}"))
    })
}

struct Builder<'a> {
    plan: Plan,
    piece_bytes: u64,
    batches: &'a [u32],
}

impl Builder<'_> {
    /// The number of the batch that a target belongs to.
    fn batch_of(&self, target: u32) -> usize {
        self.batches.partition_point(|&start| start <= target)
    }

    fn add(&mut self, part: Move) {
        if part.rows == 1 || part.from_stride == part.run && part.to_stride == part.run {
            self.add_run(part.object, part.target, part.from, part.to, part.bytes());
        } else {
            self.add_rows(part);
        }
    }

    /// One run, split at the grid.
    fn add_run(&mut self, object: u32, target: u32, from: u64, to: u64, len: u64) {
        let mut done = 0;
        while done < len {
            let at = from + done;
            let room = self.piece_bytes - at % self.piece_bytes;
            let part = Move::contiguous(object, target, at, to + done, room.min(len - done));
            self.push(part, false);
            done += part.run;
        }
    }

    /// Rows: those inside one cell together, one that crosses a line of the grid by itself.
    fn add_rows(&mut self, part: Move) {
        let packed = part.from_stride - part.run > GAP_BYTES;
        let mut row = 0;
        while row < part.rows {
            let from = part.from + row * part.from_stride;
            let to = part.to + row * part.to_stride;
            let cell_end = (from / self.piece_bytes + 1) * self.piece_bytes;
            if from + part.run > cell_end {
                self.add_run(part.object, part.target, from, to, part.run);
                row += 1;
                continue;
            }
            let fit = (cell_end - from - part.run) / part.from_stride + 1;
            let limit = if packed { PACKED_ROWS_MAX } else { u64::MAX };
            let rows = fit.min(part.rows - row).min(limit);
            self.push(Move { from, to, rows, ..part }, packed && rows > 1);
            row += rows;
        }
    }

    /// Adds a part that lies inside one cell: to the last piece if it is near enough, else as a new one.
    fn push(&mut self, part: Move, packed: bool) {
        let index = self.plan.ops.len();
        self.plan.bytes += part.bytes();
        let cell = part.from / self.piece_bytes;
        let batch = self.batch_of(part.target);
        let last_batch = self.plan.pieces.last().map(|last| self.batch_of(last.last_target));
        if !packed
            && last_batch == Some(batch)
            && let Some(last) = self.plan.pieces.last_mut()
            && !last.packed
            && last.object == part.object
            && last.offset / self.piece_bytes == cell
            && last.ops.end == index
            && part.from >= last.offset
            && part.from <= last.offset + last.len + GAP_BYTES
        {
            let len = last.len.max(part.end_in_object() - last.offset);
            self.plan.read_bytes += len - last.len;
            last.len = len;
            last.staged_len = len;
            last.bytes += part.bytes();
            last.ops.end = index + 1;
            last.last_target = last.last_target.max(part.target);
            let staged = part.from - last.offset;
            self.plan.ops.push(Op { part, staged, staged_stride: part.from_stride });
            return;
        }
        let len = part.end_in_object() - part.from;
        let staged_len = if packed { part.bytes() } else { len };
        let staged_stride = if packed { part.run } else { part.from_stride };
        self.plan.read_bytes += staged_len;
        self.plan.ops.push(Op { part, staged: 0, staged_stride });
        self.plan.pieces.push(Piece {
            object: part.object,
            offset: part.from,
            len,
            staged_len,
            bytes: part.bytes(),
            ops: index..index + 1,
            last_target: part.target,
            packed,
            checks: 0..0,
        });
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
