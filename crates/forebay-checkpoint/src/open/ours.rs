//! Checkpoints of our own, opened by their manifest.
//!
//! `.metadata` is looked at for the one line that names the manifest ([`Seal`]); its tables are not read. Where the
//! manifest is gone the checkpoint is still one of torch's, and is opened as such, with a warning: its bytes then
//! have only the checksums of their archives.

use std::path::Path;
use std::sync::Arc;

use forebay_engine::LocalFile;
use forebay_error::{Code, Error, Result};
use forebay_format::{OpenFile, shown};

use super::files::Listing;
use super::{Checkpoint, Concern, Origin, Warning};
use crate::manifest::Manifest;
use crate::save::Seal;

/// Opens it, if it is one of ours.
pub(super) fn open(folder: &Path, listing: &Listing) -> Result<Option<Checkpoint>> {
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

/// What `.metadata` says of us; `None` where it is stock's.
pub(super) fn seal(folder: &Path) -> Result<Option<Seal>> {
    let source = source(&folder.join(".metadata"))?;
    Seal::find(&*source)
}

/// The manifest that a seal names.
pub(super) fn manifest(folder: &Path, seal: &Seal) -> Result<Manifest> {
    Manifest::open(source(&folder.join(&seal.manifest))?, Some(&seal.hash))
}

fn source(path: &Path) -> Result<Arc<LocalFile>> {
    let open = OpenFile::open(path)?;
    if !open.path.is_file() {
        return Err(Error::new(Code::InvalidMetadata, "is no file").at(shown(path)));
    }
    Ok(Arc::new(LocalFile::new(Arc::new(open))?))
}
