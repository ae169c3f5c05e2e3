//! The folder of a checkpoint: what is in it by name, and its data files, each opened when it is first needed.

use crate::model::{Chunk, DataFile};
use forebay_error::{Code, Error, Result};
use forebay_format::{Folder, OpenFile, shown};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The most names that a folder may hold.
pub(super) const MAX_NAMES: usize = 4 << 20;

/// The most data files that stay open; beyond, each is opened for its use.
const KEPT_OPEN: usize = 256;

/// How far behind the last item a file may go on without a word: writers may pad to a page.
const PADDING_BYTES: u64 = 64 << 10;

/// Names that say something.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) has_metadata: bool,
    pub(super) has_index: bool,
    /// `.metadata.tmp` and its kin.
    pub(super) leftovers: BTreeSet<String>,
    /// `__0.metadata`: of saves without collective calls.
    pub(super) per_rank: BTreeSet<String>,
    pub(super) distcp: BTreeSet<String>,
    pub(super) safetensors: BTreeSet<String>,
    /// Folders that may be steps.
    pub(super) steps: BTreeSet<String>,
}

/// The names in a folder, without what is in folders below.
pub(super) fn list(folder: &Folder) -> Result<Listing> {
    let mut listing = Listing::default();
    for name in folder.names(MAX_NAMES)? {
        match name.as_str() {
            ".metadata" => listing.has_metadata = true,
            _ if name.starts_with(".metadata.") => drop(listing.leftovers.insert(name)),
            _ if name.starts_with("__") && name.ends_with(".metadata") => {
                listing.per_rank.insert(name);
            }
            _ if name.ends_with(".distcp") => drop(listing.distcp.insert(name)),
            _ if name.starts_with('.') => {}
            _ if name.ends_with(".safetensors.index.json") => listing.has_index = true,
            _ if name.ends_with(".safetensors") => drop(listing.safetensors.insert(name)),
            _ if name.starts_with("step") => drop(listing.steps.insert(name)),
            _ => {}
        }
    }
    Ok(listing)
}

/// The error for a folder without a checkpoint that counts.
pub(super) fn nothing(folder: &Folder, listing: &Listing) -> Error {
    let error = if !listing.per_rank.is_empty() {
        let what = "the checkpoint was saved without collective calls: each rank's part alone";
        Error::new(Code::Unsupported, what)
            .hint("load it with torch on as many ranks, and save it with use_collectives=True")
    } else if !listing.distcp.is_empty() || !listing.leftovers.is_empty() {
        let found = match listing.leftovers.first() {
            Some(name) => format!("{name} is there, .metadata is not"),
            None => "there are data files, but no .metadata".to_owned(),
        };
        Error::new(Code::NotCommitted, format!("the save did not end: {found}"))
            .hint("this checkpoint never counted: use the one before it")
    } else {
        let error = Error::new(Code::UnknownFormat, "the folder holds no checkpoint");
        match listing.steps.last() {
            Some(step) => error.hint(format!("name one of the folders in it, such as {step}")),
            None => error.hint("name the folder that holds .metadata"),
        }
    };
    error.at(shown(folder.path()))
}

/// A folder and its data files, by number.
#[derive(Debug)]
pub(super) struct DataFolder {
    folder: Folder,
    opened: Mutex<Vec<Option<Arc<OpenFile>>>>,
}

impl DataFolder {
    pub(super) fn new(folder: Folder, files: usize) -> Self {
        Self { folder, opened: Mutex::new(vec![None; files.min(KEPT_OPEN)]) }
    }

    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// A data file, opened once. `missing_file` where it is not there.
    pub(super) fn open(&self, number: u32, file: &DataFile) -> Result<Arc<OpenFile>> {
        let slot = number as usize;
        let opened = || self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(open)) = opened().get(slot) {
            return Ok(open.clone());
        }
        let open = self.folder.open(&file.name).map_err(|error| match error.code() {
            Code::NotFound => {
                let what = format!("the data file {:?} is not there", file.name);
                Error::new(Code::MissingFile, what)
                    .at(shown(self.folder.path()))
                    .hint("copy it again from where the checkpoint is whole")
            }
            _ => error,
        })?;
        if let Some(bytes) = file.bytes.filter(|&bytes| bytes != open.size()) {
            let (code, found) = match open.size() < bytes {
                true => (Code::Truncated, "shorter"),
                false => (Code::InvalidItem, "longer"),
            };
            let what = format!("has {} bytes, {found} than the {bytes} that it must", open.size());
            return Err(Error::new(code, what).at(shown(&open.path)));
        }
        let open = Arc::new(open);
        match opened().get_mut(slot) {
            // Another thread may have been faster: all use the same.
            Some(slot) => Ok(slot.get_or_insert(open).clone()),
            None => Ok(open),
        }
    }
}

/// Fails where an item reaches past the end of its file: `truncated` where the file was cut, `out_of_bounds` where the
/// place makes no sense, being far behind both the file and the items before, which end at `ends_before`.
pub(super) fn check_span(
    file: &OpenFile,
    chunk: &Chunk,
    ends_before: impl FnOnce() -> u64,
) -> Result<()> {
    let size = file.size();
    let end = chunk.offset.checked_add(chunk.length);
    if end.is_some_and(|end| end <= size) {
        return Ok(());
    }
    let (offset, length) = (chunk.offset, chunk.length);
    let error = match offset <= ends_before().max(size).saturating_add(PADDING_BYTES) {
        true => {
            let needs = offset.saturating_add(length);
            let what = format!("truncated, the file has {size} bytes, needs {needs}");
            Error::new(Code::Truncated, what).hint("copy the file again")
        }
        false => {
            let what = format!(
                "an item of {length} bytes is said to start at byte {offset} of a file of {size}"
            );
            Error::new(Code::OutOfBounds, what)
        }
    };
    Err(error.at(shown(&file.path)))
}

/// Whether a file goes on behind its last item for longer than padding does.
pub(super) fn has_tail(size: u64, last_end: u64) -> bool {
    size > last_end.saturating_add(PADDING_BYTES)
}
