//! What this process may use: CPUs, memory, locked memory.
//!
//! A container on a machine of 192 CPUs may own 16 of them, by affinity or by quota, and 64 GB of 2
//! TB. Threads beyond the quota are put to sleep for most of each period, which is worse than not
//! having them; memory beyond the limit ends in the out-of-memory killer. So both are read, from
//! either version of cgroups, at every level up to the root: a limit of a parent binds its
//! children.

mod cgroup;
mod cpu;
mod memory;

pub use cpu::{CpuLimits, cpu_limits, worker_cpus};
pub use memory::{Memlock, MemoryLimits, memlock, memlock_of, memory_headroom, memory_limits};

pub(crate) use memory::has_capability;

#[cfg(test)]
mod tests;
