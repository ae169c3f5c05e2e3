//! The ways that bytes go, one file each.

pub(crate) mod copy;
pub(crate) mod direct;
pub(crate) mod dma;
mod mapping;
mod scatter;
