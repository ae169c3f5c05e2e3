//! The node agent.

mod http;
mod job;
pub mod metrics;
mod page;
mod secret;
mod session;
mod settings;
#[cfg(test)]
mod testing;
pub mod words;
mod work;

pub use job::{CONFIGURED, JOBS_MAX, Job, Jobs};
pub use settings::Settings;
pub use work::Work;
