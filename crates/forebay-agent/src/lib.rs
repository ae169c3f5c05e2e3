//! The node agent.

mod agent;
mod http;
mod job;
pub mod metrics;
mod notify;
mod page;
mod secret;
mod service;
mod session;
mod settings;
mod socket;
#[cfg(test)]
mod testing;
pub mod trace;
mod track;
pub mod words;
mod work;

pub use job::{CONFIGURED, JOBS_MAX, Job, Jobs};
pub use metrics::Counts;
pub use notify::notify;
pub use service::{Service, check};
pub use socket::client::Client;
pub use work::Work;
