//! Files opened once, with what they were at that moment.
//!
//! A model file is opened one time; its header and later its tensors are read through the same descriptor, so that a
//! file renamed over it in between cannot mix two models. What a descriptor cannot prevent is somebody writing into
//! the same file: [`OpenFile::check_unchanged`] compares size and times with those at opening.
//!
//! An object of a bucket is opened in the same way: once, and all reads are of the state that it had then
//! ([`crate::remote`]).

use crate::remote::{Blocks, RemoteObject};
use crate::text::shown;
use forebay_error::{Code, Error, Result};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What tells one state of one file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device of the file system.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Last change of the bytes, in nanoseconds since 1970.
    pub mtime_ns: i128,
    /// Last change of the inode, in nanoseconds since 1970.
    pub ctime_ns: i128,
}

impl Identity {
    #[expect(clippy::unnecessary_cast, reason = "the fields have other widths on other systems")]
    fn of(stat: &Stat) -> Self {
        let ns = |seconds, nanos| i128::from(seconds) * 1_000_000_000 + nanos as i128;
        Self {
            dev: stat.st_dev as u64,
            ino: stat.st_ino as u64,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            ctime_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

/// A regular file or a remote object, open for reading.
pub struct OpenFile {
    /// The path it was opened by, for messages; of a remote object its URL.
    pub path: PathBuf,
    inner: Inner,
}

enum Inner {
    Local(Arc<Handle>),
    Remote(Blocks),
}

/// A file of this machine.
#[derive(Debug)]
pub struct Handle {
    /// The descriptor.
    pub file: File,
    /// What it was when it was opened.
    pub identity: Identity,
}

impl std::fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OpenFile").field(&self.path).finish()
    }
}

impl OpenFile {
    /// Opens a regular file. Pipes, devices, sockets and folders are refused; a pipe without a writer does not block.
    pub fn open(path: &Path) -> Result<Self> {
        // Opening some devices has effects (a tape rewinds), so look first; the check that counts is the one on the
        // descriptor.
        let before = rustix::fs::stat(path).map_err(|errno| cannot_open(path, errno))?;
        check_regular(path, &before)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| cannot_open(path, errno))?;
        let stat = rustix::fs::fstat(&fd).map_err(|errno| cannot_open(path, errno))?;
        check_regular(path, &stat)?;
        // io_uring answers EAGAIN for a non-blocking file where it would otherwise wait for the disk.
        rustix::fs::fcntl_setfl(&fd, OFlags::empty()).map_err(|errno| cannot_open(path, errno))?;
        Ok(Self::local_of(path, File::from(fd), &stat))
    }

    fn local_of(path: &Path, file: File, stat: &Stat) -> Self {
        let handle = Arc::new(Handle { file, identity: Identity::of(stat) });
        Self { path: path.to_owned(), inner: Inner::Local(handle) }
    }

    /// An object that is not on this machine; messages call it `path`.
    pub fn remote(path: &Path, object: Arc<dyn RemoteObject>) -> Self {
        Self { path: path.to_owned(), inner: Inner::Remote(Blocks::new(object)) }
    }

    /// The file of this machine, if it is one.
    pub fn local(&self) -> Option<&Arc<Handle>> {
        match &self.inner {
            Inner::Local(handle) => Some(handle),
            Inner::Remote(_) => None,
        }
    }

    /// The remote object, if it is one.
    pub fn remote_object(&self) -> Option<&Arc<dyn RemoteObject>> {
        match &self.inner {
            Inner::Local(_) => None,
            Inner::Remote(blocks) => Some(&blocks.object),
        }
    }

    /// A file of these bytes in memory, which nobody else can see or change; messages call it `path`.
    pub fn in_memory(path: &Path, bytes: &[u8]) -> Result<Self> {
        let failed = |errno: Errno| {
            let what = format!("cannot hold {} decoded bytes", bytes.len());
            Error::io(what, errno.into()).at(shown(path))
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("forebay-decoded", flags).map_err(failed)?;
        let file = File::from(fd);
        file.write_all_at(bytes, 0)
            .map_err(|error| Error::io("cannot hold decoded bytes", error).at(shown(path)))?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        Ok(Self::local_of(path, file, &stat))
    }

    /// Bytes of the file when it was opened.
    pub fn size(&self) -> u64 {
        match &self.inner {
            Inner::Local(handle) => handle.identity.size,
            Inner::Remote(blocks) => blocks.object.size(),
        }
    }

    /// Fails with `file_changed` if the file was written, cut, replaced or removed since it was opened.
    pub fn check_unchanged(&self) -> Result<()> {
        let handle = match &self.inner {
            Inner::Local(handle) => handle,
            Inner::Remote(blocks) => return blocks.object.check_unchanged(),
        };
        let stat = rustix::fs::fstat(&handle.file)
            .map_err(|errno| Error::io("cannot stat", errno.into()).at(shown(&self.path)))?;
        let now = Identity::of(&stat);
        if now == handle.identity {
            return Ok(());
        }
        let then = handle.identity;
        let what = if now.size != then.size {
            format!("its size went from {} to {} bytes", then.size, now.size)
        } else if now.mtime_ns != then.mtime_ns {
            "it was written to (its modification time differs)".to_owned()
        } else if stat.st_nlink == 0 {
            "it was replaced or removed (its last name is gone)".to_owned()
        } else {
            "its inode changed (owner, mode, links or content: its change time differs)".to_owned()
        };
        let error =
            Error::new(Code::FileChanged, format!("file changed while it was in use: {what}"));
        Err(error.at(shown(&self.path)).hint("load it again once nothing writes to it"))
    }

    /// Fills `buffer` from byte `offset` on. The file ending first is `file_changed` if it was longer when it was
    /// opened, and else `truncated`.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let handle = match &self.inner {
            Inner::Local(handle) => handle,
            Inner::Remote(blocks) => return self.read_remote(blocks, buffer, offset),
        };
        let mut filled = 0_usize;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let at = offset.saturating_add(filled as u64);
            match handle.file.read_at(rest, at) {
                Ok(0) => return Err(self.ended(at, offset.saturating_add(buffer.len() as u64))),
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let what = format!("cannot read {} bytes at byte {at}", rest.len());
                    return Err(Error::io(what, error).at(shown(&self.path)));
                }
            }
        }
        Ok(())
    }

    fn read_remote(&self, blocks: &Blocks, buffer: &mut [u8], offset: u64) -> Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        if end > self.size() {
            return Err(self.ended(self.size(), end));
        }
        blocks.read(buffer, offset).map_err(|error| error.at(shown(&self.path)))
    }

    fn ended(&self, at: u64, needed: u64) -> Error {
        let size = self.size();
        let error = if needed <= size {
            let what = format!(
                "file changed while it was in use: it ends at byte {at}, it had {size} bytes"
            );
            Error::new(Code::FileChanged, what)
        } else {
            Error::new(Code::Truncated, format!("truncated, file has {size} bytes, needs {needed}"))
        };
        error.at(shown(&self.path))
    }
}

fn cannot_open(path: &Path, errno: Errno) -> Error {
    let error = Error::io("cannot open", errno.into()).at(shown(path));
    match errno {
        Errno::MFILE | Errno::NFILE => error
            .hint("every file of a model stays open while it loads: raise the limit (ulimit -n)"),
        Errno::NOENT => match std::fs::read_link(path) {
            Ok(target) => {
                error.hint(format!("it is a link to {}, which is not there", shown(&target)))
            }
            Err(_) => error,
        },
        _ => error,
    }
}

fn check_regular(path: &Path, stat: &Stat) -> Result<()> {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(()),
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no regular file",
    };
    let error = Error::new(Code::UnknownFormat, format!("is {kind}, a regular file is needed"));
    Err(error.at(shown(path)))
}
