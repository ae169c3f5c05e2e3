//! Opening a checkpoint that is there: from a folder to what it holds.
//!
//! | origin | known by | read from |
//! | --- | --- | --- |
//! | Forebay | a line in `.metadata` that names a manifest | the manifest |
//! | torch's distributed checkpoint | `.metadata` | that file; items are opened when they are read |
//! | torch's Hugging Face storage writer | `DCP_SHARDING_INFO` in safetensors headers | all headers |
//!
//! `.metadata` decides whether a checkpoint counts: data files without it are a save that did not end, and are never
//! guessed from. Opening reads metadata and the names in the folder, no data file: one that is missing or damaged is
//! the trouble of those entries that need it ([`Checkpoint::read_tensor`], [`Checkpoint::verify`]), and all others
//! can be read. What lies in the folder and belongs to nothing is told as a warning.

mod catalog;
mod dcp;
mod files;
mod hf;
mod item;
pub(crate) mod ours;
mod place;
mod regions;
mod verify;
mod verify_ours;

pub use catalog::{Opened, open_files, open_model};
pub use place::{Place, folder_in, without_metadata};
pub use verify::{Finding, Verdict};
pub use verify_ours::{Fault, Verified, verify_folder};

use crate::manifest::Info;
use crate::model::{DataFile, Entry};
use files::DataFolder;
use forebay_error::{Code, Error, Result};
use forebay_format::torch_zip::PlainObject;
use forebay_format::{Folder, shown};
use forebay_tensor::ChunkIndex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Who wrote a checkpoint, and what is known of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// torch.distributed.checkpoint, or something that writes the same.
    Dcp {
        /// The version of the format; `None` before torch 2.9.
        version: Option<String>,
        /// The random name of the save; `None` before torch 2.4.
        save_id: Option<String>,
    },
    /// torch's Hugging Face storage writer, without consolidation.
    HfShards,
    /// Forebay: read by its manifest.
    Forebay(Box<Info>),
}

/// What kind of thing a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concern {
    /// Something that a save left which did not end.
    Leftover,
    /// A data file that nothing refers to.
    StaleFile,
    /// A stored item that no entry refers to, or bytes behind the last one.
    StaleItem,
    /// An entry that is there and not read: its dtype is none that anything here can hold.
    LeftOut,
    /// Anything else that was accepted but is odd.
    Other,
}

impl Concern {
    /// A stable name.
    pub fn name(self) -> &'static str {
        match self {
            Concern::Leftover => "leftover",
            Concern::StaleFile => "stale_file",
            Concern::StaleItem => "stale_item",
            Concern::LeftOut => "left_out",
            Concern::Other => "other",
        }
    }
}

/// What was accepted but is worth telling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// What it is about.
    pub concern: Concern,
    /// In words.
    pub text: String,
}

/// A checkpoint: what it holds and where.
#[derive(Debug)]
pub struct Checkpoint {
    /// Who wrote it.
    pub origin: Origin,
    /// Its named values, in the order of the metadata.
    pub entries: Vec<Entry>,
    /// Its data files.
    pub files: Vec<DataFile>,
    /// What others have added to torch's metadata.
    pub attributes: Vec<(String, PlainObject)>,
    /// What is worth telling.
    pub warnings: Vec<Warning>,
    /// CRC-32 of each data file, where it is known.
    pub(crate) file_crcs: Vec<Option<u32>>,
    folder: DataFolder,
    /// Places in `entries`, sorted by name.
    by_name: Vec<u32>,
    /// Of entries of many chunks, by their places: which chunks meet a region. Made at first use.
    indexes: Mutex<HashMap<usize, Arc<ChunkIndex>>>,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder, here or in a bucket.
    ///
    /// Errors: `not_committed` where there are data files and no `.metadata`; `unknown_format` where there is nothing
    /// of a checkpoint; `invalid_metadata` for one of ours whose manifest is not to be found by its `.metadata`, and
    /// `invalid_metadata`, `forbidden_global`, `unsafe_path`, `overlap`, `hole` and `out_of_bounds`
    /// for what the metadata says; `missing_file` where shards are numbered with gaps.
    pub fn open(folder: impl Into<Folder>) -> Result<Self> {
        let folder = &folder.into();
        let listing = files::list(folder)?;
        if listing.has_metadata {
            return match ours::open(folder, &listing)? {
                Some(checkpoint) => Ok(checkpoint),
                None => dcp::open_stock(folder, &listing),
            };
        }
        let shards = match listing.has_index || listing.safetensors.is_empty() {
            true => None,
            false => hf::open(folder, &listing)?,
        };
        shards.ok_or_else(|| files::nothing(folder, &listing))
    }

    fn new(
        origin: Origin,
        entries: Vec<Entry>,
        files: Vec<DataFile>,
        folder: &Folder,
        warnings: Vec<Warning>,
    ) -> Result<Self> {
        let count = u32::try_from(entries.len())
            .map_err(|_| Error::new(Code::Unsupported, "more than 2^32 entries"))?;
        let mut by_name: Vec<u32> = (0..count).collect();
        by_name.sort_by_key(|&at| entries.get(at as usize).map(|entry| entry.name.as_str()));
        let folder = DataFolder::new(folder.clone(), files.len());
        let (attributes, file_crcs) = (Vec::new(), Vec::new());
        let indexes = Mutex::default();
        Ok(Self {
            origin,
            entries,
            files,
            attributes,
            warnings,
            file_crcs,
            folder,
            by_name,
            indexes,
        })
    }

    /// Where it is; of one in a bucket its URL.
    pub fn folder(&self) -> &Path {
        self.folder.folder().path()
    }

    /// The same, as what can be looked into.
    pub fn location(&self) -> &Folder {
        self.folder.folder()
    }

    /// The entry of that name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(self.number(name)?)
    }

    /// The place of the entry of that name.
    pub(crate) fn number(&self, name: &str) -> Option<usize> {
        let key = |at: &u32| self.entries.get(*at as usize).map(|entry| entry.name.as_str());
        let place = self.by_name.binary_search_by(|at| key(at).cmp(&Some(name))).ok()?;
        self.by_name.get(place).map(|&at| at as usize)
    }

    /// An error about an entry: names the file, or the folder, and the entry.
    fn place(&self, name: &str, error: Error) -> Error {
        error.at(shown(self.folder())).within(format!("{name:?}"))
    }
}
