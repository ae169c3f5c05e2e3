//! Finding many regions at once: each part that holds some of them is read once, neighbours together.
//!
//! A restore wants one region of each of a thousand tensors. Asked for one by one, tensors that were saved by more
//! ranks than the cache keeps parts of would have all those parts read for each of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::holders::{Held, decode_regions, decode_replicas};
use super::loaded::LoadedPart;
use super::lookup::{READ_BYTES, read};
use super::read::Manifest;
use super::value::{Tensor, Value, shown};
use crate::model::{Chunk, DataFile};

/// What was found of the regions that were wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Of each wanted region the chunks that share elements with it, by file and offset.
    pub chunks: Vec<Vec<Chunk>>,
    /// The files that those chunks are in, by their numbers.
    pub files: BTreeMap<u32, DataFile>,
}

impl Manifest {
    /// The chunks that share elements with regions of tensors: `(name, region)`. Each part is read once at the most.
    ///
    /// Errors: `no_such_tensor`, `bad_slice`; those of reading a part; `hole` where not all of a region was found.
    pub fn find(&self, wants: &[(&str, &Region)]) -> Result<Found> {
        let mut found = Found { chunks: vec![Vec::new(); wants.len()], files: BTreeMap::new() };
        // By rank: wants, each with the number of its value.
        let mut by_rank: BTreeMap<u32, Vec<(usize, u32)>> = BTreeMap::new();
        for (want, (name, region)) in wants.iter().enumerate() {
            let (number, tensor) = self.find_tensor(name)?;
            region.check_within(&tensor.shape).map_err(|error| error.at(shown(name)))?;
            if region.is_empty() {
                continue;
            }
            for rank in self.holders(number, tensor, Some(region))? {
                by_rank.entry(rank).or_default().push((want, number));
            }
        }
        let ranks: Vec<u32> = by_rank.keys().copied().collect();
        self.each_part(&ranks, |rank, part| {
            for &(want, number) in by_rank.get(&rank).into_iter().flatten() {
                if let (Some(chunks), Some((_, region))) =
                    (found.chunks.get_mut(want), wants.get(want))
                {
                    let before = chunks.len();
                    part.chunks_of(number, Some(region), chunks);
                    let new = chunks.get(before..).unwrap_or_default();
                    add_files(&mut found.files, part, new)
                        .ok_or_else(|| self.bad("a chunk in no file"))?;
                }
            }
            Ok(())
        })?;
        for ((name, region), chunks) in wants.iter().zip(&found.chunks) {
            check_all(region, chunks).map_err(|error| error.at(&self.name).within(shown(name)))?;
        }
        Ok(found)
    }

    /// The regions in which a tensor is stored, as far as they have elements. Reads no part.
    ///
    /// Errors: `no_such_tensor`; those of reading a list of holders.
    pub fn regions_of(&self, name: &str) -> Result<Vec<Region>> {
        let (number, tensor) = self.find_tensor(name)?;
        if tensor.shape.contains(&0) {
            return Ok(Vec::new());
        }
        let place = format!("{}, section Holders", self.name);
        match self.held.get(number as usize) {
            None | Some(Held::Nobody) => Ok(Vec::new()),
            Some(Held::One(_)) => Ok(vec![Region::whole(&tensor.shape)]),
            Some(Held::Replica(_)) => self.boxes(tensor, |_| true),
            Some(Held::Replicas(list)) => {
                let grid = self.table.grid(tensor.layout.unwrap_or(u32::MAX))?;
                let list = decode_replicas(&self.list(list)?, grid.shards(), &place)?;
                self.boxes(tensor, |shard| matches!(list.get(shard as usize), Some(Some(_))))
            }
            Some(Held::Regions(list)) => {
                let list = decode_regions(&self.list(list)?, &tensor.shape, &place)?;
                let regions = list.into_iter().map(|(_, region)| region);
                Ok(regions.filter(|region| !region.is_empty()).collect())
            }
        }
    }

    /// The boxes of the shards that somebody holds.
    fn boxes(&self, tensor: &Tensor, is_held: impl Fn(u32) -> bool) -> Result<Vec<Region>> {
        let grid = self.table.grid(tensor.layout.unwrap_or(u32::MAX))?;
        let mut boxes = Vec::new();
        // At most as many as there are ranks.
        for shard in (0..grid.shards() as u32).filter(|&shard| is_held(shard)) {
            boxes.extend(grid.boxes(&tensor.shape, shard)?);
        }
        Ok(boxes)
    }

    /// Whether a value is an object, be it under another name.
    pub fn is_object(&self, value: &Value) -> bool {
        match value {
            Value::Tensor(_) => false,
            Value::Object => true,
            Value::Alias { of } => {
                self.value(of).is_some_and(|named| matches!(named.value, Value::Object))
            }
        }
    }

    /// Calls `each` with the parts of these ranks, which are in rising order. Parts that lie side by side are read
    /// together, up to 16 MiB: a part has some kilobytes, and a read from a file server takes a millisecond.
    fn each_part(
        &self,
        ranks: &[u32],
        mut each: impl FnMut(u32, &LoadedPart) -> Result<()>,
    ) -> Result<()> {
        let mut rest = ranks;
        while let Some(&rank) = rest.first() {
            if let Some(part) = self.kept(rank) {
                each(rank, &part)?;
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            let run = self.run_of(rest)?;
            let (now, later) = rest.split_at(run);
            let start = self.part_place(rank)?.start;
            let end = self.part_place(now.last().copied().unwrap_or(rank))?.end;
            let bytes = read(&*self.source, start, end - start)?;
            for &rank in now {
                let place = self.part_place(rank)?;
                let own = (place.start - start) as usize..(place.end - start) as usize;
                let own = bytes.get(own).ok_or_else(|| self.bad("a part outside of its place"))?;
                let part: Arc<LoadedPart> = self.keep(rank, self.decode_part(rank, own)?);
                each(rank, &part)?;
            }
            rest = later;
        }
        Ok(())
    }

    /// How many of the first ranks are read together: at least one.
    fn run_of(&self, ranks: &[u32]) -> Result<usize> {
        let Some(&first) = ranks.first() else { return Ok(0) };
        let start = self.part_place(first)?.start;
        let mut run = 1;
        for (&rank, wanted) in ranks.iter().skip(1).zip(first.saturating_add(1)..) {
            let fits = self.part_place(rank)?.end - start <= READ_BYTES;
            if rank != wanted || !fits || self.kept(rank).is_some() {
                break;
            }
            run += 1;
        }
        Ok(run)
    }
}

/// Notes the files of chunks; `None` where the part does not have one.
fn add_files(
    files: &mut BTreeMap<u32, DataFile>,
    part: &LoadedPart,
    chunks: &[Chunk],
) -> Option<()> {
    for chunk in chunks.iter().map(|chunk| chunk.file) {
        if let std::collections::btree_map::Entry::Vacant(place) = files.entry(chunk) {
            place.insert(part.file(chunk)?);
        }
    }
    Some(())
}

/// Fails where chunks leave elements of a region out. No two share an element: that was checked when they were
/// committed, and a sum that is too large is told as well.
fn check_all(region: &Region, chunks: &[Chunk]) -> Result<()> {
    let shared = chunks.iter().filter_map(|chunk| chunk.region.intersect(region));
    let found = shared.fold(0_u64, |sum, shared| sum.saturating_add(shared.elements()));
    if found == region.elements() {
        return Ok(());
    }
    let what = format!("{found} of {} elements of {region} are stored", region.elements());
    Err(Error::new(Code::Hole, what))
}
