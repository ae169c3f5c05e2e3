//! One tensor as `torch.save` would write it: the bytes before and after its own.
//!
//! An archive of four records: `archive/data.pkl` (how the tensor is made from a storage), `archive/byteorder`,
//! `archive/version`, and last `archive/data/0`, the storage. The bytes of the tensor are near the end, and an extra
//! field in front of them pads so that they start where they should.

use forebay_error::Result;

use super::TorchDtype;
use super::pickle;
use super::zip::{self, Record};
use crate::crc::crc32;

/// Small tensors start on a multiple of this many bytes of the file, as those of torch do in their archive.
pub const SMALL_ALIGN: u64 = 64;

/// What every item of a checkpoint has beside its pickle and storage.
pub(super) const BYTEORDER: (&str, &[u8], u32) = ("archive/byteorder", b"little", 0x19E3_3D85);
pub(super) const VERSION: (&str, &[u8], u32) = ("archive/version", b"3\n", 0x5567_9ED1);
pub(super) const PICKLE_NAME: &str = "archive/data.pkl";
const DATA_NAME: &str = "archive/data/0";

/// Where everything of one tensor item is, before its CRC is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemLayout {
    dtype: TorchDtype,
    shape: Box<[u64]>,
    data_bytes: u64,
    pickle_bytes: u32,
    pickle_crc: u32,
    pad: u32,
    head_bytes: u32,
}

impl ItemLayout {
    /// The item of a row-major tensor, to start at byte `offset` of a file, its data on a multiple of `align` (a power
    /// of two, at most 16 Ki) bytes of the file. Tensors without bytes are not aligned.
    pub fn new(dtype: TorchDtype, shape: &[u64], offset: u64, align: u64) -> Result<Self> {
        let (elements, data_bytes) = dtype.size(shape)?;
        let pickle = pickle(dtype, shape, elements);
        let pickle_bytes = pickle.len() as u64;
        let mut head = zip::local_len(PICKLE_NAME, pickle_bytes) + pickle_bytes;
        for (name, content, _) in [BYTEORDER, VERSION] {
            let size = content.len() as u64;
            head += zip::local_len(name, size) + size;
        }
        head += zip::local_len(DATA_NAME, data_bytes);
        let align = align.clamp(1, 1 << 14);
        let pad = if data_bytes == 0 { 0 } else { zip::padding((offset + head) % align, align) };
        Ok(Self {
            dtype,
            shape: shape.into(),
            data_bytes,
            pickle_bytes: pickle_bytes as u32,
            pickle_crc: crc32(&pickle),
            pad: pad as u32,
            head_bytes: (head + pad) as u32,
        })
    }

    /// The type of its elements.
    pub fn dtype(&self) -> TorchDtype {
        self.dtype
    }

    /// Its sides.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Bytes before the tensor's.
    pub fn head_len(&self) -> u64 {
        u64::from(self.head_bytes)
    }

    /// Bytes of the tensor.
    pub fn data_len(&self) -> u64 {
        self.data_bytes
    }

    /// Bytes after the tensor's.
    pub fn tail_len(&self) -> u64 {
        self.directory_len() + zip::end_len(self.directory_offset())
    }

    /// Bytes of the whole item.
    #[expect(clippy::len_without_is_empty, reason = "an item is never empty")]
    pub fn len(&self) -> u64 {
        self.directory_offset() + self.tail_len()
    }

    /// Appends the bytes before the tensor's; `crc` is the CRC-32 of those.
    pub fn head(&self, crc: u32, out: &mut Vec<u8>) {
        out.reserve(self.head_bytes as usize);
        let [first, byteorder, version, data] = self.records(crc);
        zip::local_header(out, &first, 0);
        put_pickle(out, self.dtype, &self.shape, self.data_bytes / self.dtype.item_bytes());
        zip::local_header(out, &byteorder, 0);
        out.extend_from_slice(BYTEORDER.1);
        zip::local_header(out, &version, 0);
        out.extend_from_slice(VERSION.1);
        zip::local_header(out, &data, u64::from(self.pad));
    }

    /// Appends the bytes after the tensor's; `crc` is the CRC-32 of those.
    pub fn tail(&self, crc: u32, out: &mut Vec<u8>) {
        for record in self.records(crc) {
            zip::central_header(out, &record);
        }
        zip::end(out, 4, self.directory_offset(), self.directory_len() as u32);
    }

    /// The records in order.
    fn records(&self, crc: u32) -> [Record<'static>; 4] {
        let mut offset = 0;
        let mut record = |name, size, crc| {
            let record = Record { name, size, crc, offset };
            offset += (zip::local_len(name, size) + size) as u32;
            record
        };
        let pickle = record(PICKLE_NAME, u64::from(self.pickle_bytes), self.pickle_crc);
        let byteorder = record(BYTEORDER.0, BYTEORDER.1.len() as u64, BYTEORDER.2);
        let version = record(VERSION.0, VERSION.1.len() as u64, VERSION.2);
        let data = Record { name: DATA_NAME, size: self.data_bytes, crc, offset };
        [pickle, byteorder, version, data]
    }

    /// Where the central directory starts in the item: after the data.
    fn directory_offset(&self) -> u64 {
        u64::from(self.head_bytes) + self.data_bytes
    }

    fn directory_len(&self) -> u64 {
        let small = [
            (PICKLE_NAME, u64::from(self.pickle_bytes)),
            (BYTEORDER.0, BYTEORDER.1.len() as u64),
            (VERSION.0, VERSION.1.len() as u64),
            (DATA_NAME, self.data_bytes),
        ];
        small.iter().map(|&(name, size)| zip::central_len(name, size)).sum()
    }
}

/// `data.pkl`, protocol 2: `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`, where the storage
/// is the persistent id `('storage', class, '0', 'cpu', elements)`. Types without a class have bytes as storage, count
/// those, and give the type as a last argument to `_rebuild_tensor_v3`.
fn pickle(dtype: TorchDtype, shape: &[u64], elements: u64) -> Vec<u8> {
    // 100 to 130 bytes of names, up to 20 a side.
    let mut out = Vec::with_capacity(160 + 20 * shape.len());
    put_pickle(&mut out, dtype, shape, elements);
    out
}

fn put_pickle(out: &mut Vec<u8>, dtype: TorchDtype, shape: &[u64], elements: u64) {
    let class = dtype.storage_class();
    out.extend_from_slice(if class.is_some() {
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
    } else {
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(("
    });
    pickle::long_text(out, "storage");
    match class {
        Some(class) => global(out, class),
        None => out.extend_from_slice(b"ctorch.storage\nUntypedStorage\n"),
    }
    pickle::long_text(out, "0");
    pickle::long_text(out, "cpu");
    let unit = if class.is_some() { 1 } else { dtype.item_bytes() };
    pickle::int(out, elements * unit);
    out.extend_from_slice(&[pickle::TUPLE, pickle::BINPERSID]);
    pickle::int(out, 0);
    pickle::int_tuple(out, shape.iter().copied());
    pickle::int_tuple(out, Strides::new(shape));
    out.push(pickle::NEWFALSE);
    out.extend_from_slice(b"ccollections\nOrderedDict\n)R");
    if class.is_none() {
        global(out, dtype.name());
    }
    out.extend_from_slice(&[pickle::TUPLE, pickle::REDUCE, pickle::STOP]);
}

fn global(out: &mut Vec<u8>, name: &str) {
    out.extend_from_slice(b"ctorch\n");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\n");
}

/// The strides of a row-major tensor, outermost first. Sides of zero count as one, as in torch.
struct Strides<'a> {
    left: &'a [u64],
    stride: u64,
}

impl<'a> Strides<'a> {
    fn new(shape: &'a [u64]) -> Self {
        // Sides next to a zero may be anything; a stride that does not fit is never used.
        let product = |product: u64, &side: &u64| product.saturating_mul(side.max(1));
        Self { left: shape, stride: shape.iter().fold(1, product).min(i64::MAX as u64) }
    }
}

impl Iterator for Strides<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let (&side, rest) = self.left.split_first()?;
        self.left = rest;
        self.stride /= side.max(1);
        Some(self.stride)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.len(), Some(self.left.len()))
    }
}

impl ExactSizeIterator for Strides<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch_zip::Archive;

    fn encoded(item: &ItemLayout, data: &[u8]) -> Vec<u8> {
        let crc = crc32(data);
        let mut bytes = Vec::new();
        item.head(crc, &mut bytes);
        assert_eq!(bytes.len() as u64, item.head_len());
        bytes.extend_from_slice(data);
        item.tail(crc, &mut bytes);
        assert_eq!(bytes.len() as u64, item.len());
        bytes
    }

    #[test]
    fn constants_are_the_checksums_of_what_they_stand_for() {
        for (_, content, crc) in [BYTEORDER, VERSION] {
            assert_eq!(crc32(content), crc, "{crc:#x} is not {:#x}", crc32(content));
        }
    }

    #[test]
    fn data_starts_where_it_should_from_any_offset() {
        for offset in (0..9000).step_by(7) {
            for (align, side) in [(64, 3), (4096, 20_000)] {
                let item = ItemLayout::new(TorchDtype::Float32, &[side], offset, align).unwrap();
                assert_eq!((offset + item.head_len()) % align, 0);
            }
        }
    }

    #[test]
    fn lengths_are_those_of_the_bytes_for_every_dtype() {
        let shapes: [&[u64]; 6] = [&[], &[5], &[0, 4], &[2, 3], &[3, 0], &[1, 2, 3, 4, 5, 6]];
        for &dtype in TorchDtype::ALL {
            for shape in shapes {
                let item = ItemLayout::new(dtype, shape, 1000, 64).unwrap();
                let data = vec![7; item.data_len() as usize];
                let bytes = encoded(&item, &data);
                assert_eq!(&bytes[..4], b"PK\x03\x04");
                // Our own reader of archives finds the data where the layout has it, and every sum right.
                let archive = Archive::open(&bytes, 0, item.len()).unwrap();
                archive.check_all_crcs().unwrap();
                let record = archive.record("data/0").unwrap().unwrap();
                assert_eq!(archive.read_checked(&record, 1 << 20).unwrap(), data, "{dtype}");
            }
        }
    }

    #[test]
    fn beyond_4_gib_lengths_grow_by_the_wide_fields() {
        let len = |bytes| {
            let item = ItemLayout::new(TorchDtype::Uint8, &[bytes], 0, 1).unwrap();
            let mut tail = Vec::new();
            item.tail(0, &mut tail);
            assert_eq!(tail.len() as u64, item.tail_len());
            (item.head_len(), item.tail_len())
        };
        let (head, tail) = len(0xffff_0000);
        // The directory's offset needs 64 bits before the size does, for the head's length.
        assert_eq!(len(0xffff_fffe), (head, tail + 76));
        assert_eq!(len(0xffff_ffff), (head + 20, tail + 76 + 20));
        assert_eq!(len(1 << 40).1, tail + 76 + 20);
    }

    #[test]
    fn strides_are_those_of_torch() {
        let strides = |shape: &[u64]| Strides::new(shape).collect::<Vec<_>>();
        assert_eq!(strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(strides(&[0, 4]), [4, 1]);
        assert_eq!(strides(&[3, 0]), [1, 1]);
        assert_eq!(strides(&[2, 0, 5]), [5, 5, 1]);
        assert!(strides(&[]).is_empty());
    }
}
