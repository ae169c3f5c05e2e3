//! Meshes, layouts, and what each place on a mesh holds of a tensor: from the text in `manifest::meshes`.

use std::collections::HashMap;

use super::cursor::{Check, Cursor};

/// A stretch: first element and number of elements.
type Run = (u64, u64);
/// Offsets and sizes.
pub(super) type Cut = (Vec<u64>, Vec<u64>);

const MOST_RUNS: usize = 1 << 20;

pub(super) struct Mesh {
    pub(super) sides: Vec<u64>,
    pub(super) ranks: Option<Vec<u64>>,
    places: HashMap<u64, u64>,
}

#[derive(Clone, Copy)]
pub(super) enum Place {
    All,
    Shard(u64),
    Strided(u64, u64),
}

pub(super) struct Layout {
    pub(super) mesh: usize,
    pub(super) right_to_left: bool,
    pub(super) places: Vec<Place>,
}

pub(super) struct Layouts {
    pub(super) meshes: Vec<Mesh>,
    pub(super) layouts: Vec<Layout>,
}

impl Mesh {
    fn read(cursor: &mut Cursor<'_>) -> Check<Self> {
        let mut sides = Vec::new();
        for _ in 0..cursor.count()? {
            sides.push(cursor.varint()?);
        }
        let size = sides.iter().try_fold(1u64, |size, &side| size.checked_mul(side));
        let size = size.filter(|size| (1..=1 << 20).contains(size)).ok_or("a mesh of odd size")?;
        let (mut ranks, mut places) = (None, HashMap::new());
        let kind = cursor.varint()?;
        if kind > 1 {
            return Err(format!("a mesh of kind {kind}"));
        }
        if kind == 1 {
            let (mut rank, mut list) = (0, Vec::new());
            for place in 0..size {
                rank = cursor.difference(rank)?;
                if rank >= 1 << 20 || places.insert(rank, place).is_some() {
                    return Err(format!("rank {rank} is on a mesh twice, or too large"));
                }
                list.push(rank);
            }
            ranks = Some(list);
        }
        Ok(Self { sides, ranks, places })
    }

    pub(super) fn size(&self) -> u64 {
        self.sides.iter().product()
    }

    fn place(&self, rank: u64) -> Option<u64> {
        match &self.ranks {
            None => (rank < self.size()).then_some(rank),
            Some(_) => self.places.get(&rank).copied(),
        }
    }

    fn coordinate(&self, mut place: u64) -> Vec<u64> {
        let mut coordinate = Vec::new();
        for side in self.sides.iter().rev() {
            coordinate.insert(0, place % side);
            place /= side;
        }
        coordinate
    }
}

impl Layouts {
    pub(super) fn read(bytes: &[u8]) -> Check<Self> {
        let mut cursor = Cursor(bytes);
        let mut meshes = Vec::new();
        for _ in 0..cursor.count()? {
            meshes.push(Mesh::read(&mut cursor)?);
        }
        let mut layouts = Vec::new();
        for _ in 0..cursor.count()? {
            let mesh = usize::try_from(cursor.varint()?).unwrap_or(usize::MAX);
            let dims = meshes.get(mesh).ok_or("a layout on no mesh")?.sides.len();
            let right_to_left = match cursor.varint()? {
                0 => false,
                1 => true,
                other => return Err(format!("direction {other}")),
            };
            let mut places = Vec::new();
            for _ in 0..dims {
                places.push(match cursor.varint()? {
                    0 => Place::All,
                    1 => Place::Shard(cursor.varint()?),
                    2 => Place::Strided(cursor.varint()?, cursor.varint()?),
                    other => return Err(format!("placement {other}")),
                });
            }
            layouts.push(Layout { mesh, right_to_left, places });
        }
        cursor.done()?;
        let all = Self { meshes, layouts };
        for layout in &all.layouts {
            let mesh = all.meshes.get(layout.mesh).ok_or("a mesh that is not listed")?;
            layout.check(mesh)?;
        }
        Ok(all)
    }

    fn get(&self, layout: u64) -> Check<(&Layout, &Mesh)> {
        let layout = usize::try_from(layout).ok().and_then(|at| self.layouts.get(at));
        let layout = layout.ok_or("a layout that is not listed")?;
        Ok((layout, self.meshes.get(layout.mesh).ok_or("a mesh that is not listed")?))
    }

    /// Shard and replica numbers of all ranks of a layout's mesh: (rank, shard, replica).
    pub(super) fn places(&self, layout: u64) -> Check<Vec<(u64, u64, u64)>> {
        let (layout, mesh) = self.get(layout)?;
        let mut all = Vec::new();
        for place in 0..mesh.size() {
            let coordinate = mesh.coordinate(place);
            let (mut shard, mut replica) = (0, 0);
            for ((at, side), kind) in coordinate.iter().zip(&mesh.sides).zip(&layout.places) {
                match kind {
                    Place::All => replica = replica * side + at,
                    _ => shard = shard * side + at,
                }
            }
            let rank = match &mesh.ranks {
                None => place,
                Some(ranks) => usize::try_from(place)
                    .ok()
                    .and_then(|place| ranks.get(place).copied())
                    .ok_or("a place without a rank")?,
            };
            all.push((rank, shard, replica));
        }
        Ok(all)
    }

    /// The boxes that a rank holds of a tensor.
    pub(super) fn boxes(&self, layout: u64, shape: &[u64], rank: u64) -> Check<Vec<Cut>> {
        let (layout, mesh) = self.get(layout)?;
        let place = mesh.place(rank).ok_or(format!("rank {rank} is not on the mesh"))?;
        let coordinate = mesh.coordinate(place);
        let mut boxes = vec![(Vec::new(), Vec::new())];
        for (dim, &side) in (0..).zip(shape) {
            let mut runs = vec![(0, side)];
            for (mesh_dim, split) in layout.order(mesh, dim)? {
                let (at, of) = coordinate
                    .get(mesh_dim)
                    .zip(mesh.sides.get(mesh_dim))
                    .ok_or("a mesh dimension that is not there")?;
                runs = cut(&runs, *at, *of, split)?;
            }
            runs.retain(|run| run.1 > 0);
            let mut grown = Vec::new();
            for (offsets, sizes) in &boxes {
                for &(start, len) in &runs {
                    grown.push((
                        [offsets as &[u64], &[start]].concat(),
                        [sizes as &[u64], &[len]].concat(),
                    ));
                }
            }
            if grown.len() > MOST_RUNS {
                return Err("more boxes than an audit counts".into());
            }
            boxes = grown;
        }
        Ok(boxes)
    }

    /// Whether all placements cut dimensions that a tensor of so many has.
    pub(super) fn fits(&self, layout: u64, dims: usize) -> Check<()> {
        for place in &self.get(layout)?.0.places {
            if let Place::Shard(dim) | Place::Strided(dim, _) = place
                && *dim >= dims as u64
            {
                return Err(format!("dimension {dim} of {dims} is cut"));
            }
        }
        Ok(())
    }
}

impl Layout {
    /// Every strided shard has pieces, and right to left they are made up by other mesh dimensions.
    fn check(&self, mesh: &Mesh) -> Check<()> {
        for place in &self.places {
            match *place {
                Place::Strided(_, 0) => return Err("a strided shard of no pieces".into()),
                Place::Strided(dim, _) | Place::Shard(dim) if dim > 64 => {
                    return Err(format!("dimension {dim} is cut"));
                }
                Place::Strided(dim, _) => drop(self.order(mesh, dim)?),
                _ => {}
            }
        }
        Ok(())
    }

    /// The mesh dimensions that cut a dimension, in the order in which they do, each with the pieces that it cuts
    /// first.
    fn order(&self, mesh: &Mesh, dim: u64) -> Check<Vec<(usize, u64)>> {
        let cuts = self.places.iter().enumerate().filter_map(|(at, place)| match *place {
            Place::Shard(of) if of == dim => Some((at, 1)),
            Place::Strided(of, split) if of == dim => Some((at, split)),
            _ => None,
        });
        let cuts: Vec<(usize, u64)> = cuts.collect();
        if !self.right_to_left {
            return Ok(cuts);
        }
        let mut order: Vec<(usize, u64)> = Vec::new();
        for &(at, split) in cuts.iter().rev() {
            let strided = matches!(self.places.get(at), Some(Place::Strided(..)));
            let mut product = 1;
            let mut behind = 0;
            while strided && product != split {
                let (before, _) = order.get(behind).ok_or("a split that nothing makes up")?;
                // At most the ranks of the mesh.
                product *= mesh.sides.get(*before).copied().unwrap_or(1);
                behind += 1;
            }
            order.insert(behind, (at, 1));
        }
        Ok(order)
    }
}

/// What place `at` of `of` keeps when each of `split` pieces of the elements is cut.
fn cut(runs: &[Run], at: u64, of: u64, split: u64) -> Check<Vec<Run>> {
    let total: u64 = runs.iter().map(|run| run.1).sum();
    if split == 0 || split > MOST_RUNS as u64 {
        return Err(format!("a strided shard of {split} pieces"));
    }
    let mut kept: Vec<Run> = Vec::new();
    let piece = total.div_ceil(split);
    for number in 0..split {
        let start = piece.saturating_mul(number).min(total);
        let len = piece.min(total - start);
        let part = len.div_ceil(of);
        let first = part.saturating_mul(at).min(len);
        for run in select(runs, start + first, part.min(len - first)) {
            match kept.last_mut() {
                Some(last) if last.0 + last.1 == run.0 => last.1 += run.1,
                _ => kept.push(run),
            }
        }
        if kept.len() > MOST_RUNS {
            return Err("more runs than an audit counts".into());
        }
    }
    Ok(kept)
}

/// The runs that hold `count` elements from the `skip`-th on.
fn select(runs: &[Run], mut skip: u64, mut count: u64) -> Vec<Run> {
    let mut found = Vec::new();
    for &(start, len) in runs {
        let over = skip.min(len);
        let here = count.min(len - over);
        if here > 0 {
            found.push((start + over, here));
        }
        skip -= over;
        count -= here;
    }
    found
}
