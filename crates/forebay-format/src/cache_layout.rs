//! The folder of one model in a Hugging Face cache.
//!
//! ```text
//! models--ORG--NAME/
//!   refs/main            the name of a snapshot: a commit in hexadecimal digits
//!   snapshots/REVISION/  links to ../../blobs/HASH, under the names of the files
//!   blobs/HASH
//! ```
//!
//! A path to the folder itself means the snapshot that `refs/main` names, as it does for the library that wrote it;
//! without that file, the only snapshot there is.

use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};

use crate::text::shown;

/// `refs/main` holds a commit: 40 digits of SHA-1, 64 of SHA-256. A longer file is none.
const REVISION_BYTES_MAX: u64 = 128;

/// The snapshot that a cache folder stands for; `None` for a folder that is none.
///
/// Errors: `unknown_format` when nothing says which of several snapshots is meant.
pub(crate) fn snapshot_of(folder: &Path) -> Result<Option<PathBuf>> {
    let snapshots = folder.join("snapshots");
    if !snapshots.is_dir() || !folder.join("blobs").is_dir() {
        return Ok(None);
    }
    if let Some(revision) = main_revision(&folder.join("refs").join("main")) {
        let snapshot = snapshots.join(revision);
        if snapshot.is_dir() {
            return Ok(Some(snapshot));
        }
    }
    let failed = |error| Error::io("cannot list folder", error).at(shown(&snapshots));
    let mut only = None;
    for entry in std::fs::read_dir(&snapshots).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && only.replace(path).is_some() {
            let what = "several snapshots, and refs/main names none of them";
            return Err(Error::new(Code::UnknownFormat, what)
                .at(shown(folder))
                .hint("name the folder in snapshots/ that you mean"));
        }
    }
    Ok(only)
}

/// The revision in a reference file, if it is one: digits only, so that it cannot lead elsewhere.
fn main_revision(file: &Path) -> Option<String> {
    let about = std::fs::metadata(file).ok()?;
    if !about.is_file() || about.len() > REVISION_BYTES_MAX {
        return None;
    }
    let text = std::fs::read_to_string(file).ok()?;
    let revision = text.trim();
    let digits = !revision.is_empty() && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| revision.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_main_snapshot_is_meant_and_nothing_outside() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        assert_eq!(snapshot_of(at).unwrap(), None);
        for name in ["blobs", "refs", "snapshots/0123abcd"] {
            fs::create_dir_all(at.join(name)).unwrap();
        }
        assert_eq!(snapshot_of(at).unwrap(), Some(at.join("snapshots/0123abcd")));
        fs::create_dir_all(at.join("snapshots/ffff")).unwrap();
        assert_eq!(snapshot_of(at).unwrap_err().code(), Code::UnknownFormat);
        fs::write(at.join("refs/main"), "ffff\n").unwrap();
        assert_eq!(snapshot_of(at).unwrap(), Some(at.join("snapshots/ffff")));
        fs::write(at.join("refs/main"), "../..").unwrap();
        assert_eq!(snapshot_of(at).unwrap_err().code(), Code::UnknownFormat);
    }
}
