//! Listings, bounded in what they return and in what they look at.

use std::collections::VecDeque;

use forebay_error::{Code, Error, Result};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::PosixStore;
use super::root::is_regular;
use crate::key::check_key;
use crate::object::{Age, Listed};

/// Entries that are no objects (folders, pipes, names that are no text) and may be passed over, beyond the limit.
const OTHERS_MAX: usize = 10_000;

/// Something in a folder.
struct Entry {
    key: String,
    /// What it is, behind a link too.
    stat: Stat,
    is_link: bool,
}

impl Entry {
    fn is_folder(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::Directory
    }
}

impl PosixStore {
    pub(super) fn list_files(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        let now = self.now();
        let mut found = Vec::new();
        let mut others = 0;
        let mut folders = VecDeque::from([prefix.to_owned()]);
        while let Some(folder) = folders.pop_front() {
            for entry in self.entries(&folder, limit)? {
                if is_regular(&entry.stat) {
                    let bytes = u64::try_from(entry.stat.st_size).unwrap_or(0);
                    let age = Age(now.since(&entry.stat));
                    found.push(Listed { key: entry.key, bytes, age });
                } else {
                    others += 1;
                    // A link to a folder may lead up again.
                    if entry.is_folder() && !entry.is_link {
                        folders.push_back(format!("{}/", entry.key));
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
        for entry in self.entries(prefix, limit)? {
            let is_folder = entry.is_folder();
            if !is_folder && !is_regular(&entry.stat) {
                continue;
            }
            let name = entry.key.get(prefix.len()..).unwrap_or_default();
            names.push((name.to_owned(), is_folder));
            if names.len() > limit {
                return Err(self.too_many(prefix, limit));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// What is in a folder and has a key; nothing where there is no folder.
    fn entries(&self, prefix: &str, limit: usize) -> Result<Vec<Entry>> {
        let failed = |errno| self.failed("cannot list", prefix, errno);
        let folder = if prefix.is_empty() { "." } else { prefix };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(self.root.fd(), folder, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            result => result.map_err(failed)?,
        };
        let mut entries = Vec::new();
        let names = Dir::read_from(&fd).map_err(failed)?;
        for (index, entry) in names.enumerate() {
            if index > limit.saturating_add(OTHERS_MAX) {
                return Err(self.too_many(prefix, limit));
            }
            let name = entry.map_err(failed)?.file_name().to_owned();
            let Ok(key) = name.to_str().map(|name| format!("{prefix}{name}")) else { continue };
            if check_key(&key).is_err() {
                continue;
            }
            let own = rustix::fs::statat(&fd, &name, AtFlags::SYMLINK_NOFOLLOW);
            let is_link = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
            let stat = match own {
                Ok(own) if is_link(&own) => rustix::fs::statat(&fd, &name, AtFlags::empty()),
                own => own,
            };
            match (own, stat) {
                (Ok(own), Ok(stat)) => entries.push(Entry { key, stat, is_link: is_link(&own) }),
                // Removed at this moment, or a link to nothing.
                (Err(Errno::NOENT), _) | (_, Err(Errno::NOENT | Errno::LOOP)) => {}
                (Err(errno), _) | (_, Err(errno)) => return Err(failed(errno)),
            }
        }
        Ok(entries)
    }

    fn too_many(&self, prefix: &str, limit: usize) -> Error {
        let what = format!("more than {limit} objects");
        Error::new(Code::Unsupported, what).at(self.place(prefix))
    }
}
