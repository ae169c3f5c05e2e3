//! A file that appears whole under its name, or not at all.
//!
//! The bytes go to a hidden temporary file in the same folder. Committing forces them to the disk, renames the file
//! over the destination, and forces the folder to the disk. A crash at any instant leaves the old file or the new one.
//!
//! - A failed fsync is final: the kernel may have dropped the pages it could not write and report success the next
//!   time, so it is never tried again on the same data. The temporary file goes, the old file stays.
//! - Some file systems cannot force a folder to the disk. That is no error; [`Durability`] tells.
//! - A destination that is a link is replaced by the file; what it pointed to is left alone.
//! - Mode and owner are those of any file the user creates.
//! - Everything happens relative to the folder as it was opened, so that renaming the folder does no harm.

use super::temp::fresh_name;
use crate::text::shown;
use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is known about a name that was just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// File and folder are on the disk.
    Proven,
    /// The file is; the file system cannot say so of the folder.
    FolderUnproven,
}

/// A folder, open.
#[derive(Debug)]
pub(super) struct Folder {
    fd: OwnedFd,
    pub(super) path: PathBuf,
}

/// A save's turn to publish in a folder.
pub(super) struct Turn<'a>(&'a Folder);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Closing the folder would do it as well.
        let _ = rustix::fs::flock(&self.0.fd, FlockOperation::Unlock);
    }
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Arc<Self>> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| Error::io("cannot open folder", errno.into()).at(shown(path)))?;
        Ok(Arc::new(Self { fd, path: path.to_owned() }))
    }

    /// The kind of what has this name, links not followed; `None` where nothing has.
    pub(super) fn kind(&self, name: impl AsRef<OsStr>) -> Result<Option<FileType>> {
        let name = name.as_ref();
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("cannot stat", name, errno)),
        }
    }

    pub(super) fn remove(&self, name: impl AsRef<OsStr>) -> Result<()> {
        let name = name.as_ref();
        let removed = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty());
        removed.map_err(|errno| self.failed("cannot remove", name, errno))
    }

    /// Waits until no other save publishes in this folder, and keeps others out as long as the guard lives. Advice: a
    /// file system without locks, or a holder that hangs, ends the wait.
    pub(super) fn take_turn(&self) -> Turn<'_> {
        const WAIT: Duration = Duration::from_secs(30);
        let deadline = Instant::now() + WAIT;
        while let Err(Errno::WOULDBLOCK | Errno::INTR) =
            rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive)
        {
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Turn(self)
    }

    pub(super) fn sync(&self) -> Result<Durability> {
        match rustix::fs::fsync(&self.fd) {
            Ok(()) => Ok(Durability::Proven),
            Err(Errno::INVAL | Errno::NOTSUP | Errno::NOSYS | Errno::BADF) => {
                Ok(Durability::FolderUnproven)
            }
            Err(errno) => {
                let error = Error::io("cannot force the folder to the disk", errno.into());
                Err(error.at(shown(&self.path)))
            }
        }
    }

    fn failed(&self, what: &str, name: &OsStr, errno: Errno) -> Error {
        Error::io(what, errno.into()).at(shown(&self.path.join(name)))
    }
}

/// A file being written. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    folder: Arc<Folder>,
    temp: Option<String>,
    name: OsString,
    /// Who made it: a child of a fork must not remove its parent's file.
    pid: u32,
}

impl AtomicFile {
    /// Makes the temporary file for a destination.
    pub fn create(dest: &Path) -> Result<Self> {
        let Some(name) = dest.file_name() else {
            let error = Error::new(Code::Usage, "the destination has no file name");
            return Err(error.at(shown(dest)));
        };
        Self::create_in(Folder::open(dest.parent().unwrap_or(Path::new("")))?, name.to_owned())
    }

    pub(super) fn create_in(folder: Arc<Folder>, name: OsString) -> Result<Self> {
        match folder.kind(&name)? {
            None | Some(FileType::RegularFile | FileType::Symlink) => {}
            Some(_) => {
                let error =
                    Error::new(Code::AlreadyExists, "destination exists and is no regular file");
                return Err(error.at(shown(&folder.path.join(&name))));
            }
        }
        let temp = fresh_name();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&folder.fd, temp.as_str(), flags, Mode::from_raw_mode(0o666))
            .map_err(|errno| {
            folder.failed("cannot create a temporary file for", &name, errno)
        })?;
        Ok(Self { file: File::from(fd), folder, temp: Some(temp), name, pid: std::process::id() })
    }

    /// The file, open for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it another destination in the same folder.
    pub(super) fn set_name(&mut self, name: &str) {
        self.name = OsString::from(name);
    }

    /// Where the file will appear.
    pub fn dest(&self) -> PathBuf {
        self.folder.path.join(&self.name)
    }

    /// Sets the length and reserves the space, so that a disk too full is found before anything is written. Where the
    /// file system cannot reserve, only the length is set.
    pub fn preallocate(&self, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let reserved = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len)
        });
        let at = |error: Error| error.at(shown(&self.dest()));
        match reserved {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self
                .file
                .set_len(len)
                .map_err(|error| at(Error::io("cannot set the length", error))),
            Err(errno @ (Errno::NOSPC | Errno::DQUOT)) => {
                let free = rustix::fs::fstatvfs(&self.file);
                let free = free.map(|free| free.f_bavail.saturating_mul(free.f_frsize));
                let available = match (errno, free) {
                    (Errno::NOSPC, Ok(free)) => format!("{free} are available"),
                    _ => "a quota or the file system does not allow them".to_owned(),
                };
                let what = format!("no space left: {len} bytes are needed, {available}");
                Err(at(Error::new(Code::NoSpace, what).with_source(std::io::Error::from(errno))))
            }
            Err(errno) => Err(at(Error::io(format!("cannot reserve {len} bytes"), errno.into()))),
        }
    }

    /// Forces the bytes to the disk. If that fails the file is given up.
    pub fn make_durable(self) -> Result<DurableFile> {
        self.sync()?;
        Ok(DurableFile(self))
    }

    /// Forces bytes, name and folder to the disk.
    pub fn commit(self) -> Result<Durability> {
        self.commit_if(|| true)
    }

    /// Commits, if `go` says so once the bytes are on the disk: forcing them there may take long, and the caller may
    /// have given up meanwhile. Then the error is `cancelled` and what was there before stays.
    pub fn commit_if(self, go: impl Fn() -> bool) -> Result<Durability> {
        let folder = Arc::clone(&self.folder);
        let file = self.make_durable()?;
        check_wanted(&go)?;
        file.publish()?;
        folder.sync()
    }

    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| {
            let error =
                Error::io("cannot force the file to the disk", error).at(shown(&self.dest()));
            error.hint("the file was given up; what was there before is untouched")
        })
    }

    fn rename(&mut self, replace: bool) -> Result<()> {
        let Some(temp) = self.temp.as_deref() else { return Ok(()) };
        let fd = &self.folder.fd;
        let name = self.name.as_os_str();
        let renamed = match replace {
            true => rustix::fs::renameat(fd, temp, fd, name),
            false => rename_new(fd, temp, name),
        };
        renamed.map_err(|errno| {
            self.folder.failed("cannot rename the finished file to", name, errno)
        })?;
        self.temp = None;
        Ok(())
    }
}

/// The last look before a save becomes visible. Errors: `cancelled`.
pub(super) fn check_wanted(go: &impl Fn() -> bool) -> Result<()> {
    match go() {
        true => Ok(()),
        false => Err(Error::new(Code::Cancelled, "the save was cancelled")
            .hint("what was there before is untouched")),
    }
}

/// Renames where nothing has the new name. Where the file system does not know how, by a second link.
fn rename_new(fd: &OwnedFd, temp: &str, name: &OsStr) -> Result<(), Errno> {
    match rustix::fs::renameat_with(fd, temp, fd, name, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            rustix::fs::linkat(fd, temp, fd, name, AtFlags::empty())?;
            rustix::fs::unlinkat(fd, temp, AtFlags::empty())
        }
        result => result,
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(temp) = self.temp.take().filter(|_| self.pid == std::process::id()) {
            // It may be gone with its folder; what cannot be removed is found by `clean_stale_temps`.
            let _ = rustix::fs::unlinkat(&self.folder.fd, temp.as_str(), AtFlags::empty());
        }
    }
}

/// A file whose bytes are on the disk, not yet under its name. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct DurableFile(AtomicFile);

impl DurableFile {
    /// Takes an [`AtomicFile`] that was synced.
    pub(super) fn of_synced(file: AtomicFile) -> Self {
        Self(file)
    }

    /// Gives the file its name, replacing what had it. The folder is not forced to the disk yet.
    pub fn publish(mut self) -> Result<()> {
        self.0.rename(true)
    }

    /// Gives the file its name, or fails with `already_exists`. The folder is not forced to the disk yet.
    pub fn publish_new(mut self) -> Result<()> {
        self.0.rename(false)
    }
}
