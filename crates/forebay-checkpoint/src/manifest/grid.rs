//! Layouts on meshes, and numbers for their shards.
//!
//! The arithmetic of [`MeshLayout`] is part of the format: a manifest does not store the boxes that follow from it. A
//! writer compares the boxes that follow with those that it really holds, and names regions where they differ.

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::{Mesh, MeshLayout, Placement, Region, Tiling};

use super::limits::MAX_RANKS;

/// How tensors lie on a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Which mesh of the list.
    pub mesh: u32,
    /// One for each dimension of the mesh.
    pub placements: Vec<Placement>,
    /// Whether strided shards are read as [`MeshLayout::right_to_left`] does, as what FSDP2 really holds.
    pub right_to_left: bool,
}

/// A layout with its mesh: numbers the shards and finds who may hold them.
///
/// A *shard* is what the ranks that differ only along dimensions that cut nothing have in common. Shards and replicas
/// are numbered row-major over the mesh dimensions that cut and over the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    layout: MeshLayout,
}

impl Grid {
    pub(crate) fn new(mesh: &Arc<Mesh>, layout: &Layout) -> Result<Self> {
        if u64::from(mesh.size()) > MAX_RANKS {
            let what = format!("a mesh of {} ranks, at most {MAX_RANKS} fit", mesh.size());
            return Err(Error::new(Code::Unsupported, what));
        }
        let plain = MeshLayout::new(Arc::clone(mesh), layout.placements.clone())?;
        let layout = match layout.right_to_left {
            false => Some(plain),
            true => plain.right_to_left(),
        };
        let Some(layout) = layout else {
            let what = "a strided shard whose split no other mesh dimensions make up";
            return Err(Error::new(Code::InvalidMetadata, what));
        };
        Ok(Self { layout })
    }

    /// Fails where a placement cuts a dimension that the tensor does not have.
    pub(crate) fn check_shape(&self, shape: &[u64]) -> Result<()> {
        self.layout.check(shape)
    }

    fn sides(&self, cut: bool) -> impl DoubleEndedIterator<Item = (usize, u64)> + '_ {
        let sides = self.layout.mesh().shape().iter().zip(self.layout.placements()).enumerate();
        sides.filter(move |(_, (_, place))| place.dim().is_some() == cut).map(|(at, s)| (at, *s.0))
    }

    /// Number of shards, at most that of the ranks.
    pub(crate) fn shards(&self) -> u64 {
        self.sides(true).map(|(_, side)| side).product()
    }

    /// Number of replicas of each shard.
    pub(crate) fn replicas(&self) -> u64 {
        self.sides(false).map(|(_, side)| side).product()
    }

    /// Shard and replica of a rank; `None` where it is not on the mesh.
    pub(crate) fn place_of(&self, rank: u32) -> Option<(u32, u32)> {
        self.layout.mesh().index(rank).map(|index| self.place_at(index))
    }

    fn place_at(&self, index: u32) -> (u32, u32) {
        let coordinate = self.layout.mesh().coordinate(index);
        let number = |cut| {
            self.sides(cut)
                .fold(0, |number, (at, side)| number * side + coordinate.get(at).unwrap_or(&0))
        };
        // Below the number of ranks, which fits.
        (number(true) as u32, number(false) as u32)
    }

    fn coordinate_of(&self, shard: u32, replica: u32) -> Vec<u64> {
        let mut coordinate = vec![0; self.layout.mesh().shape().len()];
        for (cut, number) in [(true, shard), (false, replica)] {
            let mut number = u64::from(number);
            for (at, side) in self.sides(cut).rev() {
                if let Some(place) = coordinate.get_mut(at) {
                    *place = number % side;
                }
                number /= side;
            }
        }
        coordinate
    }

    /// The rank that is a given replica of a shard.
    pub(crate) fn rank_of(&self, shard: u32, replica: u32) -> Option<u32> {
        if u64::from(shard) >= self.shards() || u64::from(replica) >= self.replicas() {
            return None;
        }
        let coordinate = self.coordinate_of(shard, replica);
        let sides = self.layout.mesh().shape();
        let index = coordinate.iter().zip(sides).fold(0, |index, (at, side)| index * side + at);
        self.layout.mesh().rank(u32::try_from(index).ok()?)
    }

    /// The boxes of a tensor in a shard, row-major by their offsets; none where the shard is empty.
    pub(crate) fn boxes(&self, shape: &[u64], shard: u32) -> Result<Vec<Region>> {
        let local = self.layout.local(shape, &self.coordinate_of(shard, 0))?;
        let regions = local.pieces.into_iter().map(|piece| piece.region);
        Ok(regions.filter(|region| !region.is_empty()).collect())
    }

    /// All boxes of a tensor, to search.
    pub(crate) fn tiling(&self, shape: &[u64]) -> Result<Tiling> {
        Tiling::new(&self.layout, shape)
    }

    /// The shards with elements in `wanted`, each once.
    pub(crate) fn shards_meeting(&self, tiling: &Tiling, wanted: &Region) -> Result<Vec<u32>> {
        let mut shards = Vec::new();
        for (tile, _) in tiling.intersecting(wanted)? {
            shards.push(self.place_at(tile.index).0);
        }
        shards.sort_unstable();
        shards.dedup();
        Ok(shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{Replicate, Shard, StridedShard};

    #[test]
    fn every_rank_has_a_place_and_every_shard_is_found_by_what_it_holds() {
        let mesh = Arc::new(Mesh::with_ranks(vec![3, 2, 2], (0..12).rev().collect()).unwrap());
        let strided = StridedShard { dim: 0, split_factor: 2 };
        for placements in [
            [Shard(0), Replicate, Shard(1)],
            [Shard(1), Shard(1), Shard(1)],
            [strided, Shard(0), Replicate],
        ] {
            let layout = Layout { mesh: 0, placements: placements.to_vec(), right_to_left: false };
            let grid = Grid::new(&mesh, &layout).unwrap();
            let shape = [7, 5];
            let tiling = grid.tiling(&shape).unwrap();
            let meeting = |wanted: &Region| -> Vec<u32> {
                let meets = |shard: &u32| {
                    let boxes = grid.boxes(&shape, *shard).unwrap();
                    boxes.iter().any(|region| region.intersect(wanted).is_some())
                };
                (0..grid.shards() as u32).filter(meets).collect()
            };
            for offset in 0..7 {
                for size in 1..=7 - offset {
                    let wanted = Region::new(vec![offset, 1], vec![size, 2]).unwrap();
                    let found = grid.shards_meeting(&tiling, &wanted).unwrap();
                    assert_eq!(found, meeting(&wanted), "{wanted}");
                }
            }
            for rank in 0..12 {
                let (shard, replica) = grid.place_of(rank).unwrap();
                assert_eq!(grid.rank_of(shard, replica), Some(rank));
            }
            assert_eq!(grid.place_of(12), None);
            assert_eq!(grid.rank_of(grid.shards() as u32, 0), None);
        }
    }

    #[test]
    fn shards_without_elements_have_no_boxes() {
        let mesh = Arc::new(Mesh::new(vec![4]).unwrap());
        let layout =
            |placement| Layout { mesh: 0, placements: vec![placement], right_to_left: false };
        let grid = Grid::new(&mesh, &layout(Shard(0))).unwrap();
        let rows = |shard| grid.boxes(&[6], shard).unwrap();
        assert_eq!(rows(2), [Region::new(vec![4], vec![2]).unwrap()]);
        assert!(rows(3).is_empty());
        assert!(grid.check_shape(&[]).is_err());
        let grid = Grid::new(&mesh, &layout(Replicate)).unwrap();
        assert_eq!(grid.boxes(&[], 0).unwrap(), [Region::whole(&[])]);
        assert!(grid.boxes(&[0, 2], 0).unwrap().is_empty());
    }
}
