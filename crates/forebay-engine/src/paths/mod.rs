//! The ways that bytes go from storage to staging memory or host targets.

pub(crate) mod copy;
pub(crate) mod direct;
pub(crate) mod mapping;
mod pacer;
mod remote;
mod ring;
pub(crate) mod scatter;
