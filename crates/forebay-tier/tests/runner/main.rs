//! The runner: tiers that drain, keep what they must, fail and heal.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod acts;
mod again;
mod drain;
mod heal;
mod keep;
mod log;
mod looks;
mod nodes;
mod servers;
mod setup;
mod tidy;
#[allow(dead_code, reason = "shared with the tests of hops")]
#[path = "../hop/world.rs"]
mod world;
