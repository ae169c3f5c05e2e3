//! Stores: places that hold objects (a directory, a bucket), behind one interface.
//!
//! [`Store`] is what checkpoints are written to and read from. It is small on purpose: small objects that are put,
//! replaced and listed as a whole, and data objects that are written and read in ranges. What makes a checkpoint
//! atomic is one call, [`Store::publish`]; everything else may fail at any byte.
//!
//! | store | is |
//! | --- | --- |
//! | [`PosixStore`] | a folder |
//! | [`ObjectStore`] | a bucket: S3 and compatible, GCS, Azure |
//! | [`SplitStore`] | records in a place that all nodes share, data in a folder of this node |
//! | [`MemoryStore`] | a map behind a lock, with a clock that tests move |
//! | [`fault::FaultStore`] | a client of another store, with faults on purpose |
//! | [`fault::FaultFolder`] | a client of a folder, with faults at its calls to the kernel |
//! | [`power::Recording`] | a folder store whose every change is written down, to lose power at any of them |

mod bucket;
pub mod fault;
mod key;
mod memory;
mod object;
mod posix;
pub mod power;
mod shared;
mod split;
mod store;
mod unique;

pub use bucket::{ObjectStore, StoreSettings, Traffic, open_store, split_url};
pub use key::{
    KEY_BYTES_MAX, NAME_BYTES_MAX, RECORDS_FOLDER, TEMP_PREFIX, check_key, check_prefix, is_temp,
};
pub use memory::MemoryStore;
pub use object::{Abilities, Age, DataObject, Expect, Listed, Published, Version};
pub use posix::PosixStore;
pub use shared::{local_path, shared_store};
pub use split::{
    NODE_OWN, NODE_RECORDS, SplitStore, create_split, drive_store, is_data, is_drive, is_unmade,
    split_folder,
};
pub use store::Store;
pub use unique::random;
