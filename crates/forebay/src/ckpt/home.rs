//! Where checkpoints are: a folder, or a prefix of a bucket.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_checkpoint::commit::{METADATA, Root, SystemClock};
use forebay_checkpoint::open::{Place, folder_in, without_metadata};
use forebay_checkpoint::save::OurMetadata;
use forebay_error::{Code, Result};
use forebay_format::Folder;
use forebay_store::{PosixStore, Store, StoreSettings, local_path, shared_store};

/// See the module.
pub(super) enum Home {
    Local(PathBuf),
    Bucket(Arc<dyn Store>),
}

/// What is at a path or URL, be it a model or a checkpoint. Buckets are reached as the providers' variables say.
pub(crate) fn place(path: &Path) -> Result<Place> {
    Place::parse(path, &StoreSettings::default())
}

impl Home {
    /// From a path or URL; that of a `.metadata` means the folder that it is in. Nothing is sent.
    pub(super) fn parse(path: &Path) -> Result<Self> {
        let Some(text) = path.to_str() else { return Ok(Self::local(path)) };
        if let Some(path) = local_path(text)? {
            return Ok(Self::local(&path));
        }
        let url = text.trim_end_matches('/');
        let url = url.strip_suffix(METADATA).and_then(|url| url.strip_suffix('/')).unwrap_or(url);
        Ok(Home::Bucket(shared_store(url, &StoreSettings::default())?))
    }

    fn local(path: &Path) -> Self {
        Home::Local(without_metadata(path).to_owned())
    }

    /// As a root of steps, or of one.
    pub(super) fn root(&self) -> Result<Root> {
        let store: Arc<dyn Store> = match self {
            Home::Local(path) => Arc::new(PosixStore::open(path)?),
            Home::Bucket(store) => store.clone(),
        };
        let (clock, identify) = (Arc::new(SystemClock::default()), Arc::new(OurMetadata));
        Ok(Root { store, clock, identify })
    }

    /// What readers look into.
    pub(super) fn folder(&self) -> Folder {
        match self {
            Home::Local(path) => path.into(),
            Home::Bucket(store) => folder_in(store.clone(), ""),
        }
    }

    /// Whether it may hold anything: a prefix always may.
    pub(super) fn is_there(&self) -> bool {
        match self {
            Home::Local(path) => path.is_dir(),
            Home::Bucket(_) => true,
        }
    }

    /// Whether it is a checkpoint.
    pub(super) fn has_metadata(&self) -> Result<bool> {
        match self {
            Home::Local(path) => Ok(path.join(METADATA).exists()),
            Home::Bucket(store) => match store.open_data(METADATA) {
                Ok(_) => Ok(true),
                Err(error) if error.code() == Code::NotFound => Ok(false),
                Err(error) => Err(error),
            },
        }
    }

    /// What it is in.
    pub(super) fn above(&self) -> Result<Self> {
        match self {
            Home::Local(path) => {
                let above = path.parent().filter(|above| !above.as_os_str().is_empty());
                Ok(Home::Local(above.unwrap_or(Path::new(".")).to_owned()))
            }
            Home::Bucket(store) => {
                let url = store.name();
                let above = url.rsplit_once('/').map_or(url.as_str(), |(above, _)| above);
                Ok(Home::Bucket(shared_store(above, &StoreSettings::default())?))
            }
        }
    }

    /// The last name of its path.
    pub(super) fn name(&self) -> Option<String> {
        match self {
            Home::Local(path) => Some(path.file_name()?.to_str()?.to_owned()),
            Home::Bucket(store) => Some(store.name().rsplit_once('/')?.1.to_owned()),
        }
    }
}
