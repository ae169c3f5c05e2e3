//! What each byte of a data file is, and what it must be compared with.
//!
//! ```text
//! file    item, item, ...        one after another; bytes between them, or behind the last, are zeros
//! item    head, blocks, tail     head and tail follow from dtype, sides, place and the CRC of the blocks together
//! ```

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32_join;
use forebay_format::dcp::{FILE_ALIGN, ItemLayout, SMALL_ALIGN};

use crate::manifest::{Named, Value};
use crate::model::{BLOCK_BYTES, Chunk};
use crate::save::{torch_dtype, torch_shape};

/// Bytes without an item are looked at in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

/// A stored item.
pub(super) struct Item<'m> {
    pub(super) named: &'m Named,
    pub(super) chunk: Chunk,
}

/// What bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A block of an item, with its CRC-32.
    Block(u32),
    /// The start of an item, before the tensor.
    Head,
    /// Its end.
    Tail,
    /// Between items: zeros.
    Gap,
    /// Of a file without items: whatever its writer liked.
    Free,
}

/// Bytes of a file that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) kind: Kind,
    /// Which item; of gaps, the one behind.
    pub(super) item: usize,
}

/// Cuts the first `size` bytes of a file into spans that follow each other. Items come in the order of their offsets.
/// `fault` is told which items cannot be where they are said to be; they are left out.
pub(super) fn cut(items: &[Item<'_>], size: u64, mut fault: impl FnMut(usize, Error)) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut at = 0;
    let other = if items.is_empty() { Kind::Free } else { Kind::Gap };
    for (number, item) in items.iter().enumerate() {
        match check_place(&item.chunk, at, size) {
            Err(error) => fault(number, error),
            Ok(end) => {
                fill(&mut spans, at, item.chunk.offset, other, number);
                add_item(&mut spans, &item.chunk, end, number);
                at = end;
            }
        }
    }
    fill(&mut spans, at, size, other, items.len());
    spans
}

/// Where an item ends, if it lies where it may.
fn check_place(chunk: &Chunk, from: u64, size: u64) -> Result<u64> {
    let bad = |code, what: String| Err(Error::new(code, what));
    let end = chunk.offset.checked_add(chunk.length).filter(|&end| end <= size);
    let Some(end) = end else {
        let what = format!(
            "its item has {} bytes from byte {} on, and the file {size}",
            chunk.length, chunk.offset
        );
        return bad(Code::Truncated, what);
    };
    if chunk.offset < from {
        let what = format!("its item starts at byte {}, inside of the one before", chunk.offset);
        return bad(Code::Overlap, what);
    }
    let data = chunk.data.as_ref();
    let inside = data.is_some_and(|data| {
        let data_end = data.offset.checked_add(data.bytes);
        data.offset >= chunk.offset && data_end.is_some_and(|data_end| data_end <= end)
    });
    let blocks = data.map_or(0, |data| data.bytes.div_ceil(BLOCK_BYTES));
    if !inside || data.is_none_or(|data| data.crcs.len() as u64 != blocks) {
        return bad(Code::InvalidMetadata, "its bytes and checksums do not fit its item".into());
    }
    Ok(end)
}

fn add_item(spans: &mut Vec<Span>, chunk: &Chunk, end: u64, item: usize) {
    let Some(data) = &chunk.data else { return };
    let mut push = |offset, len, kind| {
        if len > 0 {
            spans.push(Span { offset, len, kind, item });
        }
    };
    push(chunk.offset, data.offset - chunk.offset, Kind::Head);
    let (mut at, data_end) = (data.offset, data.offset + data.bytes);
    for &crc in &data.crcs {
        let len = BLOCK_BYTES.min(data_end - at);
        push(at, len, Kind::Block(crc));
        at += len;
    }
    push(data_end, end - data_end, Kind::Tail);
}

fn fill(spans: &mut Vec<Span>, from: u64, to: u64, kind: Kind, item: usize) {
    let mut offset = from;
    while offset < to {
        let len = PIECE_BYTES.min(to - offset);
        spans.push(Span { offset, len, kind, item });
        offset += len;
    }
}

impl Item<'_> {
    /// The bytes of its archive before and after the tensor, as they are written for it at its place; `None` where no
    /// writer of this version makes one of those lengths.
    pub(super) fn glue(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        let (Value::Tensor(tensor), Some(data)) = (&self.named.value, &self.chunk.data) else {
            return None;
        };
        let dtype = torch_dtype(tensor.dtype).ok()?;
        let sizes = torch_shape(tensor.dtype, &self.chunk.region.sizes).ok()?;
        let fits = |layout: &ItemLayout| {
            self.chunk.offset + layout.head_len() == data.offset
                && layout.data_len() == data.bytes
                && layout.len() == self.chunk.length
        };
        let layouts = [SMALL_ALIGN, FILE_ALIGN].into_iter();
        let mut layouts = layouts
            .filter_map(|align| ItemLayout::new(dtype, &sizes, self.chunk.offset, align).ok());
        let layout = layouts.find(fits)?;
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        let crc = self.crc();
        layout.head(crc, &mut head);
        layout.tail(crc, &mut tail);
        Some((head, tail))
    }

    /// The CRC-32 of all of its blocks.
    fn crc(&self) -> u32 {
        let Some(data) = &self.chunk.data else { return 0 };
        let mut left = data.bytes;
        data.crcs.iter().fold(0, |joined, &crc| {
            let len = BLOCK_BYTES.min(left);
            left -= len;
            crc32_join(joined, crc, len)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DataPlace;
    use forebay_tensor::Region;

    fn item(named: &Named, offset: u64, length: u64, head: u64, bytes: u64) -> Item<'_> {
        let crcs = vec![7; bytes.div_ceil(BLOCK_BYTES) as usize];
        let data = Some(DataPlace { offset: offset + head, bytes, crcs });
        let region = Region { offsets: vec![0], sizes: vec![bytes] };
        let chunk = Chunk { region, file: 0, offset, length, transforms: Vec::new(), data };
        Item { named, chunk }
    }

    #[test]
    fn spans_cover_a_file_once_and_blocks_count_from_the_chunk() {
        let named = Named::object("a");
        let long = BLOCK_BYTES + 5;
        let items = [item(&named, 0, long + 30, 10, long), item(&named, long + 40, 8, 0, 8)];
        let mut faults = 0;
        let spans = cut(&items, long + 60, |_, _| faults += 1);
        let mut at = 0;
        for span in &spans {
            assert_eq!(span.offset, at);
            at += span.len;
        }
        assert_eq!((at, faults), (long + 60, 0));
        let kinds: Vec<Kind> = spans.iter().map(|span| span.kind).collect();
        let block = Kind::Block(7);
        assert_eq!(kinds, [Kind::Head, block, block, Kind::Tail, Kind::Gap, block, Kind::Gap]);
        assert_eq!((spans[1].offset, spans[2].len), (10, 5));
    }

    #[test]
    fn items_that_cannot_be_there_are_named_and_left_out() {
        let named = Named::object("a");
        let items = [
            item(&named, 0, 20, 10, 10),
            item(&named, 10, 20, 0, 20),
            item(&named, 40, 20, 5, 20),
            item(&named, 90, 20, 0, 20),
        ];
        let mut faults = Vec::new();
        let spans = cut(&items, 100, |item, error| faults.push((item, error.code())));
        let wanted = [(1, Code::Overlap), (2, Code::InvalidMetadata), (3, Code::Truncated)];
        assert_eq!(faults, wanted);
        assert_eq!(spans.iter().map(|span| span.len).sum::<u64>(), 100);
        assert_eq!(cut(&[], 3, |_, _| {})[0].kind, Kind::Free);
    }
}
