//! An export must not replace what it reads.
//!
//! Paths lie: links, bind mounts and second names lead to one file. So the source is compared by its path without
//! links, and by device and inode: the folder with every folder above the destination, its files with the destination
//! itself.

use std::fs::{Metadata, metadata, read_dir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};

/// Most files of a source that are compared: more than a checkpoint of any job has.
const FILES_MAX: usize = 1 << 20;

/// Which file or folder something is, on this machine.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    fn of(found: &Metadata) -> Self {
        Self(found.dev(), found.ino())
    }

    /// Behind links; `None` where there is nothing.
    fn at(path: &Path) -> Option<Self> {
        metadata(path).ok().map(|found| Self::of(&found))
    }
}

/// Fails with `usage` where the destination `to` is the source `path`, a file of it, or lies in it.
pub(super) fn check(path: &Path, to: &Path) -> Result<()> {
    // What cannot be found is told by whoever opens it.
    let Ok(source) = path.canonicalize() else { return Ok(()) };
    let names_folder = source.extension().is_some_and(|end| end == "json")
        || source.file_name().is_some_and(|name| name == crate::commit::METADATA);
    let source = match (source.is_file() && names_folder, source.parent()) {
        (true, Some(folder)) => folder.to_owned(),
        _ => source,
    };
    let to_real = real(to);
    let own = Identity::at(&source);
    let inside = to_real.starts_with(&source)
        || own.is_some() && to_real.ancestors().any(|above| Identity::at(above) == own)
        || is_one_of(&source, to);
    if !inside {
        return Ok(());
    }
    let what = "the destination is the source of the export, or lies in it";
    let error = Error::new(Code::Usage, what).at(forebay_format::shown(to));
    Err(error.hint("choose a place outside of it"))
}

/// A path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let existing = absolute.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    match existing {
        Some((above, real)) => match absolute.strip_prefix(above) {
            Ok(rest) if rest.as_os_str().is_empty() => real,
            Ok(rest) => real.join(rest),
            Err(_) => absolute,
        },
        None => absolute,
    }
}

/// Whether the destination is a file of the source's folder under another name.
fn is_one_of(source: &Path, to: &Path) -> bool {
    let Some(wanted) = Identity::at(to) else { return false };
    let Ok(names) = read_dir(source) else { return false };
    names.take(FILES_MAX).flatten().any(|entry| Identity::at(&entry.path()) == Some(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_refused_under_each_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let step = at("root/step-1");
        std::fs::create_dir_all(&step).unwrap();
        std::fs::create_dir(at("other")).unwrap();
        for file in ["root/step-1/.metadata", "root/step-1/a.distcp", "m.pt"] {
            std::fs::write(at(file), b"x").unwrap();
        }
        std::os::unix::fs::symlink(&step, at("link")).unwrap();
        std::fs::hard_link(at("root/step-1/a.distcp"), at("second")).unwrap();
        std::os::unix::fs::symlink(at("m.pt"), at("m-link")).unwrap();
        let bad = [
            ("root/step-1", "root/step-1"),
            ("root/step-1", "root/step-1/a.distcp"),
            ("root/step-1", "root/step-1/.metadata"),
            ("root/step-1", "root/step-1/new/deep"),
            ("root/step-1/.metadata", "root/step-1/a.distcp"),
            ("root/step-1", "link/a.distcp"),
            ("link", "root/step-1/x"),
            ("root/step-1", "other/../root/step-1"),
            ("root/step-1", "second"),
            ("m.pt", "m.pt"),
            ("m-link", "m.pt"),
            ("m.pt", "m-link"),
        ];
        for (path, to) in bad {
            let code = check(&at(path), &at(to)).map_err(|error| error.code());
            assert_eq!(code, Err(Code::Usage), "{path} to {to}");
        }
        let good = [("root/step-1", "root"), ("root/step-1", "other"), ("m.pt", "other/new.pt")];
        for (path, to) in good.into_iter().chain([("m.pt", "n.pt"), ("missing", "missing")]) {
            assert!(check(&at(path), &at(to)).is_ok(), "{path} to {to}");
        }
    }
}
