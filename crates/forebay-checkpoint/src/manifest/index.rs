//! The part index: where each rank's part is, and what it must be.
//!
//! ```text
//! index     varint count: one part for each rank of the job, in the order of the ranks; then columns:
//!           varint each: bytes of the part; parts lie one after the other
//!           varint each: number of its files; files are numbered through the whole checkpoint in this order
//!           varint each: bytes of its chunks' elements
//!           32 bytes each: SHA-256 of the part
//! ```

use forebay_error::Result;

use super::limits::{MAX_FILES, MAX_PART_BYTES, MAX_RANKS};
use super::wire::{Put, Take};

/// What the index says of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartEntry {
    /// Its first byte in the section of parts.
    pub(crate) offset: u64,
    /// Its bytes.
    pub(crate) bytes: u64,
    /// The number of its first file in the checkpoint.
    pub(crate) first_file: u64,
    /// Its files.
    pub(crate) files: u64,
    /// Bytes of its chunks' elements.
    pub(crate) data_bytes: u64,
    /// SHA-256 of its bytes.
    pub(crate) digest: [u8; 32],
}

pub(crate) fn encode(parts: &[PartEntry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.len() * 44);
    out.put_varint(parts.len() as u64);
    parts.iter().for_each(|part| out.put_varint(part.bytes));
    parts.iter().for_each(|part| out.put_varint(part.files));
    parts.iter().for_each(|part| out.put_varint(part.data_bytes));
    parts.iter().for_each(|part| out.extend_from_slice(&part.digest));
    out
}

/// Reads the index; the parts fill `section` bytes.
pub(crate) fn decode(bytes: &[u8], section: u64, place: &str) -> Result<Vec<PartEntry>> {
    let mut take = Take::new(bytes, place);
    let count = take.count(MAX_RANKS, 35, "parts")?;
    let mut parts = Vec::with_capacity(count);
    let mut offset = 0u64;
    for _ in 0..count {
        let bytes = take.at_most(MAX_PART_BYTES, "bytes of a part")?;
        let part =
            PartEntry { offset, bytes, first_file: 0, files: 0, data_bytes: 0, digest: [0; 32] };
        parts.push(part);
        // A million parts of 64 MiB at the most.
        offset += bytes;
    }
    if offset != section {
        return Err(take.bad(format!("parts of {offset} bytes in a section of {section}")));
    }
    let mut first_file = 0;
    for part in &mut parts {
        part.files = take.at_most(MAX_FILES, "files of a part")?;
        part.first_file = first_file;
        first_file += part.files;
    }
    if u32::try_from(first_file).is_err() {
        return Err(take.bad(format!("{first_file} files in all")));
    }
    for part in &mut parts {
        part.data_bytes = take.varint()?;
    }
    for part in &mut parts {
        part.digest = take.digest()?;
    }
    take.end()?;
    Ok(parts)
}
