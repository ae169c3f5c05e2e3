//! Stores: places that hold objects (a directory, later a bucket), behind one interface.
//!
//! [`Store`] is what checkpoints are written to and read from. It is small on purpose: small objects that are put,
//! replaced and listed as a whole, and data objects that are written and read in ranges. What makes a checkpoint
//! atomic is one call, [`Store::publish`]; everything else may fail at any byte.

mod object;
mod store;

pub use object::{Abilities, Age, DataObject, Expect, Listed, Published, Version};
pub use store::Store;
