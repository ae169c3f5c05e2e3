//! Checksums of whole records, which archives keep: of stretches that may be larger than any piece.
//!
//! Where every byte of a record is wanted, it is cut into blocks on the grid of pieces, and read and summed as blocks
//! are that have checksums of their own ([`crate::verify`]). What is found of each is kept, and when the last one of a
//! record is in, whichever that is, all of them are joined into the CRC-32 of the whole and compared with the
//! archive's: before the piece that brought the last one counts as arrived. So a target that takes a whole record is
//! never ready with wrong bytes in it, and no byte is looked at twice. One that shares a record with others, each
//! taking a part, may be ready before the record is judged: the load then ends with the error, later.
//!
//! A record of which a part is wanted cannot be compared: the rest of it would have to be read as well, which for a
//! shard of a large tensor is many times of what is needed. Those bytes are counted
//! ([`Plan::unchecked_bytes`](crate::Plan::unchecked_bytes)).

use std::sync::{Mutex, PoisonError};

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32_join;

use crate::plan::{Check, Move, Plan};

/// Bytes of a block of a record, at the most: as large as blocks with checksums of their own.
const BLOCK_BYTES: u64 = 1 << 20;

/// Of `records`, those that `moves` want every byte of; in order of (object, offset). Rows that lie apart in a record
/// count as a part of it. `moves` are sorted by (object, from).
pub(crate) fn covered(mut records: Vec<Check>, moves: &[Move]) -> Vec<Check> {
    records.retain(|record| record.len > 0 && record.offset.checked_add(record.len).is_some());
    records.sort_by_key(|record| (record.object, record.offset, record.len));
    let mut end = (0, 0);
    records.retain(|record| {
        let apart = (record.object, record.offset) >= end;
        end = end.max((record.object, record.offset + record.len));
        apart
    });
    records.retain(|record| is_covered(record, moves));
    records
}

fn is_covered(record: &Check, moves: &[Move]) -> bool {
    let end = record.offset + record.len;
    let first =
        moves.partition_point(|part| (part.object, part.from) < (record.object, record.offset));
    let mut reached = record.offset;
    for part in moves.iter().skip(first) {
        if part.object != record.object || part.from >= end {
            break;
        }
        let stop = part.end_in_object();
        let gap = part.rows > 1 && part.from_stride != part.run || part.from > reached;
        if gap || stop > end {
            return false;
        }
        reached = reached.max(stop);
    }
    reached == end
}

/// Whether a move is one of a record of these, which are sorted.
pub(crate) fn holds(records: &[Check], part: &Move) -> bool {
    record_at(records, part.object, part.from).is_some()
}

/// The place of the record that a byte lies in.
fn record_at(records: &[Check], object: u32, offset: u64) -> Option<usize> {
    let key = (object, offset);
    let next = records.partition_point(|record| (record.object, record.offset) <= key);
    let at = next.checked_sub(1)?;
    let record = records.get(at)?;
    (record.object == object && offset - record.offset < record.len).then_some(at)
}

/// The blocks of records. Their own checksums are not known: `crc` is 0, and nothing compares it.
pub(crate) fn blocks(records: &[Check], piece_bytes: u64) -> Vec<Check> {
    let size = BLOCK_BYTES.min(piece_bytes);
    let mut blocks = Vec::new();
    for record in records {
        let end = record.offset + record.len;
        let mut offset = record.offset;
        while offset < end {
            let len = (size - offset % size).min(end - offset);
            blocks.push(Check { object: record.object, offset, len, crc: 0 });
            offset += len;
        }
    }
    blocks
}

/// What is known with a block.
pub(crate) enum Verdict {
    /// This is to be compared with its checksum now.
    Compare(Check, u32),
    /// Nothing yet: more of its record is to come, or it was known already.
    Wait,
    /// The same block had this checksum when it was read before.
    Differs(u32),
}

/// What was found of the records of a load.
pub(crate) struct Found {
    records: Vec<Mutex<Parts>>,
    size: u64,
}

/// Of one record: the CRC-32 of each of its blocks, and how many are lacking.
struct Parts {
    crcs: Vec<Option<u32>>,
    lacking: usize,
}

impl Found {
    pub(crate) fn new(plan: &Plan) -> Self {
        let size = BLOCK_BYTES.min(plan.piece_bytes.max(1));
        let parts = |record: &Check| {
            let last = record.offset + record.len - 1;
            let lacking = (last / size - record.offset / size + 1) as usize;
            Mutex::new(Parts { crcs: vec![None; lacking], lacking })
        };
        Self { records: plan.records.iter().map(parts).collect(), size }
    }

    /// Takes what was found of a block. Returns what is to be compared now: the block, if it has a checksum of its own;
    /// its record with the CRC-32 of that, if it was the last one of it; else nothing.
    pub(crate) fn of(&self, plan: &Plan, check: &Check, found: u32) -> Result<Verdict> {
        if plan.records.is_empty() {
            return Ok(Verdict::Compare(*check, found));
        }
        let at = record_at(&plan.records, check.object, check.offset);
        let known = at.and_then(|at| Some((plan.records.get(at)?, self.records.get(at)?)));
        let Some((record, parts)) = known else { return Err(unknown()) };
        let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (check.offset / self.size - record.offset / self.size) as usize;
        let slot = parts.crcs.get_mut(place).ok_or_else(unknown)?;
        match slot.replace(found) {
            None => parts.lacking -= 1,
            // Summed before, for another target or by the GPU: its record is judged without it.
            Some(before) if before == found => return Ok(Verdict::Wait),
            Some(before) => return Ok(Verdict::Differs(before)),
        }
        match parts.lacking {
            0 => Ok(Verdict::Compare(*record, self.joined(record, &parts.crcs))),
            _ => Ok(Verdict::Wait),
        }
    }

    fn joined(&self, record: &Check, crcs: &[Option<u32>]) -> u32 {
        let end = record.offset + record.len;
        let mut offset = record.offset;
        let mut whole = 0;
        for crc in crcs.iter().flatten() {
            let len = (self.size - offset % self.size).min(end - offset);
            whole = crc32_join(whole, *crc, len);
            offset += len;
        }
        whole
    }
}

fn unknown() -> Error {
    Error::new(Code::Internal, "a block of a record that is not in the plan")
}
