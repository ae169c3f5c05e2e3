//! Reads of objects that are no files of this machine. **unsafe**: it writes to host targets.
//!
//! A request is a round trip of milliseconds, so a piece is one request, whatever is in it: checksum blocks are
//! compared after the whole of it has come, small tensors and gaps between them go through a slot. Rows that lie far
//! apart are asked for together ([`RangeSource::read_many`]).
//!
//! | device | bytes | copies after the source has written them |
//! | --- | --- | --- |
//! | host | a piece that is one run of one target | none: read into the target |
//! | host | anything else | one: slot to targets |
//! | GPU | all | one: slot to the GPU, by DMA |
//!
//! A bucket's source writes them once itself, from the frames of the connection (`forebay-store`, `bucket/download`).

use forebay_device::Slot;
use forebay_error::{Error, Result};

use crate::plan::Piece;
use crate::shared::{Shared, internal};
use crate::source::{RangeSource, ended_early, read_exact_at};
use crate::verify;

/// Reads a piece into its host target, if it is one run of one; false where it is not, and nothing was read.
pub(crate) fn read_in_place(shared: &Shared, piece: &Piece) -> Result<bool> {
    let Some((target, to)) = one_run(shared, piece) else { return Ok(false) };
    let address = (shared.address(target)? + to) as *mut u8;
    // SAFETY: the runs of the piece follow each other in the target without a gap, and the plan checked that each lies
    // in it; the target is valid and unused by the contract of `Session::provide`, and bytes need no initialisation to
    // be written.
    let into = unsafe { std::slice::from_raw_parts_mut(address, piece.len as usize) };
    read_exact_at(shared.source(piece.object)?.as_ref(), into, piece.offset)?;
    for check in shared.plan.checks_of(piece) {
        verify::verify(shared, check, part(into, check.offset - piece.offset, check.len)?)?;
    }
    Ok(true)
}

/// Where a piece goes, if all of it goes to one place: the target and the byte in it.
fn one_run(shared: &Shared, piece: &Piece) -> Option<(u32, u64)> {
    let ops = shared.plan.ops_of(piece);
    let first = ops.first()?.part;
    let mut done = 0;
    for part in ops.iter().map(|op| &op.part) {
        let follows = part.from == piece.offset + done && part.to == first.to + done;
        if part.rows != 1 || part.target != first.target || !follows {
            return None;
        }
        done += part.run;
    }
    (done == piece.len).then_some((first.target, first.to))
}

/// Reads a piece into a slot, and checks what is not left to the GPU.
pub(crate) fn read_staged(
    shared: &Shared,
    piece: &Piece,
    slot: &mut Slot,
    by_gpu: bool,
) -> Result<()> {
    let source = shared.source(piece.object)?.as_ref();
    if piece.packed {
        return read_rows(shared, source, piece, slot);
    }
    let bytes = slot.bytes_mut(piece.len as usize);
    read_exact_at(source, bytes, piece.offset)?;
    for (check, places) in shared.plan.landings_of(piece) {
        if !by_gpu || places.is_empty() {
            verify::verify(shared, check, part(bytes, check.offset - piece.offset, check.len)?)?;
        }
    }
    Ok(())
}

fn read_rows(
    shared: &Shared,
    source: &dyn RangeSource,
    piece: &Piece,
    slot: &mut Slot,
) -> Result<()> {
    let mut rest = slot.bytes_mut(piece.staged_len as usize);
    let mut at = 0;
    let mut rows = Vec::new();
    for op in shared.plan.ops_of(piece) {
        for row in 0..op.part.rows {
            let staged = op.staged + row * op.staged_stride;
            let skip = staged.checked_sub(at).ok_or_else(|| internal("packed rows overlap"))?;
            let split = rest.split_at_mut_checked(skip as usize);
            let split = split.and_then(|(_, rest)| rest.split_at_mut_checked(op.part.run as usize));
            let Some((into, behind)) = split else {
                return Err(internal("packed row leaves its slot"));
            };
            rows.push((op.part.from + row * op.part.from_stride, into));
            (rest, at) = (behind, staged + op.part.run);
        }
    }
    source.read_many(&mut rows).map_err(|error| {
        if error.kind() == std::io::ErrorKind::UnexpectedEof {
            return ended_early(source, piece.offset, piece.len, source.len());
        }
        let what = format!("cannot read {} ranges from byte {} on", rows.len(), piece.offset);
        Error::io(what, error).at(source.name())
    })
}

fn part(bytes: &[u8], start: u64, len: u64) -> Result<&[u8]> {
    let end = (start + len) as usize;
    bytes.get(start as usize..end).ok_or_else(|| internal("a block leaves its piece"))
}
