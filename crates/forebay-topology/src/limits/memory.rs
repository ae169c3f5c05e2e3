//! Memory that this process may still use, and how much of it may be locked.
//!
//! The kernel's `MemAvailable` already counts what it could drop. A control group's counter
//! includes the page cache of the files that its members read, most of which can be dropped;
//! without adding that back, a container that has read a large model seems full for ever.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::cgroup::{self, Version};
use crate::Root;

/// The limits on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// What the kernel thinks can be had without swapping.
    pub available_bytes: Option<u64>,
    /// What the tightest control group leaves, if one limits memory.
    pub group_bytes: Option<u64>,
}

impl MemoryLimits {
    /// The lesser of both; `None` when neither is known.
    pub fn headroom(&self) -> Option<u64> {
        match (self.available_bytes, self.group_bytes) {
            (Some(machine), Some(group)) => Some(machine.min(group)),
            (machine, group) => machine.or(group),
        }
    }
}

/// The limits of this process.
pub fn memory_limits(root: &Root) -> MemoryLimits {
    let meminfo = root.read("proc/meminfo").unwrap_or_default();
    MemoryLimits {
        available_bytes: kib_field(&meminfo, "MemAvailable:"),
        group_bytes: group_headroom(root),
    }
}

/// Bytes of memory that this process can still take; `None` when nothing says.
pub fn memory_headroom() -> Option<u64> {
    memory_limits(&Root::live()).headroom()
}

/// `MemAvailable:   123 kB` in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

fn group_headroom(root: &Root) -> Option<u64> {
    let all = cgroup::groups(root, "memory");
    let levels = all.iter().flat_map(|groups| {
        groups.folders.iter().filter_map(|folder| headroom_of(root, groups.version, folder))
    });
    levels.min()
}

/// What one level leaves: limit, less what is used, plus the file cache that it would drop.
fn headroom_of(root: &Root, version: Version, folder: &Path) -> Option<u64> {
    let number = |name: &str| root.read_number::<u64>(folder.join(name));
    let (limit, current, prefix) = match version {
        // `max` is no number, hence no limit.
        Version::V2 => {
            let limits = [number("memory.max"), number("memory.high")];
            (limits.into_iter().flatten().min()?, number("memory.current")?, "")
        }
        // No limit is the largest multiple of the page size below 2^63.
        Version::V1 => {
            let limit = number("memory.limit_in_bytes").filter(|limit| *limit < 1 << 62)?;
            (limit, number("memory.usage_in_bytes")?, "total_")
        }
    };
    let stat = root.read(folder.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| stat_field(&stat, &format!("{prefix}{name}")).unwrap_or(0);
    // The LRU lists of files leave out tmpfs, which cannot be dropped.
    let files = field("inactive_file").saturating_add(field("active_file"));
    let dirty = if version == Version::V2 { field("file_dirty") } else { field("dirty") };
    let used = current.saturating_sub(files.saturating_sub(dirty));
    Some(limit.saturating_sub(used))
}

fn stat_field(stat: &str, name: &str) -> Option<u64> {
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(key, _)| *key == name)?.1.trim().parse().ok()
}

/// How much memory may be locked. CUDA's pinning is not counted here, io_uring's registered buffers
/// are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memlock {
    /// Any amount.
    Unlimited,
    /// At most this much, 8 MiB as a rule.
    Bytes(u64),
}

/// Bit of `CAP_IPC_LOCK`, which lifts the limit.
const CAP_IPC_LOCK: u32 = 14;

/// The limit of this process.
pub fn memlock() -> Memlock {
    let status = Root::live().read("proc/self/status").unwrap_or_default();
    memlock_of(getrlimit(Resource::Memlock).current, &status)
}

/// The limit by `RLIMIT_MEMLOCK` (`None`: unlimited) and the text of `/proc/self/status`.
pub fn memlock_of(limit: Option<u64>, status: &str) -> Memlock {
    match limit {
        Some(bytes) if !has_capability(status, CAP_IPC_LOCK) => Memlock::Bytes(bytes),
        _ => Memlock::Unlimited,
    }
}

/// Whether the effective set of `/proc/self/status` has a capability.
pub(crate) fn has_capability(status: &str, bit: u32) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> bit & 1 == 1)
}
