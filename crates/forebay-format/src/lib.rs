//! Tensor file formats: bytes in, catalog out; and the way back for saving.
//!
//! **Reading.** [`open_model`] takes a file, an index or a folder, decides which files belong to the model ([`folder`]
//! and [`index`] hold the rules), opens each once ([`OpenFile`]), reads and checks their headers ([`safetensors`]) and
//! returns a [`Model`]: the [`Catalog`] of its tensors and the open files, from which the engine then reads them.
//!
//! **Writing.** [`safetensors::layout`] plans one file, [`ModelSave`] a model in one or several; the caller writes the
//! bytes where the plan says, and committing makes them the model in one step. [`AtomicFile`] is the same for any
//! one file.
//!
//! Files come from strangers. A length in one is compared with the size of the file before anything is read or
//! allocated, names are escaped in messages, paths may not leave their folder, and nothing panics.

mod cache_layout;
mod catalog;
pub mod crc;
pub mod dcp;
mod digest;
pub mod folder;
pub mod index;
mod model;
mod open_file;
pub mod parallel;
pub mod pickle;
mod pieces;
mod place;
pub mod remote;
pub mod safetensors;
mod save;
mod text;
mod torch_file;
pub mod torch_zip;
pub mod units;

pub use catalog::{
    Catalog, CatalogFile, Check, Fault, Format, ObjectEntry, Piece, Stored, TensorEntry,
};
pub use digest::{hex, sha256_extent};
pub use model::{Model, open_files, open_files_in, open_model, open_model_in};
pub use open_file::{Handle, Identity, OpenFile};
pub use pieces::{Placed, read_tensor, sha256_tensor, verify_checks};
pub use place::Folder;
pub use save::{
    AtomicFile, Durability, DurableFile, ModelSave, Saved, Shard, ShardPlan, clean_stale_temps,
    index_json, shard_layout,
};
pub use text::{harmless, is_unseen, shown};
