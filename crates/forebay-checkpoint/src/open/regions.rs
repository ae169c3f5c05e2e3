//! Models of regions: of each tensor only the chunks that share elements with what is wanted are opened.

use super::catalog::{Job, Parts};
use super::{Checkpoint, Origin};
use crate::model::{Chunk, Entry, Kind};
use forebay_error::{Code, Error, Result};
use forebay_format::{Catalog, Format, Model, Stored, TensorEntry};
use forebay_tensor::{ChunkIndex, Dtype, Region, byte_len};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

/// From so many chunks on a tensor gets an index; fewer are gone through as fast.
const INDEX_FROM_CHUNKS: usize = 32;

impl Checkpoint {
    /// A model of these regions, `(number of the entry, region)`: only the chunks that share elements with one of
    /// them are opened. Its tensors have the names of the entries.
    ///
    /// Errors: `usage` for an entry that is no tensor; `bad_slice` for a region outside of its tensor.
    pub fn model_for(&self, wants: &[(usize, Region)]) -> Result<Model> {
        let mut tensors: Vec<TensorEntry> = Vec::new();
        let mut numbers: HashMap<usize, usize> = HashMap::new();
        let mut chosen: BTreeSet<(usize, usize)> = BTreeSet::new();
        for (entry, region) in wants {
            let (own, dtype, shape, chunks) = self.tensor_of(*entry)?;
            region.check_within(shape).map_err(|error| self.place(&own.name, error))?;
            let number = *numbers.entry(*entry).or_insert(tensors.len());
            if number == tensors.len() {
                tensors.push(TensorEntry {
                    name: own.name.clone(),
                    dtype,
                    shape: shape.to_vec(),
                    file: 0,
                    offset: 0,
                    bytes: byte_len(dtype, shape)?,
                    stored: Stored::Pieces(Vec::new()),
                });
            }
            let met = self.chunks_that_meet(*entry, shape, chunks, region)?;
            chosen.extend(met.into_iter().map(|place| (*entry, place)));
        }
        let mut jobs = Vec::with_capacity(chosen.len());
        for (entry, place) in chosen {
            let (own, _, _, chunks) = self.tensor_of(entry)?;
            if let (Some(chunk), Some(&number)) = (chunks.get(place), numbers.get(&entry)) {
                jobs.push(Job { number, entry: own, chunk });
            }
        }
        let parts = Parts::of(self, jobs, &mut tensors)?;
        let format = match self.origin {
            Origin::HfShards => Format::SafetensorsShards,
            Origin::Dcp { .. } | Origin::Forebay(_) => Format::Dcp,
        };
        let mut catalog = Catalog::new(format, None, parts.catalog, tensors, Vec::new())?;
        catalog.checks = parts.checks;
        catalog.has_blocks = matches!(self.origin, Origin::Forebay(_));
        Ok(Model { catalog, files: parts.files })
    }

    fn tensor_of(&self, entry: usize) -> Result<(&Entry, Dtype, &[u64], &[Chunk])> {
        let Some(entry) = self.entries.get(entry) else {
            return Err(Error::new(Code::Usage, format!("there is no entry {entry}")));
        };
        match &entry.kind {
            Kind::Tensor { dtype, shape, chunks } => Ok((entry, *dtype, shape, chunks)),
            Kind::Object { .. } => {
                let error = Error::new(Code::Usage, "is an object, no tensor");
                Err(self.place(&entry.name, error))
            }
        }
    }

    /// The chunks of an entry that share elements with a region, by their places. A tensor of many chunks gets an index
    /// at first use, which stays: an export asks for one box after the other.
    fn chunks_that_meet(
        &self,
        entry: usize,
        shape: &[u64],
        chunks: &[Chunk],
        region: &Region,
    ) -> Result<Vec<usize>> {
        if chunks.len() < INDEX_FROM_CHUNKS {
            let meets = |(_, chunk): &(usize, &Chunk)| chunk.region.intersect(region).is_some();
            return Ok(chunks.iter().enumerate().filter(meets).map(|(place, _)| place).collect());
        }
        let indexes = || self.indexes.lock().unwrap_or_else(PoisonError::into_inner);
        let found = indexes().get(&entry).cloned();
        let index = match found {
            Some(index) => index,
            None => {
                // Built without the lock, which others need for other tensors: two may build the same at once.
                let regions = chunks.iter().map(|chunk| &chunk.region);
                let index = Arc::new(ChunkIndex::build(shape, regions)?);
                indexes().entry(entry).or_insert(index).clone()
            }
        };
        Ok(index.intersecting(region)?.map(|(place, _)| place as usize).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor of 96 x 80 in chunks of `rows` x 16, one of them without elements.
    fn checkpoint(rows: u64) -> Checkpoint {
        let chunk = |offsets: [u64; 2], sizes: [u64; 2]| Chunk {
            region: Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() },
            file: 0,
            offset: 0,
            length: 1,
            transforms: Vec::new(),
            data: None,
        };
        let grid = (0..96 / rows).flat_map(|row| (0..5).map(move |column| (row, column)));
        let mut chunks: Vec<Chunk> =
            grid.map(|(row, column)| chunk([row * rows, column * 16], [rows, 16])).collect();
        chunks.reverse();
        chunks.push(chunk([96, 0], [0, 80]));
        let kind = Kind::Tensor { dtype: Dtype::F32, shape: vec![96, 80], chunks };
        let entry = Entry { name: "w".to_owned(), path: Vec::new(), kind };
        let origin = Origin::Dcp { version: None, save_id: None };
        Checkpoint::new(
            origin,
            vec![entry],
            Vec::new(),
            &std::path::Path::new(".").into(),
            Vec::new(),
        )
        .unwrap()
    }

    #[test]
    fn an_index_finds_what_a_look_at_every_chunk_finds() {
        for rows in [2, 3, 96] {
            let checkpoint = checkpoint(rows);
            let (_, _, shape, chunks) = checkpoint.tensor_of(0).unwrap();
            for (row, column, height, width) in
                [(0, 0, 96, 80), (5, 15, 1, 2), (95, 79, 1, 1), (1, 16, 40, 16), (7, 3, 0, 9)]
            {
                let region = Region { offsets: vec![row, column], sizes: vec![height, width] };
                let meets = |at: &usize| {
                    chunks[*at].region.intersect(&region).is_some_and(|r| !r.is_empty())
                };
                let expected: BTreeSet<usize> = (0..chunks.len()).filter(meets).collect();
                let found = checkpoint.chunks_that_meet(0, shape, chunks, &region).unwrap();
                assert_eq!(found.len(), expected.len(), "{region:?}");
                assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected, "{region:?}");
            }
            assert_eq!(checkpoint.indexes.lock().unwrap().len(), usize::from(rows < 96));
        }
    }
}
