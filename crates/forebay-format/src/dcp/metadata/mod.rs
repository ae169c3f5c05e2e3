//! `.metadata`: what a checkpoint holds and where.
//!
//! One pickle of torch's own classes, some 170 bytes a chunk. The object graph (fields of newer torch in brackets):
//!
//! ```text
//! Metadata           state_dict_metadata   dict: flat name -> TensorStorageMetadata or BytesStorageMetadata
//!                    planner_data          dict: flat name -> way in the nested state, a tuple of texts and numbers
//!                    storage_data          dict: MetadataIndex -> _StorageInfo
//!                    [storage_meta]        StorageMeta: checkpoint_id (a path or text), save_id, load_id, [modules]
//!                    [version]             text
//!                    others                kept as JSON where they are plain: [`DcpMetadata::attributes`]
//! TensorStorageMetadata   properties, size, chunks (a list of ChunkStorageMetadata: offsets, sizes)
//! TensorProperties   a tuple: dtype, layout, requires_grad, memory format, pin_memory, [strides]
//! MetadataIndex      fqn, [offset]: which chunk of a tensor; index: its place in the list of chunks, as a hint
//! _StorageInfo       relative_path, offset, length, [transform_descriptors]
//! ```
//!
//! **How.** The pickle becomes a graph without being run ([`crate::pickle`]); one pass over the entries and one over
//! the places fill flat tables (`table`): a chunk of a matrix takes 56 bytes here. Texts are compared once each, by
//! their place in the graph (`names`). A million chunks are read in less than a second.
//!
//! **What is checked.** Every size is a count; every chunk has the dimensions of its tensor, lies inside it and is
//! stored somewhere; no two overlap and none is missing; every path stays in the folder. What torch accepts and is
//! odd is told as a warning: places that belong to no entry, paths in the nested state that are no paths. Entries of
//! a dtype that nothing here can hold stay listed, with [`ElementType::dtype`] empty.

mod check;
mod describe;
mod entries;
mod names;
mod read;
mod safe_path;
mod storage;
mod table;
mod view;

pub use check::Checks;
pub use describe::StorageMeta;
pub use safe_path::check_relative_path;
pub use table::{DcpMetadata, ElementType, StaleItem};
pub use view::{Chunk, Chunks, Entry, EntryKind, Place, Step};
