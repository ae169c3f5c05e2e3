//! Listings, bounded in what they return and in what they look at.

use std::collections::VecDeque;
use std::ffi::CStr;

use forebay_error::{Code, Error, Result};
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::PosixStore;
use crate::key::check_key;
use crate::object::{Age, Listed};

/// Entries that are no objects (folders, pipes, names that are no text) and may be passed over, beyond the limit.
const OTHERS_MAX: usize = 10_000;

/// Something in a folder.
struct Entry {
    key: String,
    kind: FileType,
    is_link: bool,
    /// What it is, behind a link too; only where it was asked for, or was needed to tell the kind.
    stat: Option<Stat>,
}

impl PosixStore {
    pub(super) fn list_files(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        let now = self.now();
        let mut found = Vec::new();
        let mut others = 0;
        let mut folders = VecDeque::from([prefix.to_owned()]);
        while let Some(folder) = folders.pop_front() {
            for entry in self.entries(&folder, limit, true)? {
                match (entry.kind, &entry.stat) {
                    (FileType::RegularFile, Some(stat)) => {
                        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
                        found.push(Listed { key: entry.key, bytes, age: Age(now.since(stat)) });
                    }
                    (kind, _) => {
                        others += 1;
                        // A link to a folder may lead up again.
                        if kind == FileType::Directory && !entry.is_link {
                            folders.push_back(format!("{}/", entry.key));
                        }
                    }
                }
                if found.len() > limit || others > limit.saturating_add(OTHERS_MAX) {
                    return Err(self.too_many(prefix, limit));
                }
            }
        }
        found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    pub(super) fn list_names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        let mut names = Vec::new();
        for entry in self.entries(prefix, limit, false)? {
            let is_folder = match entry.kind {
                // A second name for a folder: whoever counts folders, or removes some, must not take it for another.
                FileType::Directory if entry.is_link => continue,
                FileType::Directory => true,
                FileType::RegularFile => false,
                _ => continue,
            };
            let name = entry.key.get(prefix.len()..).unwrap_or_default();
            names.push((name.to_owned(), is_folder));
            if names.len() > limit {
                return Err(self.too_many(prefix, limit));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// What is in a folder and has a key; nothing where there is no folder. `stats`: with sizes and times. Without them
    /// one system call gives hundreds of names with their kinds, where the file system knows these.
    fn entries(&self, prefix: &str, limit: usize, stats: bool) -> Result<Vec<Entry>> {
        let failed = |errno| self.failed("cannot list", prefix, errno);
        let folder = if prefix.is_empty() { "." } else { prefix };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = match self.root.reads_inside() {
            false => rustix::fs::openat(self.root.fd(), folder, flags, Mode::empty()),
            true => self.root.beneath(folder.trim_end_matches('/'), OFlags::RDONLY),
        };
        let fd = match opened {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            result => result.map_err(failed)?,
        };
        let mut entries = Vec::new();
        // Takes the folder as it is; a copy would be opened for the names alone.
        let mut names = Dir::new(fd).map_err(failed)?;
        let mut index = 0;
        while let Some(entry) = names.read() {
            index += 1;
            if index > limit.saturating_add(OTHERS_MAX) {
                return Err(self.too_many(prefix, limit));
            }
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Ok(key) = name.to_str().map(|name| format!("{prefix}{name}")) else { continue };
            if check_key(&key).is_err() {
                continue;
            }
            let known = (!stats).then_some(entry.file_type()).filter(|kind| is_plain(*kind));
            match known {
                Some(kind) => entries.push(Entry { key, kind, is_link: false, stat: None }),
                None => {
                    let folder = names.fd().map_err(failed)?;
                    entries.extend(stat_entry(folder, name, key).map_err(failed)?);
                }
            }
        }
        Ok(entries)
    }

    fn too_many(&self, prefix: &str, limit: usize) -> Error {
        let what = format!("more than {limit} objects");
        Error::new(Code::Unsupported, what).at(self.place(prefix))
    }
}

/// Whether the kind that a folder gives says all: a link may lead to anything, and some file systems do not say.
fn is_plain(kind: FileType) -> bool {
    !matches!(kind, FileType::Unknown | FileType::Symlink)
}

/// Looks at an entry; `None` for one that was removed at this moment, or is a link to nothing.
fn stat_entry(fd: BorrowedFd<'_>, name: &CStr, key: String) -> Result<Option<Entry>, Errno> {
    let kind = |stat: &Stat| FileType::from_raw_mode(stat.st_mode);
    let look = || {
        let own = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match kind(&own) {
            FileType::Symlink => Ok((rustix::fs::statat(fd, name, AtFlags::empty())?, true)),
            _ => Ok((own, false)),
        }
    };
    match look() {
        Ok((stat, is_link)) => {
            Ok(Some(Entry { key, kind: kind(&stat), is_link, stat: Some(stat) }))
        }
        Err(Errno::NOENT | Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno),
    }
}
