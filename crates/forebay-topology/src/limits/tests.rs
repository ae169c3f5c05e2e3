//! Limits of captured machines: containers of both cgroup versions.

use super::*;
use crate::Root;

struct Tree(tempfile::TempDir);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for (path, text) in files {
            tree.set(path, text);
        }
        tree
    }

    fn set(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn root(&self) -> Root {
        Root::at(self.0.path())
    }
}

const MOUNT_V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

/// A systemd slice with a quota on the slice and a larger one on the unit.
fn slices() -> Tree {
    Tree::new(&[
        ("proc/self/cgroup", "0::/jobs.slice/train.service\n"),
        ("proc/self/mountinfo", MOUNT_V2),
        ("proc/meminfo", "MemTotal: 2000 kB\nMemFree: 5 kB\nMemAvailable:    1000000 kB\n"),
        ("sys/fs/cgroup/jobs.slice/cpu.max", "350000 100000\n"),
        ("sys/fs/cgroup/jobs.slice/memory.max", "max\n"),
        ("sys/fs/cgroup/jobs.slice/memory.high", "max\n"),
        ("sys/fs/cgroup/jobs.slice/memory.current", "900\n"),
        ("sys/fs/cgroup/jobs.slice/train.service/cpu.max", "800000 100000\n"),
        ("sys/fs/cgroup/jobs.slice/train.service/memory.max", "100000\n"),
        ("sys/fs/cgroup/jobs.slice/train.service/memory.high", "90000\n"),
        ("sys/fs/cgroup/jobs.slice/train.service/memory.current", "80000\n"),
        (
            "sys/fs/cgroup/jobs.slice/train.service/memory.stat",
            "anon 10000\nfile 70000\ninactive_file 30000\nactive_file 20000\nfile_dirty 1000\n",
        ),
    ])
}

#[test]
fn the_tightest_level_of_version_2_counts() {
    let tree = slices();
    assert_eq!(cpu::cpu_quota(&tree.root()), Some(3.5));
    tree.set("sys/fs/cgroup/jobs.slice/cpu.max", "max 100000\n");
    assert_eq!(cpu::cpu_quota(&tree.root()), Some(8.0));
    tree.set("sys/fs/cgroup/jobs.slice/train.service/cpu.max", "max 100000\n");
    assert_eq!(cpu::cpu_quota(&tree.root()), None);
}

#[test]
fn workers_are_rounded_up_and_at_least_one() {
    let workers = |affinity, quota| CpuLimits { affinity, quota }.worker_cpus();
    assert_eq!(workers(16, Some(3.5)), 4);
    assert_eq!(workers(2, Some(3.5)), 2);
    assert_eq!(workers(16, Some(0.1)), 1);
    assert_eq!(workers(16, None), 16);
    assert_eq!(workers(0, None), 1);
    assert_eq!(workers(4, Some(f64::INFINITY)), 4);
}

#[test]
fn file_cache_counts_as_free_and_dirty_cache_does_not() {
    let tree = slices();
    let limits = memory_limits(&tree.root());
    assert_eq!(limits.available_bytes, Some(1_024_000_000));
    // high 90,000 - (80,000 - (50,000 - 1,000)).
    assert_eq!(limits.group_bytes, Some(59_000));
    assert_eq!(limits.headroom(), Some(59_000));
    tree.set("sys/fs/cgroup/jobs.slice/memory.max", "10900\n");
    assert_eq!(memory_limits(&tree.root()).headroom(), Some(10_000), "the parent binds");
    tree.set("sys/fs/cgroup/jobs.slice/memory.max", "10\n");
    assert_eq!(memory_limits(&tree.root()).headroom(), Some(0), "over the limit");
}

/// Docker of the first version without a cgroup namespace: the path is the host's, the mount shows
/// only the own part.
#[test]
fn version_1_with_the_path_of_the_host() {
    let tree = Tree::new(&[
        (
            "proc/self/cgroup",
            "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n",
        ),
        (
            "proc/self/mountinfo",
            "40 30 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
             41 30 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        ),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "50000\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "40000\n"),
        (
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 1\ndirty 1\ntotal_dirty 3\n\
             total_inactive_file 20000\ntotal_active_file 5000\n",
        ),
    ]);
    assert_eq!(cpu::cpu_quota(&tree.root()), Some(1.5));
    assert_eq!(memory_limits(&tree.root()).headroom(), Some(50_000 - (40_000 - 24_997)));
    tree.set("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    tree.set("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_eq!(cpu::cpu_quota(&tree.root()), None);
    assert_eq!(memory_limits(&tree.root()).headroom(), None);
}

/// Inside a cgroup namespace that was entered late, the own path climbs out of the mount.
#[test]
fn a_path_that_leads_nowhere_or_out_means_the_mount_point() {
    for path in ["/../../other", "/gone/away"] {
        let tree = Tree::new(&[
            ("proc/self/cgroup", &format!("0::{path}\n")),
            ("proc/self/mountinfo", MOUNT_V2),
            ("sys/fs/cgroup/cpu.max", "200000 100000\n"),
            ("sys/other/cpu.max", "100000 100000\n"),
        ]);
        assert_eq!(cpu::cpu_quota(&tree.root()), Some(2.0), "{path}");
    }
}

#[test]
fn nothing_known_is_no_limit() {
    let tree = Tree::new(&[]);
    assert_eq!(cpu::cpu_quota(&tree.root()), None);
    assert_eq!(memory_limits(&tree.root()).headroom(), None);
    tree.set("proc/self/cgroup", "garbage\n0::/\n::::\n");
    tree.set("proc/self/mountinfo", MOUNT_V2);
    tree.set("sys/fs/cgroup/cpu.max", "a b\n");
    assert_eq!(cpu::cpu_quota(&tree.root()), None);
}

#[test]
fn locked_memory_is_unlimited_with_the_capability() {
    let with = "Name:\tx\nCapEff:\t0000000000004000\n";
    let without = "CapEff:\t000001ffffffbfff\n";
    assert_eq!(memlock_of(Some(8 << 20), with), Memlock::Unlimited);
    assert_eq!(memlock_of(Some(8 << 20), without), Memlock::Bytes(8 << 20));
    assert_eq!(memlock_of(Some(8 << 20), ""), Memlock::Bytes(8 << 20));
    assert_eq!(memlock_of(None, without), Memlock::Unlimited);
}

#[test]
fn this_machine_has_cpus_and_memory() {
    let workers = worker_cpus();
    assert!((1..=cpu_limits().affinity).contains(&workers));
    assert!(memory_headroom().unwrap() > 1 << 20);
}
