//! Giving a finished file its key: the steps that decide who wins.
//!
//! A key that must be free is taken by link(2), which no file system in use gets wrong, NFS included; where there are
//! no links by renameat2(RENAME_NOREPLACE), and where that is missing too by a look and a rename under the lock. A key
//! that must hold a certain version is replaced by a look and a rename under the lock.
//!
//! A link leaves the old name, which goes when the new one is on the disk. So a file that is moved is never without a
//! name, whatever a loss of power makes of the folders; a rename, on a file system that does not order the two halves,
//! may lose both. Two who move one file at once may both be told that they did, each to a name of its own.
//!
//! A reply can get lost: an NFS client that sends its request twice is told that the name exists, or that the source is
//! gone, because its first request was carried out. So after every failure the key is looked at, and if the file there
//! is the one that was to be placed (same device and inode; it is held open, so the inode is no other file's) it was
//! placed.

use rustix::io::Errno;

use forebay_error::Result;

use super::PosixStore;
use super::lock;
use super::root::{is_regular, split};
use super::temp::FileId;
use super::version;
use crate::object::Version;

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placed {
    /// The key is this file's. It is not forced to the disk yet.
    Here,
    /// The key is not as expected; nothing was changed.
    Taken,
    /// The file has lost its name before.
    Gone,
}

/// What is to get a key: a file by one of its names.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    pub(super) id: FileId,
}

impl PosixStore {
    /// Gives a file a key that must be free.
    pub(super) fn place_new(&self, from: Source<'_>, to: &str) -> Result<Placed> {
        let linked = self.in_folder(split(to).0, || match self.files.link(from.path, to) {
            // A key in a folder that is missing and a source that is missing look the same.
            Err(Errno::NOENT) if !self.is_there(from)? => Err(Errno::STALE),
            result => result,
        });
        let failed = match linked {
            Ok(()) => return Ok(Placed::Here),
            Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP | Errno::MLINK | Errno::XDEV) => {
                match self.files.rename_new(from.path, to) {
                    Ok(()) => return Ok(Placed::Here),
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                        return self.place_new_locked(from, to);
                    }
                    Err(errno) => errno,
                }
            }
            Err(errno) => errno,
        };
        self.look_again(from, to, failed)
    }

    fn place_new_locked(&self, from: Source<'_>, to: &str) -> Result<Placed> {
        let _held = lock::take(self, split(to).0)?;
        match self.stat(to)? {
            Some(_) => self.look_again(from, to, Errno::EXIST),
            None => self.rename_over(from, to),
        }
    }

    /// Gives a file a key that must hold this version.
    pub(super) fn place_over(
        &self,
        from: Source<'_>,
        to: &str,
        expected: &Version,
    ) -> Result<Placed> {
        let _held = lock::take(self, split(to).0)?;
        match self.holds(to, expected)? {
            true => self.rename_over(from, to),
            false => self.look_again(from, to, Errno::EXIST),
        }
    }

    fn rename_over(&self, from: Source<'_>, to: &str) -> Result<Placed> {
        match self.files.rename(from.path, to) {
            Ok(()) => Ok(Placed::Here),
            Err(errno) => self.look_again(from, to, errno),
        }
    }

    /// What really happened, after a failure.
    fn look_again(&self, from: Source<'_>, to: &str, failed: Errno) -> Result<Placed> {
        if self.is_file(to, from.id)? {
            return Ok(Placed::Here);
        }
        match failed {
            Errno::EXIST => Ok(Placed::Taken),
            Errno::NOENT | Errno::STALE if self.stat(from.path)?.is_none() => Ok(Placed::Gone),
            errno => Err(self.failed("cannot give the finished file its name", to, errno)),
        }
    }

    /// Takes the old name of a file away that has its key, durably. After a link the file has both, and by now the old
    /// name may be another file's: somebody may have replaced it, under the lock. So it is looked at under the lock.
    ///
    /// Called when the new name is on the disk, so that no loss of power can take both.
    pub(super) fn leave(&self, from: Source<'_>, to: &str) -> Result<()> {
        let (folder, is_other_folder) = (split(from.path).0, split(from.path).0 != split(to).0);
        let has_both = self.is_file(from.path, from.id)?;
        if has_both {
            let _held = lock::take(self, folder)?;
            if self.is_file(from.path, from.id)? {
                match self.files.remove(from.path) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(errno) => {
                        let what = "published, but cannot take the old name away of";
                        return Err(self.failed(what, from.path, errno));
                    }
                }
            }
        }
        if has_both || is_other_folder {
            self.sync_folder_left(from.path)?;
        }
        if is_other_folder {
            self.tidy(folder);
        }
        Ok(())
    }

    fn is_file(&self, key: &str, id: FileId) -> Result<bool> {
        Ok(self.stat(key)?.is_some_and(|stat| FileId::of(&stat) == id))
    }

    fn is_there(&self, source: Source<'_>) -> Result<bool, Errno> {
        Ok(self.root.stat(source.path)?.is_some())
    }

    /// Whether a key holds a version.
    fn holds(&self, key: &str, expected: &Version) -> Result<bool> {
        let Some(stat) = self.stat(key)? else { return Ok(false) };
        if !is_regular(&stat) || !version::may_be(&stat, expected) {
            return Ok(false);
        }
        let max_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let found = self.read_small(key, max_bytes)?;
        Ok(found.is_some_and(|(_, version)| version == *expected))
    }
}
