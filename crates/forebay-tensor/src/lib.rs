//! Data types, shapes and regions of tensors, and where their bytes lie. Pure arithmetic: no I/O, no device.
//!
//! A tensor is a row-major box of elements. A [`Region`] is a smaller box inside it (the rows of one rank, the
//! columns of another), and [`byte_runs`] says which bytes of the tensor it covers: a start, the length of one
//! contiguous run, and a nest of strided dimensions over it, with everything that lies side by side merged:
//!
//! ```
//! use forebay_tensor::{Dtype, Region, byte_runs};
//!
//! let shape = [4, 6];
//! // Two columns of a 4 x 6 matrix of two-byte elements: four runs of four bytes, twelve bytes apart.
//! let columns = Region::new(vec![0, 2], vec![4, 2])?;
//! let runs = byte_runs(Dtype::BF16, &shape, &columns)?;
//! assert_eq!((runs.start, runs.run, runs.dims.len()), (4, 4, 1));
//! assert_eq!(runs.iter().collect::<Vec<_>>(), [(4, 0), (16, 4), (28, 8), (40, 12)]);
//! // Whole rows are one run.
//! let rows = Region::new(vec![1, 0], vec![2, 6])?;
//! assert!(byte_runs(Dtype::BF16, &shape, &rows)?.dims.is_empty());
//! # Ok::<(), forebay_error::Error>(())
//! ```
//!
//! The rest is what distributed checkpoints add. A [`Layout`] says which regions each rank holds, a [`Tiling`] who
//! holds what on a mesh; [`check_cover`] proves that pieces make up a tensor, [`ChunkIndex`] finds those that a wanted
//! region meets, [`copy_runs`] says which of their bytes go where, and [`assign_writers`] who writes what several ranks
//! hold.
//!
//! Sizes are `u64` throughout and every product is checked, because shapes come from files. All arithmetic is in
//! bits until the last step: formats have elements of four and six bits, and a box of those that does not start or
//! end on a byte is an error, never rounded.

mod copy;
mod cover;
mod dtype;
mod held;
mod index;
mod layout;
mod local;
mod mesh;
mod region;
mod runs;
mod share;
mod size;
mod tiling;

pub use copy::{CopyDim, CopyRows, CopyRuns, Strides, copy_runs, copy_runs_strided};
pub use cover::{Repeats, check_cover};
pub use dtype::Dtype;
pub use index::{ChunkIndex, Intersections};
pub use layout::{Layout, MeshLayout, Placement};
pub use local::{LocalShard, ShardPiece};
pub use mesh::{MAX_DIMS, Mesh};
pub use region::Region;
pub use runs::{ByteRuns, RunIter, StridedDim, byte_runs};
pub use share::{Replicated, SMALL_BYTES, assign_writers};
pub use size::{ShowShape, byte_len, element_count};
pub use tiling::{Tile, Tiles, Tiling};
