//! One data file: where its items are, and the segments in which it is written.

use std::fmt;

use forebay_error::Result;

use super::files::{ItemSpec, LayoutOptions, too_large};
use super::item::{ItemLayout, SMALL_ALIGN};

/// Segments and the data of large tensors start on multiples of this many bytes: the logical block of nearly all
/// drives, so that direct I/O can write them as they are.
pub const FILE_ALIGN: u64 = 4096;

/// One item in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedItem {
    /// Its place in the list that was handed to [`plan_files`](super::plan_files).
    pub index: usize,
    /// Its first byte in the file: what `.metadata` gives.
    pub offset: u64,
    /// Its bytes, archive included.
    pub len: u64,
    /// The first byte of the tensor in the file; of an object, that of the item.
    pub data_offset: u64,
    /// Bytes of the tensor; of an object, all.
    pub data_bytes: u64,
    /// Bytes of the tensor, from its first, that are a [`Segment::Body`]; the others are in glue.
    pub body_bytes: u64,
    pub(super) tensor: Option<ItemLayout>,
}

impl PlacedItem {
    /// The byte after its last.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Bytes of a file that are written together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// The first bytes of a large tensor, whole blocks of them, as they are in its memory.
    Body {
        /// Which of [`FileLayout::items`].
        item: usize,
        /// First byte in the file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Whatever is between bodies; [`FileLayout::glue`] makes it.
    Glue {
        /// First byte in the file.
        offset: u64,
        /// Bytes; whole blocks except at the end of the file.
        len: u64,
    },
}

impl Segment {
    /// First byte in the file; a multiple of [`FILE_ALIGN`].
    pub fn offset(&self) -> u64 {
        match *self {
            Segment::Body { offset, .. } | Segment::Glue { offset, .. } => offset,
        }
    }

    /// Bytes; whole blocks of [`FILE_ALIGN`], but for the last segment of a file.
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        match *self {
            Segment::Body { len, .. } | Segment::Glue { len, .. } => len,
        }
    }

    /// Bytes rounded up to blocks. Direct I/O writes so many, and cuts the file to [`FileLayout::len`] afterwards.
    pub fn padded_len(&self) -> u64 {
        self.len().next_multiple_of(FILE_ALIGN)
    }
}

/// One data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    /// Its items, in the order of their bytes.
    pub items: Vec<PlacedItem>,
    /// Its segments in order: they cover the file, each byte once.
    pub segments: Vec<Segment>,
    /// Its bytes.
    pub len: u64,
}

impl fmt::Display for FileLayout {
    /// A line for each segment, with the items that start in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "file of {} bytes, {} items", self.len, self.items.len())?;
        for segment in &self.segments {
            let (start, end) = (segment.offset(), segment.offset() + segment.len());
            match segment {
                Segment::Body { item, .. } => {
                    let index = self.items.get(*item).map_or(0, |item| item.index);
                    writeln!(f, "{start:>14} {end:>14} body of item {index}")?;
                }
                Segment::Glue { .. } => {
                    let from = self.items.partition_point(|item| item.offset < start);
                    let to = self.items.partition_point(|item| item.offset < end);
                    writeln!(f, "{start:>14} {end:>14} glue, {} items start", to - from)?;
                }
            }
        }
        Ok(())
    }
}

/// Places one item after the other.
pub(super) struct Builder {
    items: Vec<PlacedItem>,
    len: u64,
    large_bytes: u64,
    max_glue_bytes: u64,
}

impl Builder {
    pub(super) fn new(options: &LayoutOptions) -> Self {
        let max_glue_bytes = options.max_glue_bytes.clamp(FILE_ALIGN, 1 << 40);
        Self {
            items: Vec::new(),
            len: 0,
            large_bytes: options.large_bytes.max(FILE_ALIGN),
            max_glue_bytes: max_glue_bytes.next_multiple_of(FILE_ALIGN),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Where `item` comes when it is the next one.
    pub(super) fn place(&self, index: usize, item: &ItemSpec) -> Result<PlacedItem> {
        let offset = self.len;
        let placed = match item {
            ItemSpec::Tensor { dtype, shape } => {
                let large = dtype.size(shape)?.1 >= self.large_bytes;
                let align = if large { FILE_ALIGN } else { SMALL_ALIGN };
                let tensor = ItemLayout::new(*dtype, shape, offset, align)?;
                let data_bytes = tensor.data_len();
                PlacedItem {
                    index,
                    offset,
                    len: tensor.len(),
                    data_offset: offset + tensor.head_len(),
                    data_bytes,
                    body_bytes: if large { data_bytes - data_bytes % FILE_ALIGN } else { 0 },
                    tensor: Some(tensor),
                }
            }
            ItemSpec::Bytes(bytes) => PlacedItem {
                index,
                offset,
                len: *bytes,
                data_offset: offset,
                data_bytes: *bytes,
                body_bytes: 0,
                tensor: None,
            },
        };
        // Rounding up the end of the file must not overflow either.
        let limit = i64::MAX as u64 - FILE_ALIGN;
        offset.checked_add(placed.len).filter(|&end| end <= limit).ok_or_else(too_large)?;
        Ok(placed)
    }

    /// Takes what [`Builder::place`] gave.
    pub(super) fn push(&mut self, placed: PlacedItem) {
        self.len = placed.end();
        self.items.push(placed);
    }

    pub(super) fn finish(self) -> FileLayout {
        let mut segments = Vec::new();
        let mut done = 0;
        for (item, placed) in self.items.iter().enumerate() {
            if placed.body_bytes > 0 {
                self.cut_glue(done, placed.data_offset, &mut segments);
                let (offset, len) = (placed.data_offset, placed.body_bytes);
                segments.push(Segment::Body { item, offset, len });
                done = offset + len;
            }
        }
        self.cut_glue(done, self.len, &mut segments);
        FileLayout { items: self.items, segments, len: self.len }
    }

    fn cut_glue(&self, mut offset: u64, end: u64, segments: &mut Vec<Segment>) {
        while offset < end {
            let len = self.max_glue_bytes.min(end - offset);
            segments.push(Segment::Glue { offset, len });
            offset += len;
        }
    }
}
