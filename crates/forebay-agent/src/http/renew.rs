//! Tokens and certificates that are replaced while the agent runs, as clusters and certificate authorities do: what is
//! in the files counts some seconds later, without a restart. Files that make no sense together (half of a pair was
//! written) change nothing: what counted goes on to count, and the log says why.

use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use forebay_error::Result;
use rustls::ServerConfig;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::Site;
use crate::settings::{Checked, Settings};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What tells that a file was replaced or written: device, inode, bytes, and when.
pub(crate) type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// What TLS is made with, now.
pub(super) struct Tls(RwLock<Arc<ServerConfig>>);

impl Tls {
    pub(super) fn new(config: Arc<ServerConfig>) -> Self {
        Self(RwLock::new(config))
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn renew(&self, config: Arc<ServerConfig>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
    }
}

/// The files of an agent, and how they were when they were read.
pub(crate) struct Files {
    settings: Settings,
    seen: Vec<Stamp>,
}

impl Files {
    /// To be made before they are read.
    pub(crate) fn new(settings: Settings) -> Self {
        let seen = stamps(&settings);
        Self { settings, seen }
    }

    /// What is in them, if that is something else than at the last look. Errors: those of reading and checking it.
    fn changed(&mut self) -> Result<Option<Checked>> {
        let now = stamps(&self.settings);
        if now == self.seen {
            return Ok(None);
        }
        self.seen = now;
        self.settings.check_http()
    }
}

fn stamps(settings: &Settings) -> Vec<Stamp> {
    let paths = [
        &settings.token_file,
        &settings.action_token_file,
        &settings.tls_certificate,
        &settings.tls_key,
        &settings.copies.peer.as_ref().map(|peer| peer.token_file.clone()),
    ];
    paths.map(|path| path.as_deref().and_then(stamp)).into()
}

/// How a file is now; `None` where there is none.
pub(crate) fn stamp(path: &std::path::Path) -> Stamp {
    let about = std::fs::metadata(path).ok()?;
    Some((about.dev(), about.ino(), about.size(), about.mtime(), about.mtime_nsec()))
}

/// Looks at the files until `end` changes.
pub(super) async fn watch(
    mut files: Files,
    site: Arc<Site>,
    tls: Option<Arc<Tls>>,
    mut end: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = end.changed() => return,
        }
        let look = tokio::task::spawn_blocking(move || (files.changed(), files)).await;
        let Ok((changed, same)) = look else {
            tracing::error!("tokens and certificates are not looked at any more");
            return;
        };
        files = same;
        match changed {
            Ok(None) => {}
            Ok(Some(checked)) => {
                if let (Some(tls), Some(config)) = (&tls, checked.tls) {
                    tls.renew(config);
                }
                site.access.set_peer(checked.peer);
                if site.access.renew(checked.read, checked.act) {
                    // Who had them may not be who has the new ones.
                    site.sessions.end_all();
                }
                tracing::info!("tokens and certificates were read anew");
            }
            Err(error) => {
                let error = error.render();
                tracing::error!(error, "tokens and certificates stay as they were");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_was_replaced_is_read_and_checked_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let write = |text: &str| {
            let new = folder.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
            std::fs::rename(new, &path).unwrap();
        };
        write("0123456789abcdef-one");
        let listen = Some("127.0.0.1:1".parse().unwrap());
        let token_file = Some(path.clone());
        let mut files = Files::new(Settings { listen, token_file, ..Settings::default() });
        assert!(files.changed().unwrap().is_none());
        write("0123456789abcdef-two");
        let read = files.changed().unwrap().unwrap().read.unwrap();
        assert!(read.is(b"0123456789abcdef-two"));
        assert!(files.changed().unwrap().is_none());
        write("short");
        assert!(files.changed().is_err());
        assert!(files.changed().unwrap().is_none(), "it is told once");
        std::fs::remove_file(&path).unwrap();
        assert!(files.changed().is_err());
        write("0123456789abcdef-one");
        assert!(files.changed().unwrap().is_some());
    }
}
