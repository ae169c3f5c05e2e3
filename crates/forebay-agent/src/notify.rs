//! Tells systemd how the service stands (sd_notify): a datagram to the socket that `NOTIFY_SOCKET` names.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends lines as in `READY=1`; does nothing where nobody asked. A service manager that does not listen is no reason to
/// fail.
pub fn notify(state: &str) {
    let Some(to) = std::env::var_os("NOTIFY_SOCKET").filter(|to| !to.is_empty()) else { return };
    if let Err(error) = send(&to, state) {
        tracing::debug!(%error, "the service manager was not told");
    }
}

fn send(to: &OsStr, state: &str) -> std::io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    let address = match to.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(to)?,
    };
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
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
            send(to, "READY=1").unwrap();
            let mut bytes = [0; 64];
            let got = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..got], b"READY=1");
        }
        assert!(send(folder.path().join("none").as_os_str(), "READY=1").is_err());
    }
}
