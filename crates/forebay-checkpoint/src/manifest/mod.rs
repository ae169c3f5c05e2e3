//! The manifest: what a checkpoint holds, in a form of which each reader reads only its part.
//!
//! # Why
//!
//! The `.metadata` of stock checkpoints is one pickle that names every chunk of every rank: 190 bytes a chunk, read
//! as a whole by everybody. At 16,384 ranks with a thousand tensors each that is 3 GB a reader. A manifest describes
//! how a tensor is cut once (a mesh and placements), lets each rank say where its own chunks are, and has an index,
//! so that the same job takes some 200 MB, of which a restoring rank reads well under one.
//!
//! # How
//!
//! A save has two stages. Each rank publishes its [`Part`]: files, chunks, checksums, in final form. One rank, the
//! committer, feeds the parts to a [`Builder`], which checks that every tensor is there once, and gives the [`Head`];
//! the manifest is the head and the parts, byte for byte. `.metadata` names its [seal](Head::seal), and with it all of
//! the manifest. [`Manifest`] reads it.
//!
//! Names are sorted, and numbered by that order. Ranks that agreed on a [`Structure`] refer to its numbers and leave
//! out names and regions; a value that is not in it (the state of one rank) a part lists itself, and so does a part
//! of a job that has no structure.
//!
//! # On disk
//!
//! ```text
//! header                       magic, version, sections                        see `head`
//! 1 info                       JSON text                                       see [`Info`]
//! 2 meshes                     meshes of ranks, layouts on them                see `meshes`
//! 3 table                      dtypes; rows by name: dtype, shape, layout,     see `rows` for rows,
//!                              who holds it                                    `holders` for who holds them
//! 4 index                      for each rank: bytes, files, hash of its part   see `index`
//! 5 holders                    longer lists of holders, read one by one        see `holders`
//! 6 parts                      parts of all ranks, by rank                     see `part_codec`
//! ```
//!
//! Numbers are as `wire` says. Each byte is under a checksum: sections under a CRC-32 in the header and the header
//! under its own; lists of holders and parts, which are read one by one, under one of theirs in the table and the
//! index. What may change with a version is said in `version`; how far anything may go, in `limits`.

mod build;
mod find;
mod gather;
mod grid;
mod head;
mod holders;
mod index;
mod info;
pub mod limits;
mod loaded;
mod lookup;
mod memory;
mod meshes;
mod part;
mod part_builder;
mod part_codec;
mod part_decode;
mod read;
mod resolve;
pub(crate) mod rows;
mod structure;
mod structure_codec;
mod structure_hash;
mod value;
pub(crate) mod version;
pub(crate) mod wire;

pub use build::{Builder, Head};
pub use find::Found;
pub use grid::Layout;
pub use info::Info;
pub use memory::MemorySource;
pub use part::{Part, PartChunk, PartFile, Place, SharedStructure, ValueRef};
pub use part_builder::{ItemPlace, PartBuilder};
pub use read::Manifest;
pub use structure::Structure;
pub use value::{Named, Tensor, Value};
pub use version::{MAJOR, MINOR};
