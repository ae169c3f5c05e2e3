//! What the machine is, as far as moving bytes depends on it.
//!
//! | question | module |
//! | --- | --- |
//! | which file system holds a file, and how does it like to be read? | [`mounts`], [`profile`] |
//! | may this file be read with `O_DIRECT`, and on which alignment? | [`direct`] |
//! | which parts of a file are in the page cache? | [`residency`] |
//! | how many CPUs and how much memory may this process use? | [`limits`] |
//! | which CPUs and which GPU belong together? | [`numa`] |
//!
//! Every reader of `/proc` and `/sys` takes a [`Root`] or the text itself, so that the machines of
//! other people can be tested as captured trees. Nothing here decides anything: the engine does.
//! Nothing here fails because a file of `/proc` or `/sys` is missing or says something new: the
//! answer is then "not known", and its type says so.

pub mod direct;
pub mod limits;
pub mod mounts;
pub mod numa;
pub mod profile;
pub mod residency;
mod root;
mod sys;

pub use direct::{AlignSource, DirectAlign, page_size};
pub use limits::{Memlock, memlock, memory_headroom, worker_cpus};
pub use profile::{DirectAdvice, FsKind, FsProfile, file_profile};
pub use residency::{Method, ResidencyMap, Resident};
pub use root::Root;
