//! Which ranks hold a value: what lets a reader fetch only the parts that it needs.
//!
//! ```text
//! in a row  varint kind: 0 nobody (a tensor without elements)
//!                        1 one rank holds all of it: varint rank
//!                        2 each shard of the layout is held by the same replica: varint replica
//!                        3 each shard by a replica of its own: varint bytes, u32 CRC-32 of a list of replicas
//!                        4 regions: varint bytes, u32 CRC-32 of a list of regions
//! lists     lie in the section of holders one after the other, in the order of their rows
//! replicas  for each shard varint replica + 1; 0: nobody (the shard has no elements)
//! regions   until the end, by rank: rank as difference (the first: to 0), then for each dimension offset and
//!           size, each as difference to that of the region before (the first: to 0)
//! ```
//!
//! Shards and replicas are numbered row-major over the mesh dimensions that cut and over those that do not.

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::limits::MAX_RANKS;
use super::wire::{Put, Take};

/// A row's holders, its list unread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// By nobody.
    Nobody,
    /// All by one rank.
    One(u32),
    /// Every shard by this replica.
    Replica(u32),
    /// As a list of replicas says.
    Replicas(ListPlace),
    /// As a list of regions says.
    Regions(ListPlace),
}

/// Where a list is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListPlace {
    /// Its first byte in the section.
    pub(crate) offset: u64,
    /// Its bytes.
    pub(crate) bytes: u64,
    /// CRC-32 of them.
    pub(crate) crc: u32,
}

impl Held {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let (kind, list) = match self {
            Self::Nobody => return out.put_varint(0),
            Self::One(rank) => {
                out.put_varint(1);
                return out.put_varint(u64::from(*rank));
            }
            Self::Replica(replica) => {
                out.put_varint(2);
                return out.put_varint(u64::from(*replica));
            }
            Self::Replicas(list) => (3, list),
            Self::Regions(list) => (4, list),
        };
        out.put_varint(kind);
        out.put_varint(list.bytes);
        out.extend_from_slice(&list.crc.to_le_bytes());
    }

    /// Reads a row's holders; `offset` is where the next list begins, and moves on.
    pub(crate) fn take(take: &mut Take<'_>, offset: &mut u64) -> Result<Self> {
        let kind = take.at_most(4, "as a kind of holders")?;
        match kind {
            0 => return Ok(Self::Nobody),
            1 => return Ok(Self::One(take.small(MAX_RANKS, "as a rank")?)),
            2 => return Ok(Self::Replica(take.small(MAX_RANKS, "as a replica")?)),
            _ => {}
        }
        let (bytes, crc) = (take.varint()?, take.u32()?);
        let list = ListPlace { offset: *offset, bytes, crc };
        let Some(end) = offset.checked_add(bytes) else {
            return Err(take.bad("a list of holders ends past 2^64"));
        };
        *offset = end;
        Ok(if kind == 3 { Self::Replicas(list) } else { Self::Regions(list) })
    }
}

/// A list of regions that grows, in its final form: at 16,384 ranks and a thousand tensors, regions in memory would
/// take gigabytes.
#[derive(Default)]
pub(crate) struct RegionList {
    bytes: Vec<u8>,
    rank: u32,
    last: Option<Region>,
}

impl RegionList {
    pub(crate) fn push(&mut self, rank: u32, region: &Region) {
        self.bytes.put_difference(u64::from(self.rank), u64::from(rank));
        let zero = Region { offsets: vec![0; region.rank()], sizes: vec![0; region.rank()] };
        let last = self.last.get_or_insert(zero);
        let before = last.offsets.iter().zip(&last.sizes);
        for ((&offset, &size), now) in before.zip(region.offsets.iter().zip(&region.sizes)) {
            self.bytes.put_difference(offset, *now.0);
            self.bytes.put_difference(size, *now.1);
        }
        last.clone_from(region);
        self.rank = rank;
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads a list of regions of a tensor of this shape.
pub(crate) fn decode_regions(
    bytes: &[u8],
    shape: &[u64],
    place: &str,
) -> Result<Vec<(u32, Region)>> {
    let mut take = Take::new(bytes, place);
    let mut last = Region { offsets: vec![0; shape.len()], sizes: vec![0; shape.len()] };
    let (mut rank, mut list) = (0, Vec::new());
    while take.left() > 0 {
        let next = take.difference(rank)?;
        if next < rank || next >= MAX_RANKS {
            return Err(take.bad(format!("rank {next} after rank {rank}")));
        }
        rank = next;
        for (offset, size) in last.offsets.iter_mut().zip(&mut last.sizes) {
            *offset = take.difference(*offset)?;
            *size = take.difference(*size)?;
        }
        last.check_within(shape).map_err(|error| {
            Error::new(Code::InvalidMetadata, error.what().to_owned()).at(place)
        })?;
        // Below the largest number of ranks.
        list.push((rank as u32, last.clone()));
    }
    Ok(list)
}

/// Writes a list of replicas; `u32::MAX` is nobody.
pub(crate) fn encode_replicas(replicas: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(replicas.len());
    for &replica in replicas {
        out.put_varint(u64::from(replica.wrapping_add(1)));
    }
    out
}

/// Reads a list of replicas, one for each shard.
pub(crate) fn decode_replicas(bytes: &[u8], shards: u64, place: &str) -> Result<Vec<Option<u32>>> {
    let mut take = Take::new(bytes, place);
    let mut replicas = Vec::new();
    while take.left() > 0 {
        replicas.push(take.small(MAX_RANKS, "as a replica")?.checked_sub(1));
    }
    match replicas.len() as u64 == shards {
        true => Ok(replicas),
        false => Err(take.bad(format!("{} replicas for {shards} shards", replicas.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_round_trip() {
        let regions = [([0, 4], [2, 3]), ([2, 0], [0, 7]), ([1, 1], [1, 1])]
            .map(|(offsets, sizes)| Region::new(offsets.to_vec(), sizes.to_vec()).unwrap());
        let pairs: Vec<_> = [0, 7, 7].into_iter().zip(regions).collect();
        let mut list = RegionList::default();
        pairs.iter().for_each(|(rank, region)| list.push(*rank, region));
        let bytes = list.into_bytes();
        assert_eq!(decode_regions(&bytes, &[9, 9], "x").unwrap(), pairs);
        assert!(decode_regions(&bytes, &[9, 6], "x").is_err());
        assert!(decode_regions(&bytes[..bytes.len() - 1], &[9, 9], "x").is_err());
        let replicas = encode_replicas(&[0, u32::MAX, 300]);
        let read = decode_replicas(&replicas, 3, "x").unwrap();
        assert_eq!(read, [Some(0), None, Some(300)]);
        assert!(decode_replicas(&replicas, 4, "x").is_err());
    }
}
