//! Tells systemd how the service stands (sd_notify): a datagram to the socket that `NOTIFY_SOCKET` names.
//!
//! It also keeps descriptors for the service (`FDSTORE`): what was handed over to one process of the service is given
//! to the next one, after a crash too, as descriptors from 3 on that `LISTEN_FDNAMES` names.
//!
//! **unsafe**: takes ownership of descriptors that are known by their numbers alone.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

use crate::socket::send_with;

/// The first descriptor that a service manager passes.
const FIRST_FD: RawFd = 3;
/// Most that are looked at.
const FDS_MAX: usize = 256;

/// For a line to be taken.
const SEND_TIME: Duration = Duration::from_secs(5);

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

/// What it has kept for this process, with the names; from now on closed when a program is started, and when dropped.
/// The first call gets them, as early as it can be: until then whatever is started here would have them too.
pub(crate) fn kept() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let variable = |name| std::env::var(name).ok();
    let is_ours = variable("LISTEN_PID") == Some(std::process::id().to_string());
    let count = variable("LISTEN_FDS").and_then(|count| count.parse::<usize>().ok());
    let (true, Some(count)) = (is_ours, count) else { return Vec::new() };
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    // Those without a name are closed too.
    let all = (FIRST_FD..).take(count.min(FDS_MAX)).filter_map(|number| {
        let name = names.next();
        match take(number) {
            Ok(fd) => name.map(|name| (name.to_owned(), fd)),
            Err(error) => {
                tracing::warn!(%error, number, "the service manager has passed no descriptor");
                None
            }
        }
    });
    all.collect()
}

/// Takes a descriptor that was passed to this process.
fn take(number: RawFd) -> std::io::Result<OwnedFd> {
    // SAFETY: it is borrowed for this call alone, which fails for a number that is not open.
    let flags = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) })?;
    // SAFETY: it is open, and nobody else here owns it: the service manager has passed it to this very process, which
    // takes each number once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(fd.as_fd(), flags | FdFlags::CLOEXEC)?;
    Ok(fd)
}

fn send(to: &OsStr, state: &str, fd: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    let address = match to.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(to)?,
    };
    socket.connect_addr(&address)?;
    // One that does not listen any more must not hold anything up.
    socket.set_write_timeout(Some(SEND_TIME))?;
    send_with(&socket, state.as_bytes(), fd.as_slice())?;
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

    #[test]
    fn what_was_passed_is_owned_and_not_passed_on() {
        use rustix::fd::IntoRawFd;
        let folder = tempfile::tempdir().unwrap();
        let open: OwnedFd = std::fs::File::open(folder.path()).unwrap().into();
        fcntl_setfd(&open, FdFlags::empty()).unwrap();
        let number = open.into_raw_fd();
        let fd = take(number).unwrap();
        assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
        // Far above what is open.
        assert!(take(1 << 20).is_err());
    }
}
