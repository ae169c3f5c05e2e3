//! Whether the kernel tells this process the truth about the page cache of a file.
//!
//! The kernel's rule, for mincore since Linux 5.2 and for cachestat since early 2025: the process
//! owns the file, or has `CAP_FOWNER` over it, or may write to it. cachestat says `EPERM` to
//! others; mincore gives them "all resident" without any sign. So the rule is asked here, on the
//! safe side: "no" costs samples instead of exact counts.

use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::fs::{Access, AtFlags, CWD, Stat};

use crate::{Root, limits};

/// Bit of `CAP_FOWNER`.
const CAP_FOWNER: u32 = 3;

/// Owner shown for a user that this process's user namespace does not know.
const OVERFLOW_UID_DEFAULT: u32 = 65_534;

/// Who asks, as far as the rule goes.
struct Asker {
    euid: u32,
    /// Whether it has `CAP_FOWNER`.
    overrides_owner: bool,
    /// The owner that stands for any unknown user; `None` when there are no unknown ones.
    overflow_uid: Option<u32>,
}

impl Asker {
    fn this_process() -> Self {
        let root = Root::live();
        let status = root.read("proc/self/status").unwrap_or_default();
        let uid_map = root.read("proc/self/uid_map").unwrap_or_default();
        let overflow = root.read_number("proc/sys/kernel/overflowuid");
        Self {
            euid: rustix::process::geteuid().as_raw(),
            overrides_owner: limits::has_capability(&status, CAP_FOWNER),
            overflow_uid: (!maps_every_uid(&uid_map))
                .then_some(overflow.unwrap_or(OVERFLOW_UID_DEFAULT)),
        }
    }

    /// A capability in a user namespace does not reach files of users that the namespace does not
    /// know.
    fn owns(&self, owner_uid: u32) -> bool {
        self.overflow_uid != Some(owner_uid) && (self.overrides_owner || self.euid == owner_uid)
    }
}

/// Whether mincore answers this process truly. On a stacked file system the question goes to the
/// file beneath, which may lie on a read-only layer although the file above can be written: there,
/// only its owner is sure.
pub(super) fn mincore_answers(file: &File, stat: &Stat, stacked: bool) -> bool {
    Asker::this_process().owns(stat.st_uid) || (!stacked && may_write(file))
}

/// The first user namespace maps all users to themselves: `0 0 4294967295`.
fn maps_every_uid(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Asked with the effective user, as the kernel does. Kernels before 5.8 cannot always answer: no.
fn may_write(file: &File) -> bool {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::accessat(CWD, own, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_told_apart() {
        let plain = Asker { euid: 1000, overrides_owner: false, overflow_uid: None };
        assert!(plain.owns(1000));
        assert!(!plain.owns(0));
        let root = Asker { euid: 0, overrides_owner: true, overflow_uid: None };
        assert!(root.owns(1000) && root.owns(65_534));
        let contained = Asker { euid: 0, overrides_owner: true, overflow_uid: Some(65_534) };
        assert!(contained.owns(1000), "a user that the namespace knows");
        assert!(!contained.owns(65_534), "a user that it does not know");
    }

    #[test]
    fn the_first_namespace_is_known() {
        assert!(maps_every_uid("         0          0 4294967295"));
        assert!(!maps_every_uid("0 100000 65536"));
        assert!(!maps_every_uid(""));
    }
}
