//! The engine: executes plans.
//!
//! A load goes down one way: a [`Selection`] of a catalog becomes [`Move`]s, those a [`Plan`] of pieces, and an
//! [`Engine`] starts a [`Session`] that moves the pieces from [`RangeSource`]s to the device's memory. Worker threads
//! (`worker`) take pieces from one queue (`queue`); which way a piece goes is decided by `route`; each way of reading
//! is one file of `paths`, and one thread (`pump`) does all that concerns a GPU. Nothing here knows a framework:
//! targets are addresses, and who provides them keeps them alive. A save is [`Engine::write`]: parts of the device's
//! memory to ranges of [`RangeSink`]s.

mod checked;
mod engine;
mod options;
mod pace;
mod paths;
mod plan;
mod pump;
mod queue;
mod records;
mod report;
mod route;
mod select;
mod session;
mod shared;
mod sink;
mod slots;
mod source;
pub mod stage;
mod verify;
mod window;
mod worker;
mod write;

pub use engine::{Engine, LinkRate, measure_link};
pub use options::{
    CacheChoice, EngineConfig, LoadOptions, PathChoice, THREADS_DEFAULT_MAX, THREADS_MAX, Tuning,
};
pub use plan::{Check, GAP_BYTES, Move, Op, Piece, Plan};
pub use report::{Path, PathShare, Report};
pub use select::{Selection, Wanted};
pub use session::Session;
pub use sink::{FileSink, RangeSink, write_all_at};
pub use source::{
    DirectFile, DirectRefusal, LocalFile, RangeSource, read_exact_at, source_of, sources_of,
};
pub use write::{Part, WriteOptions, WriteReport};
