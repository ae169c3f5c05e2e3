//! Writing checkpoints in the stock form of `torch.distributed.checkpoint`: bytes and places, no I/O.
//!
//! A data file is a row of **items**. Each item is a complete zip archive such as `torch.save` makes, so that stock
//! torch opens it with `torch.load`; the zip format serves as a header and a trailer around the tensor's bytes:
//!
//! ```text
//! item    head: records data.pkl, byteorder, version; local header of data/0, padded     ItemLayout::head
//!         the tensor's bytes, row-major, on a multiple of 4096 (large) or 64 (small)     the caller's
//!         tail: central directory, end of central directory                              ItemLayout::tail
//! ```
//!
//! Every length follows from dtype, shape and place alone, so all offsets are known before a byte is written; the only
//! things that wait for the data are the two places of its CRC-32, one in the head and one in the tail.
//!
//! **Who writes what.** [`plan_files`] places the items of one rank in files and cuts each file into segments. The
//! *body* of a large tensor is as many whole blocks of 4096 bytes as it has: it goes to the file straight from where it
//! is. All between bodies (heads, tails, small items, the last bytes of large ones) is *glue*: [`FileLayout::glue`]
//! renders it when the CRCs are known. Both start and end on block boundaries, so direct I/O can write all of it; only
//! the end of a file is ragged.
//!
//! **What makes them a checkpoint** is `.metadata`, a pickle of the class `Metadata`. [`MetadataWriter`] streams it.
//!
//! Nothing here refers to a version of torch: the forms are those which all of them from 2.4 on read.

mod dtype;
mod files;
mod glue;
mod item;
mod layout;
mod metadata;
mod object;
mod pickle;
mod pickler;
mod records;
mod value;
mod zip;

#[cfg(test)]
mod layout_tests;
#[cfg(test)]
mod metadata_tests;

pub use dtype::TorchDtype;
pub use files::{ItemSpec, LayoutOptions, plan_files};
pub use glue::GlueSource;
pub use item::{ItemLayout, SMALL_ALIGN};
pub use layout::{FILE_ALIGN, FileLayout, PlacedItem, Segment};
pub use metadata::{KeyStep, MetadataWriter, TensorProps};
pub use object::ObjectItem;
pub use value::{PlainValue, StorageMeta};
