//! The root under which `/proc` and `/sys` are read: `/`, or a captured tree.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most that is read of one file of `/proc` or `/sys`. A node with 20,000 mounts of 200 bytes
/// needs 4 MB.
const TEXT_LEN_MAX: u64 = 16 << 20;

/// Where `proc/` and `sys/` lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Root {
    /// This machine.
    pub fn live() -> Self {
        Self(PathBuf::from("/"))
    }

    /// A captured tree.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The place of `relative` (with or without a leading slash) below the root.
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        let relative = relative.as_ref();
        self.0.join(relative.strip_prefix("/").unwrap_or(relative))
    }

    /// The text of a file without the white space at its ends; `None` when it cannot be read.
    pub fn read(&self, relative: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        let file = File::open(self.path(relative)).ok()?;
        file.take(TEXT_LEN_MAX).read_to_end(&mut bytes).ok()?;
        // Mount points are bytes, not always UTF-8; one odd name must not hide all others.
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file that holds one number.
    pub fn read_number<N: std::str::FromStr>(&self, relative: impl AsRef<Path>) -> Option<N> {
        self.read(relative)?.parse().ok()
    }
}

impl Default for Root {
    fn default() -> Self {
        Self::live()
    }
}
