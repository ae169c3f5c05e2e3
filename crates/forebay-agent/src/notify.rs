//! Tells systemd how the service stands (sd_notify): a datagram to the socket that `NOTIFY_SOCKET` names.
//!
//! It also keeps descriptors for the service (`FDSTORE`): what was handed over to one process of the service is given
//! to the next one, after a crash too, as descriptors from 3 on that `LISTEN_FDNAMES` names.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The first descriptor that a service manager passes.
const FIRST_FD: usize = 3;
/// Most that are looked at.
const FDS_MAX: usize = 256;

/// Sends lines as in `READY=1`; does nothing where nobody asked. A service manager that does not listen is no reason to
/// fail.
pub fn notify(state: &str) {
    let Some(to) = std::env::var_os("NOTIFY_SOCKET").filter(|to| !to.is_empty()) else { return };
    if let Err(error) = send(&to, state, None) {
        tracing::debug!(%error, "the service manager was not told");
    }
}

/// Has the service manager keep a folder under a name, which has no colon and no control character.
pub(crate) fn keep(name: &str, folder: BorrowedFd<'_>) {
    let Some(to) = std::env::var_os("NOTIFY_SOCKET").filter(|to| !to.is_empty()) else { return };
    if let Err(error) = send(&to, &format!("FDSTORE=1\nFDNAME={name}"), Some(folder)) {
        tracing::warn!(%error, name, "the service manager does not keep a folder");
    }
}

/// Has it forget one.
pub(crate) fn forget(name: &str) {
    notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
}

/// The folders that it has kept for this process, with their names.
pub(crate) fn kept() -> Vec<(String, OwnedFd)> {
    let variable = |name| std::env::var(name).ok();
    let is_ours = variable("LISTEN_PID") == Some(std::process::id().to_string());
    let count = variable("LISTEN_FDS").and_then(|count| count.parse::<usize>().ok());
    let (true, Some(count)) = (is_ours, count) else { return Vec::new() };
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').take(count.min(FDS_MAX)).enumerate();
    let open = |(number, name): (usize, &str)| {
        // Through /proc, which gives a descriptor that is this process's own, and no other kind of thing.
        let path = format!("/proc/self/fd/{}", FIRST_FD + number);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(folder) => Some((name.to_owned(), folder)),
            Err(error) => {
                tracing::warn!(%error, name, "what the service manager has kept is no folder");
                None
            }
        }
    };
    names.filter_map(open).collect()
}

fn send(to: &OsStr, state: &str, fd: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    let address = match to.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(to)?,
    };
    socket.connect_addr(&address)?;
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(std::io::ErrorKind::OutOfMemory.into());
    }
    let slices = [IoSlice::new(state.as_bytes())];
    sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_told_by_a_path_or_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("forebay-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let by_name = UnixDatagram::bind_addr(&address).unwrap();
        let named = format!("@{name}");
        for (socket, to) in [(by_path, path.as_os_str()), (by_name, OsStr::new(&named))] {
            send(to, "READY=1", None).unwrap();
            let mut bytes = [0; 64];
            let got = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..got], b"READY=1");
        }
        assert!(send(folder.path().join("none").as_os_str(), "READY=1", None).is_err());
    }
}
