//! Checkpoints of our own, opened by their manifest.
//!
//! `.metadata` is looked at for the one line that names the manifest ([`Seal`]); its tables are not read. Where the
//! manifest is gone the checkpoint is still one of torch's, and is opened as such, with a warning: its bytes then
//! have only the checksums of their archives.
//!
//! [`open`] reads all of the manifest, for listings and exports. A restore asks for what it wants ([`some_of`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_engine::{RangeSource, source_of};
use forebay_error::{Code, Error, Result};
use forebay_format::Folder;

use super::files::Listing;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::commit::METADATA;
use crate::manifest::Manifest;
use crate::model::{Chunk, DataFile, Entry, Kind};
use crate::save::Seal;

/// Opens it, if it is one of ours.
pub(super) fn open(folder: &Folder, listing: &Listing) -> Result<Option<Checkpoint>> {
    let Some(seal) = seal(folder)? else { return Ok(None) };
    let manifest = match manifest(folder, &seal) {
        Ok(manifest) => manifest,
        Err(error) if error.code() == Code::NotFound => {
            let mut stock = super::dcp::open(folder, listing)?;
            let name = &seal.manifest;
            let text = format!("the manifest {name:?} is gone: opened as torch's own format");
            stock.warnings.push(Warning { concern: Concern::Other, text });
            return Ok(Some(stock));
        }
        Err(error) => return Err(error),
    };
    let (entries, files) = (manifest.entries()?, manifest.files()?);
    let mut crcs = Vec::with_capacity(files.len());
    for rank in 0..manifest.info().world_size {
        crcs.extend(manifest.part_files(rank)?.into_iter().map(|file| file.crc));
    }
    let origin = Origin::Forebay(Box::new(manifest.info().clone()));
    let mut warnings: Vec<Warning> = super::dcp::leftovers(listing).collect();
    let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
    warnings.extend(super::dcp::stale_files(folder, listing, &names));
    let mut checkpoint = Checkpoint::new(origin, entries, files, folder, warnings)?;
    checkpoint.file_crcs = crcs;
    Ok(Some(checkpoint))
}

/// A checkpoint of a few regions and objects of ours: of its entries it has the chunks that were found, and of its
/// files those that they are in. Other files are not asked for.
pub(crate) fn some_of(
    manifest: &Manifest,
    folder: &Folder,
    mut entries: Vec<Entry>,
    files: BTreeMap<u32, DataFile>,
) -> Result<Checkpoint> {
    let numbers: BTreeMap<u32, u32> = files.keys().copied().zip(0..).collect();
    let renumber = |chunk: &mut Chunk| match numbers.get(&chunk.file) {
        Some(&number) => {
            chunk.file = number;
            Ok(())
        }
        None => Err(Error::new(Code::Internal, "a chunk without its file")),
    };
    for entry in &mut entries {
        match &mut entry.kind {
            Kind::Tensor { chunks, .. } => chunks.iter_mut().try_for_each(renumber)?,
            Kind::Object { chunk } => renumber(chunk)?,
        }
    }
    let origin = Origin::Forebay(Box::new(manifest.info().clone()));
    Checkpoint::new(origin, entries, files.into_values().collect(), folder, Vec::new())
}

/// What a look at the folder's names tells of a checkpoint of ours. Which data files belong to it is known by the
/// attempt in their names, so that no part is read for it.
pub(crate) fn warnings(folder: &Folder, manifest: &Manifest) -> Result<Vec<Warning>> {
    let listing = super::files::list(folder)?;
    let own = format!("{}_", manifest.info().attempt);
    let names = listing.distcp.iter().filter(|name| name.starts_with(&own)).cloned();
    let names: Vec<String> = names.collect();
    let mut warnings: Vec<Warning> = super::dcp::leftovers(&listing).collect();
    warnings.extend(super::dcp::stale_files(folder, &listing, &names));
    Ok(warnings)
}

/// The manifest of a checkpoint of ours; `None` where the folder's is somebody else's, or its manifest is gone.
pub(crate) fn find_manifest(folder: &Folder) -> Result<Option<Manifest>> {
    let seal = match seal(folder) {
        Err(error) if error.code() == Code::NotFound => return Ok(None),
        seal => seal?,
    };
    let Some(seal) = seal else { return Ok(None) };
    match manifest(folder, &seal) {
        Err(error) if error.code() == Code::NotFound => Ok(None),
        manifest => manifest.map(Some),
    }
}

/// What `.metadata` says of us; `None` where it is stock's.
pub(super) fn seal(folder: &Folder) -> Result<Option<Seal>> {
    let source = source(folder, METADATA)?;
    Seal::find(&*source)
}

/// The manifest that a seal names.
pub(super) fn manifest(folder: &Folder, seal: &Seal) -> Result<Manifest> {
    Manifest::open(source(folder, &seal.manifest)?, Some(&seal.hash))
}

fn source(folder: &Folder, name: &str) -> Result<Arc<dyn RangeSource>> {
    source_of(&Arc::new(folder.open(name)?))
}
