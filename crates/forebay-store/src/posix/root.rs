//! The folder that a store is in, and how keys become files in it.
//!
//! Whatever changes something goes through [`Root::beneath`], which the kernel keeps inside of the root: a link on the
//! way may lead to another place in the store, never out of it (openat2 with RESOLVE_BENEATH). Where that system call
//! is missing (before Linux 5.6, or forbidden by a container) links on the way are refused altogether. The last name
//! of a key is never followed when something is written. What is only read may lie behind links, as in a model cache;
//! not so in a folder that somebody else handed over as a descriptor ([`Root::handed_over`]): links there are not the
//! word of whoever runs this, and nothing outside of the folder is read for them either.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::stale::{again, is_stale};

/// How often the kernel may say that somebody renames folders at this moment.
const RACES_MAX: usize = 100;

/// A folder, open.
pub(crate) struct Root {
    fd: OwnedFd,
    path: PathBuf,
    /// Whether what is read must lie inside too.
    reads_inside: bool,
}

/// Folder and name of a key.
pub(crate) fn split(key: &str) -> (&str, &str) {
    key.rsplit_once('/').unwrap_or(("", key))
}

impl Root {
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>> {
        let place = path.display().to_string();
        let path = std::path::absolute(path)
            .map_err(|error| Error::io("cannot make the path absolute", error).at(&place))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOTDIR => Error::new(Code::NotFound, "is no folder").at(&place),
            errno => Error::io("cannot open the store's folder", errno.into()).at(&place),
        })?;
        Ok(Arc::new(Self { fd, path, reads_inside: false }))
    }

    /// A folder that somebody else has opened; `path` is for messages alone.
    pub(crate) fn handed_over(fd: OwnedFd, path: &Path) -> Result<Arc<Self>> {
        let place = path.display().to_string();
        let stat = rustix::fs::fstat(&fd)
            .map_err(|errno| Error::io("cannot stat the folder", errno.into()).at(&place))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Error::new(Code::NotFound, "is no folder").at(place));
        }
        Ok(Arc::new(Self { fd, path: path.to_owned(), reads_inside: true }))
    }

    /// Whether nothing may be opened by path.
    pub(crate) fn reads_inside(&self) -> bool {
        self.reads_inside
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The path of a key, for messages and for what opens by path.
    pub(crate) fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() { self.path.clone() } else { self.path.join(key) }
    }

    /// Opens a folder (empty: the root) that must lie inside. `LOOP` for links that lead out.
    pub(crate) fn beneath(&self, folder: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let folder = if folder.is_empty() { "." } else { folder };
        let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..RACES_MAX {
            match rustix::fs::openat2(&self.fd, folder, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::NOSYS | Errno::PERM) => return self.walk(folder, flags),
                Err(Errno::XDEV) => return Err(Errno::LOOP),
                result => return result,
            }
        }
        Err(Errno::AGAIN)
    }

    /// The same name by name, without links.
    fn walk(&self, folder: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = rustix::fs::openat(&self.fd, ".", step, Mode::empty())?;
        for name in folder.split('/') {
            at = match rustix::fs::openat(&at, name, step, Mode::empty()) {
                Err(Errno::NOTDIR) if is_link(&at, name) => return Err(Errno::LOOP),
                result => result?,
            };
        }
        rustix::fs::openat(&at, ".", flags, Mode::empty())
    }

    /// The folder of a key, for a change in it, and the key's last name.
    pub(crate) fn parent<'k>(&self, key: &'k str) -> Result<(OwnedFd, &'k str), Errno> {
        let (folder, name) = split(key);
        Ok((self.beneath(folder, OFlags::PATH)?, name))
    }

    /// What has this key, the last name not followed; `None` where nothing has.
    pub(crate) fn stat(&self, key: &str) -> Result<Option<Stat>, Errno> {
        let look = || {
            let (folder, name) = self.parent(key)?;
            rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        };
        match again(look, |errno| is_stale(*errno)) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Opens a regular file for reading, behind links too. `None` where there is none; `INVAL` for what is no file.
    pub(crate) fn open_file(&self, key: &str) -> Result<Option<(std::fs::File, Stat)>, Errno> {
        let open = || match self.reads_inside {
            true => self.open_file_inside(key),
            false => self.open_file_anywhere(key),
        };
        again(open, |errno| is_stale(*errno))
    }

    fn open_file_anywhere(&self, key: &str) -> Result<Option<(std::fs::File, Stat)>, Errno> {
        // Opening a pipe would wait for a writer, opening some devices has effects: look first, believe the descriptor.
        match rustix::fs::statat(&self.fd, key, AtFlags::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Err(errno) => return Err(errno),
            Ok(stat) if !is_regular(&stat) => return Err(Errno::INVAL),
            Ok(_) => {}
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = match rustix::fs::openat(&self.fd, key, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            result => result?,
        };
        let stat = rustix::fs::fstat(&fd)?;
        if !is_regular(&stat) {
            return Err(Errno::INVAL);
        }
        Ok(Some((std::fs::File::from(fd), stat)))
    }

    /// The same, where no link leads to it. `LOOP` for one that does.
    fn open_file_inside(&self, key: &str) -> Result<Option<(std::fs::File, Stat)>, Errno> {
        let (folder, name) = match self.parent(key) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            parent => parent?,
        };
        let look = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match rustix::fs::openat(&folder, name, look, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            found => found?,
        };
        match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::INVAL),
        }
        // The name may be another file's by now: the one that was looked at is opened.
        let path = format!("/proc/self/fd/{}", found.as_fd().as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Some((std::fs::File::from(fd), stat)))
    }

    /// An I/O error of this store, with the code that its errno calls for.
    pub(crate) fn failed(&self, what: &str, key: &str, errno: Errno) -> Error {
        let cause = std::io::Error::from(errno);
        let error = match errno {
            Errno::LOOP => Error::new(Code::UnsafePath, format!("{what}: a link leads out"))
                .with_source(cause)
                .hint("below the store's folder, links may only be read through"),
            Errno::INVAL => {
                Error::new(Code::Unsupported, format!("{what}: no regular file, or not possible"))
                    .with_source(cause)
            }
            Errno::ROFS => Error::new(Code::PermissionDenied, what).with_source(cause),
            Errno::NOSPC | Errno::DQUOT => {
                let what = format!("{what}: no space left, {}", self.free_text());
                Error::new(Code::NoSpace, what).with_source(cause)
            }
            Errno::FBIG => self.too_large(what.to_owned()).with_source(cause),
            _ => Error::io(what, cause),
        };
        error.at(self.path(key).display())
    }

    /// A file that would be larger than a file may be: most often than the process's own limit.
    pub(crate) fn too_large(&self, what: String) -> Error {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        match limit {
            Some(limit) => {
                let what = format!("{what}, files of this process may have {limit} at the most");
                Error::new(Code::NoSpace, what).hint("raise the limit of file sizes (`ulimit -f`)")
            }
            None => {
                let what = format!("{what}, its file system has no files that large");
                Error::new(Code::NoSpace, what)
            }
        }
    }

    /// How much room there is, in words.
    pub(crate) fn free_text(&self) -> String {
        match rustix::fs::fstatvfs(&self.fd) {
            Ok(free) => {
                let bytes = free.f_bavail.saturating_mul(free.f_frsize);
                match free.f_favail {
                    // CephFS and others that do not count them.
                    u64::MAX => format!("{bytes} bytes are free in its file system"),
                    files => format!("{bytes} bytes and {files} files are free in its file system"),
                }
            }
            Err(_) => "how much is free is not known".to_owned(),
        }
    }
}

pub(crate) fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn is_link(folder: &OwnedFd, name: &str) -> bool {
    let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_never_lead_a_change_out_of_the_store() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir_all(inside.path().join("real/deep")).unwrap();
        symlink(outside.path(), inside.path().join("out")).unwrap();
        symlink("../../..", inside.path().join("real/up")).unwrap();
        symlink("real", inside.path().join("in")).unwrap();
        let root = Root::open(inside.path()).unwrap();
        for bad in ["out", "out/x", "real/up", "real/up/x"] {
            let by_kernel = root.beneath(bad, OFlags::PATH).unwrap_err();
            assert_eq!(by_kernel, Errno::LOOP, "{bad}");
            assert_eq!(root.walk(bad, OFlags::PATH).unwrap_err(), Errno::LOOP, "{bad}");
        }
        root.beneath("in/deep", OFlags::PATH).unwrap();
        assert_eq!(root.walk("in/deep", OFlags::PATH).unwrap_err(), Errno::LOOP);
        root.walk("real/deep", OFlags::RDONLY).unwrap();
        root.walk(".", OFlags::RDONLY).unwrap();
        assert_eq!(root.walk("none", OFlags::RDONLY).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn of_a_folder_that_was_handed_over_nothing_outside_is_read() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(inside.path().join("deep")).unwrap();
        std::fs::write(inside.path().join("deep/own"), "own").unwrap();
        std::fs::write(outside.path().join("secret"), "secret").unwrap();
        symlink(outside.path(), inside.path().join("out")).unwrap();
        symlink(outside.path().join("secret"), inside.path().join("deep/link")).unwrap();
        symlink("own", inside.path().join("deep/near")).unwrap();
        let fd = std::fs::File::open(inside.path()).unwrap();
        let root = Root::handed_over(fd.into(), Path::new("a job's folder")).unwrap();
        let (mut file, _) = root.open_file("deep/own").unwrap().unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text).unwrap();
        assert_eq!(text, "own");
        for bad in ["out/secret", "deep/link", "deep/near"] {
            assert_eq!(root.open_file(bad).err(), Some(Errno::LOOP), "{bad}");
        }
        assert_eq!(root.open_file("deep").err(), Some(Errno::INVAL));
        assert!(root.open_file("deep/none").unwrap().is_none());
        assert!(root.open_file("none/none").unwrap().is_none());
        let ours = Root::open(inside.path()).unwrap();
        assert!(
            ours.open_file("deep/link").unwrap().is_some(),
            "a folder of one's own may have links"
        );
        let file = std::fs::File::open(inside.path().join("deep/own")).unwrap();
        let refused = Root::handed_over(file.into(), Path::new("x")).err().unwrap();
        assert_eq!(refused.code(), Code::NotFound);
    }

    #[test]
    fn pipes_are_no_objects_and_do_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        rustix::fs::mkfifoat(root.fd(), "pipe", Mode::RUSR).unwrap();
        assert_eq!(root.open_file("pipe").unwrap_err(), Errno::INVAL);
        assert_eq!(root.open_file(".").unwrap_err(), Errno::INVAL);
        assert!(root.open_file("none").unwrap().is_none());
        assert!(root.open_file("pipe/x").unwrap().is_none());
    }
}
