//! The node agent.

mod agent;
mod http;
mod job;
pub mod metrics;
mod notify;
mod page;
mod secret;
mod session;
mod settings;
mod socket;
#[cfg(test)]
mod testing;
pub mod words;
mod work;

pub use agent::Agent;
pub use job::{CONFIGURED, JOBS_MAX, Job, Jobs};
pub use notify::notify;
pub use settings::Settings;
pub use socket::client::Client;
pub use work::Work;
