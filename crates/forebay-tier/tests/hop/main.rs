//! Hops between stores: killed at every call, raced, with bytes flipped, on stores that are full or cannot be written.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod copies;
mod faults;
mod kills;
mod limited;
mod movers;
mod nearest;
mod nodes;
mod places;
mod replace;
mod uploads;
mod world;
