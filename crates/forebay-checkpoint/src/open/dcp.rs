//! From `.metadata` to the model.

use super::files::Listing;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::commit::METADATA;
use crate::model::{Chunk, DataFile, Entry, Kind, PathStep};
use crate::save::{refuse_ours, stamp};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::metadata::{self, DcpMetadata, EntryKind, Place, Step};
use forebay_format::pickle::Limits;
use forebay_format::{Folder, shown};
use forebay_tensor::Region;
use std::collections::BTreeSet;

/// How many stale files are named.
const NAMED: usize = 20;

/// Opens a folder that has a `.metadata` without a line of ours.
///
/// Errors: `invalid_metadata` where it is ours all the same: the line is damaged, and with it all that is known of the
/// bytes beyond their archives' own checksums.
pub(super) fn open_stock(folder: &Folder, listing: &Listing) -> Result<Checkpoint> {
    open_if(folder, listing, |_, metadata| {
        refuse_ours(metadata).map_err(|error| {
            error
                .hint("`forebay ckpt verify` says what else is damaged; use the step before it")
                .hint("torch.distributed.checkpoint loads it still, and compares no checksums")
        })
    })
}

/// Opens a folder of ours whose manifest is gone, by its `.metadata` alone. Errors: `checksum` where that has a CRC of
/// all of itself, and another one.
pub(super) fn open(folder: &Folder, listing: &Listing) -> Result<Checkpoint> {
    open_if(folder, listing, |bytes, _| stamp::check(bytes).map(drop))
}

/// Opens a folder that has a `.metadata` as far as that can be read, whoever wrote it, damaged or not: to say what else
/// is wrong, never to load from.
pub(super) fn open_damaged(folder: &Folder, listing: &Listing) -> Result<Checkpoint> {
    open_if(folder, listing, |_, _| Ok(()))
}

/// Opens what `accept` does not refuse: it is given the bytes of `.metadata` and what they say.
fn open_if(
    folder: &Folder,
    listing: &Listing,
    accept: impl FnOnce(&[u8], &DcpMetadata) -> Result<()>,
) -> Result<Checkpoint> {
    let path = folder.path().join(METADATA);
    let parsed = read(folder).and_then(|bytes| {
        let metadata = DcpMetadata::read(&bytes)?;
        accept(&bytes, &metadata)?;
        Ok(metadata)
    });
    let metadata = parsed.map_err(|error| error.at(shown(&path)))?;
    let mut warnings: Vec<Warning> =
        metadata.warnings().iter().map(|text| told(text, !metadata.stale().is_empty())).collect();
    let entries = metadata.entries().filter_map(|entry| convert(&entry, &mut warnings)).collect();
    warnings.extend(leftovers(listing));
    warnings.extend(stale_files(folder, listing, metadata.files()));
    let files = metadata.files().iter();
    let files = files.map(|name| DataFile { name: name.clone(), bytes: None }).collect();
    let origin = Origin::Dcp {
        version: metadata.version().map(str::to_owned),
        save_id: metadata.storage_meta().and_then(|meta| meta.save_id.clone()),
    };
    let mut checkpoint = Checkpoint::new(origin, entries, files, folder, warnings)?;
    checkpoint.attributes = metadata.attributes().to_vec();
    Ok(checkpoint)
}

fn read(folder: &Folder) -> Result<Vec<u8>> {
    let file = folder.open(METADATA)?;
    let most = Limits::METADATA.input_bytes as u64;
    if file.size() > most {
        let what = format!("has {} bytes, {most} is the most that is read", file.size());
        return Err(Error::new(Code::Unsupported, what));
    }
    if file.size() == 0 {
        return Err(Error::new(Code::InvalidMetadata, "is empty")
            .hint("it may have been lost with the power: use the checkpoint before this one"));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(file.size()).ok();
    let room = room.filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let room = room.ok_or_else(|| Error::new(Code::OutOfMemory, "no memory for .metadata"))?;
    bytes.resize(room, 0);
    file.read_exact_at(&mut bytes, 0)?;
    file.check_unchanged()?;
    Ok(bytes)
}

/// A warning of the reader of `.metadata`; one of them may be about items without an entry.
fn told(text: &str, has_stale: bool) -> Warning {
    let concern = match has_stale && text.contains("belong to no entry") {
        true => Concern::StaleItem,
        false => Concern::Other,
    };
    Warning { concern, text: text.to_owned() }
}

/// An entry of the model; `None`, and a warning, for a dtype that nothing here can hold.
fn convert(entry: &metadata::Entry<'_>, warnings: &mut Vec<Warning>) -> Option<Entry> {
    let kind = match &entry.kind {
        EntryKind::Object { place } => {
            let region = Region { offsets: Vec::new(), sizes: Vec::new() };
            Kind::Object { chunk: chunk(region, *place) }
        }
        EntryKind::Tensor { element, shape, chunks } => {
            let Some(dtype) = element.dtype else {
                let (name, dtype) = (entry.name, &element.torch);
                let text = format!("tensor {name:?} of torch.{dtype} is left out: it is not read");
                warnings.push(Warning { concern: Concern::LeftOut, text });
                return None;
            };
            // A chunk that is stored nowhere has no elements.
            let stored = |part: metadata::Chunk<'_>| Some(chunk(part.region(), part.place?));
            let chunks = chunks.clone().filter_map(stored).collect();
            Kind::Tensor { dtype, shape: shape.to_vec(), chunks }
        }
    };
    let step = |step: &Step<'_>| match step {
        Step::Key(key) => PathStep::Key((*key).to_owned()),
        Step::Index(index) => PathStep::Index(*index),
    };
    let path = entry.path.iter().flatten().map(step).collect();
    Some(Entry { name: entry.name.to_owned(), path, kind })
}

fn chunk(region: Region, place: Place<'_>) -> Chunk {
    Chunk {
        region,
        file: place.file as u32,
        offset: place.offset,
        length: place.length,
        transforms: place.transforms.to_vec(),
        data: None,
    }
}

pub(super) fn leftovers(listing: &Listing) -> impl Iterator<Item = Warning> + '_ {
    listing.leftovers.iter().map(|name| Warning {
        concern: Concern::Leftover,
        text: format!("{name:?} is left from a save that did not end; it is not read"),
    })
}

/// Data files that nothing refers to: from an earlier save on more ranks, or one that did not end. An empty one is
/// what a rank without data leaves, in any save.
pub(super) fn stale_files(folder: &Folder, listing: &Listing, files: &[String]) -> Vec<Warning> {
    let used: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    let stale = listing.distcp.iter().map(String::as_str).filter(|name| !used.contains(name));
    let stale: Vec<&str> = stale.collect();
    let sizes = match folder.sizes(&stale) {
        Ok(sizes) => sizes,
        // What can be read is no worse for it.
        Err(error) => {
            let text = format!("which data files belong to nothing is not known: {}", error.what());
            return vec![Warning { concern: Concern::Other, text }];
        }
    };
    let with_bytes = stale.into_iter().zip(sizes).filter(|(_, size)| size.unwrap_or(0) > 0);
    let stale: Vec<&str> = with_bytes.map(|(name, _)| name).collect();
    let named = stale.iter().take(NAMED).map(|name| Warning {
        concern: Concern::StaleFile,
        text: format!("data file {name:?} belongs to nothing; it is not read"),
    });
    let mut warnings: Vec<Warning> = named.collect();
    if stale.len() > NAMED {
        let text = format!("{} more data files belong to nothing", stale.len() - NAMED);
        warnings.push(Warning { concern: Concern::StaleFile, text });
    }
    warnings
}
