//! What the bytes of each file must sum up to.
//!
//! The manifest has the CRC-32 of every file that a rank wrote, and is itself vouched for by the hash in `.metadata`. A
//! file of which it has none (the manifest itself) is read twice: once for its sum, once to be copied; what changed on
//! the way of either is seen.

use std::collections::HashMap;

use forebay_checkpoint::commit::{Adoption, FileRef, Root};
use forebay_checkpoint::manifest::Manifest;
use forebay_checkpoint::save::Seal;
use forebay_error::{Code, Error, Result};

/// CRC-32 by file name.
pub(crate) struct Expected {
    crcs: HashMap<String, u32>,
}

impl Expected {
    /// Reads the manifest of the source. Errors: those of [`Manifest::open`] and of reading its parts;
    /// `invalid_metadata` where the record of the commit and the manifest disagree.
    pub(crate) fn read(from: &Root, adoption: &Adoption, seal: &Seal) -> Result<Self> {
        let key = adoption.layout().file(&seal.manifest);
        let disagree = |what: &str| {
            let place = format!("{}/{key}", from.store.name());
            Err(Error::new(Code::InvalidMetadata, what).at(place))
        };
        if seal.manifest != adoption.manifest() {
            return disagree("the record of the commit names another manifest than `.metadata`");
        }
        let manifest = Manifest::open(from.store.open_data(&key)?, Some(&seal.hash))?;
        let bytes_of: HashMap<&str, u64> =
            adoption.files().iter().map(|file| (file.name.as_str(), file.bytes)).collect();
        let mut crcs = HashMap::new();
        for rank in 0..manifest.info().world_size {
            for file in manifest.part_files(rank)? {
                if bytes_of.get(file.name.as_str()) != Some(&file.bytes) {
                    return disagree("the record of the commit lacks a file of the manifest");
                }
                crcs.extend(file.crc.map(|crc| (file.name, crc)));
            }
        }
        Ok(Self { crcs })
    }

    /// The sum of a file, where the manifest has it.
    pub(crate) fn of(&self, file: &FileRef) -> Option<u32> {
        self.crcs.get(&file.name).copied()
    }
}
