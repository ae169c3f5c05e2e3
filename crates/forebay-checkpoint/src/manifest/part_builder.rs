//! Putting a part together.

use forebay_error::{Code, Error, Result};

use super::part::{Part, PartChunk, PartFile, Place, SharedStructure, ValueRef, blocks};
use super::value::Named;

/// Puts a part together.
pub struct PartBuilder(pub(super) Part);

/// Where a chunk lies: see the fields of [`PartChunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemPlace {
    /// Which of the part's files.
    pub file: u32,
    /// First byte of the item.
    pub offset: u64,
    /// Bytes of the item.
    pub length: u64,
    /// First byte of the elements.
    pub data_offset: u64,
    /// Bytes of the elements.
    pub data_bytes: u64,
}

impl PartBuilder {
    /// Numbers may refer to this structure.
    pub fn structure(&mut self, hash: [u8; 32], values: u32) {
        self.0.structure = Some(SharedStructure { hash, values });
    }

    /// Adds a file; gives its number.
    pub fn file(&mut self, file: PartFile) -> u32 {
        self.0.files.push(file);
        self.0.files.len() as u32 - 1
    }

    /// Sets what was not known when the file was added.
    pub fn set_file(&mut self, number: u32, bytes: u64, crc: Option<u32>) {
        if let Some(file) = self.0.files.get_mut(number as usize) {
            (file.bytes, file.crc) = (bytes, crc);
        }
    }

    /// Adds a value that is not in the shared structure: it has no layout. Gives its number until `finish`, which
    /// sorts.
    pub fn own(&mut self, named: Named) -> u32 {
        self.0.own.push(named);
        self.0.own.len() as u32 - 1
    }

    /// Adds a chunk, in any order, but boxes of one tensor that are [`Place::Implied`] must lie in their files in the
    /// order of the boxes. `crcs` has one checksum for each block of the elements.
    pub fn chunk(&mut self, value: ValueRef, place: Place, item: ItemPlace, crcs: &[u32]) {
        let first_crc = self.0.crcs.len();
        self.0.crcs.extend_from_slice(crcs);
        let ItemPlace { file, offset, length, data_offset, data_bytes } = item;
        self.0.chunks.push(PartChunk {
            value,
            place,
            file,
            offset,
            length,
            data_offset,
            data_bytes,
            first_crc,
        });
    }

    /// The part.
    ///
    /// Errors: `invalid_metadata`, `out_of_bounds`, `offset_overlap`, `unsafe_path` for what contradicts itself.
    pub fn finish(self) -> Result<Part> {
        let Self(mut part) = self;
        sort_own(&mut part);
        let in_order = |pair: &[PartChunk]| match pair {
            [a, b] => (a.file, a.offset) <= (b.file, b.offset),
            _ => true,
        };
        if !part.chunks.windows(2).all(in_order) {
            sort_chunks(&mut part)?;
        }
        part.check(&format!("the part of rank {}", part.rank))?;
        Ok(part)
    }
}

fn sort_own(part: &mut Part) {
    if part.own.is_sorted_by(|a, b| a.name <= b.name) {
        return;
    }
    let mut numbered: Vec<_> = std::mem::take(&mut part.own).into_iter().zip(0u32..).collect();
    numbered.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let mut places = vec![0; numbered.len()];
    for ((_, old), new) in numbered.iter().zip(0u32..) {
        if let Some(place) = places.get_mut(*old as usize) {
            *place = new;
        }
    }
    part.own = numbered.into_iter().map(|(named, _)| named).collect();
    for chunk in &mut part.chunks {
        if let ValueRef::Own(number) = &mut chunk.value {
            *number = places.get(*number as usize).copied().unwrap_or(u32::MAX);
        }
    }
}

fn sort_chunks(part: &mut Part) -> Result<()> {
    let crcs = std::mem::take(&mut part.crcs);
    // Stable: empty items at one place keep their order.
    part.chunks.sort_by_key(|chunk| (chunk.file, chunk.offset));
    for chunk in &mut part.chunks {
        let count = usize::try_from(blocks(chunk.data_bytes)).ok();
        let end = count.and_then(|count| chunk.first_crc.checked_add(count));
        let Some(own) = end.and_then(|end| crcs.get(chunk.first_crc..end)) else {
            let what = format!("a chunk of {} bytes lacks checksums", chunk.data_bytes);
            return Err(Error::new(Code::InvalidMetadata, what));
        };
        chunk.first_crc = part.crcs.len();
        part.crcs.extend_from_slice(own);
    }
    Ok(())
}
