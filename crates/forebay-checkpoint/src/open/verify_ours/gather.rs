//! What a manifest says of the files: which items are in them, and where.

use forebay_error::{Code, Error, Result};

use super::spans::Item;
use crate::manifest::Manifest;

/// All files of a checkpoint, with what is in them.
pub(super) struct Files<'m> {
    pub(super) files: Vec<FileOf<'m>>,
}

/// One of them.
pub(super) struct FileOf<'m> {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// CRC-32 of all of it, where the manifest has one.
    pub(super) crc: Option<u32>,
    /// In the order of their offsets.
    pub(super) items: Vec<Item<'m>>,
}

impl<'m> Files<'m> {
    /// Reads all parts of a manifest.
    pub(super) fn gather(manifest: &'m Manifest) -> Result<Self> {
        let mut files = Vec::new();
        for rank in 0..manifest.info().world_size {
            for file in manifest.part_files(rank)? {
                let (name, bytes, crc) = (file.name, file.bytes, file.crc);
                files.push(FileOf { name, bytes, crc, items: Vec::new() });
            }
        }
        let values = manifest.table().values();
        manifest.visit(|_, number, chunk| {
            let file = files.get_mut(chunk.file as usize);
            let (file, named) = file.zip(values.get(number as usize)).ok_or_else(|| {
                Error::new(Code::InvalidMetadata, "a chunk of a value or file that is not there")
            })?;
            file.items.push(Item { named, chunk });
            Ok(())
        })?;
        for file in &mut files {
            file.items.sort_by_key(|item| (item.chunk.offset, item.chunk.length));
        }
        Ok(Self { files })
    }

    /// Their names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.name.as_str())
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}
