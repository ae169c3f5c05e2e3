//! How each kind of file system likes to be read.
//!
//! # The numbers
//! Requests in flight times their size must cover rate times latency, or the pipe runs dry. A good
//! local NVMe gives 7 GB/s at about 1 ms for 4 MiB requests under load: 7 MB; four of them in a
//! stripe: 28 MB; 4 MiB x 16 = 64 MiB is twice that. A file system behind a network gives up to 25
//! GB/s (200 Gbit/s) at 2 to 5 ms: 125 MB; 4 MiB x 32 = 128 MiB. Requests follow what the file
//! system moves at once (NFS 1 MiB, FUSE 1 MiB, CephFS and JuiceFS 4 MiB objects, Lustre RPCs of 4
//! MiB), because smaller ones are split by no one and larger ones are split anyway.
//!
//! # `O_DIRECT`
//! Local block file systems do it well. tmpfs is memory: there is nothing to go directly to.
//! Network and FUSE file systems differ: some ignore the flag, some lose their readahead with it,
//! some drop their own cache, so they start buffered, and the engine may measure. An overlay has
//! the habits of a layer that cannot be seen from here: buffered.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use forebay_error::{Error, Result};

use crate::{Root, mounts};

/// Kind of a file system.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FsKind {
    /// ext2, ext3, ext4.
    Ext,
    /// XFS.
    Xfs,
    /// Btrfs.
    Btrfs,
    /// ZFS. Its cache (the ARC) is not the page cache.
    Zfs,
    /// tmpfs, ramfs, hugetlbfs, devtmpfs: memory.
    Tmpfs,
    /// Overlay of other file systems, as containers have it.
    Overlay,
    /// NFS, any version.
    Nfs,
    /// Lustre.
    Lustre,
    /// IBM Storage Scale, also known as GPFS.
    Gpfs,
    /// WekaFS.
    Weka,
    /// BeeGFS.
    BeeGfs,
    /// CephFS, by the kernel or by FUSE.
    Ceph,
    /// GlusterFS.
    Gluster,
    /// JuiceFS.
    JuiceFs,
    /// Another FUSE file system, with its subtype.
    Fuse(String),
    /// virtiofs: the host's file system in a virtual machine.
    Virtiofs,
    /// 9P.
    P9,
    /// SMB.
    Cifs,
    /// Any other, by its name in the mount table.
    Other(String),
}

/// Magic numbers of `statfs`, for when the mount table is hidden. The kernel's `magic.h` has most;
/// Lustre, GPFS, BeeGFS and ZFS document theirs.
const MAGICS: &[(u64, &str)] = &[
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0x2FC1_2FC1, "zfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58F6, "ramfs"),
    (0x9584_58F6, "hugetlbfs"),
    (0x794C_7630, "overlay"),
    (0x6969, "nfs"),
    (0x0BD0_0BD0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x1983_0326, "beegfs"),
    (0x00C3_6400, "ceph"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb3"),
    (0xF2F5_2010, "f2fs"),
    (0xCA45_1A4E, "bcachefs"),
    (0xE0F5_E1E2, "erofs"),
    (0x7371_7368, "squashfs"),
];

impl FsKind {
    /// The kind by its name in the mount table (`fuse.juicefs` and the like included).
    pub fn from_name(name: &str) -> Self {
        match name {
            "ext2" | "ext3" | "ext4" => FsKind::Ext,
            "xfs" => FsKind::Xfs,
            "btrfs" => FsKind::Btrfs,
            "zfs" => FsKind::Zfs,
            "tmpfs" | "ramfs" | "hugetlbfs" | "devtmpfs" => FsKind::Tmpfs,
            "overlay" | "fuse.fuse-overlayfs" => FsKind::Overlay,
            "nfs" | "nfs3" | "nfs4" => FsKind::Nfs,
            "lustre" => FsKind::Lustre,
            "gpfs" => FsKind::Gpfs,
            "wekafs" => FsKind::Weka,
            "beegfs" => FsKind::BeeGfs,
            "ceph" | "fuse.ceph" | "fuse.ceph-fuse" => FsKind::Ceph,
            "fuse.glusterfs" => FsKind::Gluster,
            "fuse.juicefs" => FsKind::JuiceFs,
            "virtiofs" => FsKind::Virtiofs,
            "9p" => FsKind::P9,
            "cifs" | "smb3" | "smbfs" => FsKind::Cifs,
            "fuse" | "fuseblk" => FsKind::Fuse(String::new()),
            other => match other.strip_prefix("fuse.").or(other.strip_prefix("fuseblk.")) {
                Some(subtype) => FsKind::Fuse(subtype.to_owned()),
                None => FsKind::Other(other.to_owned()),
            },
        }
    }

    /// The kind by the magic number of `statfs`.
    pub fn from_magic(magic: u64) -> Self {
        match MAGICS.iter().find(|(number, _)| *number == magic) {
            Some((_, name)) => FsKind::from_name(name),
            None => FsKind::Other(format!("{magic:#x}")),
        }
    }

    /// The kind by both: the table knows subtypes, the magic number is there when the table is
    /// hidden.
    fn from_both(magic: u64, name: Option<&str>) -> Self {
        name.map_or_else(|| FsKind::from_magic(magic), FsKind::from_name)
    }
}

impl fmt::Display for FsKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            FsKind::Ext => "ext4",
            FsKind::Xfs => "xfs",
            FsKind::Btrfs => "btrfs",
            FsKind::Zfs => "zfs",
            FsKind::Tmpfs => "tmpfs",
            FsKind::Overlay => "overlay",
            FsKind::Nfs => "nfs",
            FsKind::Lustre => "lustre",
            FsKind::Gpfs => "gpfs",
            FsKind::Weka => "wekafs",
            FsKind::BeeGfs => "beegfs",
            FsKind::Ceph => "ceph",
            FsKind::Gluster => "glusterfs",
            FsKind::JuiceFs => "juicefs",
            FsKind::Fuse(subtype) if subtype.is_empty() => "fuse",
            FsKind::Fuse(subtype) => return write!(f, "fuse.{subtype}"),
            FsKind::Virtiofs => "virtiofs",
            FsKind::P9 => "9p",
            FsKind::Cifs => "cifs",
            FsKind::Other(name) => name,
        };
        f.write_str(name)
    }
}

/// Whether to open a file with `O_DIRECT` for a cold read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirectAdvice {
    /// Start direct.
    Good,
    /// Start buffered; direct may work and may even be faster.
    Avoid,
    /// Never direct: it is refused or has no meaning.
    Never,
}

/// How to read a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsProfile {
    /// What it is.
    pub kind: FsKind,
    /// Whether to use `O_DIRECT`.
    pub direct: DirectAdvice,
    /// Bytes of one request.
    pub request_bytes: u64,
    /// Requests in flight.
    pub concurrency: u32,
    /// Whether bytes come over a network (or from a process that may fetch them there).
    pub network: bool,
}

impl FsProfile {
    /// The table. The module says where its numbers come from.
    pub fn of(kind: FsKind) -> Self {
        use DirectAdvice::{Avoid, Good, Never};
        const MIB: u64 = 1 << 20;
        let (direct, request_bytes, concurrency, network) = match &kind {
            FsKind::Ext | FsKind::Xfs => (Good, 4 * MIB, 16, false),
            // Data checksums are verified in direct reads too; compressed extents fall back by
            // themselves.
            FsKind::Btrfs => (Good, 4 * MIB, 16, false),
            // Before OpenZFS 2.3 O_DIRECT is accepted and ignored.
            FsKind::Zfs => (Avoid, MIB, 32, false),
            FsKind::Tmpfs => (Never, 4 * MIB, 16, false),
            FsKind::Overlay => (Avoid, 4 * MIB, 32, false),
            FsKind::Nfs => (Avoid, MIB, 64, true),
            FsKind::Lustre => (Avoid, 4 * MIB, 32, true),
            // Blocks of a Storage Scale file system are 4 to 16 MiB.
            FsKind::Gpfs => (Avoid, 8 * MIB, 32, true),
            FsKind::Weka => (Avoid, MIB, 64, true),
            FsKind::BeeGfs => (Avoid, 4 * MIB, 32, true),
            FsKind::Ceph => (Avoid, 4 * MIB, 32, true),
            FsKind::Gluster => (Avoid, MIB, 64, true),
            FsKind::JuiceFs => (Avoid, 4 * MIB, 64, true),
            FsKind::Fuse(_) => (Avoid, MIB, 64, true),
            FsKind::Virtiofs => (Avoid, MIB, 32, false),
            // 9P over virtio moves at most 512 KiB a message.
            FsKind::P9 => (Avoid, MIB / 2, 32, true),
            FsKind::Cifs => (Avoid, 4 * MIB, 32, true),
            FsKind::Other(name) if LOCAL_BLOCK.contains(&name.as_str()) => {
                (Good, 4 * MIB, 16, false)
            }
            FsKind::Other(_) => (Avoid, 4 * MIB, 32, false),
        };
        Self { kind, direct, request_bytes, concurrency, network }
    }
}

/// Local block file systems without a kind of their own. EROFS and SquashFS are compressed: not
/// among them.
const LOCAL_BLOCK: &[&str] = &["f2fs", "bcachefs", "jfs", "nilfs2"];

/// A device number is used again after an unmount, so the magic number is part of the key.
type Key = (u64, u64);

static PROFILES: Mutex<Option<HashMap<Key, FsProfile>>> = Mutex::new(None);

/// More file systems than this in one process, and the cache starts again.
const PROFILES_MAX: usize = 4096;

/// The profile of the file system of an open file; looked up once a file system. `path` helps where
/// the kernel does not say which mount a file is on, and names the file in an error.
pub fn file_profile(file: impl AsFd, path: &Path) -> Result<FsProfile> {
    let place = |error| Error::io("cannot ask for the file system", error).at(path.display());
    let device = rustix::fs::fstat(&file).map_err(|error| place(error.into()))?.st_dev;
    let statfs = rustix::fs::fstatfs(&file).map_err(|error| place(error.into()))?;
    // The type of the field differs between architectures; magic numbers have 32 bits.
    let magic = u64::from(statfs.f_type as u32);
    let key = (device, magic);
    let mut cache = PROFILES.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_with(HashMap::new);
    if let Some(profile) = cache.get(&key) {
        return Ok(profile.clone());
    }
    let mounts = mounts::mounts(&Root::live());
    let name = mounts::mount_of(&mounts, &file, path).map(|mount| mount.fs_type.as_str());
    let profile = FsProfile::of(FsKind::from_both(magic, name));
    if cache.len() >= PROFILES_MAX {
        cache.clear();
    }
    cache.insert(key, profile.clone());
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_subtypes() {
        assert_eq!(FsKind::from_name("fuse.juicefs"), FsKind::JuiceFs);
        assert_eq!(FsKind::from_name("fuse.glusterfs"), FsKind::Gluster);
        assert_eq!(FsKind::from_name("fuse.ceph-fuse"), FsKind::Ceph);
        assert_eq!(FsKind::from_name("fuse.s3fs"), FsKind::Fuse("s3fs".into()));
        assert_eq!(FsKind::from_name("fuse"), FsKind::Fuse(String::new()));
        assert_eq!(FsKind::from_name("nfs4"), FsKind::Nfs);
        assert_eq!(FsKind::from_name("sunfs"), FsKind::Other("sunfs".into()));
    }

    #[test]
    fn magic_numbers_agree_with_names() {
        for (magic, name) in MAGICS {
            assert_eq!(FsKind::from_magic(*magic), FsKind::from_name(name));
        }
        assert_eq!(FsKind::from_magic(0xEF53), FsKind::Ext);
        assert_eq!(FsKind::from_magic(7).to_string(), "0x7");
        assert_eq!(FsKind::from_both(0x6573_5546, Some("virtiofs")), FsKind::Virtiofs);
        assert_eq!(FsKind::from_both(0x6573_5546, None), FsKind::Fuse(String::new()));
    }

    #[test]
    fn the_table_keeps_its_word() {
        let of = |name| FsProfile::of(FsKind::from_name(name));
        for name in ["ext4", "xfs", "btrfs", "f2fs"] {
            assert_eq!(of(name).direct, DirectAdvice::Good, "{name}");
            assert!(!of(name).network);
        }
        assert_eq!(of("tmpfs").direct, DirectAdvice::Never);
        let local = of("ext4");
        for name in ["nfs4", "lustre", "gpfs", "wekafs", "beegfs", "ceph", "fuse.juicefs", "cifs"] {
            let profile = of(name);
            assert_eq!(profile.direct, DirectAdvice::Avoid, "{name}");
            assert!(profile.network, "{name}");
            assert!(profile.concurrency > local.concurrency, "{name}");
        }
        for (_, name) in MAGICS {
            let profile = of(name);
            let in_flight = profile.request_bytes * u64::from(profile.concurrency);
            assert!((16 << 20..=256 << 20).contains(&in_flight), "{name}: {in_flight}");
            assert!(profile.request_bytes.is_power_of_two());
        }
    }

    #[test]
    fn files_of_this_machine() {
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        let profile = file_profile(&proc, Path::new("/proc/self/status")).unwrap();
        assert_eq!(profile.kind, FsKind::Other("proc".into()));
        assert_eq!(file_profile(&proc, Path::new("/other")).unwrap(), profile);
    }
}
