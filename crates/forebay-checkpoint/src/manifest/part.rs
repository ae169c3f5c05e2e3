//! What one rank contributes to a checkpoint.
//!
//! A rank publishes its part when its data is durable; the committer puts the parts of all ranks into the manifest byte
//! for byte, so that nothing is encoded twice and the manifest holds what the ranks themselves said.

use std::collections::HashSet;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::limits::{MAX_FILE_NAME_BYTES, MAX_FILES, MAX_RANKS};
use super::part_builder::PartBuilder;
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
    pub(crate) fn check(&self, place: &str) -> Result<()> {
        if self.world == 0 || u64::from(self.world) > MAX_RANKS || self.rank >= self.world {
            let what = format!("rank {} of {} ranks", self.rank, self.world);
            return Err(bad(what).at(place));
        }
        if self.files.len() as u64 > MAX_FILES {
            let what = format!("{} files, at most {MAX_FILES} fit", self.files.len());
            return Err(bad(what).at(place));
        }
        let mut names = HashSet::new();
        for file in &self.files {
            check_file_name(&file.name).map_err(|error| error.at(place))?;
            if !names.insert(file.name.as_str()) {
                return Err(bad(format!("file {} occurs twice", shown(&file.name))).at(place));
            }
        }
        if self.own.windows(2).any(|pair| matches!(pair, [a, b] if a.name >= b.name)) {
            return Err(bad("a name occurs twice, or names are not in order".into()).at(place));
        }
        for named in &self.own {
            named.check().map_err(|error| error.at(format!("{place}, {}", shown(&named.name))))?;
        }
        self.check_chunks(place)
    }

    fn check_chunks(&self, of: &str) -> Result<()> {
        let (mut file, mut free, mut crcs) = (0, 0, 0);
        for (number, chunk) in self.chunks.iter().enumerate() {
            if chunk.file != file {
                (file, free) = (chunk.file, 0);
            }
            let place = || format!("{of}, chunk {number}");
            let Some(data) = self.files.get(file as usize) else {
                return Err(bad(format!("file {file} is not in the list")).at(place()));
            };
            let end = chunk.offset.checked_add(chunk.length);
            let data_end = chunk.data_offset.checked_add(chunk.data_bytes);
            let (Some(end), Some(data_end)) = (end, data_end) else {
                return Err(bad("ends past 2^64".into()).at(place()));
            };
            if end > data.bytes {
                let (name, bytes) = (shown(&data.name), data.bytes);
                let what = format!("an item ends at byte {end} of {name}, which has {bytes}");
                return Err(Error::new(Code::OutOfBounds, what).at(place()));
            }
            if chunk.offset < free {
                let what =
                    format!("two items share byte {} of {}", chunk.offset, shown(&data.name));
                return Err(Error::new(Code::OffsetOverlap, what).at(place()));
            }
            if chunk.data_offset < chunk.offset || data_end > end {
                return Err(bad("elements lie outside of their item".into()).at(place()));
            }
            self.check_value(chunk.value).map_err(|error| error.at(place()))?;
            if chunk.first_crc as u64 != crcs {
                return Err(bad("checksums are not in order".into()).at(place()));
            }
            crcs += blocks(chunk.data_bytes);
            free = end;
        }
        match crcs == self.crcs.len() as u64 {
            true => Ok(()),
            false => {
                let what = format!("{} checksums for {crcs} blocks", self.crcs.len());
                Err(bad(what).at(of))
            }
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
            false => Err(bad(format!("value {number} of {count}"))),
        }
    }
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

fn bad(what: String) -> Error {
    Error::new(Code::InvalidMetadata, what)
}
