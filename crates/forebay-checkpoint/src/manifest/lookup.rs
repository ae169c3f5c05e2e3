//! The reader's ways from a name to the parts that hold it.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use forebay_engine::{RangeSource, read_exact_at};
use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::hex;
use forebay_tensor::{Region, Tiling};
use sha2::{Digest, Sha256};

use super::head::Id;
use super::holders::{Held, ListPlace, decode_regions, decode_replicas};
use super::index::PartEntry;
use super::loaded::LoadedPart;
use super::part::Part;
use super::read::Manifest;
use super::value::{Named, Tensor, Value, shown};

/// Bytes that are read at a time.
pub(super) const READ_BYTES: u64 = 16 << 20;

impl Manifest {
    pub(super) fn find_tensor(&self, name: &str) -> Result<(u32, &Tensor)> {
        let (number, named) = self.table.find(name).ok_or_else(|| self.no_such(name))?;
        match self.resolve(number, named)? {
            (number, Named { value: Value::Tensor(tensor), .. }) => Ok((number, tensor)),
            _ => Err(Error::new(Code::NoSuchTensor, format!("{} is an object", shown(name)))
                .at(&self.name)),
        }
    }

    /// The value itself, for an alias.
    pub(super) fn resolve<'a>(&'a self, number: u32, named: &'a Named) -> Result<(u32, &'a Named)> {
        match &named.value {
            Value::Alias { of } => self.table.find(of).ok_or_else(|| self.bad("a lost alias")),
            _ => Ok((number, named)),
        }
    }

    pub(super) fn one_holder(&self, number: u32) -> Result<Vec<u32>> {
        match self.held.get(number as usize) {
            Some(Held::One(rank)) => Ok(vec![*rank]),
            _ => Err(self.bad("an object is not held by one rank")),
        }
    }

    /// The ranks whose parts have chunks of a tensor, or of a region of it: ascending, each once.
    pub(super) fn holders(
        &self,
        number: u32,
        tensor: &Tensor,
        wanted: Option<&Region>,
    ) -> Result<Vec<u32>> {
        let mut ranks = match self.held.get(number as usize) {
            None | Some(Held::Nobody) => Vec::new(),
            Some(Held::One(rank)) => vec![*rank],
            Some(Held::Replica(replica)) => {
                self.shard_holders(tensor, wanted, |_| Some(*replica))?
            }
            Some(Held::Replicas(list)) => {
                let grid = self.table.grid(tensor.layout.unwrap_or(u32::MAX))?;
                let place = format!("{}, section Holders", self.name);
                let list = decode_replicas(&self.list(list)?, grid.shards(), &place)?;
                let replica = |shard: u32| list.get(shard as usize).copied().flatten();
                self.shard_holders(tensor, wanted, replica)?
            }
            Some(Held::Regions(list)) => {
                let place = format!("{}, section Holders", self.name);
                let list = decode_regions(&self.list(list)?, &tensor.shape, &place)?;
                let meets = |region: &Region| {
                    wanted.is_none_or(|wanted| region.intersect(wanted).is_some())
                };
                let met = list.into_iter().filter(|(_, region)| meets(region));
                met.map(|(rank, _)| rank).collect()
            }
        };
        ranks.sort_unstable();
        ranks.dedup();
        Ok(ranks)
    }

    pub(super) fn shard_holders(
        &self,
        tensor: &Tensor,
        wanted: Option<&Region>,
        replica: impl Fn(u32) -> Option<u32>,
    ) -> Result<Vec<u32>> {
        let layout = tensor.layout.unwrap_or(u32::MAX);
        let grid = self.table.grid(layout)?;
        let shards = if grid.shards() == 1 && !tensor.shape.contains(&0) {
            // Replicated: nothing to search.
            vec![0]
        } else {
            let whole = Region::whole(&tensor.shape);
            let tiling = self.tiling(layout, &tensor.shape)?;
            grid.shards_meeting(&tiling, wanted.unwrap_or(&whole))?
        };
        let rank = |shard| {
            replica(shard)
                .and_then(|replica| grid.rank_of(shard, replica))
                .ok_or_else(|| self.bad(format!("nobody holds shard {shard} of a tensor")))
        };
        shards.into_iter().map(rank).collect()
    }

    /// Tensors of one layout and shape share the tiling.
    pub(super) fn tiling(&self, layout: u32, shape: &[u64]) -> Result<Arc<Tiling>> {
        let mut tilings = self.tilings.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (layout, shape.to_vec());
        if let Some(tiling) = tilings.get(&key) {
            return Ok(Arc::clone(tiling));
        }
        let tiling = Arc::new(self.table.grid(layout)?.tiling(shape)?);
        tilings.insert(key, Arc::clone(&tiling));
        Ok(tiling)
    }

    pub(super) fn list(&self, list: &ListPlace) -> Result<Vec<u8>> {
        // The lists add up to the section, which lies inside of the source.
        let start = self.header.section(Id::Holders).bytes.start + list.offset;
        let bytes = read(&*self.source, start, list.bytes)?;
        match crc32(&bytes) == list.crc {
            true => Ok(bytes),
            false => {
                let what = "a list of holders does not have its checksum";
                let place = format!("{}, byte {start}", self.name);
                Err(Error::new(Code::Checksum, what).at(place))
            }
        }
    }

    pub(super) fn part(&self, rank: u32) -> Result<Arc<LoadedPart>> {
        match self.kept(rank) {
            Some(part) => Ok(part),
            None => Ok(self.keep(rank, self.load(rank)?)),
        }
    }

    /// A part that was read before and is still there.
    pub(super) fn kept(&self, rank: u32) -> Option<Arc<LoadedPart>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(rank)
    }

    pub(super) fn keep(&self, rank: u32, part: LoadedPart) -> Arc<LoadedPart> {
        let part = Arc::new(part);
        let bytes = self.parts.get(rank as usize).map_or(0, |entry| entry.bytes);
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.put(rank, bytes, Arc::clone(&part));
        part
    }

    pub(super) fn load(&self, rank: u32) -> Result<LoadedPart> {
        let place = self.part_place(rank)?;
        let bytes = read(&*self.source, place.start, place.end - place.start)?;
        self.decode_part(rank, &bytes)
    }

    /// Where the part of a rank is in the manifest.
    pub(super) fn part_place(&self, rank: u32) -> Result<Range<u64>> {
        let Some(entry) = self.parts.get(rank as usize) else {
            let what = format!("rank {rank} of {} ranks", self.parts.len());
            return Err(Error::new(Code::InvalidMetadata, what).at(&self.name));
        };
        // The parts add up to the section, which lies inside of the source.
        let start = self.header.section(Id::Parts).bytes.start + entry.offset;
        Ok(start..start + entry.bytes)
    }

    /// Checks the bytes of a rank's part against the index, which the seal covers, and takes them in.
    pub(super) fn decode_part(&self, rank: u32, bytes: &[u8]) -> Result<LoadedPart> {
        let start = self.part_place(rank)?.start;
        let place = format!("{}, part of rank {rank} at byte {start}", self.name);
        let entry = self.parts.get(rank as usize).ok_or_else(|| self.bad("no such rank"))?;
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        if digest != entry.digest {
            let what = "a rank's part does not have its hash";
            return Err(Error::new(Code::Checksum, what).at(place));
        }
        let part = Part::decode(bytes, &place)?;
        self.check_part(&part, rank, entry).map_err(|error| error.at(&place))?;
        // All files of all parts are fewer than 2^32.
        LoadedPart::new(part, entry.first_file as u32, &self.table, &self.shared, &place)
    }

    fn check_part(&self, part: &Part, rank: u32, entry: &PartEntry) -> Result<()> {
        let world = self.info.world_size;
        if part.rank() != rank || part.world() != world || part.attempt() != self.info.attempt {
            return Err(self.bad("it is that of another rank, job or attempt"));
        }
        if part.files().len() as u64 != entry.files {
            return Err(self.bad("it has more or fewer files than the index says"));
        }
        let known = part.structure().is_none_or(|shared| {
            self.info.structure.as_ref() == Some(&hex(&shared.hash))
                && shared.values as usize == self.shared.len()
        });
        if known { Ok(()) } else { Err(self.bad("its structure is not that of the manifest")) }
    }

    pub(super) fn no_such(&self, name: &str) -> Error {
        Error::new(Code::NoSuchTensor, format!("no value of the name {}", shown(name)))
            .at(&self.name)
    }

    pub(super) fn bad(&self, what: impl Into<String>) -> Error {
        Error::new(Code::InvalidMetadata, what)
    }
}

/// Reads a range that was checked against the source's length. Large ones in pieces, so that the memory for them is
/// taken as bytes come.
pub(super) fn read(source: &dyn RangeSource, offset: u64, len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut done = 0;
    while done < len {
        let step = (len - done).min(READ_BYTES);
        let start = bytes.len();
        // At most 16 MiB.
        bytes.resize(start + step as usize, 0);
        read_exact_at(source, bytes.get_mut(start..).unwrap_or_default(), offset + done)?;
        done += step;
    }
    Ok(bytes)
}
