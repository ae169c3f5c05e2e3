//! What a reader of the tables sees.

use super::table::{DcpMetadata, ElementType};
use forebay_tensor::Region;

/// A step of the way to a value in the nested state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step<'m> {
    /// A key of a dict.
    Key(&'m str),
    /// A place in a list.
    Index(u64),
}

/// One named value of a checkpoint.
#[derive(Clone)]
pub struct Entry<'m> {
    /// Its flat name.
    pub name: &'m str,
    /// The way to it in the nested state; the name alone where the state was not flattened, `None` where the checkpoint
    /// does not say.
    pub path: Option<Vec<Step<'m>>>,
    /// What it is.
    pub kind: EntryKind<'m>,
}

/// What an entry is.
#[derive(Clone)]
pub enum EntryKind<'m> {
    /// A tensor.
    Tensor {
        /// The type of its elements.
        element: &'m ElementType,
        /// Its sides. Of [`F4`](forebay_tensor::Dtype::F4) in elements of that, of which torch counts two as one: the
        /// last side of shape and chunks is twice what the file says.
        shape: &'m [u64],
        /// Its pieces, in the order of the file.
        chunks: Chunks<'m>,
    },
    /// An object in the form of `torch.save`.
    Object {
        /// Where it is.
        place: Place<'m>,
    },
}

/// A stored piece of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'m> {
    /// First element in each dimension.
    pub offsets: &'m [u64],
    /// Elements in each dimension.
    pub sizes: &'m [u64],
    /// Where it is; `None` only for a piece without elements.
    pub place: Option<Place<'m>>,
}

impl Chunk<'_> {
    /// The piece as a region.
    pub fn region(&self) -> Region {
        Region { offsets: self.offsets.to_vec(), sizes: self.sizes.to_vec() }
    }
}

/// Where an item is. Whether the file is that long is not known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'m> {
    /// Which of [`DcpMetadata::files`].
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes; the sum with the offset is below 2^63.
    pub length: u64,
    /// What to apply to the bytes when reading, in this order: `stream.zstd/1`.
    pub transforms: &'m [String],
}

impl Place<'_> {
    /// Never seen from outside: an object without a place is refused.
    pub(super) fn nowhere() -> Self {
        Place { file: usize::MAX, offset: 0, length: 0, transforms: &[] }
    }
}

/// The pieces of a tensor.
#[derive(Clone)]
pub struct Chunks<'m> {
    pub(super) metadata: &'m DcpMetadata,
    pub(super) dims: usize,
    pub(super) numbers: &'m [u64],
    pub(super) places: std::ops::Range<usize>,
}

impl<'m> Iterator for Chunks<'m> {
    type Item = Chunk<'m>;

    fn next(&mut self) -> Option<Chunk<'m>> {
        let place = self.places.next()?;
        let (offsets, rest) = self.numbers.split_at_checked(self.dims)?;
        let (sizes, rest) = rest.split_at_checked(self.dims)?;
        self.numbers = rest;
        Some(Chunk { offsets, sizes, place: self.metadata.place(place) })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.places.size_hint()
    }
}

impl ExactSizeIterator for Chunks<'_> {}
