//! From the chunks of a part to regions of tensors, with every claim checked against the tensors themselves.

use std::collections::HashMap;
use std::rc::Rc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::{Region, byte_len};

use super::part::{Part, PartChunk, Place, ValueRef};
use super::structure::Structure;
use super::value::{Named, Tensor, Value, shown};

/// A chunk of a part, with what it is.
pub(crate) struct Piece {
    /// The number of its value, by the caller's numbers.
    pub(crate) key: u32,
    /// Its number in the part.
    pub(crate) chunk: u32,
    /// Which region it is.
    pub(crate) region: Region,
    /// Whether the region follows from the layout.
    pub(crate) implied: bool,
}

/// The boxes of a layout and a shape that this rank holds; `None` where it is not on the mesh.
type Boxes = Option<Rc<Vec<Region>>>;

/// Resolves the chunks of one part.
pub(crate) struct Resolver<'a> {
    part: &'a Part,
    structure: &'a Structure,
    place: &'a str,
    boxes: HashMap<(u32, &'a [u64]), Boxes>,
    implied: HashMap<u32, usize>,
}

impl<'a> Resolver<'a> {
    /// `place` is what errors call the part.
    pub(crate) fn new(part: &'a Part, structure: &'a Structure, place: &'a str) -> Self {
        Self { part, structure, place, boxes: HashMap::new(), implied: HashMap::new() }
    }

    /// All chunks by key, those of one key in the order of the part. `value_of` gives key and value.
    ///
    /// Errors: `invalid_metadata` for a chunk that does not fit its value, naming both.
    pub(crate) fn pieces(
        mut self,
        value_of: impl Fn(ValueRef) -> Option<(u32, &'a Named)>,
    ) -> Result<Vec<Piece>> {
        let mut pieces = Vec::with_capacity(self.part.chunks().len());
        for (number, chunk) in (0..).zip(self.part.chunks()) {
            let Some((key, named)) = value_of(chunk.value) else {
                let what = "a chunk of a value that is not there";
                return Err(self.bad(what.into()).at(self.place));
            };
            let region = self
                .region(key, named, chunk)
                .map_err(|error| error.at(format!("{}, {}", self.place, shown(&named.name))))?;
            let implied = chunk.place == Place::Implied;
            pieces.push(Piece { key, chunk: number, region, implied });
        }
        if !pieces.is_sorted_by_key(|piece| piece.key) {
            pieces.sort_by_key(|piece| piece.key);
        }
        Ok(pieces)
    }

    /// The boxes that the layout gives to this part's rank; `None` where there are none for it.
    pub(crate) fn boxes(&mut self, tensor: &'a Tensor) -> Result<Boxes> {
        let Some(layout) = tensor.layout else {
            return Ok(None);
        };
        let key = (layout, tensor.shape.as_slice());
        if let Some(known) = self.boxes.get(&key) {
            return Ok(known.clone());
        }
        let grid = self.structure.grid(layout)?;
        let place = grid.place_of(self.part.rank());
        let boxes = place.map(|(shard, _)| grid.boxes(&tensor.shape, shard)).transpose()?;
        let boxes = boxes.map(Rc::new);
        self.boxes.insert(key, boxes.clone());
        Ok(boxes)
    }

    fn region(&mut self, key: u32, named: &'a Named, chunk: &PartChunk) -> Result<Region> {
        let tensor = match &named.value {
            Value::Tensor(tensor) => tensor,
            Value::Object => return self.object(chunk),
            Value::Alias { of } => {
                return Err(self.bad(format!("bytes of an alias of {}", shown(of))));
            }
        };
        let region = match &chunk.place {
            Place::Whole => Region::whole(&tensor.shape),
            Place::Box(region) => {
                region
                    .check_within(&tensor.shape)
                    .map_err(|error| self.bad(error.what().into()))?;
                region.clone()
            }
            Place::Implied => {
                let boxes = self.boxes(tensor)?.unwrap_or_default();
                let next = self.implied.entry(key).or_insert(0);
                let region = boxes.get(*next).cloned();
                *next += 1;
                region.ok_or_else(|| self.bad("a box that its layout does not give".into()))?
            }
        };
        let bytes = byte_len(tensor.dtype, &region.sizes)?;
        match bytes == chunk.data_bytes {
            true => Ok(region),
            false => Err(self.bad(format!(
                "{} bytes for {region} of {}, which has {bytes}",
                chunk.data_bytes, tensor.dtype
            ))),
        }
    }

    fn object(&self, chunk: &PartChunk) -> Result<Region> {
        let all = chunk.data_offset == chunk.offset && chunk.data_bytes == chunk.length;
        match all && chunk.place == Place::Whole {
            true => Ok(Region::whole(&[])),
            false => Err(self.bad("an object that is not stored as a whole".into())),
        }
    }

    fn bad(&self, what: String) -> Error {
        Error::new(Code::InvalidMetadata, what)
    }
}
