//! The runner.
mod action;
pub use action::{Action, Outcome, RemovedStep};
