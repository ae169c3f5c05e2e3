//! What one rank contributes to a checkpoint.
//!
//! A rank publishes its part when its data is durable; the committer puts the parts of all ranks into the manifest byte
//! for byte, so that nothing is encoded twice and the manifest holds what the ranks themselves said.

use std::collections::HashSet;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::limits::{MAX_FILES, MAX_FILE_NAME_BYTES, MAX_RANKS};
use super::value::{Named, shown};
use crate::model::BLOCK_BYTES;

/// One file of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartFile {
    /// Its name in the step's folder: one name, no folder, not starting with a dot.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// CRC-32 of all of it, where the writer knew.
    pub crc: Option<u32>,
}

/// A value that a chunk belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ValueRef {
    /// By its number in the structure that all ranks agreed on.
    Shared(u32),
    /// By its number among the values that the part lists itself.
    Own(u32),
}

/// Which region of a tensor a chunk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The next box that the layout gives to the rank: the first such chunk of a tensor in the part is its first box.
    Implied,
    /// All of the tensor; of an object, always.
    Whole,
    /// This one.
    Box(Region),
}

/// A chunk of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartChunk {
    /// What it is a piece of.
    pub value: ValueRef,
    /// Which piece.
    pub place: Place,
    /// Which of the part's files.
    pub file: u32,
    /// First byte of the item in the file.
    pub offset: u64,
    /// Bytes of the item.
    pub length: u64,
    /// First byte of the elements in the file; of an object, of the item.
    pub data_offset: u64,
    /// Bytes of the elements; of an object, of the item.
    pub data_bytes: u64,
    /// Its first checksum in [`Part::crcs`]; one follows for each block of [`BLOCK_BYTES`].
    pub(crate) first_crc: usize,
}

/// What one rank contributes: checked, chunks in the order of file and offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub(crate) attempt: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) structure: Option<SharedStructure>,
    pub(crate) files: Vec<PartFile>,
    pub(crate) own: Vec<Named>,
    pub(crate) chunks: Vec<PartChunk>,
    pub(crate) crcs: Vec<u32>,
}

/// The structure that a part's numbers refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedStructure {
    /// Its hash.
    pub hash: [u8; 32],
    /// How many values it has.
    pub values: u32,
}

impl Part {
    /// A part of the attempt without files.
    pub fn builder(attempt: impl Into<String>, rank: u32, world: u32) -> PartBuilder {
        let attempt = attempt.into();
        PartBuilder(Part {
            attempt,
            rank,
            world,
            structure: None,
            files: Vec::new(),
            own: Vec::new(),
            chunks: Vec::new(),
            crcs: Vec::new(),
        })
    }

    /// The attempt that it belongs to.
    pub fn attempt(&self) -> &str {
        &self.attempt
    }

    /// Whose part it is.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the job.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The structure that its numbers refer to.
    pub fn structure(&self) -> Option<SharedStructure> {
        self.structure
    }

    /// Its files.
    pub fn files(&self) -> &[PartFile] {
        &self.files
    }

    /// Values that are not in the shared structure, by name.
    pub fn own(&self) -> &[Named] {
        &self.own
    }

    /// Its chunks, by file and offset.
    pub fn chunks(&self) -> &[PartChunk] {
        &self.chunks
    }

    /// The checksums of a chunk's blocks.
    pub fn crcs(&self, chunk: &PartChunk) -> &[u32] {
        let count = blocks(chunk.data_bytes);
        let end = usize::try_from(count).ok().and_then(|count| chunk.first_crc.checked_add(count));
        end.and_then(|end| self.crcs.get(chunk.first_crc..end)).unwrap_or_default()
    }

    /// Checks everything that can be checked without the structure.
    pub(crate) fn check(&self) -> Result<()> {
        if self.world == 0 || u64::from(self.world) > MAX_RANKS || self.rank >= self.world {
            return Err(self.bad(format!("rank {} of {} ranks", self.rank, self.world)));
        }
        if self.files.len() as u64 > MAX_FILES {
            return Err(self.bad(format!("{} files, at most {MAX_FILES} fit", self.files.len())));
        }
        let mut names = HashSet::new();
        for file in &self.files {
            check_file_name(&file.name)?;
            if !names.insert(file.name.as_str()) {
                return Err(self.bad(format!("file {} occurs twice", shown(&file.name))));
            }
        }
        if self.own.windows(2).any(|pair| matches!(pair, [a, b] if a.name >= b.name)) {
            return Err(self.bad("a name occurs twice, or names are not in order".into()));
        }
        self.own.iter().try_for_each(Named::check)?;
        self.check_chunks()
    }

    fn check_chunks(&self) -> Result<()> {
        let (mut file, mut free, mut crcs) = (0, 0, 0);
        for (number, chunk) in self.chunks.iter().enumerate() {
            if chunk.file != file {
                (file, free) = (chunk.file, 0);
            }
            let place = || format!("chunk {number} of the part of rank {}", self.rank);
            let Some(data) = self.files.get(file as usize) else {
                return Err(self.bad(format!("file {file} is not in the list")).at(place()));
            };
            let end = chunk.offset.checked_add(chunk.length);
            let data_end = chunk.data_offset.checked_add(chunk.data_bytes);
            let (Some(end), Some(data_end)) = (end, data_end) else {
                return Err(self.bad("ends past 2^64".into()).at(place()));
            };
            if end > data.bytes {
                let (name, bytes) = (shown(&data.name), data.bytes);
                let what = format!("an item ends at byte {end} of {name}, which has {bytes}");
                return Err(Error::new(Code::OutOfBounds, what).at(place()));
            }
            if chunk.offset < free {
                let what = format!("two items share byte {} of {}", chunk.offset, shown(&data.name));
                return Err(Error::new(Code::OffsetOverlap, what).at(place()));
            }
            if chunk.data_offset < chunk.offset || data_end > end {
                return Err(self.bad("elements lie outside of their item".into()).at(place()));
            }
            self.check_value(chunk.value).map_err(|error| error.at(place()))?;
            if chunk.first_crc as u64 != crcs {
                return Err(self.bad("checksums are not in order".into()).at(place()));
            }
            crcs += blocks(chunk.data_bytes);
            free = end;
        }
        match crcs == self.crcs.len() as u64 {
            true => Ok(()),
            false => Err(self.bad(format!("{} checksums for {crcs} blocks", self.crcs.len()))),
        }
    }

    fn check_value(&self, value: ValueRef) -> Result<()> {
        let (number, count) = match value {
            ValueRef::Shared(number) => {
                (number, self.structure.map_or(0, |shared| shared.values as usize))
            }
            ValueRef::Own(number) => (number, self.own.len()),
        };
        match (number as usize) < count {
            true => Ok(()),
            false => Err(self.bad(format!("value {number} of {count}"))),
        }
    }

    fn bad(&self, what: String) -> Error {
        Error::new(Code::InvalidMetadata, what)
    }
}

/// Puts a part together.
pub struct PartBuilder(Part);

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

    /// Adds a value that is not in the shared structure: it has no layout. Gives its number until `finish`, which sorts.
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
        part.check()?;
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

/// Blocks that have a checksum of their own in so many bytes.
pub(crate) fn blocks(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES)
}

/// Fails with `unsafe_path` unless the name is one that a data file may have.
pub(crate) fn check_file_name(name: &str) -> Result<()> {
    let bad = name.is_empty()
        || name.len() as u64 > MAX_FILE_NAME_BYTES
        || name.starts_with('.')
        || name.chars().any(|c| c == '/' || c == '\\' || c.is_control());
    match bad {
        false => Ok(()),
        true => Err(Error::new(Code::UnsafePath, format!("a data file called {}", shown(name)))),
    }
}
