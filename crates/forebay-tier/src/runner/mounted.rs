//! Whether the file system on which a folder was found is mounted still.
//!
//! A tier's folder is made where the one above it is there. Where its file system is unmounted while steps are moved,
//! that would make it anew on whatever lies beneath: the system's own disk, as a rule, which would fill up with steps
//! that nobody finds again. So it is remembered where the file system was mounted, and nothing is opened or made while
//! nothing is mounted there.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};

/// Where the file system of a folder is mounted; `None` for the root's, and where it cannot be told.
pub(super) fn mount_of(folder: &Path) -> Option<PathBuf> {
    let mut at = folder.canonicalize().ok()?;
    let device = device_of(&at)?;
    while let Some(above) = at.parent() {
        if device_of(above)? != device {
            return Some(at);
        }
        at = above.to_owned();
    }
    None
}

/// Errors: `not_found` where nothing is mounted there. What cannot be told is told by who opens it.
pub(super) fn check(mount: &Path) -> Result<()> {
    let is_lost = match std::fs::metadata(mount) {
        Ok(found) => mount.parent().and_then(device_of) == Some(found.dev()),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if !is_lost {
        return Ok(());
    }
    let what = "the file system of this tier is not mounted any more";
    let hint = "mount it again; if the folder is to be another one from now on, start anew";
    Err(Error::new(Code::NotFound, what).at(mount.display()).hint(hint))
}

fn device_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|found| found.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_told_from_a_folder() {
        // Where every Linux has one.
        assert_eq!(mount_of(Path::new("/proc/sys/kernel")).as_deref(), Some(Path::new("/proc")));
        check(Path::new("/proc")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("mnt");
        std::fs::create_dir(&below).unwrap();
        for lost in [below, folder.path().join("gone")] {
            let error = check(&lost).unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
            assert!(error.render().contains("mount it again"), "{}", error.render());
        }
        assert_eq!(mount_of(Path::new("/no/such")), None);
    }
}
