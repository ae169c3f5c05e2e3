//! The tables that a `.metadata` is read into.

use super::StorageMeta;
use super::view::{Chunks, Entry, EntryKind, Place, Step};
use crate::torch_zip::PlainObject;
use forebay_tensor::Dtype;

/// No path, no place.
pub(super) const NONE: u32 = u32::MAX;

/// What the `.metadata` of a checkpoint says, checked.
///
/// Tables, because a checkpoint may have millions of chunks:
///
/// ```text
/// rows       one an entry, in the order of the file
/// numbers    of each tensor: its sides; then of each chunk its offsets and its sides
/// places     one a chunk of a tensor, one an object, in the order of the rows
/// steps      ways in the nested state: numbers into a table of distinct steps
/// ```
pub struct DcpMetadata {
    pub(super) names: String,
    pub(super) rows: Vec<Row>,
    pub(super) numbers: Vec<u64>,
    pub(super) places: Vec<PlaceRow>,
    /// Whether the state is not nested: then the way to an entry is its name.
    pub(super) is_flat: bool,
    pub(super) steps: Vec<u32>,
    pub(super) distinct_steps: Vec<StepRow>,
    pub(super) files: Vec<String>,
    pub(super) transforms: Vec<Vec<String>>,
    pub(super) elements: Vec<ElementType>,
    pub(super) storage_meta: Option<StorageMeta>,
    pub(super) version: Option<String>,
    pub(super) attributes: Vec<(String, PlainObject)>,
    pub(super) stale: Vec<StaleItem>,
    /// All of them; the list has fewer where their names are longer than the file.
    pub(super) stale_count: usize,
    pub(super) warnings: Vec<String>,
}

pub(super) struct Row {
    /// Bytes of the table of names.
    pub(super) name: (u32, u32),
    /// Into the steps: first and number; `NONE` where there is no path.
    pub(super) path: (u32, u32),
    /// Into the element types; `NONE` for an object.
    pub(super) element: u32,
    pub(super) dims: u32,
    /// Into the numbers.
    pub(super) numbers: usize,
    /// Into the places.
    pub(super) places: usize,
    /// Places: chunks of a tensor, one for an object.
    pub(super) count: usize,
}

#[derive(Clone, Copy)]
pub(super) struct PlaceRow {
    pub(super) offset: u64,
    pub(super) length: u64,
    /// `NONE` where nothing is stored, which only chunks without elements may be.
    pub(super) file: u32,
    /// `NONE` where nothing was done to the bytes.
    pub(super) transforms: u32,
}

impl PlaceRow {
    pub(super) const NOWHERE: PlaceRow =
        PlaceRow { offset: 0, length: 0, file: NONE, transforms: NONE };
}

/// A step as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum StepRow {
    Key(Box<str>),
    Index(u64),
}

/// The type of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementType {
    /// Torch's name: `float32`.
    pub torch: String,
    /// The type here; `None` for those that nothing here can hold (complex128, quantized ones, bits).
    pub dtype: Option<Dtype>,
}

/// A place that belongs to no entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleItem {
    /// The name that it is stored under.
    pub name: String,
    /// Which of [`DcpMetadata::files`].
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl DcpMetadata {
    pub(super) fn empty() -> Self {
        Self {
            names: String::new(),
            rows: Vec::new(),
            numbers: Vec::new(),
            places: Vec::new(),
            is_flat: false,
            steps: Vec::new(),
            distinct_steps: Vec::new(),
            files: Vec::new(),
            transforms: Vec::new(),
            elements: Vec::new(),
            storage_meta: None,
            version: None,
            attributes: Vec::new(),
            stale: Vec::new(),
            stale_count: 0,
            warnings: Vec::new(),
        }
    }

    /// The named values, in the order of the file. No name occurs twice.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = Entry<'_>> {
        self.rows.iter().map(|row| self.entry(row))
    }

    /// Data files, relative to the folder of `.metadata`. Names stay in that folder.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// What the writer says of the save as a whole; torch 2.4 and newer.
    pub fn storage_meta(&self) -> Option<&StorageMeta> {
        self.storage_meta.as_ref()
    }

    /// The version of the format; torch 2.9 and newer.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// What others have added to torch's fields.
    pub fn attributes(&self) -> &[(String, PlainObject)] {
        &self.attributes
    }

    /// One of them.
    pub fn attribute(&self, name: &str) -> Option<&PlainObject> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Places that belong to no entry.
    pub fn stale(&self) -> &[StaleItem] {
        &self.stale
    }

    /// What was accepted but is worth telling.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    pub(super) fn name(&self, row: &Row) -> &str {
        let (start, len) = (row.name.0 as usize, row.name.1 as usize);
        self.names.get(start..start + len).unwrap_or_default()
    }

    fn entry(&self, row: &Row) -> Entry<'_> {
        let kind = match self.elements.get(row.element as usize) {
            None => EntryKind::Object { place: self.place(row.places).unwrap_or(Place::nowhere()) },
            Some(element) => {
                EntryKind::Tensor { element, shape: self.shape(row), chunks: self.chunks(row) }
            }
        };
        Entry { name: self.name(row), path: self.path(row), kind }
    }

    fn path(&self, row: &Row) -> Option<Vec<Step<'_>>> {
        if row.path.0 == NONE {
            return self.is_flat.then(|| vec![Step::Key(self.name(row))]);
        }
        let (start, len) = (row.path.0 as usize, row.path.1 as usize);
        let steps = self.steps.get(start..start + len)?.iter();
        let step = |&step: &u32| match self.distinct_steps.get(step as usize)? {
            StepRow::Key(key) => Some(Step::Key(key)),
            StepRow::Index(index) => Some(Step::Index(*index)),
        };
        steps.map(step).collect()
    }

    pub(super) fn shape(&self, row: &Row) -> &[u64] {
        self.numbers.get(row.numbers..row.numbers + row.dims as usize).unwrap_or_default()
    }

    pub(super) fn chunks(&self, row: &Row) -> Chunks<'_> {
        let dims = row.dims as usize;
        let start = row.numbers + dims;
        let numbers = self.numbers.get(start..start + 2 * dims * row.count).unwrap_or_default();
        Chunks { metadata: self, dims, numbers, places: row.places..row.places + row.count }
    }

    pub(super) fn place(&self, at: usize) -> Option<Place<'_>> {
        let row = self.places.get(at).filter(|row| row.file != NONE)?;
        let transforms = self.transforms.get(row.transforms as usize).map(Vec::as_slice);
        Some(Place {
            file: row.file as usize,
            offset: row.offset,
            length: row.length,
            transforms: transforms.unwrap_or_default(),
        })
    }
}
