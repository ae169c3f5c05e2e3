//! A store in a folder of a POSIX file system.
//!
//! An object is a file, its key the path below the store's folder. Files have the modes that the user's umask gives.
//!
//! | call | how it is one step, and durable |
//! | --- | --- |
//! | `create` | temporary file beside the key, fsync, link(2), fsync of the folder |
//! | `put` | temporary file, fsync, rename, fsync of the folder |
//! | `publish`, nothing there | link(2) of the staged file, fsync of the folder, then the staged name goes, fsync of its folder |
//! | `publish`, over a version | under the lock ([`lock`]): look, rename; then fsync of the folder |
//! | `remove` | unlink, fsync of the folder; folders that are empty then go |
//! | `discard` | unlink; not durable |
//! | `create_data` | O_EXCL under its own key, fallocate; `seal` is fsync of file and folder |
//! | `resume_data` | the same file, under flock(2): see [`data`] |
//!
//! What is promised beyond the interface, and what is not:
//!
//! - **fsync.** One that fails is final: what was written is given up, never synced again, for the kernel may have
//!   dropped the pages and call the next fsync a success. The fsync of a folder that fails after a change is an error
//!   of its own, `not_durable`, because readers see the change: what a loss of power would leave is not known. Whoever
//!   looks whether a lost reply hid a success must not take this for one. A file system that cannot force
//!   folders to the disk makes `durable_publish` false and `Done { durable: false }`.
//! - **Atomicity.** A first publication is atomic wherever link(2) is, even between machines. A replacement is atomic
//!   among Forebay's writers that the lock keeps apart; who writes the file without the lock, or removes it in the
//!   instant between look and rename, is not seen.
//! - **Names.** A key never leads out of the folder for a change ([`root`]). The folder is held open: renaming it does
//!   changes no harm, but data objects are opened for reading by path.
//! - **Leftovers.** A killed writer leaves files that [`is_temp`](crate::is_temp) knows; nothing else.

mod clock;
mod data;
mod direct;
mod files;
mod folders;
mod list;
mod lock;
mod place;
mod root;
mod small;
mod stale;
mod temp;
mod version;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

pub(crate) use files::{Files, Handle, Locked, RealFiles, Synced};
pub(crate) use root::{Root, split};

use crate::key::{check_key, check_prefix};
use crate::object::{Abilities, DataObject, Expect, Listed, Published, Version};
use crate::store::Store;
use folders::FolderId;

/// See the module.
pub struct PosixStore {
    root: Arc<Root>,
    files: Arc<dyn Files>,
    /// Folders whose names are on the disk.
    known: Mutex<HashMap<String, FolderId>>,
    abilities: OnceLock<Abilities>,
    /// See [`lock`].
    claim_stale: Duration,
}

impl PosixStore {
    /// Opens a folder that exists. Nothing is written before something is asked for.
    ///
    /// Errors: `not_found`, also for what is no folder, `permission_denied`, `io`.
    pub fn open(folder: &Path) -> Result<Self> {
        let root = Root::open(folder)?;
        let files = Arc::new(RealFiles::new(Arc::clone(&root)));
        Ok(Self::with_files(root, files))
    }

    /// A folder that another process has opened and handed over; messages call it `name`. Nothing in it is opened by
    /// path, and no link in it is followed to a file: the store can reach what is in the folder, and no more.
    ///
    /// Errors: `not_found` for what is no folder.
    pub fn handed_over(folder: OwnedFd, name: &Path) -> Result<Self> {
        let root = Root::handed_over(folder, name)?;
        let files = Arc::new(RealFiles::new(Arc::clone(&root)));
        Ok(Self::with_files(root, files))
    }

    /// Opens a folder, which is made if it is missing, with those above it, durably where the file system can.
    pub fn create(folder: &Path) -> Result<Self> {
        let failed = |what, error| Error::io(what, error).at(folder.display());
        let folder_abs = std::path::absolute(folder)
            .map_err(|error| failed("cannot make the path absolute", error))?;
        let missing = folder_abs.ancestors().take_while(|path| !path.exists()).count();
        std::fs::create_dir_all(&folder_abs)
            .map_err(|error| failed("cannot make the folder", error))?;
        for parent in folder_abs.ancestors().skip(1).take(missing) {
            // A folder that may be searched but not read cannot be synced; that is no reason to stop.
            if let Err(error) = std::fs::File::open(parent).and_then(|parent| parent.sync_all()) {
                tracing::debug!(%error, path = %parent.display(), "folder not forced to the disk");
            }
        }
        Self::open(&folder_abs)
    }

    pub(crate) fn with_files(root: Arc<Root>, files: Arc<dyn Files>) -> Self {
        Self {
            root,
            files,
            known: Mutex::new(HashMap::new()),
            abilities: OnceLock::new(),
            claim_stale: lock::CLAIM_STALE,
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, FolderId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What errors call an object.
    fn place(&self, key: &str) -> String {
        self.root.path(key).display().to_string()
    }

    fn failed(&self, what: &str, key: &str, errno: Errno) -> Error {
        self.root.failed(what, key, errno)
    }

    fn stat(&self, key: &str) -> Result<Option<Stat>> {
        self.root.stat(key).map_err(|errno| self.failed("cannot stat", key, errno))
    }

    fn find_abilities(&self) -> Abilities {
        let durable = matches!(self.files.sync_folder(""), Ok(Synced::Yes));
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let nameless = rustix::fs::openat(self.root.fd(), ".", flags, Mode::RUSR | Mode::WUSR);
        let reserved =
            nameless.and_then(|file| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 1));
        Abilities {
            create_if_absent: true,
            replace_if_version: true,
            durable_publish: durable,
            reserves_space: reserved.is_ok(),
            rejects_bad_checksums: false,
            returns_checksums: false,
            publish_time: Duration::ZERO,
        }
    }
}

impl Store for PosixStore {
    fn name(&self) -> String {
        self.place("")
    }

    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        if self.root.reads_inside() {
            return Ok(None);
        }
        let path = self.root.path("");
        // Links and dots on the way say nothing of where it lies.
        let real = std::fs::canonicalize(&path).map_err(|error| {
            Error::io("cannot find where the folder lies", error).at(path.display())
        })?;
        let name = real.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let (Some(above), Some(name)) = (real.parent(), name) else { return Ok(None) };
        Ok(Some((Arc::new(Self::open(above)?), name)))
    }

    fn abilities(&self) -> Abilities {
        *self.abilities.get_or_init(|| self.find_abilities())
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        check_key(key)?;
        self.read_small(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        check_key(key)?;
        self.create_small(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        check_key(key)?;
        self.put_small(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        check_prefix(prefix)?;
        self.list_files(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        check_prefix(prefix)?;
        self.list_names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        self.remove_object(key)
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        keys.iter().try_for_each(|key| check_key(key))?;
        self.discard_objects(keys)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        check_key(staged)?;
        check_key(to)?;
        if staged == to {
            return Err(Error::new(Code::Usage, "published onto itself").at(self.place(to)));
        }
        self.publish_file(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        self.create_data_file(key, bytes)
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        self.resume_data_file(key, bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        check_key(key)?;
        self.open_data_file(key)
    }
}
