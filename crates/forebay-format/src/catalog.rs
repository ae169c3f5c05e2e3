//! The tensors of a model: what is in which file, and where.

use crate::torch_zip::PlainObject;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, Region};
use std::path::PathBuf;

/// A kind of model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// safetensors, one file or several.
    Safetensors,
    /// Archives of `torch.save`, one file or several.
    Torch,
    /// A distributed checkpoint of torch (DCP).
    Dcp,
    /// A distributed checkpoint in safetensors files, as torch's Hugging Face storage writer makes them.
    SafetensorsShards,
}

impl Format {
    /// The name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Format::Safetensors => "safetensors",
            Format::Torch => "torch",
            Format::Dcp => "dcp",
            Format::SafetensorsShards => "safetensors_shards",
        }
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogFile {
    /// The name the model knows it by, relative to its folder.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes.
    pub size: u64,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides, in elements.
    pub shape: Vec<u64>,
    /// Which of the catalog's files holds it.
    pub file: usize,
    /// First byte in that file.
    pub offset: u64,
    /// Bytes, row-major.
    pub bytes: u64,
    /// How it lies there.
    pub stored: Stored,
}

/// How a tensor is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Row-major, in one run from the entry's offset on.
    Run,
    /// In pieces that cover it without overlap; file and offset of the entry are those of the first.
    Pieces(Vec<Piece>),
    /// In an item that was not opened, which starts at the entry's offset; or that could not be, and why.
    Unopened(Option<Fault>),
}

/// Why something cannot be had, kept until somebody asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The code of the error.
    pub code: Code,
    /// What is wrong.
    pub what: String,
    /// Where.
    pub place: Option<String>,
}

impl Fault {
    /// The error again.
    pub fn error(&self) -> Error {
        let error = Error::new(self.code, self.what.clone());
        match &self.place {
            Some(place) => error.at(place),
            None => error,
        }
    }
}

impl From<&Error> for Fault {
    fn from(error: &Error) -> Self {
        let place = error.place().map(str::to_owned);
        Self { code: error.code(), what: error.what().to_owned(), place }
    }
}

/// A part of a tensor that is stored somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which part.
    pub region: Region,
    /// Which of the catalog's files holds it.
    pub file: usize,
    /// Its first element's first byte in that file.
    pub offset: u64,
    /// Elements from one to the next in each dimension; `None` where it lies row-major without gaps.
    pub strides: Option<Vec<u64>>,
}

/// Bytes of a file whose CRC-32 the format keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Which of the catalog's files.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// CRC-32 (ISO-HDLC).
    pub crc: u32,
}

/// A value that is no tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Its name.
    pub name: String,
    /// What it is.
    pub object: PlainObject,
}

/// The tensors of a model and the files that hold them.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// The kind of the files.
    pub format: Format,
    /// Text that came with the tensors, in the order of the file. Of a model in several files, that of the first file
    /// (first by name as the index or the folder lists them): writers repeat it in each, and what little differs
    /// between shards belongs to the shard.
    pub metadata: Vec<(String, String)>,
    /// Whether there was such text at all; it may have been empty.
    pub has_metadata: bool,
    /// The files: by name as an index or a folder lists them, or in the order they were asked for.
    pub files: Vec<CatalogFile>,
    /// The tensors in order of (file, offset), so that reading them in order reads each file once, forwards.
    pub tensors: Vec<TensorEntry>,
    /// Values that are no tensors, in the order of the format.
    pub objects: Vec<ObjectEntry>,
    /// Bytes whose checksum is known, in order of (file, offset).
    pub checks: Vec<Check>,
    /// Whether those cover every byte of every tensor in blocks that are small enough to be checked while they are
    /// loaded.
    pub has_blocks: bool,
    /// What was accepted but is worth telling.
    pub warnings: Vec<String>,
    /// Places in `tensors`, sorted by name.
    by_name: Vec<u32>,
}

impl Catalog {
    /// A catalog of these files and tensors. Sorts the tensors and fails if a name occurs twice.
    pub fn new(
        format: Format,
        metadata: Option<Vec<(String, String)>>,
        files: Vec<CatalogFile>,
        mut tensors: Vec<TensorEntry>,
        warnings: Vec<String>,
    ) -> Result<Self> {
        // A tensor without elements starts where the next one does and goes first, as the library sorts them.
        tensors.sort_by_key(|tensor| (tensor.file, tensor.offset, tensor.bytes));
        let count = u32::try_from(tensors.len())
            .map_err(|_| Error::new(Code::Unsupported, "more than 2^32 tensors"))?;
        let name = |&index: &u32| tensors.get(index as usize).map(|tensor| tensor.name.as_str());
        let mut by_name: Vec<u32> = (0..count).collect();
        by_name.sort_by(|a, b| name(a).cmp(&name(b)));
        let twice = by_name.windows(2).find_map(|pair| match pair {
            [a, b] if name(a) == name(b) => Some((*a as usize, *b as usize)),
            _ => None,
        });
        if let Some((a, b)) = twice {
            return Err(duplicate(&files, &tensors, a, b));
        }
        let has_metadata = metadata.is_some();
        let metadata = metadata.unwrap_or_default();
        let (objects, checks) = (Vec::new(), Vec::new());
        Ok(Self {
            format,
            metadata,
            has_metadata,
            files,
            tensors,
            objects,
            checks,
            has_blocks: false,
            warnings,
            by_name,
        })
    }

    /// The place of a tensor in [`tensors`](Self::tensors).
    pub fn find(&self, name: &str) -> Option<usize> {
        let key =
            |&index: &u32| self.tensors.get(index as usize).map(|tensor| tensor.name.as_str());
        let place = self.by_name.binary_search_by(|index| key(index).cmp(&Some(name))).ok()?;
        self.by_name.get(place).map(|&index| index as usize)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(self.find(name)?)
    }

    /// The tensors by name, in the order of its UTF-8 bytes (what `keys()` of the safetensors library gives; its
    /// `offset_keys()` is the order of [`tensors`](Self::tensors)).
    pub fn by_name(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.by_name.iter().map(|&index| index as usize)
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }
}

fn duplicate(files: &[CatalogFile], tensors: &[TensorEntry], a: usize, b: usize) -> Error {
    let name = tensors.get(a).map(|tensor| crate::text::quoted(&tensor.name)).unwrap_or_default();
    let file = |index: usize| {
        let file = tensors.get(index).and_then(|tensor| files.get(tensor.file));
        file.map(|file| crate::text::shown(&file.path)).unwrap_or_default()
    };
    let what = format!(
        "tensor {name} is in two files and nothing says which one counts: {} and {}",
        file(a),
        file(b)
    );
    Error::new(Code::DuplicateTensor, what)
        .hint("add the index (*.safetensors.index.json), or name the files that belong together")
}
