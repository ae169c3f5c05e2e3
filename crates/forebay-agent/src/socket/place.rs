//! The socket's file. One agent a path: a lock on `SOCKET.lock` says who has it, and ends with its process however that
//! ends, so that the file a killed agent left is known for what it is and replaced.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// A bound socket; its file goes when this is dropped.
pub(super) struct Place {
    path: PathBuf,
    /// Closing it unlocks.
    _lock: File,
}

/// Binds. The socket may be connected to by its owner alone, or by everybody where `open`: then who may use it is
/// decided by who they are.
///
/// Errors: `already_exists` where another agent has it, or what is there is no socket; I/O.
pub(super) fn bind(path: &Path, open: bool) -> Result<(UnixListener, Place)> {
    let failed = |what: &'static str| move |error| Error::io(what, error).at(path.display());
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        let mode = if open { 0o755 } else { 0o700 };
        let made = DirBuilder::new().recursive(true).mode(mode).create(folder);
        made.map_err(failed("cannot make the folder of the socket"))?;
    }
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFLAGS_NOFOLLOW)
        .open(&lock_path)
        .map_err(failed("cannot open the lock of the socket"))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let what = "another agent listens on this socket";
            let hint = "`forebay top` shows what it does; agent.socket gives this one another";
            return Err(Error::new(Code::AlreadyExists, what).at(path.display()).hint(hint));
        }
        Err(errno) => return Err(failed("cannot lock the socket")(errno.into())),
    }
    match std::fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(failed("cannot remove the socket left there"))?;
        }
        Ok(_) => {
            let what = "what is there is no socket, and is left alone";
            return Err(Error::new(Code::AlreadyExists, what).at(path.display()));
        }
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed("cannot listen on the socket"))?;
    let place = Place { path: path.to_owned(), _lock: lock };
    let mode = if open { 0o666 } else { 0o600 };
    std::fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(failed("cannot set the mode of the socket"))?;
    Ok((listener, place))
}

/// O_NOFOLLOW: nobody makes this create a file elsewhere.
const OFLAGS_NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();

impl Drop for Place {
    fn drop(&mut self) {
        // The lock file stays: removing it could take it from under another agent that has just opened it.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "the socket's file stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn one_agent_a_path_and_leftovers_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/agent.sock");
        let (_listener, place) = bind(&path, false).unwrap();
        let second = bind(&path, false).err().unwrap();
        assert_eq!(second.code(), Code::AlreadyExists);
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(place);
        assert!(!path.exists());
        // As a killed agent leaves it: a file that nobody listens on, and no lock.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists() && UnixStream::connect(&path).is_err());
        let (_listener, _place) = bind(&path, true).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn what_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        std::fs::write(&path, "mine").unwrap();
        assert_eq!(bind(&path, false).err().unwrap().code(), Code::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
