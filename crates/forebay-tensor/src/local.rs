//! What one rank holds of a tensor: boxes, and where they lie in the rank's own tensor.

use forebay_error::{Code, Error, Result};

use crate::Region;
use crate::held::Held;

/// Pieces of one rank's shard of one tensor, at the most.
const MAX_PIECES: u64 = 1 << 20;

/// A box that a rank holds, and where it lies in the rank's own tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// The part of the whole tensor.
    pub region: Region,
    /// The offsets of the same box in the rank's tensor.
    pub local: Vec<u64>,
}

/// What one rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalShard {
    /// Shape of the rank's own tensor.
    pub shape: Vec<u64>,
    /// Its boxes, in row-major order: one, or several for strided shards. A rank without elements has one box of size
    /// zero, which starts where DTensor says: at the end of the dimensions that left it nothing.
    pub pieces: Vec<ShardPiece>,
}

/// Every combination of the runs of all dimensions, in row-major order.
pub(crate) fn pieces_of(held: &[Held], shape: &[u64]) -> Result<Vec<ShardPiece>> {
    let count = held.iter().try_fold(1_u64, |count, held| {
        count.checked_mul(held.runs().len().max(1) as u64).filter(|&count| count <= MAX_PIECES)
    });
    if count.is_none() {
        let what = format!("a shard has over {MAX_PIECES} pieces");
        return Err(Error::new(Code::Unsupported, what));
    }
    let empty = Region { offsets: Vec::new(), sizes: Vec::new() };
    let mut pieces = vec![ShardPiece { region: empty, local: Vec::new() }];
    for (held, &side) in held.iter().zip(shape) {
        let nothing = [(side, 0)];
        let runs = if held.runs().is_empty() { &nothing } else { held.runs() };
        // One run, nearly always: then every piece only grows.
        let shorter = std::mem::take(&mut pieces);
        pieces.reserve_exact(shorter.len() * runs.len());
        for piece in shorter {
            let mut local = 0;
            for &(start, len) in runs {
                let mut piece = piece.clone();
                piece.region.offsets.push(start);
                piece.region.sizes.push(len);
                piece.local.push(local);
                pieces.push(piece);
                local += len;
            }
        }
    }
    if held.iter().any(|held| held.len() == 0) {
        // Nothing times several runs is still nothing: one box, of the rank's own shape.
        pieces.truncate(1);
        for piece in &mut pieces {
            piece.region.sizes = held.iter().map(Held::len).collect();
        }
    }
    Ok(pieces)
}
