//! Meshes and layouts as bytes.
//!
//! ```text
//! meshes    varint count; each: varint dims, varint each side, then
//!           varint 0: ranks are 0, 1, 2, ...; 1: the ranks, row-major, as differences (the first: to 0)
//! layouts   varint count; each: varint mesh, varint 0 or 1 (read from right to left), then for each dimension of the
//!           mesh varint 0 (replicate), 1 and varint dim (shard), 2 and varint dim, varint split (strided shard)
//! ```
//!
//! What a rank holds of a tensor follows from its coordinate on the mesh, dimension by dimension of the tensor. It
//! starts with all n elements; the mesh dimensions that cut it do so from left to right, each what the ones before it
//! left. A shard at place i of p keeps elements i * ceil(n / p) to (i + 1) * ceil(n / p), as far as there are so
//! many. A strided shard does that in each of `split` pieces, which are cut in the same manner, and keeps what it has
//! of all of them.
//!
//! Read from right to left there are plain shards only, and their order is found so: from the last mesh dimension to
//! the first, a shard goes to the front of the cuts of its dimension; a strided shard goes behind as few of the first
//! of them as have mesh sides whose product is `split`.
//!
//! The boxes of a rank are all combinations of the runs of elements that it keeps in each dimension, row-major.

use std::sync::Arc;

use forebay_error::Result;
use forebay_tensor::{Mesh, Placement};

use super::grid::Layout;
use super::limits::{MAX_DIMS, MAX_LAYOUTS, MAX_RANKS};
use super::wire::{Put, Take};

pub(crate) fn encode(meshes: &[Arc<Mesh>], layouts: &[Layout]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_varint(meshes.len() as u64);
    for mesh in meshes {
        out.put_varint(mesh.shape().len() as u64);
        mesh.shape().iter().for_each(|&side| out.put_varint(side));
        let ranks = (0..mesh.size()).map(|index| mesh.rank(index).unwrap_or(index));
        if ranks.clone().eq(0..mesh.size()) {
            out.put_varint(0);
            continue;
        }
        out.put_varint(1);
        let mut last = 0;
        for rank in ranks.map(u64::from) {
            out.put_difference(last, rank);
            last = rank;
        }
    }
    out.put_varint(layouts.len() as u64);
    for layout in layouts {
        out.put_varint(u64::from(layout.mesh));
        out.put_varint(u64::from(layout.right_to_left));
        for placement in &layout.placements {
            match *placement {
                // Partial sums are in no layout.
                Placement::Replicate | Placement::Partial => out.put_varint(0),
                Placement::Shard(dim) => {
                    out.put_varint(1);
                    out.put_varint(dim as u64);
                }
                Placement::StridedShard { dim, split_factor } => {
                    out.put_varint(2);
                    out.put_varint(dim as u64);
                    out.put_varint(split_factor);
                }
            }
        }
    }
    out
}

pub(crate) fn decode(bytes: &[u8], place: &str) -> Result<(Vec<Arc<Mesh>>, Vec<Layout>)> {
    let mut take = Take::new(bytes, place);
    let count = take.count(MAX_LAYOUTS, 2, "meshes")?;
    let mut meshes = Vec::with_capacity(count);
    for _ in 0..count {
        let mesh = take_mesh(&mut take).map_err(|error| error.at(place))?;
        meshes.push(Arc::new(mesh));
    }
    let count = take.count(MAX_LAYOUTS, 2, "layouts")?;
    let mut layouts = Vec::with_capacity(count);
    for _ in 0..count {
        layouts.push(take_layout(&mut take, &meshes)?);
    }
    take.end()?;
    Ok((meshes, layouts))
}

fn take_mesh(take: &mut Take<'_>) -> Result<Mesh> {
    let dims = take.count(MAX_DIMS, 1, "dimensions")?;
    let shape = (0..dims).map(|_| take.varint()).collect::<Result<Vec<_>>>()?;
    let size = shape.iter().try_fold(1u64, |size, &side| size.checked_mul(side));
    let Some(size) = size.filter(|&size| size <= MAX_RANKS) else {
        return Err(take.bad(format!("a mesh of {shape:?}, at most {MAX_RANKS} ranks fit")));
    };
    match take.varint()? {
        0 => Mesh::new(shape),
        1 if size <= take.left() as u64 => {
            let (mut last, mut ranks) = (0, Vec::with_capacity(size as usize));
            for _ in 0..size {
                last = take.difference(last)?;
                match u32::try_from(last) {
                    Ok(rank) if u64::from(rank) < MAX_RANKS => ranks.push(rank),
                    _ => return Err(take.bad(format!("rank {last} on a mesh"))),
                }
            }
            Mesh::with_ranks(shape, ranks)
        }
        _ => Err(take.bad("unknown kind of mesh, or one that is not all there")),
    }
}

fn take_layout(take: &mut Take<'_>, meshes: &[Arc<Mesh>]) -> Result<Layout> {
    let mesh = take.small(MAX_LAYOUTS, "as a mesh")?;
    let right_to_left = take.at_most(1, "as a direction")? == 1;
    let Some(dims) = meshes.get(mesh as usize).map(|mesh| mesh.shape().len()) else {
        return Err(take.bad(format!("mesh {mesh} is not in the list")));
    };
    let mut placements = Vec::with_capacity(dims);
    for _ in 0..dims {
        let kind = take.at_most(2, "as a placement")?;
        let mut dim = || take.at_most(MAX_DIMS, "as a dimension").map(|dim| dim as usize);
        placements.push(match kind {
            0 => Placement::Replicate,
            1 => Placement::Shard(dim()?),
            _ => Placement::StridedShard { dim: dim()?, split_factor: take.varint()? },
        });
    }
    Ok(Layout { mesh, placements, right_to_left })
}
