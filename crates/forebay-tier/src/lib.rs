//! Tiers: several stores that hold the checkpoints of one job, the nearest first (a node's drive, a shared file system,
//! a bucket), and what happens between them.
//!
//! - [`config`]: what is configured, in `forebay.toml`.
//! - [`hop`]: one committed step from one store to another: resumable, verified, committed there.
//! - [`limits`]: how fast bytes may go in and out of a tier, who goes first, and pauses.
//! - [`policy`]: which step goes where next, which may go away, and what a save does when the first tier is full.
//!   Decisions only: nothing is moved or removed there.
//! - [`nearest`]: from which tier to restore: the nearest copy that verifies.
//! - [`audit_log`]: who moved or removed what, in a chain of hashes.
//! - [`copies`]: copies of what is on a node's drive on those of others.
//! - [`lead`]: which of several runners of a job moves what is beyond the drives of its nodes.
//! - [`runner`]: the threads that do all that, in a training process or in the agent.
//! - [`status`]: what is seen of all that.
//! - [`told`]: what was told already, so that what lasts is not told again and again.
//!
//! Everything is over [`Store`](forebay_store::Store), so a folder and a bucket are one code.

pub mod audit_log;
pub mod config;
pub mod copies;
pub mod hop;
pub mod lead;
pub mod limits;
pub mod nearest;
pub mod policy;
pub mod runner;
pub mod status;
pub mod told;
