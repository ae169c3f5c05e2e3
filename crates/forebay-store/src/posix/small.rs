//! Small objects: read, made and replaced as a whole.

use std::io::Read;

use forebay_error::{Code, Error, Result};
use rustix::io::Errno;

use super::PosixStore;
use super::files::Synced;
use super::place::{Placed, Source};
use super::root::split;
use super::stale::{again, is_stale};
use super::temp::{FileId, Temp};
use super::version::version;
use crate::object::{Expect, Published, Version};

/// Memory that is taken on the word of a file's size.
const AT_ONCE: u64 = 64 << 10;

/// Why something was not read.
enum Trouble {
    /// The name led to what is gone.
    Stale(Errno),
    Other(Error),
}

impl PosixStore {
    pub(super) fn read_small(
        &self,
        key: &str,
        max_bytes: u64,
    ) -> Result<Option<(Vec<u8>, Version)>> {
        let read = again(
            || self.read_once(key, max_bytes),
            |trouble| matches!(trouble, Trouble::Stale(_)),
        );
        read.map_err(|trouble| match trouble {
            Trouble::Stale(errno) => self.failed("cannot read", key, errno),
            Trouble::Other(error) => error,
        })
    }

    fn read_once(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>, Trouble> {
        let opened = self.root.open_file(key);
        let opened =
            opened.map_err(|errno| Trouble::Other(self.failed("cannot open", key, errno)))?;
        let Some((file, stat)) = opened else { return Ok(None) };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        // As much as there seems to be, at once if that is little; beyond it memory is taken as bytes arrive.
        let expected = size.min(max_bytes).min(AT_ONCE).saturating_add(1);
        let mut bytes = Vec::with_capacity(expected as usize);
        if size <= max_bytes {
            // One byte more than may be there tells whether it grew.
            let read = file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes);
            read.map_err(|error| match Errno::from_io_error(&error) {
                Some(errno) if is_stale(errno) || errno == Errno::NOENT => Trouble::Stale(errno),
                _ => Trouble::Other(Error::io("cannot read", error).at(self.place(key))),
            })?;
        }
        let size = size.max(bytes.len() as u64);
        if size > max_bytes {
            let what = format!("object has {size} bytes, at most {max_bytes} are read");
            let error = Error::new(Code::Unsupported, what).at(self.place(key));
            return Err(Trouble::Other(error));
        }
        let version = version(&stat, &bytes);
        Ok(Some((bytes, version)))
    }

    pub(super) fn create_small(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        if self.stat(key)?.is_some() {
            return Ok(false);
        }
        let temp = Temp::write(self, key, bytes)?;
        let id = temp.id().map_err(|errno| self.failed("cannot stat", key, errno))?;
        match self.place_new(Source { path: &temp.path, id }, key)? {
            Placed::Here => self.sync_folder_of(key).map(|_| true),
            Placed::Taken => Ok(false),
            Placed::Gone => {
                let what = "somebody removed the temporary file while it was in use";
                Err(Error::new(Code::Io, what).at(self.place(&temp.path)))
            }
        }
    }

    pub(super) fn put_small(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let temp = Temp::write(self, key, bytes)?;
        let id = temp.id().map_err(|errno| self.failed("cannot stat", key, errno))?;
        if let Err(errno) = self.files.rename(&temp.path, key) {
            let there = self.stat(key)?.map(|stat| FileId::of(&stat));
            if there != Some(id) {
                return Err(self.failed("cannot rename the finished file to", key, errno));
            }
        }
        self.sync_folder_of(key).map(|_| ())
    }

    pub(super) fn publish_file(
        &self,
        staged: &str,
        to: &str,
        expect: &Expect,
    ) -> Result<Published> {
        let opened = self.root.open_file(staged);
        let opened = opened.map_err(|errno| self.failed("cannot open", staged, errno))?;
        // The file stays open until the end, so that its inode is nobody else's.
        let Some((_file, stat)) = opened else { return Ok(Published::Withdrawn) };
        let source = Source { path: staged, id: FileId::of(&stat) };
        let placed = match expect {
            Expect::Absent => self.place_new(source, to)?,
            Expect::Version(version) => self.place_over(source, to, version)?,
        };
        match placed {
            Placed::Here => {
                let durable = self.sync_folder_of(to)? == Synced::Yes;
                self.leave(source, to)?;
                Ok(Published::Done { durable })
            }
            Placed::Taken => Ok(Published::Lost),
            Placed::Gone => Ok(Published::Withdrawn),
        }
    }

    pub(super) fn sync_folder_of(&self, key: &str) -> Result<Synced> {
        let synced = self.files.sync_folder(split(key).0);
        synced.map_err(|errno| self.not_durable(key, errno))
    }

    /// The error of a change that readers see, and whose folder could not be forced to the disk.
    pub(super) fn not_durable(&self, key: &str, errno: Errno) -> Error {
        let what = "changed, but cannot force the folder to the disk";
        let error = Error::new(Code::NotDurable, what).with_source(std::io::Error::from(errno));
        let error = error.at(self.place(key));
        error.hint("whether the change survives a loss of power is not known")
    }
}
