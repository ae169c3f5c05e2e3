//! Renders glue: what is in a file beside the bodies of large tensors.

use std::ops::Range;

use forebay_error::{Code, Error, Result};

use super::layout::{FileLayout, PlacedItem, Segment};

/// What glue is made of. Items are named by [`PlacedItem::index`], their place in the list that was planned.
pub trait GlueSource {
    /// The CRC-32 (ISO-HDLC) of all bytes of a tensor, its body included.
    fn crc(&self, index: usize) -> u32;

    /// Copies the bytes of a tensor or finished item from byte `from` on.
    fn copy(&self, index: usize, from: u64, into: &mut [u8]) -> Result<()>;
}

impl FileLayout {
    /// Renders `segment`, one of [`FileLayout::segments`] that is glue. `into` has [`Segment::len`] bytes, or more (as
    /// [`Segment::padded_len`]): those become zero.
    pub fn glue(&self, segment: &Segment, source: &impl GlueSource, into: &mut [u8]) -> Result<()> {
        let &Segment::Glue { offset, len } = segment else {
            return Err(Error::new(Code::Internal, "a body was to be rendered as glue"));
        };
        let Some((bytes, rest)) = into.split_at_mut_checked(len as usize) else {
            return Err(Error::new(Code::Internal, "the buffer is smaller than its glue"));
        };
        rest.fill(0);
        let mut window = Window { offset, bytes };
        let mut scratch = Vec::new();
        let first = self.items.partition_point(|item| item.end() <= offset);
        for item in &self.items[first..] {
            if item.offset >= offset + len {
                break;
            }
            window.item(item, source, &mut scratch)?;
        }
        Ok(())
    }
}

/// The bytes of a file from `offset` on.
struct Window<'a> {
    offset: u64,
    bytes: &'a mut [u8],
}

impl Window<'_> {
    fn item(
        &mut self,
        item: &PlacedItem,
        source: &impl GlueSource,
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        let data = item.data_offset + item.body_bytes;
        let data_end = item.data_offset + item.data_bytes;
        if let Some((range, skipped)) = self.part(data, data_end) {
            source.copy(item.index, item.body_bytes + skipped, &mut self.bytes[range])?;
        }
        let Some(tensor) = &item.tensor else { return Ok(()) };
        if let Some((range, skipped)) = self.part(item.offset, item.data_offset) {
            scratch.clear();
            tensor.head(source.crc(item.index), scratch);
            self.put(range, skipped, scratch);
        }
        if let Some((range, skipped)) = self.part(data_end, item.end()) {
            scratch.clear();
            tensor.tail(source.crc(item.index), scratch);
            self.put(range, skipped, scratch);
        }
        Ok(())
    }

    /// What of the file's bytes from `start` to `end` is in the window: where in it, and how many bytes of the part lie
    /// before it.
    fn part(&self, start: u64, end: u64) -> Option<(Range<usize>, u64)> {
        let from = start.max(self.offset);
        let to = end.min(self.offset + self.bytes.len() as u64);
        let range = || (from - self.offset) as usize..(to - self.offset) as usize;
        (from < to).then(|| (range(), from - start))
    }

    fn put(&mut self, range: Range<usize>, skipped: u64, whole: &[u8]) {
        let skipped = skipped as usize;
        let part = &whole[skipped..skipped + range.len()];
        self.bytes[range].copy_from_slice(part);
    }
}
