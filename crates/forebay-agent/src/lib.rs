//! The node agent: what moves the checkpoints of a node between tiers, and lets people and programs see and steer it.
//!
//! Moving is [`forebay_tier::runner`]'s, the same here as in a training process. This crate is the doors: a Unix socket
//! for processes of this machine, who may also hand their checkpoint folders over and be gone; HTTP with a page, an API
//! and metrics; traces. Each shows what a job's `Status` says, which is asked for once however many look.
//!
//! | module | what it does |
//! | --- | --- |
//! | `service` | from a configuration to a running agent |
//! | `agent`, `settings`, `accept` | what listens, and what is refused before it does |
//! | `work`, `job` | a job's tiers as the doors see them; what is remembered of them |
//! | `track` | folders that clients hand over |
//! | `copies` | copies of what is on this node's drives, on others |
//! | `socket` | local processes |
//! | `staged` | staged saves of processes, which are finished here where these die |
//! | `http`, `session`, `secret` | everybody else, and what they may |
//! | `page`, `metrics`, [`trace`], [`words`] | what is shown |
//! | `notify` | the service manager |
//!
//! Who is not trusted, and what bounds what they can do, is in SECURITY.md; the protocols are in docs/AGENT.md.

mod accept;
mod agent;
mod copies;
mod http;
mod job;
mod lead;
mod metrics;
mod notify;
mod page;
mod secret;
mod service;
mod session;
mod settings;
mod socket;
mod staged;
#[cfg(test)]
mod testing;
pub mod trace;
mod track;
pub mod words;
mod work;

pub use metrics::Counts;
pub use notify::notify;
pub use service::{Service, check};
pub use socket::client::{Client, Staged};
pub use socket::message::StagedSave;
