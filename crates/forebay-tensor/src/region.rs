//! Boxes inside tensors.

use forebay_error::{Code, Error, Result};
use std::fmt;

/// A box of elements: where it starts and how long it is in each dimension. Both lists have one number a dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    /// First element in each dimension.
    pub offsets: Vec<u64>,
    /// Elements in each dimension.
    pub sizes: Vec<u64>,
}

impl Region {
    /// A box; fails where the lists have different lengths or an end leaves 64 bits.
    pub fn new(offsets: Vec<u64>, sizes: Vec<u64>) -> Result<Self> {
        let region = Self { offsets, sizes };
        if region.offsets.len() != region.sizes.len() {
            return Err(bad(format!("region {region} has {} sizes", region.sizes.len())));
        }
        let fits = region.sides().all(|(offset, size)| offset.checked_add(size).is_some());
        if fits { Ok(region) } else { Err(bad(format!("region {region} ends past 2^64"))) }
    }

    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// The part of `rank` when dimension `dim` is cut for `world` ranks as `torch.chunk` and DTensor's `Shard` do:
    /// ceil(n / world) rows for each, so that later ranks may have fewer or none.
    pub fn shard(shape: &[u64], dim: usize, rank: u64, world: u64) -> Result<Self> {
        let Some(&side) = shape.get(dim) else {
            return Err(bad(format!("shape {shape:?} has no dimension {dim}")));
        };
        if rank >= world {
            return Err(bad(format!("rank {rank} is not below the {world} ranks")));
        }
        let rows = side.div_ceil(world);
        let start = rank.saturating_mul(rows).min(side);
        let mut region = Self::whole(shape);
        if let (Some(offset), Some(size)) = (region.offsets.get_mut(dim), region.sizes.get_mut(dim))
        {
            *offset = start;
            *size = rows.min(side - start);
        }
        Ok(region)
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.sizes.len()
    }

    /// Elements in the box; `u64::MAX` where they are more than that.
    pub fn elements(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        self.sizes.iter().fold(1, |product: u64, &size| product.saturating_mul(size))
    }

    /// Whether the box holds nothing.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Whether the box is all of a tensor of this shape.
    pub fn is_whole(&self, shape: &[u64]) -> bool {
        self.sizes == shape && self.offsets.iter().all(|&offset| offset == 0)
    }

    /// What two boxes share; `None` where that is nothing or they differ in the number of dimensions.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if self.rank() != other.rank() {
            return None;
        }
        let mut shared = Self { offsets: Vec::new(), sizes: Vec::new() };
        for ((a, a_size), (b, b_size)) in self.sides().zip(other.sides()) {
            let start = a.max(b);
            let end = a.saturating_add(a_size).min(b.saturating_add(b_size));
            if start >= end {
                return None;
            }
            shared.offsets.push(start);
            shared.sizes.push(end - start);
        }
        Some(shared)
    }

    /// Whether `other` lies wholly inside. An empty box lies inside where its corners do.
    pub fn contains(&self, other: &Self) -> bool {
        self.rank() == other.rank()
            && self.sides().zip(other.sides()).all(|((a, a_size), (b, b_size))| {
                b >= a && b.saturating_add(b_size) <= a.saturating_add(a_size)
            })
    }

    /// The same box counted from the corner of `outer`; `None` where it does not lie inside.
    pub fn relative_to(&self, outer: &Self) -> Option<Self> {
        outer.contains(self).then(|| Self {
            offsets: self
                .offsets
                .iter()
                .zip(&outer.offsets)
                .map(|(inner, outer)| inner - outer)
                .collect(),
            sizes: self.sizes.clone(),
        })
    }

    /// Fails with `bad_slice` unless the box lies inside a tensor of this shape.
    pub fn check_within(&self, shape: &[u64]) -> Result<()> {
        if self.offsets.len() != shape.len() || self.sizes.len() != shape.len() {
            let dims = shape.len();
            return Err(bad(format!(
                "region {self} does not have the {dims} dimensions of {shape:?}"
            )));
        }
        let fits = |((offset, size), &side): ((u64, u64), &u64)| {
            offset.checked_add(size).is_some_and(|end| end <= side)
        };
        match self.sides().zip(shape).all(fits) {
            true => Ok(()),
            false => Err(bad(format!("region {self} leaves the shape {shape:?}"))),
        }
    }

    fn sides(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.offsets.iter().copied().zip(self.sizes.iter().copied())
    }
}

/// `[0:4, 2:4]`, as a slice is written in Python.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, (offset, size)) in self.sides().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{offset}:{}", u128::from(offset) + u128::from(size))?;
        }
        f.write_str("]")
    }
}

fn bad(what: String) -> Error {
    Error::new(Code::BadSlice, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets.to_vec(), sizes.to_vec()).unwrap()
    }

    #[test]
    fn shards_follow_torch_chunk() {
        let rows = |side, world| -> Vec<(u64, u64)> {
            (0..world)
                .map(|rank| Region::shard(&[3, side], 1, rank, world).unwrap())
                .map(|shard| (shard.offsets[1], shard.sizes[1]))
                .collect()
        };
        assert_eq!(rows(6, 4), [(0, 2), (2, 2), (4, 2), (6, 0)]);
        assert_eq!(rows(7, 3), [(0, 3), (3, 3), (6, 1)]);
        assert_eq!(rows(0, 2), [(0, 0), (0, 0)]);
        assert_eq!(rows(1, 3), [(0, 1), (1, 0), (1, 0)]);
        assert!(Region::shard(&[u64::MAX], 0, u64::MAX - 1, u64::MAX).unwrap().elements() == 1);
        assert!(Region::shard(&[4], 1, 0, 1).is_err());
        assert!(Region::shard(&[4], 0, 2, 2).is_err());
        assert!(Region::shard(&[4], 0, 0, 0).is_err());
    }

    #[test]
    fn intersections() {
        let a = region(&[0, 0], &[4, 4]);
        let b = region(&[2, 3], &[4, 4]);
        assert_eq!(a.intersect(&b), Some(region(&[2, 3], &[2, 1])));
        assert_eq!(a.intersect(&region(&[4, 0], &[1, 4])), None);
        assert_eq!(a.intersect(&region(&[0], &[4])), None);
        assert_eq!(region(&[], &[]).intersect(&region(&[], &[])), Some(region(&[], &[])));
        assert_eq!(b.relative_to(&region(&[1, 3], &[9, 9])), Some(region(&[1, 0], &[4, 4])));
        assert_eq!(b.relative_to(&a), None);
    }

    #[test]
    fn bounds_are_checked_without_wrapping() {
        let shape = [4, 4];
        assert!(region(&[0, 0], &[4, 4]).check_within(&shape).is_ok());
        assert!(region(&[4, 0], &[0, 4]).check_within(&shape).is_ok());
        assert!(region(&[1, 0], &[4, 4]).check_within(&shape).is_err());
        assert!(region(&[0], &[4]).check_within(&shape).is_err());
        assert!(Region::new(vec![u64::MAX], vec![1]).is_err());
        assert!(Region::new(vec![0, 0], vec![1]).is_err());
        let wrapping = Region { offsets: vec![u64::MAX], sizes: vec![2] };
        let error = wrapping.check_within(&[4]).unwrap_err();
        assert_eq!(error.code(), Code::BadSlice);
        assert!(error.what().contains("[18446744073709551615:18446744073709551617]"));
    }
}
