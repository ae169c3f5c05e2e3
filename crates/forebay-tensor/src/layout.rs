//! How a tensor is cut over ranks.
//!
//! A mesh layout says it once for all ranks: a placement for each dimension of a mesh, with the meaning that DTensor
//! gives them. The mesh dimensions cut one after another, each cutting what the ones before it left:
//!
//! - `Shard(d)` cuts dimension `d` as `torch.chunk` does: ceil(n / parts) for each, so that later ranks may have fewer
//!   or none. Two mesh dimensions may cut one dimension of the tensor.
//! - `StridedShard` cuts first into `split_factor` pieces, then each piece; a rank holds its part of every piece. FSDP2
//!   over tensor parallelism uses it: there the *right* mesh dimension cuts first, and
//!   `[StridedShard(0, tp), Shard(0)]` says so to software that goes from left to right.
//! - `Replicate` cuts nothing.
//!
//! The trick of `StridedShard` is exact only where everything divides evenly. Nine rows over dp = 4, tp = 2: FSDP2
//! gives the rank at (3, 1) row 8, the placements from left to right give it to (3, 0). What the ranks really hold is
//! [`MeshLayout::right_to_left`]; a caller that has the local shapes can tell which of the two it faces.
//!
//! Whatever no mesh describes (ragged shards, flat buffers) is a list of regions for each rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};

use crate::held::Held;
use crate::local::pieces_of;
use crate::{LocalShard, MAX_DIMS, Mesh, Region, Repeats, ShowShape, Tiling, check_cover};

/// What one dimension of a mesh does to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along it holds the same.
    Replicate,
    /// It cuts this dimension of the tensor.
    Shard(usize),
    /// It cuts each of `split_factor` equal pieces of a dimension of the tensor.
    StridedShard {
        /// The dimension of the tensor.
        dim: usize,
        /// Into how many pieces the dimension is cut before; at least one.
        split_factor: u64,
    },
    /// Every rank along it holds a term of a sum. Nobody holds the tensor then, so no layout has it.
    Partial,
}

impl Placement {
    /// The dimension of the tensor that it cuts.
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) | Self::StridedShard { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial => None,
        }
    }
}

/// Placements on a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MeshLayout {
    mesh: Arc<Mesh>,
    placements: Vec<Placement>,
    /// The dimensions of the mesh in the order in which they cut.
    order: Vec<usize>,
    /// (ranks, index stride) of the dimensions of the mesh that cut nothing.
    replicated: Vec<(u32, u32)>,
}

impl MeshLayout {
    /// Placements that cut from left to right, as DTensor's do.
    ///
    /// Fails with `invalid_metadata` where there is not one placement for each dimension of the mesh or a split factor
    /// is zero, with `unsupported` for partial sums.
    pub fn new(mesh: Arc<Mesh>, placements: Vec<Placement>) -> Result<Self> {
        let (dims, given) = (mesh.shape().len(), placements.len());
        if dims != given {
            return Err(bad(format!("mesh of {dims} dimensions has {given} placements")));
        }
        for &placement in &placements {
            match placement {
                Placement::Partial => {
                    let what = "a tensor of partial sums cannot be stored";
                    return Err(Error::new(Code::Unsupported, what)
                        .hint("redistribute it to Replicate() or Shard(dim) first"));
                }
                Placement::StridedShard { split_factor: 0, .. } => {
                    return Err(bad("the split factor of a strided shard is zero".into()));
                }
                _ => {}
            }
        }
        let along = mesh.shape().iter().zip(mesh.strides()).zip(&placements);
        let replicated = along
            .filter(|((side, _), placement)| **side > 1 && placement.dim().is_none())
            .map(|((&side, stride), _)| (side as u32, stride))
            .collect();
        Ok(Self { mesh, placements, order: (0..dims).collect(), replicated })
    }

    /// The same placements with each strided one read as what it stands for: a plain cut, made after the mesh
    /// dimensions to its right that make up its split factor. `None` where no choice of those makes it up.
    pub fn right_to_left(&self) -> Option<Self> {
        // For each dimension of the tensor the mesh dimensions that cut it, in the order in which they do.
        let mut cutters: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut placements = self.placements.clone();
        for (mesh_dim, placement) in placements.iter_mut().enumerate().rev() {
            let Some(dim) = placement.dim() else { continue };
            let cutters = cutters.entry(dim).or_default();
            let before = match *placement {
                Placement::StridedShard { split_factor, .. } => {
                    self.count_that_make(cutters, split_factor)?
                }
                _ => 0,
            };
            cutters.insert(before, mesh_dim);
            *placement = Placement::Shard(dim);
        }
        let order = cutters.into_values().flatten().collect();
        Some(Self { placements, order, ..self.clone() })
    }

    /// How many of these mesh dimensions, from the first on, have `factor` ranks together.
    fn count_that_make(&self, mesh_dims: &[usize], factor: u64) -> Option<usize> {
        let mut product = 1;
        for (count, &mesh_dim) in mesh_dims.iter().enumerate() {
            if product == factor {
                return Some(count);
            }
            product *= self.mesh.shape().get(mesh_dim)?;
        }
        (product == factor).then_some(mesh_dims.len())
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// One placement for each dimension of the mesh.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// How many ranks hold the same as any one of them, itself included.
    pub fn holder_count(&self) -> u32 {
        // Divides the size of the mesh, which fits.
        self.replicated.iter().map(|&(side, _)| side).product()
    }

    /// The mesh index of the first rank that holds the same as the one at this index.
    pub fn first_holder(&self, index: u32) -> u32 {
        let at = |&(side, stride): &(u32, u32)| index / stride % side * stride;
        index - self.replicated.iter().map(at).sum::<u32>()
    }

    /// The ranks that hold the same as the one at a mesh index, itself included, in the order of their places on the
    /// mesh. (Ranks that hold nothing at all are not counted as replicas of each other.)
    pub fn holders(&self, index: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.first_holder(index);
        (0..self.holder_count()).filter_map(move |number| {
            let mut rest = number;
            let mut index = first;
            for &(side, stride) in self.replicated.iter().rev() {
                index = index.saturating_add(rest % side * stride);
                rest /= side;
            }
            self.mesh.rank(index)
        })
    }

    /// Fails with `invalid_metadata` where a placement cuts a dimension that the shape does not have.
    pub fn check(&self, shape: &[u64]) -> Result<()> {
        if shape.len() > MAX_DIMS {
            return Err(bad(format!("tensor has {} dimensions, over {MAX_DIMS}", shape.len())));
        }
        let missing = self.placements.iter().filter_map(|p| p.dim()).find(|&d| d >= shape.len());
        match missing {
            None => Ok(()),
            Some(dim) => {
                let shape = ShowShape(shape);
                Err(bad(format!("a placement cuts dimension {dim}, which {shape} does not have")))
            }
        }
    }

    /// What the rank at a coordinate of the mesh holds of a tensor of this shape.
    ///
    /// Fails as [`MeshLayout::check`] does, with `invalid_metadata` for a coordinate outside the mesh, and with
    /// `unsupported` for over 2^20 pieces.
    pub fn local(&self, shape: &[u64], coordinate: &[u64]) -> Result<LocalShard> {
        self.check(shape)?;
        let inside = coordinate.len() == self.mesh.shape().len()
            && coordinate.iter().zip(self.mesh.shape()).all(|(at, side)| at < side);
        if !inside {
            let (at, mesh) = (ShowShape(coordinate), ShowShape(self.mesh.shape()));
            return Err(bad(format!("the mesh {mesh} has no coordinate {at}")));
        }
        let mut held = Vec::with_capacity(shape.len());
        for (dim, &side) in shape.iter().enumerate() {
            held.push(self.held(side, dim, coordinate)?);
        }
        let pieces = pieces_of(&held, shape)?;
        Ok(LocalShard { shape: held.iter().map(Held::len).collect(), pieces })
    }

    /// What a rank holds of one dimension.
    pub(crate) fn held(&self, side: u64, dim: usize, coordinate: &[u64]) -> Result<Held> {
        let mut held = Held::all(side);
        for (mesh_dim, placement) in self.cutters(dim) {
            let (Some(&part), Some(&parts)) =
                (coordinate.get(mesh_dim), self.mesh.shape().get(mesh_dim))
            else {
                continue;
            };
            held = match placement {
                Placement::StridedShard { split_factor, .. } => {
                    held.strided(part, parts, split_factor)?
                }
                _ => held.shard(part, parts),
            };
        }
        Ok(held)
    }

    /// The mesh dimensions that cut a dimension of the tensor, in order.
    pub(crate) fn cutters(&self, dim: usize) -> impl Iterator<Item = (usize, Placement)> + '_ {
        let all = self.order.iter().filter_map(|&at| Some((at, *self.placements.get(at)?)));
        all.filter(move |(_, placement)| placement.dim() == Some(dim))
    }
}

/// How a tensor is cut over ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// By placements on a mesh.
    Mesh(MeshLayout),
    /// By a list of regions for each rank.
    Explicit(BTreeMap<u32, Vec<Region>>),
}

impl Layout {
    /// Checks that the layout fits a tensor of this shape; explicit regions must cover it, see [`check_cover`]. The
    /// same region with several ranks is a replica; any other overlap is an error.
    pub fn check(&self, shape: &[u64]) -> Result<()> {
        match self {
            Self::Mesh(layout) => layout.check(shape),
            Self::Explicit(ranks) => {
                check_cover(shape, ranks.values().flatten(), Repeats::AreReplicas)
            }
        }
    }

    /// The regions that a rank holds: none for a rank that is not in the layout, one of size zero for a rank of the
    /// mesh that got no elements. Fails as [`MeshLayout::local`] does.
    pub fn regions(&self, shape: &[u64], rank: u32) -> Result<Vec<Region>> {
        match self {
            Self::Mesh(layout) => match layout.mesh.index(rank) {
                Some(index) => {
                    let shard = layout.local(shape, &layout.mesh.coordinate(index))?;
                    Ok(shard.pieces.into_iter().map(|piece| piece.region).collect())
                }
                None => Ok(Vec::new()),
            },
            Self::Explicit(ranks) => Ok(ranks.get(&rank).cloned().unwrap_or_default()),
        }
    }

    /// Every region that has elements, once, with all ranks that hold it, in the order of offsets. (On a mesh with many
    /// replicas a [`Tiling`] says the same without the lists.) Fails as [`Tiling::new`] does.
    pub fn chunks(&self, shape: &[u64]) -> Result<Vec<(Region, Vec<u32>)>> {
        match self {
            Self::Mesh(layout) => {
                let tiling = Tiling::new(layout, shape)?;
                let tiles = tiling.tiles().map(|tile| {
                    let ranks = tiling.holders(&tile).collect();
                    (tile.region, ranks)
                });
                Ok(tiles.collect())
            }
            Self::Explicit(ranks) => {
                let mut chunks: BTreeMap<&Region, Vec<u32>> = BTreeMap::new();
                for (&rank, regions) in ranks {
                    for region in regions.iter().filter(|region| !region.is_empty()) {
                        let holders = chunks.entry(region).or_default();
                        if holders.last() != Some(&rank) {
                            holders.push(rank);
                        }
                    }
                }
                Ok(chunks.into_iter().map(|(region, ranks)| (region.clone(), ranks)).collect())
            }
        }
    }
}

fn bad(what: String) -> Error {
    Error::new(Code::InvalidMetadata, what)
}
