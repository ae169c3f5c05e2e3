//! Parts that were read, and how many of them are kept.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::part::{Part, ValueRef};
use super::resolve::{Piece, Resolver};
use super::structure::Structure;
use super::value::shown;
use crate::model::{Chunk, DataFile, DataPlace};

/// Bytes of parts, as stored, that a manifest keeps; in memory they take some four times as much. 64 MiB are the parts
/// of 7,000 ranks with a thousand tensors each.
const CACHE_BYTES: u64 = 64 << 20;

/// A part with its chunks by value.
pub(crate) struct LoadedPart {
    part: Part,
    first_file: u32,
    /// By value, then in the order of the part; keys are numbers in the manifest's table.
    pieces: Vec<Piece>,
}

impl LoadedPart {
    /// Checks a part against the table. `place` is what errors call it; `shared` has for each value of the common
    /// structure its place in the table.
    pub(crate) fn new(
        part: Part,
        first_file: u32,
        table: &Structure,
        shared: &[u32],
        place: &str,
    ) -> Result<Self> {
        let mut own = Vec::with_capacity(part.own().len());
        for named in part.own() {
            match table.find(&named.name) {
                Some((number, known)) if known == named => own.push(number),
                _ => {
                    let what = "a value of a rank's own is not so in the table";
                    return Err(Error::new(Code::InvalidMetadata, what)
                        .at(format!("{place}, {}", shown(&named.name))));
                }
            }
        }
        let pieces = Resolver::new(&part, table, place).pieces(|value| {
            let number = match value {
                ValueRef::Shared(number) => shared.get(number as usize),
                ValueRef::Own(number) => own.get(number as usize),
            };
            number.and_then(|&number| Some((number, table.values().get(number as usize)?)))
        })?;
        Ok(Self { part, first_file, pieces })
    }

    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    /// One of its files, by the number that chunks call it.
    pub(crate) fn file(&self, number: u32) -> Option<DataFile> {
        let file = self.part.files().get(number.checked_sub(self.first_file)? as usize)?;
        Some(DataFile { name: file.name.clone(), bytes: Some(file.bytes) })
    }

    /// Appends the chunks of a value that share elements with a region, or all that have any.
    pub(crate) fn chunks_of(&self, number: u32, wanted: Option<&Region>, into: &mut Vec<Chunk>) {
        let first = self.pieces.partition_point(|piece| piece.key < number);
        let after = self.pieces.partition_point(|piece| piece.key <= number);
        for piece in self.pieces.get(first..after).unwrap_or_default() {
            let meets = match wanted {
                Some(wanted) => piece.region.intersect(wanted).is_some(),
                None => !piece.region.is_empty(),
            };
            into.extend(if meets { self.chunk(piece) } else { None });
        }
    }

    pub(crate) fn for_each(&self, mut each: impl FnMut(u32, Chunk) -> Result<()>) -> Result<()> {
        for piece in &self.pieces {
            if let Some(chunk) = self.chunk(piece) {
                each(piece.key, chunk)?;
            }
        }
        Ok(())
    }

    fn chunk(&self, piece: &Piece) -> Option<Chunk> {
        let chunk = self.part.chunks().get(piece.chunk as usize)?;
        let crcs = self.part.crcs(chunk).to_vec();
        Some(Chunk {
            region: piece.region.clone(),
            file: self.first_file + chunk.file,
            offset: chunk.offset,
            length: chunk.length,
            transforms: Vec::new(),
            data: Some(DataPlace { offset: chunk.data_offset, bytes: chunk.data_bytes, crcs }),
        })
    }
}

/// Parts that were read last.
#[derive(Default)]
pub(crate) struct Cache {
    parts: HashMap<u32, (u64, Arc<LoadedPart>)>,
    order: VecDeque<u32>,
    bytes: u64,
}

impl Cache {
    pub(crate) fn get(&self, rank: u32) -> Option<Arc<LoadedPart>> {
        self.parts.get(&rank).map(|(_, part)| Arc::clone(part))
    }

    /// Keeps a part, and drops the oldest ones where it gets too much.
    pub(crate) fn put(&mut self, rank: u32, bytes: u64, part: Arc<LoadedPart>) {
        if self.parts.insert(rank, (bytes, part)).is_none() {
            self.order.push_back(rank);
            self.bytes += bytes;
        }
        while self.bytes > CACHE_BYTES && self.order.len() > 1 {
            let oldest = self.order.pop_front().and_then(|rank| self.parts.remove(&rank));
            self.bytes -= oldest.map_or(0, |(bytes, _)| bytes);
        }
    }
}
