//! Tokens: read from files that nobody else can read, kept as hashes, compared in constant time, never shown.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_error::{Code, Error, Result};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The shortest token: 16 characters of hexadecimal are 64 bits, which nobody guesses through a network.
const TOKEN_BYTES_MIN: usize = 16;
/// And the longest.
const TOKEN_BYTES_MAX: usize = 1024;
/// What errors call the token of agents.
pub(crate) const PEER_TOKEN: &str = "the token of agents (agent.peer_token_file)";
/// Keys and chains of certificates are a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A token. Only its SHA-256 is kept: a comparison of hashes takes the same time for every guess, whatever its length.
#[derive(Clone)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    /// A token out of a file, without the white space around it.
    ///
    /// Errors: those of [`read_private`]; `usage` for a token that is short, long, or has characters that a header
    /// cannot have.
    pub(crate) fn read(path: &Path, what: &str) -> Result<Self> {
        read_token(path, what).map(|token| Self::of(token.as_bytes()))
    }

    fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Whether this is the token.
    pub(crate) fn is(&self, guess: &[u8]) -> bool {
        self.same(&Self::of(guess))
    }

    /// Whether both are one token.
    pub(crate) fn same(&self, other: &Self) -> bool {
        bool::from(self.0.ct_eq(&other.0))
    }
}

/// A token itself, for who shows it to others. Errors: those of [`Secret::read`].
pub(crate) fn read_token(path: &Path, what: &str) -> Result<String> {
    let bytes = read_private(path, what)?;
    let token = bytes.trim_ascii();
    let wrong = if token.len() < TOKEN_BYTES_MIN {
        Some(format!("{what} has {} characters, at least {TOKEN_BYTES_MIN}", token.len()))
    } else if token.len() > TOKEN_BYTES_MAX {
        Some(format!("{what} has {} characters, at most {TOKEN_BYTES_MAX}", token.len()))
    } else if !token.iter().all(u8::is_ascii_graphic) {
        Some(format!("{what} has characters that are not visible ASCII"))
    } else {
        None
    };
    match wrong {
        None => Ok(String::from_utf8_lossy(token).into_owned()),
        Some(wrong) => Err(Error::new(Code::Usage, wrong)
            .at(path.display())
            .hint("make one with: openssl rand -hex 32 > FILE; chmod 600 FILE")),
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Reads a small file that holds a secret.
///
/// A file of root's may be open to its group to read: so secrets are given to a service (mode 0640, group of the
/// service; a Kubernetes secret with fsGroup).
///
/// Errors: I/O; `permission_denied` where others than those may read or write it, or it is neither this user's nor
/// root's; `unsupported` for one of more than 1 MiB.
pub(crate) fn read_private(path: &Path, what: &str) -> Result<Vec<u8>> {
    let failed = |error| Error::io(format!("cannot read {what}"), error).at(path.display());
    let file = File::open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    let by_group = if about.uid() == 0 && own != 0 { 0o040 } else { 0 };
    if about.mode() & 0o077 & !by_group != 0 {
        let what = format!("{what} is open to others: mode {:03o}", about.mode() & 0o777);
        return Err(Error::new(Code::PermissionDenied, what)
            .at(path.display())
            .hint("chmod 600, and if others could read it, make a new one"));
    }
    if ![0, own].contains(&about.uid()) {
        let what = format!("{what} belongs to another user: {}", about.uid());
        return Err(Error::new(Code::PermissionDenied, what).at(path.display()));
    }
    read_bounded(file, what, path)
}

/// Reads a small file.
pub(crate) fn read_public(path: &Path, what: &str) -> Result<Vec<u8>> {
    let failed = |error| Error::io(format!("cannot read {what}"), error).at(path.display());
    read_bounded(File::open(path).map_err(failed)?, what, path)
}

fn read_bounded(file: File, what: &str, path: &Path) -> Result<Vec<u8>> {
    let failed = |error| Error::io(format!("cannot read {what}"), error).at(path.display());
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let what = format!("{what} has more than {FILE_BYTES_MAX} bytes");
        return Err(Error::new(Code::Unsupported, what).at(path.display()));
    }
    Ok(bytes)
}

/// 32 bytes that nobody can guess, in hexadecimal. Errors: `io` where the kernel has none.
pub(crate) fn random() -> Result<String> {
    let mut bytes = [0; 32];
    let failed = |error| Error::io("cannot get random bytes", error);
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(rest, flags) {
            Ok(got) => filled += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn tokens_come_from_files_that_nobody_else_reads() {
        let (_folder, path) = file(" 0123456789abcdef\n", 0o600);
        let secret = Secret::read(&path, "the token").unwrap();
        assert!(secret.is(b"0123456789abcdef"));
        assert!(!secret.is(b"0123456789abcdeg"));
        assert!(!secret.is(b""));
        assert_eq!(format!("{secret:?}"), "Secret");
        for mode in [0o640, 0o604, 0o620] {
            let (_folder, path) = file("0123456789abcdef", mode);
            let error = Secret::read(&path, "the token").unwrap_err();
            assert_eq!(error.code(), Code::PermissionDenied, "{mode:o}");
        }
    }

    #[test]
    fn a_token_that_can_be_guessed_or_not_be_sent_is_refused() {
        for text in ["", "short", "0123456789 abcdef", "0123456789\u{e9}abcdef"] {
            let (_folder, path) = file(text, 0o600);
            let error = Secret::read(&path, "the token").unwrap_err();
            assert_eq!(error.code(), Code::Usage, "{text}");
            assert!(!error.render().contains("0123456789"), "a token in a message");
        }
    }

    #[test]
    fn random_texts_differ() {
        let (one, two) = (random().unwrap(), random().unwrap());
        assert_eq!(one.len(), 64);
        assert_ne!(one, two);
    }
}
