//! The socket for processes of this machine. They need no token: the kernel says who they are (SO_PEERCRED).
//!
//! | module | what it does |
//! | --- | --- |
//! | [`frame`] | frames on the wire |
//! | [`message`] | requests and answers |
//! | [`place`] | the file: one agent a path, leftovers of a killed one |
//! | [`serve`] | a thread a client |
//! | [`client`] | the other side |
//!
//! A client costs a thread and a frame of at most 64 KiB. It may stay idle as long as it lives, send nothing for longer
//! than a few seconds in the middle of a frame, and be one of at most 64.

pub(crate) mod client;
mod frame;
pub(crate) mod message;
mod place;
mod serve;

pub(crate) use serve::{Socket, Tracker};
