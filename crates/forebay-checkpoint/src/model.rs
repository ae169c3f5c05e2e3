//! What a checkpoint holds, whoever wrote it: the model that readers build, and that restore, verify, export and diff
//! work on.

use forebay_tensor::{Dtype, Region};

/// Bytes of a checksum block: blocks are counted from the first byte of a chunk, the last may be shorter.
///
/// 1 MiB: a range read reads and checks whole blocks, so it costs at most 2 MiB more than it needs; 4 bytes a block are
/// 4 MB a terabyte.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// A step of the way to a value in the nested state: `("optim", "state", 0, "exp_avg")`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathStep {
    /// A key of a dict.
    Key(String),
    /// A place in a list.
    Index(u64),
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name, relative to the step's folder; never leaves it.
    pub name: String,
    /// Bytes that it must have; `None` where the format does not say.
    pub bytes: Option<u64>,
}

/// A region that is stored somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which part of the tensor. Of an object: no dimensions.
    pub region: Region,
    /// Which of the checkpoint's files.
    pub file: u32,
    /// First byte of the item in the file: of the archive, where the item is one.
    pub offset: u64,
    /// Bytes of the item.
    pub length: u64,
    /// What was done to the item's bytes, in the order to undo it: `stream.zstd/1`.
    pub transforms: Vec<String>,
    /// Where the elements lie; `None` where the item must be opened to know.
    pub data: Option<DataPlace>,
}

/// Elements of a chunk in a file: row-major, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPlace {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// CRC-32 (ISO-HDLC, as in zip) of each block of [`BLOCK_BYTES`]; empty where there is none.
    pub crcs: Vec<u32>,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A tensor, cut into chunks that cover it without overlap.
    Tensor {
        /// The type of its elements, as the metadata says.
        dtype: Dtype,
        /// Its sides, in elements.
        shape: Vec<u64>,
        /// Where its pieces are.
        chunks: Vec<Chunk>,
    },
    /// Anything else, in the form of `torch.save`.
    Object {
        /// Where it is.
        chunk: Chunk,
    },
}

/// One named value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its flat name.
    pub name: String,
    /// The way to it in the nested state; empty where the format does not say.
    pub path: Vec<PathStep>,
    /// What it is.
    pub kind: Kind,
}

impl Entry {
    /// Where its pieces are: of an object one.
    pub fn chunks(&self) -> &[Chunk] {
        match &self.kind {
            Kind::Tensor { chunks, .. } => chunks,
            Kind::Object { chunk } => std::slice::from_ref(chunk),
        }
    }
}
