//! The items of one rank, spread over files.
//!
//! Items keep their order, and each file is a stretch of it: what a model keeps side by side stays side by side, and a
//! restore reads long runs. Files are about equal in bytes, so that they can be written at the same time; none is made
//! for so little that making it costs more than it brings.

use forebay_error::{Code, Error, Result};

use super::TorchDtype;
use super::layout::{Builder, FILE_ALIGN, FileLayout};

/// One item to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemSpec {
    /// A row-major tensor, or piece of one.
    Tensor {
        /// The type of its elements.
        dtype: TorchDtype,
        /// Its sides, as torch counts them.
        shape: Vec<u64>,
    },
    /// A finished item of so many bytes: an [`ObjectItem`](super::ObjectItem), or what `torch.save` made.
    Bytes(u64),
}

/// How to spread and cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutOptions {
    /// Files to make, as many as can be written well at the same time.
    pub files: usize,
    /// Bytes from which a further file is worth while: fewer are made than `files` when there is less to write.
    pub min_file_bytes: u64,
    /// No file is larger than this, unless one item alone is.
    pub max_file_bytes: u64,
    /// Tensors of at least so many bytes start on a block of their own; not below one block.
    pub large_bytes: u64,
    /// No segment of glue is larger than this, rounded up to blocks.
    pub max_glue_bytes: u64,
}

impl Default for LayoutOptions {
    fn default() -> Self {
        Self {
            files: 1,
            // At 1 GB/s a file of 32 MiB takes 32 ms; creating one and its fsync take a few.
            min_file_bytes: 32 << 20,
            max_file_bytes: 1 << 40,
            // Below it the padding of up to two blocks would be more than an eighth of the item.
            large_bytes: 64 << 10,
            max_glue_bytes: 4 << 20,
        }
    }
}

/// Places `items` in files. None without items.
pub fn plan_files(items: &[ItemSpec], options: &LayoutOptions) -> Result<Vec<FileLayout>> {
    let mut total = 0u64;
    for item in items {
        total = total.checked_add(payload(item)?).ok_or_else(too_large)?;
    }
    let wanted = total / options.min_file_bytes.max(1);
    let wanted = wanted.clamp(1, options.files.max(1) as u64);
    // Divided first: a total near the limit must not overflow when multiplied.
    let share = total / wanted + 1;

    let mut files = Vec::new();
    let mut file = Builder::new(options);
    let (mut taken, mut shares) = (0u64, 1);
    for (index, item) in items.iter().enumerate() {
        let bytes = payload(item)?;
        // An item goes where the larger half of it belongs.
        if shares < wanted && !file.is_empty() && taken + bytes / 2 > share * shares {
            files.push(std::mem::replace(&mut file, Builder::new(options)).finish());
            shares += 1;
        }
        let mut placed = file.place(index, item)?;
        if placed.end() > options.max_file_bytes && !file.is_empty() {
            files.push(std::mem::replace(&mut file, Builder::new(options)).finish());
            placed = file.place(index, item)?;
        }
        file.push(placed);
        taken += bytes;
    }
    if !file.is_empty() {
        files.push(file.finish());
    }
    Ok(files)
}

/// Bytes that an item will take, archive included: for sharing out, so about right is enough.
fn payload(item: &ItemSpec) -> Result<u64> {
    const ARCHIVE_BYTES: u64 = 700;
    let bytes = match item {
        ItemSpec::Tensor { dtype, shape } => dtype.size(shape)?.1 + ARCHIVE_BYTES,
        ItemSpec::Bytes(bytes) => *bytes,
    };
    // Room for rounding up in all that follows.
    if bytes > i64::MAX as u64 - 2 * FILE_ALIGN { Err(too_large()) } else { Ok(bytes) }
}

pub(super) fn too_large() -> Error {
    Error::new(Code::Overflow, "the items of a rank do not fit a file of 2^63 bytes")
}
