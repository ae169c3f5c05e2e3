//! The folders of keys: made when a key needs them, removed when the last key goes.
//!
//! A file is as durable as the names of all folders above it. Whoever made such a folder forces its parent to the disk,
//! but may be killed before, and another client may use the folder meanwhile; so each client forces the parents of
//! every folder once, the first time that it meets it.

use std::collections::BTreeSet;

use forebay_error::Result;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::PosixStore;
use super::lock::{self, records_of};
use super::root::split;
use super::temp::FileId;
use crate::key::RECORDS_FOLDER;

/// How often a folder may vanish under a write before it fails.
const TRIES: usize = 20;
/// Most folders that are remembered.
const KNOWN_MAX: usize = 4096;

/// Which folder it is: with the time of its birth, where there is one, because a new folder may get the inode of one
/// that was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FolderId {
    id: FileId,
    born: (i64, u32),
}

impl PosixStore {
    /// Runs a change in a folder, which is made if need be; again if somebody removes the folder at that moment.
    pub(super) fn in_folder<T>(
        &self,
        folder: &str,
        change: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        for _ in 1..TRIES {
            match self.ensure_folder(folder).and_then(|()| change()) {
                Err(Errno::NOENT) => {}
                result => return result,
            }
        }
        self.ensure_folder(folder)?;
        change()
    }

    fn ensure_folder(&self, folder: &str) -> Result<(), Errno> {
        if folder.is_empty() || self.knows(folder)? {
            return Ok(());
        }
        let ends = folder.match_indices('/').map(|(end, _)| end).chain([folder.len()]);
        for path in ends.filter_map(|end| folder.get(..end)) {
            if self.knows(path)? {
                continue;
            }
            match self.files.make_folder(path) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            self.files.sync_folder(split(path).0)?;
            self.remember(path)?;
        }
        Ok(())
    }

    /// Whether this very folder is known to be on the disk.
    fn knows(&self, folder: &str) -> Result<bool, Errno> {
        let known = self.known().get(folder).copied();
        let Some(known) = known else { return Ok(false) };
        match self.folder_id(folder) {
            Ok(id) => Ok(id == known),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn remember(&self, folder: &str) -> Result<(), Errno> {
        let id = self.folder_id(folder)?;
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(folder.to_owned(), id);
        Ok(())
    }

    fn folder_id(&self, folder: &str) -> Result<FolderId, Errno> {
        let fd = self.root.beneath(folder, OFlags::PATH)?;
        let id = rustix::fs::fstat(&fd).map(|stat| FileId::of(&stat))?;
        let born = match rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME) {
            Ok(more) => (more.stx_btime.tv_sec, more.stx_btime.tv_nsec),
            Err(_) => (0, 0),
        };
        Ok(FolderId { id, born })
    }

    /// See [`Store::discard`](crate::Store::discard). All names of a folder first, then the folder once.
    pub(super) fn discard_objects(&self, keys: &[String]) -> Result<()> {
        let mut failed = None;
        let mut left = BTreeSet::new();
        for key in keys {
            match self.files.remove(key) {
                Ok(()) => drop(left.insert(split(key).0)),
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => {
                    failed.get_or_insert_with(|| self.failed("cannot remove", key, errno));
                }
            }
        }
        // Deeper ones first: what is empty then takes those above it along.
        left.iter().rev().for_each(|folder| self.tidy(folder));
        failed.map_or(Ok(()), Err)
    }

    pub(super) fn remove_object(&self, key: &str) -> Result<bool> {
        let removed = match self.files.remove(key) {
            Ok(()) => true,
            Err(Errno::NOENT | Errno::NOTDIR) => false,
            Err(errno) => return Err(self.failed("cannot remove", key, errno)),
        };
        // Also when it was gone before: whoever removed it may have been killed before this.
        self.sync_folder_left(key)?;
        self.tidy(split(key).0);
        Ok(removed)
    }

    /// Forces the folder of a name that is gone to the disk; the folder may be gone too.
    pub(super) fn sync_folder_left(&self, key: &str) -> Result<()> {
        match self.files.sync_folder(split(key).0) {
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(errno) => Err(self.not_durable(key, errno)),
        }
    }

    /// Removes folders that are empty but for a lock that nobody holds, from here up, never the root. Also those that a
    /// client left that was killed on the way.
    pub(super) fn tidy(&self, folder: &str) {
        let mut folder = folder;
        while !folder.is_empty() {
            match self.remove_folder(folder) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(_) => return,
            }
            self.known().remove(folder);
            folder = split(folder).0;
        }
    }

    fn remove_folder(&self, folder: &str) -> Result<(), Errno> {
        match self.files.remove_folder(folder) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            result => return result,
        }
        let records = match split(folder).1 {
            RECORDS_FOLDER => folder.to_owned(),
            _ if self.holds_only(folder, RECORDS_FOLDER)? => records_of(folder),
            _ => return Err(Errno::NOTEMPTY),
        };
        if !self.holds_only(&records, "lock")? {
            return Err(Errno::NOTEMPTY);
        }
        let lock = format!("{records}/lock");
        let held = match self.files.try_lock(&lock) {
            Ok(held) => Some(held),
            // Without locks there are claims, and there is none.
            Err(errno) if lock::is_missing(errno) => None,
            Err(errno) => return Err(errno),
        };
        self.files.remove(&lock)?;
        drop(held);
        if records != folder {
            self.files.remove_folder(&records)?;
        }
        self.files.remove_folder(folder)
    }

    /// Whether a folder has one entry, of this name.
    fn holds_only(&self, folder: &str, name: &str) -> Result<bool, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self.root.fd(), folder, flags, Mode::empty())?;
        for entry in Dir::new(fd)? {
            let entry = entry?;
            let found = entry.file_name().to_bytes();
            if found != b"." && found != b".." && found != name.as_bytes() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
