//! A checkpoint in a folder (here or in a bucket), checked byte by byte, whoever wrote it.
//!
//! Of our own everything is known, so everything is compared:
//!
//! | what | with what | where |
//! | --- | --- | --- |
//! | manifest | its own checksums and rules, by code of its own; the hash in `.metadata` | [`crate::audit`] |
//! | `.metadata` | the manifest: names, types, sides, places; then all of its bytes with what is written for that | `metadata` |
//! | tensors' and objects' bytes | the CRC-32 of each block | `blocks` |
//! | archive headers, directories, padding | what is written for that tensor at that place | `blocks` |
//! | whole files | their CRC-32, where the manifest has it (side files have nothing else) | `blocks` |
//!
//! A damaged manifest does not end it: what can be read by `.metadata` is then checked as torch's. Other writers'
//! checkpoints are checked by [`Checkpoint::verify`]. Memory: some hundred bytes a chunk, and 4 MiB a thread.

mod beside;
mod blocks;
mod gather;
mod large;
mod metadata;
mod reader;
mod spans;

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::dcp::metadata::DcpMetadata;
use forebay_format::{Folder, shown};

use super::files::Listing;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::audit::check_manifest;
use crate::commit::METADATA;
use crate::manifest::{Manifest, MemorySource};
use crate::model::Entry;
use crate::progress::Progress;
use crate::save::{ATTRIBUTE, Seal};

/// The most faults that are kept.
const MAX_FAULTS: usize = 1000;

/// The most bytes of `.metadata` or of a manifest.
const MAX_BYTES: u64 = 8 << 30;

/// Something that is wrong.
#[derive(Debug)]
pub struct Fault {
    /// The file that is at fault, relative to the checkpoint's folder.
    pub file: String,
    /// The tensor or object whose bytes they are, where that is known.
    pub name: Option<String>,
    /// The first byte of the file that is, or may be, wrong.
    pub offset: Option<u64>,
    /// What is wrong, and where.
    pub error: Error,
}

/// What a check found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Who wrote it; `None` where it could not be opened at all.
    pub origin: Option<Origin>,
    /// What is damaged, up to a thousand.
    pub faults: Vec<Fault>,
    /// How many more there are.
    pub more_faults: usize,
    /// What is sound but worth telling.
    pub warnings: Vec<Warning>,
    /// Tensors, and objects.
    pub values: (usize, usize),
    /// Data files, side files too.
    pub files: usize,
    /// Bytes that were compared with something.
    pub checked_bytes: u64,
    /// Bytes of files that have nothing to be compared with.
    pub unchecked_bytes: u64,
}

impl Verified {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.faults.is_empty()
    }

    fn add(&mut self, fault: Fault) {
        match self.faults.len() < MAX_FAULTS {
            true => self.faults.push(fault),
            false => self.more_faults += 1,
        }
    }

    /// A fault of a file as a whole.
    fn of_file(&mut self, folder: &Folder, file: &str, error: Error) {
        let error = error.at(shown(&folder.path().join(file)));
        self.add(Fault { file: file.to_owned(), name: None, offset: None, error });
    }

    fn warn(&mut self, concern: Concern, text: String) {
        self.warnings.push(Warning { concern, text });
    }
}

/// Checks the checkpoint in a folder.
///
/// Errors: those of [`Checkpoint::open`] for what is no checkpoint, or one that was never committed; what `progress`
/// says; and I/O that keeps everything from being looked at. All else is a fault in what is returned.
pub fn verify_folder(folder: impl Into<Folder>, progress: &impl Progress) -> Result<Verified> {
    let folder = &folder.into();
    let listing = super::files::list(folder)?;
    let mut found = Verified::default();
    if !listing.has_metadata {
        stock(folder, progress, &mut found)?;
        return Ok(found);
    }
    let bytes = read_whole(folder, METADATA)?;
    let table = DcpMetadata::read(&bytes);
    let (seal, unread) = match super::ours::seal(folder) {
        Ok(seal) => (seal, None),
        Err(error) => (None, Some(error)),
    };
    let name = match &seal {
        Some(seal) => Some(seal.manifest.clone()),
        None => beside::lost_manifest(folder, table.as_ref().ok())?,
    };
    let marked = table.as_ref().is_ok_and(|table| table.attribute(ATTRIBUTE).is_some());
    if seal.is_none() && (name.is_some() || marked || unread.is_some()) {
        let gone = || {
            let what = "the line that names the manifest is not there any more";
            Error::new(Code::InvalidMetadata, what)
        };
        found.of_file(folder, METADATA, unread.unwrap_or_else(gone));
    }
    let Some(name) = name else {
        stock(folder, progress, &mut found)?;
        return Ok(found);
    };
    ours(&Ours { folder, listing: &listing, bytes, table, seal, name }, progress, &mut found)?;
    Ok(found)
}

/// What is known of a checkpoint of ours before its manifest is read.
struct Ours<'a> {
    folder: &'a Folder,
    listing: &'a Listing,
    /// `.metadata`, and what it says.
    bytes: Vec<u8>,
    table: Result<DcpMetadata>,
    seal: Option<Seal>,
    /// The manifest's name.
    name: String,
}

fn ours(own: &Ours<'_>, progress: &impl Progress, found: &mut Verified) -> Result<()> {
    let Some(manifest) = read_manifest(own, found) else {
        // What `.metadata` and the archives say is all that there is.
        if let Err(error) = stock(own.folder, progress, found) {
            check_end(&error)?;
            found.of_file(own.folder, METADATA, error);
        }
        return Ok(());
    };
    found.origin = Some(Origin::Forebay(Box::new(manifest.info().clone())));
    for named in manifest.table().values() {
        match manifest.is_object(&named.value) {
            true => found.values.1 += 1,
            false => found.values.0 += 1,
        }
    }
    metadata::compare(own, &manifest, found);
    let files = match gather::Files::gather(&manifest) {
        Ok(files) => files,
        Err(error) => {
            found.of_file(own.folder, &own.name, error);
            if let Err(error) = stock(own.folder, progress, found) {
                check_end(&error)?;
                found.of_file(own.folder, METADATA, error);
            }
            return Ok(());
        }
    };
    beside::leftovers(own, &files, found)?;
    blocks::check(own.folder, &files, progress, found)
}

/// Errors that are no fault of the checkpoint end it.
fn check_end(error: &Error) -> Result<()> {
    match error.code() {
        Code::Cancelled => Err(error.again()),
        _ => Ok(()),
    }
}

/// The manifest, as far as it can be read; what is wrong with it is noted.
fn read_manifest(own: &Ours<'_>, found: &mut Verified) -> Option<Manifest> {
    let path = own.folder.path().join(&own.name);
    let bytes = match read_whole(own.folder, &own.name) {
        Ok(bytes) => bytes,
        Err(error) => {
            let error = match error.code() {
                Code::NotFound => Error::new(Code::MissingFile, "the manifest is not there")
                    .hint("the data were checked by the checksums of their archives alone"),
                _ => error,
            };
            found.of_file(own.folder, &own.name, error);
            return None;
        }
    };
    let hash = own.seal.as_ref().map(|seal| &seal.hash);
    let findings = check_manifest(&bytes, hash);
    let damaged = !findings.is_empty();
    for finding in findings {
        let error =
            Error::new(Code::InvalidMetadata, finding.what).at(shown(&path)).within(finding.place);
        found.add(Fault { file: own.name.clone(), name: None, offset: None, error });
    }
    let found_size = bytes.len() as u64;
    found.checked_bytes += found_size;
    let source = Arc::new(MemorySource::new(own.name.clone(), bytes));
    match Manifest::open(source, hash) {
        Ok(manifest) => Some(manifest),
        Err(_) if damaged => None,
        Err(error) => {
            found.of_file(own.folder, &own.name, error);
            None
        }
    }
}

/// Checks a checkpoint by what torch's own format has.
fn stock(folder: &Folder, progress: &impl Progress, found: &mut Verified) -> Result<()> {
    let checkpoint = Checkpoint::open(folder).or_else(|error| match found.is_sound() {
        true => Err(error),
        // Its manifest is no help.
        false => super::dcp::open_damaged(folder, &super::files::list(folder)?),
    })?;
    let chunks = checkpoint.entries.iter().flat_map(Entry::chunks);
    progress.total(chunks.fold(0_u64, |sum, chunk| sum.saturating_add(chunk.length)));
    let verdict = checkpoint.verify(|bytes| progress.add(bytes))?;
    for finding in verdict.faults {
        let (name, offset) = (Some(finding.name), None);
        found.add(Fault { file: finding.file, name, offset, error: finding.error });
    }
    found.more_faults += verdict.more_faults;
    found.warnings.extend(verdict.warnings);
    found.checked_bytes += verdict.checked_bytes;
    found.unchecked_bytes += verdict.unchecked_bytes;
    found.files = checkpoint.files.len();
    let is_object = |entry: &&Entry| matches!(entry.kind, crate::model::Kind::Object { .. });
    let objects = checkpoint.entries.iter().filter(is_object).count();
    found.values = (checkpoint.entries.len() - objects, objects);
    found.origin = Some(checkpoint.origin);
    Ok(())
}

/// All bytes of a small file.
fn read_whole(folder: &Folder, name: &str) -> Result<Vec<u8>> {
    let file = folder.open(name)?;
    if file.size() > MAX_BYTES {
        let what = format!("has {} bytes, {MAX_BYTES} is the most that is read", file.size());
        return Err(Error::new(Code::Unsupported, what).at(shown(&file.path)));
    }
    let mut bytes = buffer(file.size())?;
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// A buffer of that many bytes; `out_of_memory` where it cannot be had.
fn buffer(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let room = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let room =
        room.ok_or_else(|| Error::new(Code::OutOfMemory, format!("no memory for {len} bytes")))?;
    bytes.resize(room, 0);
    Ok(bytes)
}
