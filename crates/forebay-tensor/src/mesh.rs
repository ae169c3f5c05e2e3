//! Meshes of ranks: the n-dimensional arrays over which frameworks cut tensors.

use forebay_error::{Code, Error, Result};

use crate::ShowShape;

/// Dimensions of meshes and of tensors in layouts at the most; torch itself stops at 64.
pub const MAX_DIMS: usize = 64;

/// An array of ranks. A rank's place in it is a coordinate, or the coordinate's row-major number, called its index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    shape: Vec<u64>,
    size: u32,
    /// Rank of each index; `None` where the two are the same number.
    ranks: Option<Vec<u32>>,
    /// (rank, index), sorted; empty where the two are the same number.
    indices: Vec<(u32, u32)>,
}

impl Mesh {
    /// The ranks from 0 on in row-major order.
    ///
    /// Fails with `invalid_metadata` for a side of zero, over [`MAX_DIMS`] dimensions and over 2^32 - 1 ranks.
    pub fn new(shape: Vec<u64>) -> Result<Self> {
        if shape.len() > MAX_DIMS {
            return Err(bad(format!("mesh has {} dimensions, over {MAX_DIMS}", shape.len())));
        }
        let size = shape.iter().try_fold(1_u64, |size, &side| size.checked_mul(side));
        let size = size.and_then(|size| u32::try_from(size).ok()).filter(|&size| size > 0);
        match size {
            Some(size) => Ok(Self { shape, size, ranks: None, indices: Vec::new() }),
            None => {
                let shape = ShowShape(&shape);
                Err(bad(format!("mesh {shape} does not have 1 to 2^32 - 1 ranks")))
            }
        }
    }

    /// These ranks in row-major order.
    ///
    /// Fails as [`Mesh::new`] does, and where the list has another length than the mesh or names a rank twice.
    pub fn with_ranks(shape: Vec<u64>, ranks: Vec<u32>) -> Result<Self> {
        let mut mesh = Self::new(shape)?;
        if ranks.len() != mesh.size as usize {
            let (listed, size) = (ranks.len(), mesh.size);
            return Err(bad(format!("mesh of {size} ranks lists {listed}")));
        }
        let mut indices: Vec<(u32, u32)> = ranks.iter().copied().zip(0..).collect();
        indices.sort_unstable();
        for pair in indices.windows(2) {
            if let [(a, _), (b, _)] = pair
                && a == b
            {
                return Err(bad(format!("mesh lists rank {a} twice")));
            }
        }
        if !ranks.iter().copied().eq(0..mesh.size) {
            mesh.ranks = Some(ranks);
            mesh.indices = indices;
        }
        Ok(mesh)
    }

    /// Ranks in each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Number of ranks, at least one.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The rank at an index; `None` past the end.
    pub fn rank(&self, index: u32) -> Option<u32> {
        match &self.ranks {
            Some(ranks) => ranks.get(index as usize).copied(),
            None => (index < self.size).then_some(index),
        }
    }

    /// The index of a rank; `None` where the mesh does not have it.
    pub fn index(&self, rank: u32) -> Option<u32> {
        if self.ranks.is_none() {
            return (rank < self.size).then_some(rank);
        }
        let at = self.indices.binary_search_by_key(&rank, |entry| entry.0).ok()?;
        self.indices.get(at).map(|entry| entry.1)
    }

    /// The coordinate of an index below [`Mesh::size`].
    pub fn coordinate(&self, index: u32) -> Vec<u64> {
        let mut rest = u64::from(index);
        let mut coordinate = vec![0; self.shape.len()];
        for (at, &side) in coordinate.iter_mut().zip(&self.shape).rev() {
            *at = rest % side;
            rest /= side;
        }
        coordinate
    }

    /// By how much an index grows from one rank to the next in each dimension.
    pub(crate) fn strides(&self) -> Vec<u32> {
        let mut stride = 1_u32;
        let mut strides = vec![0; self.shape.len()];
        for (at, &side) in strides.iter_mut().zip(&self.shape).rev() {
            *at = stride;
            // At most the size of the mesh, which fits.
            stride = stride.saturating_mul(side as u32);
        }
        strides
    }
}

fn bad(what: String) -> Error {
    Error::new(Code::InvalidMetadata, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_indices_and_coordinates() {
        let mesh = Mesh::new(vec![2, 3]).unwrap();
        assert_eq!((mesh.size(), mesh.rank(5), mesh.rank(6)), (6, Some(5), None));
        assert_eq!((mesh.index(5), mesh.index(6)), (Some(5), None));
        assert_eq!(mesh.coordinate(4), [1, 1]);
        assert_eq!(mesh.strides(), [3, 1]);
        let mesh = Mesh::with_ranks(vec![2, 2], vec![7, 3, 5, 1]).unwrap();
        assert_eq!((mesh.rank(2), mesh.index(1), mesh.index(0)), (Some(5), Some(3), None));
        assert_eq!(Mesh::with_ranks(vec![2], vec![0, 1]).unwrap(), Mesh::new(vec![2]).unwrap());
        assert_eq!(Mesh::new(vec![]).unwrap().size(), 1);
        assert!(Mesh::new(vec![]).unwrap().coordinate(0).is_empty());
    }

    #[test]
    fn meshes_that_contradict_themselves() {
        let code = |result: Result<Mesh>| result.unwrap_err().code();
        assert_eq!(code(Mesh::new(vec![2, 0])), Code::InvalidMetadata);
        assert_eq!(code(Mesh::new(vec![1 << 16, 1 << 16])), Code::InvalidMetadata);
        assert_eq!(code(Mesh::new(vec![u64::MAX, 2])), Code::InvalidMetadata);
        assert_eq!(code(Mesh::new(vec![1; 65])), Code::InvalidMetadata);
        assert_eq!(code(Mesh::with_ranks(vec![2], vec![0])), Code::InvalidMetadata);
        assert_eq!(code(Mesh::with_ranks(vec![2], vec![4, 4])), Code::InvalidMetadata);
    }
}
