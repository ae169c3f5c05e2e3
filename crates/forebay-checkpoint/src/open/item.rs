//! One item of a checkpoint: read, or checked.

use super::Checkpoint;
use super::files::check_span;
use crate::model::{BLOCK_BYTES, Chunk, DataPlace, Entry, Kind};
use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::dcp::{
    ItemSpan, TensorItem, check_object, open_tensor, read_object, verify_object, verify_tensor,
};
use forebay_format::torch_zip::PlainObject;
use forebay_format::{OpenFile, shown};
use forebay_tensor::{Dtype, Region, byte_len, copy_runs};
use std::sync::Arc;

/// Where the elements of a chunk are.
pub(super) enum Elements {
    /// In the file, as its metadata says.
    Place(DataPlace),
    /// In an item that was opened.
    Item(TensorItem),
}

impl Checkpoint {
    /// One of its data files. `missing_file` where it is not there.
    pub fn open_file(&self, number: u32) -> Result<Arc<OpenFile>> {
        let file = self.files.get(number as usize);
        let file = file.ok_or_else(|| Error::new(Code::Internal, "a chunk without a file"))?;
        self.folder.open(number, file)
    }

    /// The whole of a tensor, row-major, on the host. Checksums are compared where there are any.
    ///
    /// Errors name the entry; of a damaged item they are those of [`open_tensor`] and of [`Self::open_file`].
    pub fn read_tensor(&self, entry: &Entry) -> Result<Vec<u8>> {
        let Kind::Tensor { dtype, shape, chunks } = &entry.kind else {
            return Err(Error::new(Code::Usage, format!("{:?} is no tensor", entry.name)));
        };
        let whole = Region::whole(shape);
        let mut bytes = zeros(byte_len(*dtype, shape)?)?;
        for chunk in chunks.iter().filter(|chunk| !chunk.region.is_empty()) {
            let place = |error| self.place(&entry.name, error);
            let part = self.read_chunk(*dtype, chunk).map_err(place)?;
            if let Some(runs) = copy_runs(*dtype, &chunk.region, &whole)? {
                runs.copy(&part, &mut bytes)?;
            }
        }
        Ok(bytes)
    }

    /// An object. Nothing is executed: one that is no plain data says what it is.
    pub fn read_object(&self, entry: &Entry) -> Result<PlainObject> {
        let Kind::Object { chunk } = &entry.kind else {
            return Err(Error::new(Code::Usage, format!("{:?} is a tensor", entry.name)));
        };
        let read = || {
            let file = self.open_for(chunk)?;
            read_object(file.as_ref(), span(chunk)).map_err(|error| error.at(shown(&file.path)))
        };
        read().map_err(|error| self.place(&entry.name, error))
    }

    /// Checks one item: that it is what the metadata says, and every byte of it that has a checksum. An object is not
    /// asked whether it is harmless.
    pub fn verify_item(&self, entry: &Entry, chunk: &Chunk) -> Result<()> {
        let check = || {
            let file = self.open_for(chunk)?;
            let at_file = |error: Error| error.at(shown(&file.path));
            match &entry.kind {
                Kind::Object { .. } => verify_object(file.as_ref(), span(chunk)).map_err(at_file),
                Kind::Tensor { dtype, .. } if chunk.data.is_none() => {
                    let sizes = &chunk.region.sizes;
                    verify_tensor(file.as_ref(), span(chunk), *dtype, sizes).map_err(at_file)
                }
                // Its header was checked when it was opened.
                Kind::Tensor { .. } => Ok(()),
            }?;
            chunk.data.as_ref().map_or(Ok(()), |place| check_blocks(&file, place))
        };
        check().map_err(|error| self.place(&entry.name, error))
    }

    /// Looks through the pickle of an object: whether a restore takes it. See [`check_object`].
    pub(super) fn look_through(&self, entry: &Entry, chunk: &Chunk) -> Result<()> {
        let Kind::Object { .. } = &entry.kind else { return Ok(()) };
        let check = || {
            let file = self.open_for(chunk)?;
            check_object(file.as_ref(), span(chunk)).map_err(|error| error.at(shown(&file.path)))
        };
        check().map_err(|error| self.place(&entry.name, error))
    }

    /// Finds the elements of a chunk. Reads no more than what describes them.
    pub(super) fn locate(&self, dtype: Dtype, chunk: &Chunk) -> Result<(Arc<OpenFile>, Elements)> {
        let file = self.open_for(chunk)?;
        let elements = match &chunk.data {
            Some(place) => Elements::Place(place.clone()),
            None => {
                let sizes = &chunk.region.sizes;
                let item = open_tensor(file.as_ref(), span(chunk), dtype, sizes);
                Elements::Item(item.map_err(|error| error.at(shown(&file.path)))?)
            }
        };
        Ok((file, elements))
    }

    fn read_chunk(&self, dtype: Dtype, chunk: &Chunk) -> Result<Vec<u8>> {
        match self.locate(dtype, chunk)? {
            (file, Elements::Place(place)) => {
                let mut bytes = zeros(place.bytes)?;
                file.read_exact_at(&mut bytes, place.offset)?;
                check_blocks(&file, &place)?;
                Ok(bytes)
            }
            (file, Elements::Item(item)) => {
                item.read(file.as_ref()).map_err(|error| error.at(shown(&file.path)))
            }
        }
    }

    /// The file of a chunk, which must reach as far as the chunk does.
    fn open_for(&self, chunk: &Chunk) -> Result<Arc<OpenFile>> {
        let file = self.open_file(chunk.file)?;
        check_span(&file, chunk, || self.ends_before(chunk))?;
        Ok(file)
    }

    /// Where the items before this one in its file end.
    fn ends_before(&self, chunk: &Chunk) -> u64 {
        let chunks = self.entries.iter().flat_map(Entry::chunks);
        let before = chunks.filter(|other| other.file == chunk.file && other.offset < chunk.offset);
        before.map(|other| other.offset.saturating_add(other.length)).max().unwrap_or(0)
    }
}

/// Compares the blocks of a chunk with their checksums, if it has any.
fn check_blocks(file: &OpenFile, place: &DataPlace) -> Result<()> {
    let blocks = place.bytes.div_ceil(BLOCK_BYTES);
    if !place.crcs.is_empty() && place.crcs.len() as u64 != blocks {
        let what = format!("{} checksums of {blocks} blocks", place.crcs.len());
        return Err(Error::new(Code::InvalidMetadata, what).at(shown(&file.path)));
    }
    let mut done = 0;
    for &crc in &place.crcs {
        let len = BLOCK_BYTES.min(place.bytes.saturating_sub(done));
        let mut block = zeros(len)?;
        let offset = place.offset.saturating_add(done);
        file.read_exact_at(&mut block, offset)?;
        let found = crc32(&block);
        if found != crc {
            let what = format!(
                "{len} bytes at byte {offset} have the checksum {found:08x}, {crc:08x} was written"
            );
            return Err(Error::new(Code::Checksum, what).at(shown(&file.path)));
        }
        done += len;
    }
    Ok(())
}

pub(super) fn span(chunk: &Chunk) -> ItemSpan<'_> {
    ItemSpan { offset: chunk.offset, length: chunk.length, transforms: &chunk.transforms }
}

/// A buffer of that many bytes; `out_of_memory` where it cannot be had.
fn zeros(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let room = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let room =
        room.ok_or_else(|| Error::new(Code::OutOfMemory, format!("no memory for {len} bytes")))?;
    bytes.resize(room, 0);
    Ok(bytes)
}
