//! CPUs that this process may use.

use super::cgroup::{self, Version};
use crate::Root;

/// The limits on CPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuLimits {
    /// CPUs that the process may be scheduled on.
    pub affinity: usize,
    /// CPUs' worth of time that the control groups grant, if they limit it.
    pub quota: Option<f64>,
}

impl CpuLimits {
    /// Worker threads worth having: the least of all limits, rounded up, at least 1.
    pub fn worker_cpus(&self) -> usize {
        let affinity = self.affinity.max(1);
        match self.quota {
            // A float cast to an integer saturates, and NaN gives 0.
            Some(quota) => affinity.min((quota.ceil() as usize).max(1)),
            None => affinity,
        }
    }
}

/// The limits of this process.
pub fn cpu_limits() -> CpuLimits {
    CpuLimits { affinity: affinity(), quota: cpu_quota(&Root::live()) }
}

/// Worker threads worth having in this process.
pub fn worker_cpus() -> usize {
    cpu_limits().worker_cpus()
}

/// CPUs of the affinity mask. Machines with more than 1024 CPUs refuse the short mask; then the
/// standard library knows.
fn affinity() -> usize {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => set.count() as usize,
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
    }
}

/// The tightest quota of any level.
pub(crate) fn cpu_quota(root: &Root) -> Option<f64> {
    let mut least: Option<f64> = None;
    for groups in cgroup::groups(root, "cpu") {
        for folder in &groups.folders {
            let quota = match groups.version {
                Version::V2 => root.read(folder.join("cpu.max")).and_then(|text| parse_max(&text)),
                Version::V1 => quota_v1(root, folder),
            };
            if let Some(quota) = quota {
                least = Some(least.map_or(quota, |least| least.min(quota)));
            }
        }
    }
    least
}

/// `50000 100000` is half a CPU, `max 100000` no limit.
fn parse_max(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    share(quota.parse().ok()?, period.trim().parse().ok()?)
}

fn quota_v1(root: &Root, folder: &std::path::Path) -> Option<f64> {
    let quota = root.read_number(folder.join("cpu.cfs_quota_us"))?;
    share(quota, root.read_number(folder.join("cpu.cfs_period_us"))?)
}

/// A quota of -1 means none.
fn share(quota_us: i64, period_us: i64) -> Option<f64> {
    (quota_us > 0 && period_us > 0).then(|| quota_us as f64 / period_us as f64)
}
