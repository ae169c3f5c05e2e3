//! Plans whose bytes are checked: pieces are made of whole checksum blocks.
//!
//! A block can only be checked as a whole, so a range that ends inside a block reads the rest of it as well and
//! throws it away: with blocks of 1 MiB at most 2 MiB a range. Each move is cut at the block borders; the blocks that
//! any move touches, in the order of the object, become pieces of neighbouring blocks. Blocks that nothing wants are
//! not read.
//!
//! Where a block arrives as a whole and without gaps (a whole tensor, a slice of its first dimension), its place in the
//! target is kept ([`Landing`]): there it can be checked again once it has arrived, by a GPU that reads its own memory.

use std::ops::Range;

use forebay_error::{Code, Error, Result};

use crate::plan::{Check, Landing, Move, Op, Piece, Plan};

/// A part of a move inside one block.
struct Cut {
    block: usize,
    batch: usize,
    part: Move,
}

/// Adds the pieces of `moves`, sorted by (object, from), each inside of `blocks`, which are sorted and do not overlap.
pub(crate) fn add(
    plan: &mut Plan,
    moves: &[Move],
    blocks: &[Check],
    piece_bytes: u64,
    batches: &[u32],
) -> Result<()> {
    let mut cuts = Vec::with_capacity(moves.len());
    for part in moves {
        let batch = batches.partition_point(|&start| start <= part.target);
        cut(&joined(*part), blocks, &mut |block, part| cuts.push(Cut { block, batch, part }))?;
    }
    cuts.sort_by_key(|cut| (cut.block, cut.batch, cut.part.from));
    let mut batch = None;
    for group in cuts.chunk_by(|a, b| (a.block, a.batch) == (b.block, b.batch)) {
        let Some(first) = group.first() else { continue };
        let Some(block) = blocks.get(first.block) else { return Err(no_block()) };
        let joins = batch == Some(first.batch);
        batch = Some(first.batch);
        push(plan, *block, group, piece_bytes, joins);
    }
    Ok(())
}

/// Adds one block with its parts: to the last piece where that is its neighbour, of the same batch, and has room.
fn push(plan: &mut Plan, block: Check, group: &[Cut], piece_bytes: u64, joins: bool) {
    let (op, check) = (plan.ops.len(), plan.checks.len());
    let fits = |last: &&mut Piece| {
        let end = last.offset + last.len;
        last.object == block.object
            && last.checks.end == check
            && !last.checks.is_empty()
            && block.offset >= end
            && block.offset - end <= crate::plan::GAP_BYTES
            && block.offset + block.len - last.offset <= piece_bytes
    };
    let start = match plan.pieces.last_mut().filter(|_| joins).filter(fits) {
        Some(last) => {
            let len = block.offset + block.len - last.offset;
            plan.read_bytes += len - last.len;
            last.len = len;
            last.staged_len = len;
            last.checks.end = check + 1;
            last.offset
        }
        None => {
            plan.read_bytes += block.len;
            plan.pieces.push(Piece {
                object: block.object,
                offset: block.offset,
                len: block.len,
                staged_len: block.len,
                bytes: 0,
                ops: op..op,
                last_target: 0,
                packed: false,
                checks: check..check + 1,
            });
            block.offset
        }
    };
    plan.checks.push(block);
    plan.landed.push(land(block, group, &mut plan.landings));
    plan.checked_bytes += block.len;
    for cut in group {
        let part = cut.part;
        plan.bytes += part.bytes();
        plan.ops.push(Op { part, staged: part.from - start, staged_stride: part.from_stride });
        if let Some(last) = plan.pieces.last_mut() {
            last.bytes += part.bytes();
            last.last_target = last.last_target.max(part.target);
        }
    }
    if let Some(last) = plan.pieces.last_mut() {
        last.ops.end = plan.ops.len();
    }
}

/// Rows without gaps on either side are one run.
fn joined(part: Move) -> Move {
    if part.from_stride == part.run && part.to_stride == part.run {
        return Move::contiguous(part.object, part.target, part.from, part.to, part.bytes());
    }
    part
}

/// Adds the places of a block to `out`, if every target that wants of it wants all of it, in one run each. `group` is
/// sorted by place in the object.
fn land(block: Check, group: &[Cut], out: &mut Vec<Landing>) -> Range<usize> {
    let start = out.len();
    // Beside each of `out`, from `start` on: bytes so far.
    let mut done: Vec<u64> = Vec::with_capacity(1);
    let whole = group.iter().all(|Cut { part, .. }| {
        let own = out.iter().skip(start).position(|place| place.target == part.target);
        let own = own.unwrap_or_else(|| {
            out.push(Landing { target: part.target, to: part.to });
            done.push(0);
            done.len() - 1
        });
        let (Some(place), Some(done)) = (out.get(start + own), done.get_mut(own)) else {
            return false;
        };
        let follows =
            part.rows == 1 && part.from == block.offset + *done && part.to == place.to + *done;
        *done += part.run;
        follows
    });
    if !whole || done.iter().any(|&done| done != block.len) {
        out.truncate(start);
    }
    start..out.len()
}

impl Plan {
    /// The checks of a piece, each with the places of its block where that arrives as a whole.
    pub(crate) fn landings_of(&self, piece: &Piece) -> impl Iterator<Item = (&Check, &[Landing])> {
        let landed = self.landed.get(piece.checks.clone()).unwrap_or_default();
        let places =
            landed.iter().map(|range| self.landings.get(range.clone()).unwrap_or_default());
        self.checks_of(piece).iter().zip(places)
    }

    /// Whether every block of a piece arrives as a whole.
    pub(crate) fn lands_whole(&self, piece: &Piece) -> bool {
        self.landings_of(piece).all(|(_, places)| !places.is_empty())
    }

    /// Whether there is something of this object that no CPU has to look at: pieces that nothing is known of, and,
    /// where a GPU checks, those that arrive as wholes; one is enough.
    pub(crate) fn leaves_the_cpu_out(&self, object: u32, gpu_checks: bool) -> bool {
        if !self.is_checked(object) {
            return true;
        }
        let first = self.pieces.partition_point(|piece| piece.object < object);
        let mut own = self.pieces.iter().skip(first).take_while(|piece| piece.object == object);
        own.any(|piece| piece.checks.is_empty() || gpu_checks && self.lands_whole(piece))
    }

    /// Bytes of the blocks that arrive as wholes: those that a GPU can check where they are.
    pub fn whole_checked_bytes(&self) -> u64 {
        let whole = self.checks.iter().zip(&self.landed).filter(|(_, places)| !places.is_empty());
        whole.map(|(check, _)| check.len).sum()
    }
}

/// Cuts a move at block borders: rows that lie in one block stay together.
fn cut(part: &Move, blocks: &[Check], out: &mut impl FnMut(usize, Move)) -> Result<()> {
    let first = (part.object, part.from);
    let mut at = blocks.partition_point(|block| (block.object, block.offset + block.len) <= first);
    let mut row = 0;
    while row < part.rows {
        let (from, to) = (part.from + row * part.from_stride, part.to + row * part.to_stride);
        let block = loop {
            let block = blocks.get(at).filter(|block| block.object == part.object);
            let block = block.filter(|block| block.offset <= from).ok_or_else(no_block)?;
            if from < block.offset + block.len {
                break block;
            }
            at += 1;
        };
        let end = block.offset + block.len;
        if from + part.run <= end {
            let fit = if part.rows == 1 {
                1
            } else {
                ((end - from - part.run) / part.from_stride + 1).min(part.rows - row)
            };
            out(at, Move { from, to, rows: fit, ..*part });
            row += fit;
        } else {
            cut_run(part, (from, to), at, blocks, out)?;
            row += 1;
        }
    }
    Ok(())
}

/// Cuts one run that goes on in the next block.
fn cut_run(
    part: &Move,
    (from, to): (u64, u64),
    mut at: usize,
    blocks: &[Check],
    out: &mut impl FnMut(usize, Move),
) -> Result<()> {
    let mut done = 0;
    while done < part.run {
        let here = from + done;
        let block = blocks.get(at).filter(|block| {
            block.object == part.object && block.offset <= here && here < block.offset + block.len
        });
        let block = block.ok_or_else(no_block)?;
        let len = (block.offset + block.len - here).min(part.run - done);
        out(at, Move::contiguous(part.object, part.target, here, to + done, len));
        done += len;
        at += 1;
    }
    Ok(())
}

fn no_block() -> Error {
    Error::new(Code::Internal, "bytes of a checked object that no block covers")
}
