//! Distributed checkpoints: what a step holds, how it is saved, committed, restored and checked.
//!
//! - [`model`]: what a checkpoint holds, wherever it was read from.

pub mod model;
