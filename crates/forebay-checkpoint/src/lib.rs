//! Distributed checkpoints: what a step holds, how it is saved, committed, restored and checked.
//!
//! - [`model`]: what a checkpoint holds, wherever it was read from.
//! - [`manifest`]: the same on disk, for checkpoints of ours: written in parts, read in ranges.

pub mod manifest;
pub mod model;
