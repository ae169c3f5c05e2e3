//! Gathers who holds a value while parts come in, and checks in the end that it is all there, once.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_tensor::{Region, Repeats, check_cover};

use super::grid::Grid;
use super::holders::{Held, ListPlace, RegionList, decode_regions, encode_replicas};
use super::structure::Structure;
use super::value::{Named, Tensor, Value};

/// Nobody, in lists of replicas.
const NOBODY: u32 = u32::MAX;

/// Who holds a value, as far as parts have come in. Becomes a list of regions when nothing shorter says it.
#[derive(Default)]
pub(crate) enum Gathered {
    #[default]
    Nothing,
    /// One rank, all of it.
    One(u32),
    /// Of each shard the replica that holds it.
    Shards(Vec<u32>),
    Regions(RegionList),
}

impl Gathered {
    /// A rank holds the whole value.
    pub(crate) fn whole(&mut self, rank: u32, named: &Named, structure: &Structure) -> Result<()> {
        match (&self, &named.value) {
            (Self::Nothing, _) => *self = Self::One(rank),
            (_, Value::Tensor(tensor)) => {
                self.regions(tensor, structure)?.push(rank, &Region::whole(&tensor.shape));
            }
            (Self::One(other), _) => {
                let what = format!("ranks {other} and {rank} both store it");
                return Err(Error::new(Code::Overlap, what));
            }
            _ => return Err(Error::new(Code::Internal, "an object in pieces")),
        }
        Ok(())
    }

    /// A rank holds all boxes of its shard.
    pub(crate) fn shard(
        &mut self,
        rank: u32,
        tensor: &Tensor,
        boxes: &[Region],
        structure: &Structure,
    ) -> Result<()> {
        let layout = tensor.layout.map(|layout| structure.grid(layout)).transpose()?;
        let place = layout.and_then(|grid| Some((grid, grid.place_of(rank)?)));
        let Some((grid, (shard, replica))) = place else {
            return Err(Error::new(Code::Internal, "a shard without a layout"));
        };
        if matches!(self, Self::Nothing) {
            let shards = usize::try_from(grid.shards()).unwrap_or_default();
            *self = Self::Shards(vec![NOBODY; shards]);
        }
        if let Self::Shards(replicas) = self
            && let Some(slot) = replicas.get_mut(shard as usize)
        {
            if *slot == NOBODY {
                *slot = replica;
                return Ok(());
            }
            let other = grid.rank_of(shard, *slot).unwrap_or_default();
            let what = format!("ranks {other} and {rank} both store one shard");
            return Err(Error::new(Code::Overlap, what));
        }
        let regions = self.regions(tensor, structure)?;
        boxes.iter().for_each(|region| regions.push(rank, region));
        Ok(())
    }

    /// A rank holds a region.
    pub(crate) fn region(
        &mut self,
        rank: u32,
        tensor: &Tensor,
        region: &Region,
        structure: &Structure,
    ) -> Result<()> {
        self.regions(tensor, structure)?.push(rank, region);
        Ok(())
    }

    fn regions(&mut self, tensor: &Tensor, structure: &Structure) -> Result<&mut RegionList> {
        let mut list = RegionList::default();
        match self {
            Self::Nothing | Self::Regions(_) => {}
            Self::One(rank) => list.push(*rank, &Region::whole(&tensor.shape)),
            Self::Shards(replicas) => {
                let grid = structure.grid(tensor.layout.unwrap_or(u32::MAX))?;
                for (rank, shard) in by_rank(grid, replicas) {
                    let boxes = grid.boxes(&tensor.shape, shard)?;
                    boxes.iter().for_each(|region| list.push(rank, region));
                }
            }
        }
        if !matches!(self, Self::Regions(_)) {
            *self = Self::Regions(list);
        }
        match self {
            Self::Regions(list) => Ok(list),
            _ => Err(Error::new(Code::Internal, "a list of regions that is none")),
        }
    }

    /// Checks that all of the value is there, once; gives its row's holders, and appends its list if it has one.
    ///
    /// Errors: `hole`, `overlap`.
    pub(crate) fn finish(
        self,
        named: &Named,
        structure: &Structure,
        lists: &mut Vec<u8>,
    ) -> Result<Held> {
        let tensor = match &named.value {
            Value::Tensor(tensor) => Some(tensor),
            _ => None,
        };
        let mut append = |bytes: Vec<u8>| {
            let (offset, len, crc) = (lists.len() as u64, bytes.len() as u64, crc32(&bytes));
            lists.extend_from_slice(&bytes);
            ListPlace { offset, bytes: len, crc }
        };
        match self {
            Self::Nothing if tensor.is_some_and(|tensor| tensor.shape.contains(&0)) => {
                Ok(Held::Nobody)
            }
            Self::Nothing => Err(Error::new(Code::Hole, "no rank stores it")),
            Self::One(rank) => Ok(Held::One(rank)),
            Self::Shards(replicas) => {
                check_shards(&replicas, tensor, structure)?;
                let mut some = replicas.iter().copied().filter(|&replica| replica != NOBODY);
                match some.next() {
                    Some(first) if some.all(|replica| replica == first) => Ok(Held::Replica(first)),
                    _ => Ok(Held::Replicas(append(encode_replicas(&replicas)))),
                }
            }
            Self::Regions(list) => {
                let bytes = list.into_bytes();
                if let Some(tensor) = tensor {
                    check_regions(&bytes, tensor)?;
                }
                Ok(Held::Regions(append(bytes)))
            }
        }
    }
}

/// The ranks of shards that somebody holds, in the order of the ranks.
fn by_rank(grid: &Grid, replicas: &[u32]) -> Vec<(u32, u32)> {
    let held = replicas.iter().zip(0..).filter(|(replica, _)| **replica != NOBODY);
    let mut ranks: Vec<(u32, u32)> =
        held.filter_map(|(&replica, shard)| Some((grid.rank_of(shard, replica)?, shard))).collect();
    ranks.sort_unstable();
    ranks
}

/// Shards that nobody holds must be empty.
fn check_shards(replicas: &[u32], tensor: Option<&Tensor>, structure: &Structure) -> Result<()> {
    let grid = tensor.and_then(|tensor| Some((tensor, structure.grid(tensor.layout?).ok()?)));
    let Some((tensor, grid)) = grid else {
        return Err(Error::new(Code::Internal, "shards without a layout"));
    };
    for (&replica, shard) in replicas.iter().zip(0..) {
        if replica == NOBODY
            && let Some(region) = grid.boxes(&tensor.shape, shard)?.first()
        {
            let rank = grid.rank_of(shard, 0).unwrap_or_default();
            let what = format!("no rank stores {region}, which rank {rank} holds");
            return Err(Error::new(Code::Hole, what));
        }
    }
    Ok(())
}

fn check_regions(bytes: &[u8], tensor: &Tensor) -> Result<()> {
    let list = decode_regions(bytes, &tensor.shape, "regions of a tensor")?;
    check_cover(&tensor.shape, list.iter().map(|(_, region)| region), Repeats::Overlap)
}
