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
//! A client costs a thread and a frame of at most 64 KiB. It is left when it was idle for a minute, or for some seconds
//! while all places are taken (clients connect again), or sends nothing for a few seconds in the middle of a frame.
//! There are at most 64, and a quarter of the places is for root and the agent's own user: what others hold keeps
//! nobody from looking after the agent. Nor do those who have staged a save, for as long as that takes: they are
//! counted apart, as [`staged`](crate::staged) limits them, and their connection ends when they let go.

pub(crate) mod client;
mod frame;
pub(crate) mod message;
mod place;
mod serve;

pub(crate) use frame::send_with;
pub(crate) use serve::{Socket, Tracker};
