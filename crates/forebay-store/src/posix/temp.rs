//! Files that are not under their key yet.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_error::Result;
use rustix::fs::Stat;
use rustix::io::Errno;

use super::PosixStore;
use super::files::Handle;
use super::root::split;
use crate::key::TEMP_PREFIX;

/// Sixteen hexadecimal digits that nobody else has, as good as: the standard library's random hasher keys, hashed with
/// process and count. A name that is taken all the same is found by O_EXCL.
pub(super) fn fresh() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.write_u64(COUNT.fetch_add(1, Ordering::Relaxed));
    format!("{:016x}", hasher.finish())
}

/// Which file it is, whatever its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId(u64, u64);

impl FileId {
    #[expect(clippy::unnecessary_cast, reason = "the fields have other widths on other systems")]
    pub(super) fn of(stat: &Stat) -> Self {
        Self(stat.st_dev as u64, stat.st_ino as u64)
    }
}

/// A temporary file with all its bytes on the disk. Dropped, its name goes.
pub(super) struct Temp<'a> {
    store: &'a PosixStore,
    /// Open, so that its inode is nobody else's until this is dropped.
    handle: Handle,
    pub(super) path: String,
}

impl<'a> Temp<'a> {
    /// Writes a file beside `key`. A failed fsync gives it up.
    pub(super) fn write(store: &'a PosixStore, key: &str, bytes: &[u8]) -> Result<Self> {
        let (folder, _) = split(key);
        let slash = if folder.is_empty() { "" } else { "/" };
        let path = format!("{folder}{slash}{TEMP_PREFIX}s{}", fresh());
        let handle = store
            .in_folder(folder, || store.files.create(&path))
            .map_err(|errno| store.failed("cannot create a file for", key, errno))?;
        let temp = Self { store, handle, path };
        temp.fill(bytes).map_err(|errno| store.failed("cannot write", key, errno))?;
        let synced = store.files.sync(&temp.handle);
        synced.map_err(|errno| {
            let error = store.failed("cannot force to the disk", key, errno);
            error.hint("the file was given up; what was there before is untouched")
        })?;
        Ok(temp)
    }

    pub(super) fn id(&self) -> Result<FileId, Errno> {
        rustix::fs::fstat(&self.handle.file).map(|stat| FileId::of(&stat))
    }

    fn fill(&self, bytes: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            match self.store.files.write_at(&self.handle, rest, done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(())
    }
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        // It has its key if all went well, so there is nothing under this name any more.
        match self.store.files.remove(&self.path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => tracing::debug!(%error, path = self.path, "a temporary file stays"),
        }
    }
}
