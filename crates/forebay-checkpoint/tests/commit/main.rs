//! The commit protocol over a store that fails on purpose, in virtual time.
//!
//! Ranks are threads; one runs at a time and hands over when it waits, so a run is the same each time, and hours of
//! waiting pass in milliseconds. What is checked after each run is in `world`.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "helpers of tests are tests"
)]

mod agree;
mod crash;
mod damage;
mod fail;
mod fence;
mod hinted;
mod interrupt;
mod marks;
mod meet;
mod pace;
mod posix;
mod race;
mod readers;
mod rival;
mod sim;
mod strays;
mod world;
