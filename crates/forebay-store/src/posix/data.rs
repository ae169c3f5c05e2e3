//! Data objects: files that are written in ranges, under their key from the start.
//!
//! # Going on with a file that another process began
//!
//! Nothing that is in it is believed: whoever goes on with it has the bytes that should be there, and each range is
//! compared with them. Ranges are written in a row, so after the first that differs none is compared any more. That
//! this is safe rests on four things:
//!
//! - **Nobody else writes it.** It is locked (flock) for as long as it is open, and the kernel frees the lock when its
//!   holder dies, however that happens; a child that inherited the descriptor keeps it. Two machines may not see each
//!   other's locks (see [`lock`](super::lock)): so a key must be of one machine, and of one start of it.
//! - **It is nobody's object yet.** A file with a second name is being published, or was: it is left alone.
//! - **The drive has it.** What a failed write left in the page cache looks right and is on no disk, and the error may
//!   have been told to the process that is dead. So pages are dropped before they are compared: what was written is
//!   read from the disk, and what is still to be written stays, for the fsync of `seal` to answer for.
//! - **The end is the same.** `seal` forces all of the file to the disk, whoever wrote it.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{LocalFile, RangeSink, RangeSource};
use forebay_error::{Code, Error, Result};
use forebay_format::OpenFile;
use rustix::fs::{Advice, FileType};
use rustix::io::Errno;

use super::PosixStore;
use super::files::{Files, Handle};
use super::root::{Root, split};
use crate::object::DataObject;

/// Without fallocate, room up to this is made by writing zeros: the records that tell of a full disk depend on theirs.
const FILLED_BYTES_MAX: u64 = 64 << 10;
/// What is compared at once of a file that is gone on with.
const COMPARED_BYTES: usize = 1 << 20;

/// A file that is being written.
struct DataFile {
    files: Arc<dyn Files>,
    root: Arc<Root>,
    handle: Handle,
    key: String,
    sealed: AtomicBool,
    /// What is there may be what should be.
    comparing: AtomicBool,
}

impl PosixStore {
    pub(super) fn create_data_file(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        let handle = self.in_folder(split(key).0, || self.files.create(key));
        let handle = handle.map_err(|errno| self.failed("cannot create", key, errno))?;
        if let Err(error) = self.set_aside(&handle, key, bytes) {
            if let Err(error) = self.files.remove(key) {
                tracing::debug!(%error, key, "a file that found no room stays");
            }
            return Err(error);
        }
        Ok(self.data_file(handle, key, false))
    }

    pub(super) fn resume_data_file(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        let failed = |errno| self.failed("cannot go on with", key, errno);
        let taken = |why: &str| Error::new(Code::AlreadyExists, why).at(self.place(key));
        let opened = self.in_folder(split(key).0, || self.files.open_alone(key));
        let (handle, made) = opened.map_err(|errno| match errno {
            Errno::WOULDBLOCK => taken("another writer has it open"),
            Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP => {
                let what = "the file system has no locks, so who writes a file cannot be told";
                Error::new(Code::Unsupported, what).at(self.place(key))
            }
            errno => failed(errno),
        })?;
        let stat = rustix::fs::fstat(&handle.file).map_err(failed)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let there = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if !is_file || stat.st_nlink != 1 || there > bytes {
            return Err(taken("what is there is no file that was begun so"));
        }
        if there < bytes
            && let Err(error) = self.set_aside(&handle, key, bytes)
        {
            // What found no room is begun anew, when there is some.
            if let Err(error) = self.files.remove(key) {
                tracing::debug!(%error, key, "a file that found no room stays");
            }
            return Err(error);
        }
        Ok(self.data_file(handle, key, !made))
    }

    fn data_file(&self, handle: Handle, key: &str, begun: bool) -> Box<dyn DataObject> {
        Box::new(DataFile {
            files: Arc::clone(&self.files),
            root: Arc::clone(&self.root),
            handle,
            key: key.to_owned(),
            sealed: AtomicBool::new(false),
            comparing: AtomicBool::new(begun),
        })
    }

    /// Reserves room, or at least compares with what is free.
    fn set_aside(&self, handle: &Handle, key: &str, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match self.files.reserve(handle, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
            Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                return Err(self.no_room(key, bytes, Some(errno)));
            }
            Err(errno) => return Err(self.failed("cannot set room aside for", key, errno)),
        }
        let free = rustix::fs::fstatvfs(&handle.file);
        if free.is_ok_and(|free| free.f_bavail.saturating_mul(free.f_frsize) < bytes) {
            return Err(self.no_room(key, bytes, None));
        }
        if bytes <= FILLED_BYTES_MAX {
            return self.fill(handle, bytes as usize).map_err(|errno| match errno {
                Errno::NOSPC | Errno::DQUOT | Errno::FBIG => self.no_room(key, bytes, Some(errno)),
                _ => self.failed("cannot set room aside for", key, errno),
            });
        }
        let set = self.files.set_len(handle, bytes);
        set.map_err(|errno| self.failed("cannot set the length of", key, errno))
    }

    fn fill(&self, handle: &Handle, len: usize) -> Result<(), Errno> {
        let mut left: &[u8] = &vec![0; len];
        while !left.is_empty() {
            match self.files.write_at(handle, left, (len - left.len()) as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(written) => left = left.get(written..).unwrap_or_default(),
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(())
    }

    fn no_room(&self, key: &str, bytes: u64, errno: Option<Errno>) -> Error {
        let error = match errno {
            Some(Errno::FBIG) => self.root.too_large(format!("{bytes} bytes are needed")),
            _ => {
                let free = self.root.free_text();
                let what = format!("no space left: {bytes} bytes are needed, {free}");
                Error::new(Code::NoSpace, what)
            }
        };
        let error = error.at(self.place(key));
        match errno {
            Some(errno) => error.with_source(io::Error::from(errno)),
            None => error,
        }
    }

    pub(super) fn open_data_file(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        let open = match self.root.reads_inside() {
            false => OpenFile::open(&self.root.path(key))?,
            true => self.open_inside(key)?,
        };
        Ok(Arc::new(LocalFile::new(Arc::new(open))?))
    }
}

impl PosixStore {
    /// Opens a file of a folder that somebody handed over, in which paths mean nothing.
    fn open_inside(&self, key: &str) -> Result<OpenFile> {
        let opened = self.root.open_file(key);
        let opened = opened.map_err(|errno| self.failed("cannot open", key, errno))?;
        let Some((file, _)) = opened else {
            return Err(Error::new(Code::NotFound, "no such file").at(self.place(key)));
        };
        let mut open = OpenFile::open(format!("/proc/self/fd/{}", file.as_raw_fd()).as_ref())?;
        open.path = self.root.path(key);
        Ok(open)
    }
}

impl DataFile {
    fn compare(&self, bytes: &[u8], offset: u64) -> Result<bool, Errno> {
        let file = &self.handle.file;
        let range = NonZeroU64::new(bytes.len() as u64);
        // A hint, which some file systems do not take.
        let _ = rustix::fs::fadvise(file, offset, range, Advice::DontNeed);
        let mut there = vec![0; COMPARED_BYTES.min(bytes.len())];
        for (at, piece) in bytes.chunks(COMPARED_BYTES).enumerate() {
            let there = there.get_mut(..piece.len()).ok_or(Errno::INVAL)?;
            let read = file.read_exact_at(there, offset + (at * COMPARED_BYTES) as u64);
            match read {
                Ok(()) if *there == *piece => {}
                Ok(()) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(true)
    }
}

impl DataObject for DataFile {
    fn sink(&self) -> &dyn RangeSink {
        self
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> Result<bool> {
        if !self.comparing.load(Ordering::Acquire) || bytes.is_empty() {
            return Ok(false);
        }
        let same = self.compare(bytes, offset).map_err(|errno| {
            self.root.failed("cannot read what was written of", &self.key, errno)
        })?;
        if !same {
            self.comparing.store(false, Ordering::Release);
        }
        Ok(same)
    }

    fn seal(&self) -> Result<()> {
        if self.sealed.swap(true, Ordering::AcqRel) {
            let what = "a data object is sealed once: the system may have dropped its bytes";
            return Err(Error::new(Code::Internal, what).at(self.name()));
        }
        let given_up = "the file was given up; write it again under another name";
        let synced = self.files.sync(&self.handle);
        let synced = synced.and_then(|()| self.files.sync_folder(split(&self.key).0));
        synced.map(|_| ()).map_err(|errno| {
            self.root.failed("cannot force to the disk", &self.key, errno).hint(given_up)
        })
    }
}

impl RangeSink for DataFile {
    fn name(&self) -> String {
        self.root.path(&self.key).display().to_string()
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.files.write_at(&self.handle, bytes, offset)
    }

    fn flush_soon(&self, offset: u64, len: u64) {
        self.files.flush_soon(&self.handle, offset, len);
    }
}
