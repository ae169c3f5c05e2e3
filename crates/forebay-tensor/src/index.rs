//! Finding the stored chunks that a wanted region meets.
//!
//! A packed tree of bounding boxes: chunks in the order of their offsets, sixteen to a node, sixteen nodes to a node
//! above. For grids that order keeps nodes compact, and a query visits few nodes that give nothing; for boxes scattered
//! in an order of their own it is slower, at worst a scan of all. All boxes lie in flat arrays: an index takes
//! 16 bytes a chunk and dimension, and 4.

use forebay_error::{Code, Error, Result};

use crate::{MAX_DIMS, Region, ShowShape};

/// Children of a node.
const FANOUT: usize = 16;

/// An index over the regions of a tensor's chunks.
#[derive(Clone, Debug)]
pub struct ChunkIndex {
    dims: usize,
    /// Numbers of the chunks with elements, in the order of their offsets.
    order: Vec<u32>,
    /// Boxes of the chunks in that order, then bounding boxes of sixteen, and so on up to one node. A box is its
    /// starts, then its ends.
    levels: Vec<Vec<u64>>,
}

impl ChunkIndex {
    /// An index over chunks, which are numbered from 0 on. They may overlap; those without elements are never found.
    ///
    /// Fails with `out_of_bounds` where a chunk leaves the shape, with `unsupported` for over [`MAX_DIMS`] dimensions
    /// or 2^32 - 1 chunks.
    pub fn build<'a>(shape: &[u64], chunks: impl IntoIterator<Item = &'a Region>) -> Result<Self> {
        let dims = shape.len();
        if dims > MAX_DIMS {
            let what = format!("tensor has {dims} dimensions, over {MAX_DIMS}");
            return Err(Error::new(Code::Unsupported, what));
        }
        let mut numbers = Vec::new();
        let mut boxes: Vec<u64> = Vec::new();
        for (number, chunk) in chunks.into_iter().enumerate() {
            chunk.check_within(shape).map_err(|cause| {
                let what = format!("chunk {number} leaves the tensor {}", ShowShape(shape));
                Error::new(Code::OutOfBounds, what).with_source(cause)
            })?;
            if !chunk.is_empty() {
                let number = u32::try_from(number);
                let too_many = |_| Error::new(Code::Unsupported, "over 2^32 - 1 chunks");
                numbers.push(number.map_err(too_many)?);
                boxes.extend_from_slice(&chunk.offsets);
                boxes.extend(chunk.offsets.iter().zip(&chunk.sizes).map(|(at, size)| at + size));
            }
        }
        Ok(Self::packed(dims, numbers, boxes))
    }

    fn packed(dims: usize, numbers: Vec<u32>, boxes: Vec<u64>) -> Self {
        let starts = |place: u32| {
            let from = place as usize * 2 * dims;
            boxes.get(from..from + dims).unwrap_or_default()
        };
        let mut places: Vec<u32> = (0..numbers.len() as u32).collect();
        places.sort_unstable_by(|&a, &b| starts(a).cmp(starts(b)).then(a.cmp(&b)));
        let in_order = places.iter().flat_map(|&place| {
            let from = place as usize * 2 * dims;
            boxes.get(from..from + 2 * dims).unwrap_or_default().iter().copied()
        });
        let mut levels: Vec<Vec<u64>> = vec![in_order.collect()];
        let mut count = numbers.len();
        while count > 1 && dims > 0 {
            let below = levels.last().map(Vec::as_slice).unwrap_or_default();
            levels.push(bounds(below, dims));
            count = count.div_ceil(FANOUT);
        }
        let order = places.iter().filter_map(|&at| numbers.get(at as usize).copied()).collect();
        Self { dims, order, levels }
    }

    /// Number of chunks with elements.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether no chunk has elements.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The chunks that share elements with a region, and what they share, in the order of the chunks' offsets.
    ///
    /// Fails with `bad_slice` where the region has another number of dimensions.
    pub fn intersecting<'a>(&'a self, wanted: &'a Region) -> Result<Intersections<'a>> {
        if wanted.offsets.len() != self.dims || wanted.sizes.len() != self.dims {
            let (has, dims) = (wanted.sizes.len(), self.dims);
            let what = format!("region of {has} dimensions in a tensor of {dims}");
            return Err(Error::new(Code::BadSlice, what));
        }
        let mut todo = Vec::new();
        if !self.is_empty() && !wanted.is_empty() {
            // Without dimensions there is one level, and all chunks are the one element.
            let nodes = if self.dims == 0 { self.len() } else { 1 };
            todo.extend((0..nodes).rev().map(|node| (self.levels.len() - 1, node)));
        }
        Ok(Intersections { index: self, wanted, todo })
    }

    fn node(&self, level: usize, node: usize) -> Option<(&[u64], &[u64])> {
        let from = node * 2 * self.dims;
        self.levels.get(level)?.get(from..from + 2 * self.dims)?.split_at_checked(self.dims)
    }
}

/// Bounding boxes of each sixteen boxes.
fn bounds(boxes: &[u64], dims: usize) -> Vec<u64> {
    let mut above = Vec::with_capacity(boxes.len().div_ceil(FANOUT) + 2 * dims);
    for group in boxes.chunks(FANOUT * 2 * dims) {
        let mut bound: Vec<u64> = group.iter().take(2 * dims).copied().collect();
        for child in group.chunks(2 * dims) {
            for (side, (bound, &child)) in bound.iter_mut().zip(child).enumerate() {
                *bound = if side < dims { child.min(*bound) } else { child.max(*bound) };
            }
        }
        above.extend(bound);
    }
    above
}

/// Iterator over the chunks that a region meets, see [`ChunkIndex::intersecting`].
#[derive(Clone, Debug)]
pub struct Intersections<'a> {
    index: &'a ChunkIndex,
    wanted: &'a Region,
    /// Nodes to look at: (level, number), the next one last.
    todo: Vec<(usize, usize)>,
}

impl Iterator for Intersections<'_> {
    type Item = (u32, Region);

    fn next(&mut self) -> Option<(u32, Region)> {
        while let Some((level, node)) = self.todo.pop() {
            let Some((starts, ends)) = self.index.node(level, node) else { continue };
            let sides = starts.iter().zip(ends);
            let wanted = self.wanted.offsets.iter().zip(&self.wanted.sizes);
            let meets = sides.zip(wanted).all(|((start, end), (offset, size))| {
                offset < end && *start < offset.saturating_add(*size)
            });
            if !meets {
                continue;
            }
            if level == 0 {
                let number = *self.index.order.get(node)?;
                return Some((number, shared(starts, ends, self.wanted)));
            }
            let children = node * FANOUT..(node + 1) * FANOUT;
            self.todo.extend(children.rev().map(|child| (level - 1, child)));
        }
        None
    }
}

/// What a box that meets a region shares with it.
fn shared(starts: &[u64], ends: &[u64], wanted: &Region) -> Region {
    let wanted = wanted.offsets.iter().zip(&wanted.sizes);
    let sides = starts.iter().zip(ends).zip(wanted).map(|((start, end), (offset, size))| {
        let first = start.max(offset);
        (*first, end.min(&offset.saturating_add(*size)) - first)
    });
    let (offsets, sizes) = sides.unzip();
    Region { offsets, sizes }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets.to_vec(), sizes.to_vec()).unwrap()
    }

    #[test]
    fn chunks_without_elements_and_tensors_without_dimensions() {
        let chunks = [region(&[0], &[2]), region(&[2], &[0]), region(&[2], &[2])];
        let index = ChunkIndex::build(&[4], &chunks).unwrap();
        assert_eq!(index.len(), 2);
        let all: Vec<_> = index.intersecting(&region(&[1], &[9])).unwrap().collect();
        assert_eq!(all, [(0, region(&[1], &[1])), (2, region(&[2], &[2]))]);
        assert_eq!(index.intersecting(&region(&[1], &[0])).unwrap().count(), 0);
        let scalar = ChunkIndex::build(&[], &[region(&[], &[])]).unwrap();
        let found: Vec<_> = scalar.intersecting(&region(&[], &[])).unwrap().collect();
        assert_eq!(found, [(0, region(&[], &[]))]);
        assert!(ChunkIndex::build(&[0], &[region(&[0], &[0])]).unwrap().is_empty());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = ChunkIndex::build(&[4], &[region(&[3], &[2])]).unwrap_err();
        assert_eq!(error.code(), Code::OutOfBounds);
        let index = ChunkIndex::build(&[4], &[region(&[0], &[4])]).unwrap();
        let error = index.intersecting(&region(&[], &[])).unwrap_err();
        assert_eq!(error.code(), Code::BadSlice);
        let error = ChunkIndex::build(&[1; 65], []).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported);
    }
}
