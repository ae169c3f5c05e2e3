//! Saving: files that appear whole or not at all, and models of several files that do.

mod atomic;
mod model;
mod shards;
mod temp;

pub use atomic::{AtomicFile, Durability, DurableFile};
pub use model::{ModelSave, Saved, Shard};
pub use shards::{ShardPlan, index_json, shard_layout};
pub use temp::clean_stale_temps;
