//! The store's own time.
//!
//! Ages are the difference of two stamps of the same file system: of an object, and of a file that is made for the
//! question (without a name where the file system can, else removed at once). No clock of this machine is compared with
//! another's, if the file system stamps by its own: local ones do, and NFS servers. Lustre, CephFS and most of FUSE
//! stamp with the writer's clock, so there ages are as good as the machines' clocks agree. Where nothing can be
//! written, and so nothing be collected either, this machine's clock has to do.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use super::PosixStore;
use crate::key::TEMP_PREFIX;

/// An instant of the store, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now(i128);

impl Now {
    /// How long ago a file was last touched: bytes, names or owner, whichever was later. So a copy that kept its
    /// source's times is as young as it is.
    pub(super) fn since(self, stat: &Stat) -> Duration {
        let age = self.0 - stamp(stat);
        Duration::from_nanos(u64::try_from(age.max(0)).unwrap_or(u64::MAX))
    }
}

fn stamp(stat: &Stat) -> i128 {
    let ns = |seconds, nanos| i128::from(seconds) * 1_000_000_000 + nanos as i128;
    ns(stat.st_mtime, stat.st_mtime_nsec).max(ns(stat.st_ctime, stat.st_ctime_nsec))
}

impl PosixStore {
    /// The time in the store.
    pub(super) fn now(&self) -> Now {
        let asked = self.ask_nameless().or_else(|_| self.ask_named());
        asked.map(|stat| Now(stamp(&stat))).unwrap_or_else(|error| {
            tracing::debug!(%error, "the file system cannot be asked for the time");
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            Now(i128::try_from(now.as_nanos()).unwrap_or(i128::MAX))
        })
    }

    fn ask_nameless(&self) -> Result<Stat, Errno> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.root.fd(), ".", flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::fstat(&file)
    }

    fn ask_named(&self) -> Result<Stat, Errno> {
        let path = format!("{TEMP_PREFIX}s{}", super::temp::fresh());
        let handle = self.files.create(&path)?;
        let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let stat = rustix::fs::futimens(&handle.file, &times)
            .and_then(|()| rustix::fs::fstat(&handle.file));
        self.files.remove(&path)?;
        stat
    }
}
