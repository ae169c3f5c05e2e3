//! A folder of files, here or in a bucket: what readers of models and checkpoints look into.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_error::{Code, Error, Result};

use crate::open_file::OpenFile;
use crate::remote::RemoteFolder;
use crate::text::shown;

/// See the module. Of a remote one the path is its URL: for messages, nothing is opened by it.
#[derive(Clone)]
pub struct Folder {
    path: PathBuf,
    remote: Option<Arc<dyn RemoteFolder>>,
}

impl Folder {
    /// One that is not on this machine; `url` is what messages call it.
    pub fn remote(url: impl Into<PathBuf>, folder: Arc<dyn RemoteFolder>) -> Self {
        Self { path: url.into(), remote: Some(folder) }
    }

    /// Its path, or its URL.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is not on this machine.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// A folder in it, be it there or not.
    pub fn folder(&self, name: &str) -> Self {
        let remote = self.remote.as_ref().map(|remote| remote.folder(name));
        Self { path: self.path.join(name), remote }
    }

    /// Opens a file in it.
    pub fn open(&self, name: &str) -> Result<OpenFile> {
        let path = self.path.join(name);
        match &self.remote {
            None => OpenFile::open(&path),
            Some(remote) => Ok(OpenFile::remote(&path, remote.open(name)?)),
        }
    }

    /// The names in it, of files and folders, in no order; those that are no text are left out. More than `limit` are
    /// `unsupported`.
    pub fn names(&self, limit: usize) -> Result<Vec<String>> {
        let Some(remote) = &self.remote else { return self.local_names(limit) };
        Ok(remote.names(limit)?.into_iter().map(|(name, _)| name).collect())
    }

    fn local_names(&self, limit: usize) -> Result<Vec<String>> {
        let failed = |error| Error::io("cannot list folder", error).at(shown(&self.path));
        let mut names = Vec::new();
        for (count, entry) in std::fs::read_dir(&self.path).map_err(failed)?.enumerate() {
            if count >= limit {
                let what = format!("the folder holds more than {limit} names");
                return Err(Error::new(Code::Unsupported, what).at(shown(&self.path)));
            }
            let entry = entry.map_err(failed)?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }

    /// Bytes of some of its files, in their order; `None` of one that is not there. In a bucket one listing tells all.
    /// Errors: of that listing.
    pub fn sizes(&self, names: &[&str]) -> Result<Vec<Option<u64>>> {
        match &self.remote {
            None => {
                let size = |name: &&str| std::fs::metadata(self.path.join(name)).ok();
                Ok(names.iter().map(|name| size(name).map(|file| file.len())).collect())
            }
            Some(_) if names.is_empty() => Ok(Vec::new()),
            Some(remote) => {
                let sizes = remote.sizes()?;
                Ok(names.iter().map(|name| sizes.get(*name).copied()).collect())
            }
        }
    }
}

impl std::fmt::Debug for Folder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Folder").field(&self.path).finish()
    }
}

impl From<&Path> for Folder {
    fn from(path: &Path) -> Self {
        Self { path: path.to_owned(), remote: None }
    }
}

impl From<&PathBuf> for Folder {
    fn from(path: &PathBuf) -> Self {
        path.as_path().into()
    }
}

impl From<&Folder> for Folder {
    fn from(folder: &Folder) -> Self {
        folder.clone()
    }
}
