//! Whether the kernel tells this process the truth about the page cache of a file.
//!
//! The kernel's rule, for mincore since Linux 5.2 and for cachestat since early 2025: the process owns the file, or has
//! `CAP_FOWNER` over it, or may write to it. cachestat says `EPERM` to others; mincore gives them "all resident" without
//! any sign. So the rule is asked here, on the safe side: "no" costs samples instead of exact counts.

use std::os::fd::AsFd;

use rustix::fs::{Access, AtFlags, Stat};

use crate::{Root, limits};

/// Bit of `CAP_FOWNER`.
const CAP_FOWNER: u32 = 3;

/// Owner shown for a user that this process's user namespace does not know.
const OVERFLOW_UID_DEFAULT: u32 = 65_534;

pub(super) fn mincore_answers(file: impl AsFd, stat: &Stat) -> bool {
    let root = Root::live();
    let uid_map = root.read("proc/self/uid_map").unwrap_or_default();
    let overflow_uid = root.read_number("proc/sys/kernel/overflowuid");
    let status = root.read("proc/self/status").unwrap_or_default();
    let unknown_owner =
        !maps_every_uid(&uid_map) && stat.st_uid == overflow_uid.unwrap_or(OVERFLOW_UID_DEFAULT);
    if !unknown_owner {
        let owns = stat.st_uid == rustix::process::geteuid().as_raw();
        if owns || limits::has_capability(&status, CAP_FOWNER) {
            return true;
        }
    }
    may_write(file)
}

/// The first user namespace maps all users to themselves: `0 0 4294967295`.
fn maps_every_uid(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Asked with the effective user, as the kernel does. Kernels before 5.8 cannot answer: no.
fn may_write(file: impl AsFd) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::EACCESS;
    rustix::fs::accessat(file, "", Access::WRITE_OK, flags).is_ok()
}
