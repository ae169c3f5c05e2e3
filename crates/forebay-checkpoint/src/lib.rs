//! Distributed checkpoints: what a step holds, how it is saved, committed, restored and checked.
//!
//! - [`audit`]: a second look at manifests, by code that shares nothing with what writes and reads them.
//! - [`commit`]: how a step becomes visible, all of it or none.
//! - [`mod@diff`]: two of them compared.
//! - [`mod@export`]: from a checkpoint to safetensors, or a file of torch.
//! - [`model`]: what a checkpoint holds, wherever it was read from.
//! - [`open`]: checkpoints that are there, of torch and of others, read and checked.
//! - [`manifest`]: the same on disk, for checkpoints of ours: written in parts, read in ranges.
//! - [`progress`]: what long work tells while it goes on.
//! - [`restore`]: from a checkpoint to memory, by regions.
//! - [`save`]: from the memory of all ranks to a committed step.

pub mod audit;
pub mod commit;
pub mod diff;
pub mod export;
pub mod manifest;
pub mod model;
pub mod open;
pub mod progress;
pub mod restore;
pub mod save;
mod stream;
