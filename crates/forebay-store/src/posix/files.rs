//! The changes that a store makes to its files, one system call each.
//!
//! Everything that can be lost in a crash goes through [`Files`]: the store's own logic is above it, and below it is
//! either the kernel ([`RealFiles`]), or the kernel and a record of what was asked of it
//! ([`power`](crate::power)), or a test that refuses something. Paths are keys; errors are bare errnos, because the
//! callers decide by them.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{FileSink, RangeSink};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::direct::{Direct, is_in_memory};
use super::root::Root;

/// A file that was made by [`Files::create`], or opened by [`Files::open_alone`], for writing.
pub(crate) struct Handle {
    pub(crate) file: File,
    /// What a recording calls its inode.
    pub(crate) node: u64,
    pub(crate) direct: Direct,
}

/// Whether something was forced to the disk, or the file system does not know how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Synced {
    Yes,
    Unproven,
}

/// A lock, held until it is dropped.
pub(crate) struct Locked(#[expect(dead_code, reason = "closing it unlocks")] pub(crate) OwnedFd);

/// See the module. All of these may be called from many threads.
pub(crate) trait Files: Send + Sync {
    /// mkdir.
    fn make_folder(&self, path: &str) -> Result<(), Errno>;
    /// Makes a file where nothing is.
    fn create(&self, path: &str) -> Result<Handle, Errno>;
    /// Opens a file that is there, or makes it, and locks it (flock) until the handle is dropped; whether it was made.
    /// `WOULDBLOCK` where another has it open so.
    fn open_alone(&self, path: &str) -> Result<(Handle, bool), Errno>;
    /// pwrite, direct where that suits.
    fn write_at(&self, handle: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// A hint to start writing a range to the device.
    fn flush_soon(&self, handle: &Handle, offset: u64, len: u64);
    /// fallocate, which sets the length too; not of much in memory, where it would fill the file with zeros.
    fn reserve(&self, handle: &Handle, len: u64) -> Result<(), Errno>;
    /// ftruncate.
    fn set_len(&self, handle: &Handle, len: u64) -> Result<(), Errno>;
    /// fsync of a file.
    fn sync(&self, handle: &Handle) -> Result<(), Errno>;
    /// fsync of a folder.
    fn sync_folder(&self, path: &str) -> Result<Synced, Errno>;
    /// link.
    fn link(&self, from: &str, to: &str) -> Result<(), Errno>;
    /// rename.
    fn rename(&self, from: &str, to: &str) -> Result<(), Errno>;
    /// rename where nothing is.
    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno>;
    /// unlink.
    fn remove(&self, path: &str) -> Result<(), Errno>;
    /// rmdir.
    fn remove_folder(&self, path: &str) -> Result<(), Errno>;
    /// Opens or makes a file and tries to lock it (flock), without waiting.
    fn try_lock(&self, path: &str) -> Result<Locked, Errno>;
}

/// What is no longer is set aside in memory too: filling it with zeros takes a tenth of a millisecond, and the
/// records that tell of a full disk depend on it.
const RESERVED_IN_MEMORY: u64 = 1 << 20;

/// The kernel's own.
pub(crate) struct RealFiles {
    root: Arc<Root>,
}

impl RealFiles {
    pub(crate) fn new(root: Arc<Root>) -> Self {
        Self { root }
    }
}

impl Files for RealFiles {
    fn make_folder(&self, path: &str) -> Result<(), Errno> {
        let (folder, name) = self.root.parent(path)?;
        rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(0o777))
    }

    fn create(&self, path: &str) -> Result<Handle, Errno> {
        let (folder, name) = self.root.parent(path)?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o666))?;
        Ok(Handle { file: File::from(fd), node: 0, direct: Direct::default() })
    }

    fn open_alone(&self, path: &str) -> Result<(Handle, bool), Errno> {
        let (folder, name) = self.root.parent(path)?;
        let (handle, made) = match self.create(path) {
            Ok(handle) => (handle, true),
            Err(Errno::EXIST) => {
                let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let fd = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
                // It was for pipes, which are refused later; no write to a file is to end for it.
                rustix::fs::fcntl_setfl(&fd, OFlags::empty())?;
                (Handle { file: File::from(fd), node: 0, direct: Direct::default() }, false)
            }
            Err(errno) => return Err(errno),
        };
        match lock_soon(&handle.file) {
            Ok(()) if is_named(&handle.file, &folder, name)? => Ok((handle, made)),
            // Its name went to another file, or to none, since it was opened.
            Ok(()) | Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK),
            Err(errno) => {
                if made {
                    self.remove(path)?;
                }
                Err(errno)
            }
        }
    }

    fn write_at(&self, handle: &Handle, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match handle.direct.write_at(&handle.file, bytes, offset) {
            Some(written) => written,
            None => FileSink::new(&handle.file, String::new()).write_at(bytes, offset),
        }
    }

    fn flush_soon(&self, handle: &Handle, offset: u64, len: u64) {
        FileSink::new(&handle.file, String::new()).flush_soon(offset, len);
    }

    fn reserve(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| {
            if len > RESERVED_IN_MEMORY && is_in_memory(&handle.file) {
                return Err(Errno::OPNOTSUPP);
            }
            rustix::fs::fallocate(&handle.file, FallocateFlags::empty(), 0, len)
        })
    }

    fn set_len(&self, handle: &Handle, len: u64) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&handle.file, len))
    }

    fn sync(&self, handle: &Handle) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::fs::fsync(&handle.file))
    }

    fn sync_folder(&self, path: &str) -> Result<Synced, Errno> {
        let folder = self.root.beneath(path, OFlags::RDONLY)?;
        match rustix::io::retry_on_intr(|| rustix::fs::fsync(&folder)) {
            Ok(()) => Ok(Synced::Yes),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::BADF) => {
                Ok(Synced::Unproven)
            }
            Err(errno) => Err(errno),
        }
    }

    fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        let ((old, from), (new, to)) = (self.root.parent(from)?, self.root.parent(to)?);
        rustix::fs::linkat(old, from, new, to, AtFlags::empty())
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        let ((old, from), (new, to)) = (self.root.parent(from)?, self.root.parent(to)?);
        rustix::fs::renameat(old, from, new, to)
    }

    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno> {
        let ((old, from), (new, to)) = (self.root.parent(from)?, self.root.parent(to)?);
        rustix::fs::renameat_with(old, from, new, to, RenameFlags::NOREPLACE)
    }

    fn remove(&self, path: &str) -> Result<(), Errno> {
        let (folder, name) = self.root.parent(path)?;
        rustix::fs::unlinkat(folder, name, AtFlags::empty())
    }

    fn remove_folder(&self, path: &str) -> Result<(), Errno> {
        let (folder, name) = self.root.parent(path)?;
        rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
    }

    fn try_lock(&self, path: &str) -> Result<Locked, Errno> {
        let (folder, name) = self.root.parent(path)?;
        let fd = open_lock(&folder, name)?;
        rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
        match is_named(&fd, &folder, name)? {
            true => Ok(Locked(fd)),
            // Its last user has removed it since it was opened: the next one locks another file.
            false => Err(Errno::WOULDBLOCK),
        }
    }
}

/// Tries to lock a file, for half a second: file systems in user space hear of a close a moment after it.
fn lock_soon(file: &File) -> Result<(), Errno> {
    let lock = || rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
    for pause_ms in [10, 40, 150, 300] {
        match lock() {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(pause_ms)),
            result => return result,
        }
    }
    lock()
}

/// Opens a file to lock, or makes it.
fn open_lock(folder: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let (flags, mode) = (OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::from_raw_mode(0o666));
    // NFS wants a descriptor for writing; another user's file may be open to readers only.
    match rustix::fs::openat(folder, name, flags | OFlags::CREATE | OFlags::RDWR, mode) {
        Err(Errno::ACCESS) => rustix::fs::openat(folder, name, flags, mode),
        result => result,
    }
}

/// Whether a name is still that of an open file.
fn is_named(fd: impl AsFd, folder: &OwnedFd, name: &str) -> Result<bool, Errno> {
    let held = rustix::fs::fstat(fd)?;
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok((named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_on_a_file_that_lost_its_name_counts_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let (inside, name) = root.parent("lock").unwrap();
        let first = open_lock(&inside, name).unwrap();
        assert!(is_named(&first, &inside, name).unwrap());
        std::fs::remove_file(folder.path().join("lock")).unwrap();
        assert!(!is_named(&first, &inside, name).unwrap());
        let second = open_lock(&inside, name).unwrap();
        assert!(!is_named(&first, &inside, name).unwrap());
        assert!(is_named(&second, &inside, name).unwrap());
        let files = RealFiles::new(root);
        let held = files.try_lock("lock").unwrap();
        assert_eq!(files.try_lock("lock").err(), Some(Errno::WOULDBLOCK));
        drop(held);
        files.try_lock("lock").unwrap();
    }
}
