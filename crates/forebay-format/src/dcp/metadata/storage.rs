//! `storage_data`: which place belongs to which chunk.
//!
//! A key is a name and, for tensors, the offsets of a chunk; its index is a hint where in the list that chunk is. The
//! hint is right in what torch writes; where it is not, the chunks of that tensor are sorted once and searched.

use super::check_relative_path;
use super::entries::double_last;
use super::names::Field;
use super::read::{Reader, bad, within};
use super::table::{NONE, PlaceRow, Row, StaleItem};
use crate::pickle::Value;
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;
use std::collections::HashMap;

/// The most transforms of one item, and the most bytes of the name of one; torch has one of 13.
const MAX_TRANSFORMS: usize = 16;
const MAX_TRANSFORM_BYTES: usize = 256;

#[derive(Default)]
struct Tables<'g> {
    files: HashMap<&'g str, u32>,
    transforms: HashMap<Vec<&'g str>, u32>,
    /// Chunks in the order of their offsets, of rows whose hints were no help.
    sorted: HashMap<u32, Vec<u32>>,
}

impl<'g> Reader<'g, '_> {
    pub(super) fn storage(&mut self, storage: Value) -> Result<()> {
        let pairs = self.graph().as_dict(storage);
        let pairs = pairs.ok_or_else(|| bad("storage_data is no dict"))?;
        let mut tables = Tables::default();
        for (key, info) in pairs {
            let wanted = [Field::Fqn, Field::Offset, Field::Index];
            let Some([Some(fqn), offset, index]) = self.names.fields(key, wanted) else {
                return Err(bad("storage_data has a key that is no MetadataIndex"));
            };
            let name = self.graph().as_str(fqn);
            let name = name.ok_or_else(|| bad("storage_data has a key whose name is no text"))?;
            let place = self.place(info, &mut tables);
            let place = place.map_err(|error| within("the place of", name, error))?;
            let assigned = self.assign(fqn, offset, index, place, &mut tables);
            if !assigned.map_err(|error| within("the place of", name, error))? {
                self.stale(name, &place);
            }
        }
        self.out.places.shrink_to_fit();
        self.warn_of_stale();
        self.check_stored()
    }

    fn stale(&mut self, name: &str, place: &PlaceRow) {
        self.out.stale_count += 1;
        // Keys may share one name; together the names kept are no longer than the file.
        self.stale_bytes = self.stale_bytes.saturating_add(name.len());
        if self.stale_bytes <= self.input_bytes {
            self.out.stale.push(StaleItem {
                name: name.to_string(),
                file: place.file as usize,
                offset: place.offset,
                length: place.length,
            });
        }
    }

    fn warn_of_stale(&mut self) {
        if let Some(first) = self.out.stale.first() {
            let (count, name) = (self.out.stale_count, quoted(&first.name));
            self.warn(format!("{count} stored items belong to no entry, the first to {name}"));
        }
    }

    /// The place that a `_StorageInfo`, or another class with its fields, describes.
    fn place(&mut self, info: Value, tables: &mut Tables<'g>) -> Result<PlaceRow> {
        let wanted =
            [Field::RelativePath, Field::Offset, Field::Length, Field::TransformDescriptors];
        let graph = self.graph();
        let Some([Some(path), Some(offset), Some(length), transforms]) =
            self.names.fields(info, wanted)
        else {
            return Err(bad("a stored item has no path, offset or length"));
        };
        let path = graph.as_str(path).ok_or_else(|| bad("the path of a data file is no text"))?;
        // Items may share one long text: it must not be looked up for each.
        let file = match tables.files.get(short(path)) {
            Some(&file) => file,
            None => {
                check_relative_path(path)?;
                let file = self.out.files.len() as u32;
                self.out.files.push(path.to_string());
                tables.files.insert(path, file);
                file
            }
        };
        let offset = graph.as_u64(offset).ok_or_else(|| self.no_count("the offset", offset))?;
        let length = graph.as_u64(length).ok_or_else(|| self.no_count("the length", length))?;
        if offset.checked_add(length).is_none_or(|end| end > i64::MAX as u64) {
            let what = format!("{length} bytes at {offset} end past 2^63, where no file reaches");
            return Err(Error::new(Code::OutOfBounds, what));
        }
        let transforms = match transforms.filter(|transforms| !graph.is_none(*transforms)) {
            None => NONE,
            Some(transforms) => self.transforms(transforms, tables)?,
        };
        Ok(PlaceRow { offset, length, file, transforms })
    }

    fn transforms(&mut self, transforms: Value, tables: &mut Tables<'g>) -> Result<u32> {
        let graph = self.graph();
        let items = graph.as_sequence(transforms).filter(|items| items.len() <= MAX_TRANSFORMS);
        let text = |item| graph.as_str(item).filter(|text| text.len() <= MAX_TRANSFORM_BYTES);
        let texts = items.and_then(|items| items.map(text).collect());
        let texts: Vec<&str> =
            texts.ok_or_else(|| bad("transform_descriptors is no list of texts"))?;
        if texts.is_empty() {
            return Ok(NONE);
        }
        if let Some(&number) = tables.transforms.get(&texts) {
            return Ok(number);
        }
        let number = self.out.transforms.len() as u32;
        self.out.transforms.push(texts.iter().map(|text| (*text).to_string()).collect());
        tables.transforms.insert(texts, number);
        Ok(number)
    }

    /// Gives the place to the chunks or the object that the key means; false where there is none.
    fn assign(
        &mut self,
        fqn: Value,
        offset: Option<Value>,
        index: Option<Value>,
        place: PlaceRow,
        tables: &mut Tables<'g>,
    ) -> Result<bool> {
        let Some(number) = self.names.number(fqn, &self.rows) else {
            return Ok(false);
        };
        let offset = offset.filter(|offset| !self.graph().is_none(*offset));
        // The numbers of the key go behind all others for a moment.
        let end = self.out.numbers.len();
        let dims = offset.map(|offset| self.sides(offset)).transpose()?;
        if self.is_f4(number) {
            let key = self.out.numbers.get_mut(end..).unwrap_or_default();
            double_last(key, key.len())?;
        }
        let hint = index.and_then(|index| self.graph().as_u64(index));
        let key = self.out.numbers.get(end..).unwrap_or_default();
        let chunks = match self.out.rows.get(number as usize) {
            Some(row) => self.chunks_of_key(number, row, dims.map(|_| key), hint, tables),
            None => Vec::new(),
        };
        self.out.numbers.truncate(end);
        for &chunk in &chunks {
            let slot = self.out.places.get_mut(chunk);
            let slot = slot.filter(|slot| slot.file == NONE);
            *slot.ok_or_else(|| bad("it is stored twice"))? = place;
        }
        Ok(!chunks.is_empty())
    }

    /// Which places a key means.
    fn chunks_of_key(
        &self,
        number: u32,
        row: &Row,
        key: Option<&[u64]>,
        hint: Option<u64>,
        tables: &mut Tables<'g>,
    ) -> Vec<usize> {
        let Some(key) = key else {
            // An object, or a tensor in one piece.
            return if row.count == 1 { vec![row.places] } else { Vec::new() };
        };
        if row.element == NONE || row.dims as usize != key.len() {
            return Vec::new();
        }
        let hint = hint.and_then(|hint| usize::try_from(hint).ok());
        if let Some(hint) = hint.filter(|hint| *hint < row.count) {
            let (offsets, sizes) = self.chunk(row, hint);
            if offsets == key && !sizes.contains(&0) {
                return vec![row.places + hint];
            }
        }
        let sorted = tables.sorted.entry(number).or_insert_with(|| {
            let mut order: Vec<u32> = (0..row.count as u32).collect();
            order.sort_unstable_by_key(|at| self.chunk(row, *at as usize));
            order
        });
        // Pieces without elements may start where others do: then the place is that of the others.
        let start = sorted.partition_point(|at| self.chunk(row, *at as usize).0 < key);
        let equal = sorted.iter().skip(start).map(|at| *at as usize);
        let equal = equal.take_while(|at| self.chunk(row, *at).0 == key);
        let (empty, full): (Vec<usize>, Vec<usize>) =
            equal.partition(|at| self.chunk(row, *at).1.contains(&0));
        let chosen = if full.is_empty() { empty } else { full };
        chosen.into_iter().map(|at| row.places + at).collect()
    }

    /// Every object and every piece with elements must be stored somewhere.
    fn check_stored(&self) -> Result<()> {
        for row in &self.out.rows {
            for index in 0..row.count {
                let place = self.out.places.get(row.places + index);
                let (offsets, sizes) = self.chunk(row, index);
                if place.is_some_and(|place| place.file != NONE) || sizes.contains(&0) {
                    continue;
                }
                let error = if row.element == NONE {
                    Error::new(Code::Hole, "the object is stored nowhere")
                } else {
                    let piece = Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
                    Error::new(Code::Hole, format!("its piece {piece} is stored nowhere"))
                };
                return Err(within("entry", self.out.name(row), error));
            }
        }
        Ok(())
    }

    /// Offsets and sides of a chunk.
    fn chunk(&self, row: &Row, index: usize) -> (&[u64], &[u64]) {
        let dims = row.dims as usize;
        let start = row.numbers + dims + index * 2 * dims;
        let both = self.out.numbers.get(start..start + 2 * dims).unwrap_or_default();
        both.split_at_checked(dims).unwrap_or_default()
    }
}

/// The text, or an empty one in place of one that is too long to be a path.
fn short(path: &str) -> &str {
    if path.len() > super::safe_path::MAX_PATH_BYTES { "" } else { path }
}
