//! Places by path or URL, and folders in a store as the readers of formats see them.
//!
//! A local path stays a path: what is opened by it is a file of this machine, with all that the engine can do with one
//! (page-cache DMA, direct reads). Buckets are prefixes in a [`Store`]; a URL whose last name is that of a file
//! (`model.safetensors`, an index, a file of torch, `.metadata`) means that object, any other a folder.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_format::Folder;
use forebay_format::remote::{RemoteFolder, RemoteObject};
use forebay_store::{Store, StoreSettings, local_path, shared_store};

use crate::commit::METADATA;

/// The most objects below a folder that are listed for their sizes.
const SIZES_MAX: usize = 1 << 22;

/// How names of files end. Anything else at the end of a URL is a folder.
const FILE_ENDS: [&str; 6] = [".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"];

/// Where something is.
#[derive(Clone, Debug)]
pub enum Place {
    /// A path of this machine.
    Local(PathBuf),
    /// In a bucket.
    Remote {
        /// The folder.
        folder: Folder,
        /// The object in it; `None` for the folder itself.
        name: Option<String>,
    },
}

impl Place {
    /// Reads a path or URL: see [`forebay_store::open_store`]. Nothing is sent yet; a bucket that this process has open
    /// already is used again.
    ///
    /// Errors: `usage` for other URLs and settings that do not fit; `unsafe_path`.
    pub fn parse(place: &Path, settings: &StoreSettings) -> Result<Self> {
        let Some(text) = place.to_str() else { return Ok(Place::Local(place.to_owned())) };
        if let Some(path) = local_path(text)? {
            return Ok(Place::Local(path));
        }
        let url = text.trim_end_matches('/');
        let (url, name) = match url.rsplit_once('/') {
            Some((above, name)) if is_file(name) && !above.ends_with('/') => (above, Some(name)),
            _ => (url, None),
        };
        let folder = folder_in(shared_store(url, settings)?, "");
        Ok(Place::Remote { folder, name: name.map(str::to_owned) })
    }

    /// The folder that may be a checkpoint; `None` where the place is one file of a model.
    pub(super) fn folder(&self) -> Result<Option<Folder>> {
        match self {
            Place::Local(path) => {
                let named = path.file_name().is_some_and(|name| name == METADATA);
                let path = if named { path.parent().unwrap_or(path) } else { path };
                Ok(path.is_dir().then(|| path.into()))
            }
            Place::Remote { folder, name } => match name.as_deref() {
                None | Some(METADATA) => Ok(Some(folder.clone())),
                Some(_) => Ok(None),
            },
        }
    }

    /// The folder of a checkpoint that it names: itself, or where its `.metadata` is. Errors: `usage` for one file of a
    /// model.
    pub fn checkpoint(&self) -> Result<Folder> {
        match self {
            Place::Local(path) => {
                let named = path.file_name().is_some_and(|name| name == METADATA);
                Ok((if named { path.parent().unwrap_or(path) } else { path }).into())
            }
            Place::Remote { .. } => self.folder()?.ok_or_else(|| {
                let what = "is one file, not the folder of a checkpoint";
                Error::new(Code::Usage, what).at(self.path().display())
            }),
        }
    }

    /// Its path or URL.
    pub fn path(&self) -> PathBuf {
        match self {
            Place::Local(path) => path.clone(),
            Place::Remote { folder, name: None } => folder.path().to_owned(),
            Place::Remote { folder, name: Some(name) } => folder.path().join(name),
        }
    }
}

impl From<&Path> for Place {
    fn from(path: &Path) -> Self {
        Place::Local(path.to_owned())
    }
}

impl From<&PathBuf> for Place {
    fn from(path: &PathBuf) -> Self {
        Place::Local(path.clone())
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Self {
        place.clone()
    }
}

impl From<&Folder> for Place {
    fn from(folder: &Folder) -> Self {
        match folder.is_remote() {
            true => Place::Remote { folder: folder.clone(), name: None },
            false => Place::Local(folder.path().to_owned()),
        }
    }
}

fn is_file(name: &str) -> bool {
    name == METADATA || FILE_ENDS.iter().any(|end| name.ends_with(end))
}

/// A folder in a store: what is below `prefix`, which is empty or ends in `/`.
pub fn folder_in(store: Arc<dyn Store>, prefix: &str) -> Folder {
    let url = format!("{}/{prefix}", store.name());
    let process = std::process::id();
    let folder = InStore { store, prefix: prefix.to_owned(), process };
    Folder::remote(url.trim_end_matches('/'), Arc::new(folder))
}

struct InStore {
    store: Arc<dyn Store>,
    prefix: String,
    process: u32,
}

impl RemoteFolder for InStore {
    fn names(&self, limit: usize) -> Result<Vec<(String, bool)>> {
        check_process(self.process)?;
        let names = self.store.names(&self.prefix, limit)?;
        // A prefix of nothing is no folder.
        if names.is_empty() {
            let place = format!("{}/{}", self.store.name(), self.prefix);
            let error = Error::new(Code::NotFound, "no object is there").at(place);
            return Err(error.hint("a file is meant where its name ends like one: .safetensors"));
        }
        Ok(names)
    }

    fn sizes(&self) -> Result<HashMap<String, u64>> {
        check_process(self.process)?;
        let listed = self.store.list(&self.prefix, SIZES_MAX)?.into_iter();
        let own = listed.filter_map(|object| {
            let name = object.key.strip_prefix(&self.prefix)?;
            (!name.contains('/')).then(|| (name.to_owned(), object.bytes))
        });
        Ok(own.collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn RemoteObject>> {
        check_process(self.process)?;
        let source = self.store.open_data(&format!("{}{name}", self.prefix))?;
        Ok(Arc::new(Object { source, process: self.process }))
    }

    fn folder(&self, name: &str) -> Arc<dyn RemoteFolder> {
        let (store, prefix) = (self.store.clone(), format!("{}{name}/", self.prefix));
        Arc::new(InStore { store, prefix, process: self.process })
    }
}

/// An object of a store.
struct Object {
    source: Arc<dyn RangeSource>,
    process: u32,
}

impl RemoteObject for Object {
    fn size(&self) -> u64 {
        self.source.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        check_process(self.process).map_err(io::Error::other)?;
        self.source.read_at(into, offset)
    }

    fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        check_process(self.process).map_err(io::Error::other)?;
        self.source.read_many(parts)
    }

    fn check_unchanged(&self) -> Result<()> {
        check_process(self.process)?;
        self.source.check_unchanged()
    }
}

/// In a child of a fork nobody would answer: the threads that drive connections are its parent's.
fn check_process(process: u32) -> Result<()> {
    if process == std::process::id() {
        return Ok(());
    }
    let what = "an object of a bucket was opened before a fork and belongs to the parent";
    Err(Error::new(Code::Forked, what).hint("open it again in this process"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_folders_or_files() {
        let settings = StoreSettings::default();
        let place = |text: &str| Place::parse(Path::new(text), &settings).unwrap();
        for (text, folder, file) in [
            ("memory:x/a/model.safetensors", "memory:x/a", Some("model.safetensors")),
            ("memory:x/a/step-7/", "memory:x/a/step-7", None),
            ("memory:x/a/step-7/.metadata", "memory:x/a/step-7", Some(".metadata")),
            ("memory:x", "memory:x", None),
        ] {
            let Place::Remote { folder: found, name } = place(text) else { panic!("{text}") };
            assert_eq!((found.path(), name.as_deref()), (Path::new(folder), file), "{text}");
        }
        assert!(matches!(place("/a/b"), Place::Local(path) if path == Path::new("/a/b")));
        assert!(matches!(place("file:///a/b"), Place::Local(path) if path == Path::new("/a/b")));
        let step = place("memory:x/a/step-7/.metadata").checkpoint().unwrap();
        assert_eq!(step.path(), Path::new("memory:x/a/step-7"));
        assert!(place("memory:x/m.safetensors").checkpoint().is_err());
    }

    #[test]
    fn a_prefix_of_nothing_is_not_found() {
        let folder = folder_in(Arc::new(forebay_store::MemoryStore::new()), "a/");
        assert_eq!(folder.names(10).unwrap_err().code(), Code::NotFound);
        assert_eq!(folder.open("b").unwrap_err().code(), Code::NotFound);
    }
}
