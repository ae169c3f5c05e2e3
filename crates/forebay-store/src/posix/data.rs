//! Data objects: files that are written in ranges, under their key from the start.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{LocalFile, RangeSink, RangeSource};
use forebay_error::{Code, Error, Result};
use forebay_format::OpenFile;
use rustix::io::Errno;

use super::PosixStore;
use super::files::{Files, Handle};
use super::root::{Root, split};
use crate::object::DataObject;

/// Without fallocate, room up to this is made by writing zeros: the records that tell of a full disk depend on theirs.
const FILLED_BYTES_MAX: u64 = 64 << 10;

/// A file that is being written.
struct DataFile {
    files: Arc<dyn Files>,
    root: Arc<Root>,
    handle: Handle,
    key: String,
    sealed: AtomicBool,
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
        Ok(Box::new(DataFile {
            files: Arc::clone(&self.files),
            root: Arc::clone(&self.root),
            handle,
            key: key.to_owned(),
            sealed: AtomicBool::new(false),
        }))
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

impl DataObject for DataFile {
    fn sink(&self) -> &dyn RangeSink {
        self
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
