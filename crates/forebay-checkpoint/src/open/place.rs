//! Places by path or URL, and folders in a store as the readers of formats see them.
//!
//! A local path stays a path: what is opened by it is a file of this machine, with all that the engine can do with one
//! (page-cache DMA, direct reads). Buckets are prefixes in a [`Store`]; a URL whose last name is like that of a file
//! (`model.safetensors`, an index, a file of torch, `.metadata`) means that object, and where there is none, or where a
//! checkpoint is asked for, the folder of that name. A slash at its end says that a folder is meant, as does any name
//! of another kind.

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

/// The most objects of a folder that are listed for their sizes.
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
        let (url, name) = match text.rsplit_once('/') {
            Some((above, name)) if is_file(name) && !above.ends_with('/') => (above, Some(name)),
            _ => (url, None),
        };
        let folder = folder_in(shared_store(url, settings)?, "");
        Ok(Place::Remote { folder, name: name.map(str::to_owned) })
    }

    /// The folder that may be a checkpoint; `None` where the place is one file of a model.
    pub(super) fn folder(&self) -> Option<Folder> {
        match self {
            Place::Local(path) => {
                let path = without_metadata(path);
                path.is_dir().then(|| path.into())
            }
            Place::Remote { folder, name } => match name.as_deref() {
                None | Some(METADATA) => Some(folder.clone()),
                Some(_) => None,
            },
        }
    }

    /// The folder of a checkpoint that it names: itself, whatever it is called, or where its `.metadata` is.
    pub fn checkpoint(&self) -> Folder {
        match self {
            Place::Local(path) => without_metadata(path).into(),
            Place::Remote { folder, name } => match name.as_deref() {
                None | Some(METADATA) => folder.clone(),
                Some(name) => folder.folder(name),
            },
        }
    }

    /// The folder of the name that was taken for a file's.
    pub(super) fn as_folder(&self) -> Option<Self> {
        match self {
            Place::Remote { folder, name: Some(name) } if name != METADATA => {
                Some(Place::Remote { folder: folder.folder(name), name: None })
            }
            _ => None,
        }
    }

    /// What is there: the folder of the name that was taken for a file's, where no such object is.
    ///
    /// Errors: those of the store.
    pub fn settled(self) -> Result<Self> {
        let (Place::Remote { folder, name: Some(name) }, Some(below)) = (&self, self.as_folder())
        else {
            return Ok(self);
        };
        match folder.open(name) {
            Ok(_) => Ok(self),
            Err(error) if error.code() == Code::NotFound => Ok(below),
            Err(error) => Err(error),
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

/// The folder that a path means: of a `.metadata` the one that it is in.
pub fn without_metadata(path: &Path) -> &Path {
    if path.file_name().is_none_or(|name| name != METADATA) {
        return path;
    }
    match path.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => path,
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
        let listed = self.store.list_here(&self.prefix, SIZES_MAX)?.into_iter();
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
            ("memory:x/a/llama.ckpt/", "memory:x/a/llama.ckpt", None),
            ("memory:x/a/step-7/.metadata", "memory:x/a/step-7", Some(".metadata")),
            ("memory:x", "memory:x", None),
        ] {
            let Place::Remote { folder: found, name } = place(text) else { panic!("{text}") };
            assert_eq!((found.path(), name.as_deref()), (Path::new(folder), file), "{text}");
        }
        assert!(matches!(place("/a/b"), Place::Local(path) if path == Path::new("/a/b")));
        assert!(matches!(place("file:///a/b"), Place::Local(path) if path == Path::new("/a/b")));
        for (text, folder) in [
            ("memory:x/a/step-7/.metadata", "memory:x/a/step-7"),
            ("memory:x/a/llama.ckpt", "memory:x/a/llama.ckpt"),
            ("memory:x/a/llama.ckpt/", "memory:x/a/llama.ckpt"),
            ("/a/llama.ckpt", "/a/llama.ckpt"),
            ("a/.metadata", "a"),
            (".metadata", "."),
        ] {
            assert_eq!(place(text).checkpoint().path(), Path::new(folder), "{text}");
        }
    }

    #[test]
    fn a_name_like_a_files_is_the_folder_where_no_such_object_is() {
        let url = "memory:place-settled/a";
        let store = shared_store(url, &StoreSettings::default()).unwrap();
        store.put("llama.ckpt/x", b"1").unwrap();
        store.put("m.pt", b"1").unwrap();
        let settled = |name: &str| {
            let place = Path::new(url).join(name);
            let place = Place::parse(&place, &StoreSettings::default()).unwrap();
            let Place::Remote { folder, name } = place.settled().unwrap() else { panic!() };
            (folder.path().to_owned(), name)
        };
        assert_eq!(settled("llama.ckpt"), (Path::new(url).join("llama.ckpt"), None));
        assert_eq!(settled("m.pt"), (PathBuf::from(url), Some("m.pt".to_owned())));
        assert_eq!(settled(".metadata"), (PathBuf::from(url), Some(METADATA.to_owned())));
    }

    #[test]
    fn models_are_opened_in_folders_that_are_called_like_files() {
        let url = "memory:place-models";
        let store = shared_store(url, &StoreSettings::default()).unwrap();
        let header = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let file = [&(header.len() as u64).to_le_bytes(), header.as_slice(), b"7"].concat();
        store.put("llama.ckpt/model.safetensors", &file).unwrap();
        let open = |name: &str| {
            let place = Path::new(url).join(name);
            let place = Place::parse(&place, &StoreSettings::default()).unwrap();
            crate::open::open_model(place).map(|opened| opened.listing.catalog.tensors.len())
        };
        for name in ["llama.ckpt", "llama.ckpt/", "llama.ckpt/model.safetensors"] {
            assert_eq!(open(name).unwrap(), 1, "{name}");
        }
        let error = open("other.ckpt").unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert_eq!(error.place(), Some("memory:place-models/other.ckpt"));
    }

    #[test]
    fn a_prefix_of_nothing_is_not_found() {
        let folder = folder_in(Arc::new(forebay_store::MemoryStore::new()), "a/");
        assert_eq!(folder.names(10).unwrap_err().code(), Code::NotFound);
        assert_eq!(folder.open("b").unwrap_err().code(), Code::NotFound);
    }
}
