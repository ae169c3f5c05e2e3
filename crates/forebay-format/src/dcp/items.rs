//! Items of data files: what lies at a place that `.metadata` names.
//!
//! A tensor's item is an archive of torch.save with one tensor ([`crate::torch_zip`]), whose bytes lie in one storage,
//! row-major or with strides. An object's item is an archive of anything. Writers may have sent the whole item through
//! stream transforms; [`TRANSFORMS`] are undone, in memory.
//!
//! What an item says of itself must be what the metadata says of the chunk: dtype and sizes. Nothing is reinterpreted.

use super::items_zstd;
use crate::pickle::{Options, parse};
use crate::text::quoted;
use crate::torch_zip::{
    Archive, MAX_PICKLE_BYTES, PlainObject, ReadAt, Record, View, buffer, check_byteorder, invalid,
    plain, tensor,
};
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, Region, ShowShape, byte_len, copy_runs_strided};

/// The transforms that are undone.
pub const TRANSFORMS: [&str; 1] = ["stream.zstd/1"];

/// The most transforms of one item.
const MAX_TRANSFORMS: usize = 4;

/// Bytes of an item beside those of its tensor: pickle, headers, directory.
const OVERHEAD_BYTES: u64 = 64 << 10;

/// The most bytes of an object's item.
pub const MAX_OBJECT_BYTES: u64 = 256 << 20;

/// Where an item lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct ItemSpan<'a> {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What to undo, in this order.
    pub transforms: &'a [String],
}

/// A tensor's item, opened and found to be what the metadata says; its numbers were not looked at.
#[derive(Debug)]
pub struct TensorItem {
    /// Its dtype, sizes and strides.
    pub view: View,
    /// The storage's bytes: in the file, or in [`decoded`](Self::decoded).
    pub record: Record,
    /// The whole item, where it had to be decoded.
    pub decoded: Option<Vec<u8>>,
}

/// Opens the item of a chunk of `sizes` elements of `dtype`.
///
/// Errors: `out_of_bounds` where it leaves the file; `invalid_item` where it is not an archive of one tensor, or one
/// that contradicts itself; `checksum` where its pickle is not what was saved; `dtype_mismatch` and `shape_mismatch`
/// where it is another tensor; `unsupported` for transforms, byte orders and tensors that are not read.
pub fn open_tensor(
    source: &dyn ReadAt,
    span: ItemSpan<'_>,
    dtype: Dtype,
    sizes: &[u64],
) -> Result<TensorItem> {
    let most = byte_len(dtype, sizes)?.saturating_add(OVERHEAD_BYTES);
    with_archive(source, span, most, |archive, decoded| {
        let view = view_of(archive)?;
        compare(&view, dtype, sizes)?;
        let record = view.check_record(archive.record(&view.record)?)?;
        Ok(TensorItem { view, record, decoded: decoded.map(<[u8]>::to_vec) })
    })
}

/// Opens a tensor's item and checks every byte of it that has a checksum.
pub fn verify_tensor(
    source: &dyn ReadAt,
    span: ItemSpan<'_>,
    dtype: Dtype,
    sizes: &[u64],
) -> Result<()> {
    let item = open_tensor(source, span, dtype, sizes)?;
    match &item.decoded {
        Some(bytes) => Archive::open(bytes, 0, bytes.len() as u64)?.check_all_crcs(),
        None => Archive::open(source, span.offset, span.length)?.check_all_crcs(),
    }
}

/// Checks every byte of an object's item that has a checksum. What the object is, and whether it may be had, is not
/// asked.
pub fn verify_object(source: &dyn ReadAt, span: ItemSpan<'_>) -> Result<()> {
    with_archive(source, span, MAX_OBJECT_BYTES, |archive, _| archive.check_all_crcs())
}

/// Reads an object. Nothing is executed: see [`PlainObject`].
pub fn read_object(source: &dyn ReadAt, span: ItemSpan<'_>) -> Result<PlainObject> {
    if span.length > MAX_OBJECT_BYTES {
        let what = format!("an object of {} bytes, {MAX_OBJECT_BYTES} is the most", span.length);
        return Err(Error::new(Code::Unsupported, what));
    }
    with_archive(source, span, MAX_OBJECT_BYTES, |archive, _| {
        let pickle = pickle_of(archive)?;
        let graph = parse(&pickle, &Options::ITEM)?;
        Ok(plain(&graph, graph.root()))
    })
}

/// The pickle of an object's item, compared with its checksum: the `data.pkl` of the archive that `item` is. Nothing is
/// asked of the pickle. Errors: those of a damaged archive.
pub fn pickle_of_item(item: &dyn ReadAt) -> Result<Vec<u8>> {
    pickle_of(&Archive::open(item, 0, item.size())?)
}

/// Whether a pickle of an item may be given to Python's own unpickler: it is whole, keeps no more than it has bytes
/// for, and its keys can be hashed in reasonable time. What it calls is not asked. Errors: `invalid_item`.
pub fn check_pickle(pickle: &[u8]) -> Result<()> {
    parse(pickle, &Options::ITEM).map(drop)
}

/// Looks through an object's item as whoever restores it does before Python's unpickler gets it: it has a pickle, and
/// that passes [`check_pickle`]. Errors: `invalid_item`, and those of a damaged archive.
pub fn check_object(source: &dyn ReadAt, span: ItemSpan<'_>) -> Result<()> {
    with_archive(source, span, MAX_OBJECT_BYTES, |archive, _| check_pickle(&pickle_of(archive)?))
}

impl TensorItem {
    /// Where its elements lie in the file if they are there row-major without gaps: first byte, bytes.
    pub fn extent(&self) -> Option<(u64, u64)> {
        let plain = self.decoded.is_none() && self.view.is_row_major();
        plain.then(|| (self.start(), self.view.bytes()))
    }

    /// First byte of its first element: in the file, or in the decoded bytes. Of one without elements, anywhere in it.
    pub fn start(&self) -> u64 {
        match self.view.bytes() {
            0 => self.record.offset,
            _ => self.record.offset + self.view.start_bytes(),
        }
    }

    /// Its elements, row-major, from a storage whose checksum was found right.
    pub fn read(&self, source: &dyn ReadAt) -> Result<Vec<u8>> {
        let source: &dyn ReadAt = match &self.decoded {
            Some(bytes) => bytes,
            None => source,
        };
        let mut storage = buffer(self.record.bytes)?;
        source.read_exact_at(&mut storage, self.record.offset)?;
        self.record.check(crate::crc::crc32(&storage))?;
        let chunk = Region::whole(&self.view.shape);
        let mut bytes = buffer(self.view.bytes())?;
        if let Some(runs) = copy_runs_strided(self.view.dtype, &chunk, &self.view.memory, &chunk)? {
            runs.copy(&storage, &mut bytes)?;
        }
        Ok(bytes)
    }
}

/// Opens the archive of an item, of at most `most` bytes once its transforms are undone; `work` gets those bytes too.
fn with_archive<T>(
    source: &dyn ReadAt,
    span: ItemSpan<'_>,
    most: u64,
    work: impl FnOnce(&Archive<'_>, Option<&[u8]>) -> Result<T>,
) -> Result<T> {
    if span.transforms.is_empty() {
        let archive = Archive::open(source, span.offset, span.length)?;
        return work(&archive, None);
    }
    let bytes = decode(source, span, most)?;
    let archive = Archive::open(&bytes, 0, bytes.len() as u64)?;
    work(&archive, Some(&bytes))
}

/// The bytes of an item once its transforms are undone.
fn decode(source: &dyn ReadAt, span: ItemSpan<'_>, most: u64) -> Result<Vec<u8>> {
    let known = |name: &&String| !TRANSFORMS.contains(&name.as_str());
    if let Some(unknown) = span.transforms.iter().find(known) {
        let what = format!("the transform {} is not known", quoted(unknown));
        return Err(Error::new(Code::Unsupported, what)
            .hint(format!("these are undone: {}", TRANSFORMS.join(", "))));
    }
    if span.transforms.len() > MAX_TRANSFORMS {
        return Err(Error::new(Code::Unsupported, "an item has too many transforms"));
    }
    let end = span.offset.checked_add(span.length);
    if end.is_none_or(|end| end > source.size()) {
        let what = format!(
            "{} bytes from byte {} on, of {} bytes",
            span.length,
            span.offset,
            source.size()
        );
        return Err(Error::new(Code::OutOfBounds, what).at(source.name()));
    }
    let mut bytes = buffer(span.length)?;
    source.read_exact_at(&mut bytes, span.offset)?;
    for _ in span.transforms {
        bytes = items_zstd::decode(&bytes, most)?;
    }
    Ok(bytes)
}

fn pickle_of(archive: &Archive<'_>) -> Result<Vec<u8>> {
    let record = archive.record("data.pkl")?;
    let record = record.ok_or_else(|| invalid("the archive has no data.pkl"))?;
    archive.read_checked(&record, MAX_PICKLE_BYTES)
}

fn view_of(archive: &Archive<'_>) -> Result<View> {
    check_byteorder(archive)?;
    let pickle = pickle_of(archive)?;
    let graph = parse(&pickle, &Options::ITEM)?;
    match tensor(&graph, graph.root()) {
        Some(view) => view,
        None => {
            let kind = plain(&graph, graph.root()).python_type;
            let what = format!("a tensor's item holds an object of type {}", quoted(&kind));
            Err(invalid(what))
        }
    }
}

fn compare(view: &View, dtype: Dtype, sizes: &[u64]) -> Result<()> {
    if view.dtype != dtype {
        let what = format!("the metadata says {dtype}, the item holds {}", view.dtype);
        return Err(Error::new(Code::DtypeMismatch, what));
    }
    if view.shape != sizes {
        let (wanted, found) = (ShowShape(sizes), ShowShape(&view.shape));
        let what = format!("the metadata says a piece of shape {wanted}, the item holds {found}");
        return Err(Error::new(Code::ShapeMismatch, what));
    }
    Ok(())
}
