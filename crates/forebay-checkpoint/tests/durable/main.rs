//! What the promises of a commit rest on, with the real parts: [`Save`](forebay_checkpoint::save::Save) with the real
//! engine, `.metadata` and manifest as they are, a store in a folder.
//!
//! The tests of `commit` look at the protocol, in virtual time, over a store whose calls are one step each. Here a call
//! of the store is many steps: `matrix` lets each call to the kernel fail, `power` takes the power away after each.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod external;
mod matrix;
mod power;
mod slow;
mod world;
