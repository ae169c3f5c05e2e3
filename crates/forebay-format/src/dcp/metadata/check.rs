//! Whether the chunks of each tensor make it up: none leaves it, none overlaps another, none is missing.

use super::read::within;
use super::table::{DcpMetadata, NONE, Row};
use forebay_error::Result;
use forebay_tensor::{Region, Repeats, check_cover};

/// Which checks are made when a `.metadata` is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Whether chunks must make up their tensors. They do in a `.metadata` of a whole checkpoint, not in those of
    /// single ranks (saves with `use_collectives=False`).
    pub coverage: bool,
}

impl Default for Checks {
    fn default() -> Self {
        Self { coverage: true }
    }
}

pub(super) fn check_cover_of_all(metadata: &DcpMetadata) -> Result<()> {
    let mut pieces = Vec::new();
    for row in metadata.rows.iter().filter(|row| row.element != NONE) {
        check_one(metadata, row, &mut pieces)
            .map_err(|error| within("tensor", metadata.name(row), error))?;
    }
    Ok(())
}

/// `pieces` is memory to use again.
fn check_one(metadata: &DcpMetadata, row: &Row, pieces: &mut Vec<Region>) -> Result<()> {
    let shape = metadata.shape(row);
    let mut chunks = metadata.chunks(row);
    if row.count == 1
        && let Some(chunk) = chunks.next()
        && chunk.sizes == shape
        && chunk.offsets.iter().all(|&offset| offset == 0)
    {
        return Ok(());
    }
    pieces.truncate(row.count);
    pieces.resize_with(row.count, || Region { offsets: Vec::new(), sizes: Vec::new() });
    for (piece, chunk) in pieces.iter_mut().zip(metadata.chunks(row)) {
        piece.offsets.clear();
        piece.offsets.extend_from_slice(chunk.offsets);
        piece.sizes.clear();
        piece.sizes.extend_from_slice(chunk.sizes);
    }
    check_cover(shape, pieces.iter(), Repeats::Overlap)
}
