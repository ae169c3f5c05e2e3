//! The tiles of a mesh layout, without a list of them.
//!
//! Each mesh dimension cuts one dimension of the tensor or none, so a tile is one slot of each dimension, and the
//! tensor is a grid of slots. A grid of 128 x 128 ranks takes 256 slots, not 16,384 regions; finding what a wanted
//! region meets is a binary search in each dimension. Who holds a tile is arithmetic too: the index of the first holder
//! is the sum of what its slots contribute, and its replicas follow along the mesh dimensions that cut nothing.
//!
//! Tensors of one shape and one layout have one tiling: callers with thousands of tensors keep it.

use std::ops::Range;

use forebay_error::{Code, Error, Result};

use crate::{MeshLayout, Region};

/// Slots of one dimension at the most.
const MAX_SLOTS: u64 = 1 << 24;

/// A run of one dimension that one place on the mesh holds.
#[derive(Clone, Copy, Debug)]
struct Slot {
    start: u64,
    len: u64,
    /// Where it starts in the holder's own tensor.
    local: u64,
    /// What it adds to the mesh index of the holder.
    index: u32,
    /// Its number among the runs that the holder has of this dimension, and how many those are.
    number: u32,
    of: u32,
}

/// The boxes into which a mesh layout cuts a tensor, each held by one place on the mesh and its replicas.
#[derive(Clone, Debug)]
pub struct Tiling {
    layout: MeshLayout,
    /// Slots of each dimension of the tensor, ascending, without gaps.
    axes: Vec<Vec<Slot>>,
}

/// One box of a [`Tiling`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The part of the whole tensor; never empty.
    pub region: Region,
    /// The offsets of the same box in the holder's own tensor.
    pub local: Vec<u64>,
    /// Mesh index of the first that holds it; [`Tiling::holders`] gives all ranks.
    pub index: u32,
    /// Its number among the holder's pieces, as [`MeshLayout::local`] lists them.
    pub piece: u64,
}

impl Tiling {
    /// The tiles of a tensor of this shape.
    ///
    /// Fails as [`MeshLayout::check`] does, and with `unsupported` where a dimension has over 2^24 slots.
    pub fn new(layout: &MeshLayout, shape: &[u64]) -> Result<Self> {
        layout.check(shape)?;
        let strides = layout.mesh().strides();
        let axes = shape.iter().enumerate().map(|(dim, &side)| slots(layout, &strides, dim, side));
        let axes = axes.collect::<Result<Vec<_>>>()?;
        Ok(Self { layout: layout.clone(), axes })
    }

    /// Number of tiles; `u64::MAX` where they are more than that. None for a tensor without elements.
    pub fn len(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        self.axes.iter().fold(1, |count: u64, axis| count.saturating_mul(axis.len() as u64))
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.axes.iter().any(|axis| axis.is_empty())
    }

    /// All tiles in the order of their offsets.
    pub fn tiles(&self) -> Tiles<'_> {
        self.tiles_in(self.axes.iter().map(|axis| 0..axis.len()).collect())
    }

    /// The tiles that share elements with a region, in the order of their offsets, and what they share. Takes a binary
    /// search in each dimension, then time in proportion to the result.
    ///
    /// Fails with `bad_slice` where the region has another number of dimensions.
    pub fn intersecting<'a>(
        &'a self,
        wanted: &'a Region,
    ) -> Result<impl Iterator<Item = (Tile, Region)> + 'a> {
        if wanted.rank() != self.axes.len() {
            let dims = self.axes.len();
            let what = format!("region of {} dimensions in a tensor of {dims}", wanted.sizes.len());
            return Err(Error::new(Code::BadSlice, what));
        }
        let sides = self.axes.iter().zip(wanted.offsets.iter().zip(&wanted.sizes));
        let ranges = sides.map(|(axis, (&offset, &size))| {
            if wanted.is_empty() {
                return 0..0;
            }
            let end = offset.saturating_add(size);
            let first = axis.partition_point(|slot| slot.start + slot.len <= offset);
            first..axis.partition_point(|slot| slot.start < end).max(first)
        });
        let tiles = self.tiles_in(ranges.collect());
        Ok(tiles.filter_map(|tile| tile.region.intersect(wanted).map(|shared| (tile, shared))))
    }

    /// The ranks that hold a tile, in the order of their places on the mesh: the first is [`Tile::index`]'s.
    pub fn holders(&self, tile: &Tile) -> impl Iterator<Item = u32> + '_ {
        self.layout.holders(tile.index)
    }

    fn tiles_in(&self, ranges: Vec<Range<usize>>) -> Tiles<'_> {
        let done = ranges.iter().any(|range| range.is_empty());
        let at = ranges.iter().map(|range| range.start).collect();
        Tiles { tiling: self, ranges, at, done }
    }

    fn tile(&self, at: &[usize]) -> Option<Tile> {
        let dims = at.len();
        let (mut offsets, mut sizes) = (Vec::with_capacity(dims), Vec::with_capacity(dims));
        let mut local = Vec::with_capacity(dims);
        let (mut index, mut piece) = (0, 0);
        for (axis, &at) in self.axes.iter().zip(at) {
            let slot = axis.get(at)?;
            offsets.push(slot.start);
            sizes.push(slot.len);
            local.push(slot.local);
            index += slot.index;
            piece = u64::saturating_mul(piece, slot.of.into()).saturating_add(slot.number.into());
        }
        Some(Tile { region: Region { offsets, sizes }, local, index, piece })
    }
}

/// The slots of one dimension: those of every place along the mesh dimensions that cut it.
fn slots(layout: &MeshLayout, strides: &[u32], dim: usize, side: u64) -> Result<Vec<Slot>> {
    let mesh = layout.mesh().shape();
    let cutters: Vec<usize> = layout.cutters(dim).map(|(mesh_dim, _)| mesh_dim).collect();
    let cut = |mesh_dim: &usize| mesh.get(*mesh_dim).copied().unwrap_or(1);
    let places: u64 = cutters.iter().map(cut).product();
    let mut coordinate = vec![0; mesh.len()];
    let mut slots = Vec::new();
    check_slots(places, dim)?;
    for place in 0..places {
        let (mut rest, mut index) = (place, 0);
        for &mesh_dim in cutters.iter().rev() {
            let side = cut(&mesh_dim);
            if let (Some(at), Some(&stride)) = (coordinate.get_mut(mesh_dim), strides.get(mesh_dim))
            {
                *at = rest % side;
                index += *at as u32 * stride;
            }
            rest /= side;
        }
        let held = layout.held(side, dim, &coordinate)?;
        let of = held.runs().len() as u32;
        check_slots(slots.len() as u64 + u64::from(of), dim)?;
        let mut local = 0;
        for (&(start, len), number) in held.runs().iter().zip(0..) {
            slots.push(Slot { start, len, local, index, number, of });
            local += len;
        }
    }
    slots.sort_unstable_by_key(|slot| slot.start);
    Ok(slots)
}

fn check_slots(count: u64, dim: usize) -> Result<()> {
    if count <= MAX_SLOTS {
        return Ok(());
    }
    let what = format!("dimension {dim} is cut into over {MAX_SLOTS} pieces");
    Err(Error::new(Code::Unsupported, what))
}

/// Iterator over the tiles of a [`Tiling`].
#[derive(Clone, Debug)]
pub struct Tiles<'a> {
    tiling: &'a Tiling,
    ranges: Vec<Range<usize>>,
    at: Vec<usize>,
    done: bool,
}

impl Iterator for Tiles<'_> {
    type Item = Tile;

    fn next(&mut self) -> Option<Tile> {
        if self.done {
            return None;
        }
        let tile = self.tiling.tile(&self.at);
        // The next place: the last dimension that can advance does, those behind it start over.
        self.done = true;
        for (at, range) in self.at.iter_mut().zip(&self.ranges).rev() {
            *at += 1;
            if *at < range.end {
                self.done = false;
                break;
            }
            *at = range.start;
        }
        tile
    }
}
