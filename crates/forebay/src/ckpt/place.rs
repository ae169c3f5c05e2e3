//! From a path on the command line to a root of steps, or to the folder of one step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_checkpoint::commit::{
    Identify, Layout, METADATA, ReadLease, Root, SystemClock, latest, numbers, require,
    step_folder, step_of_folder,
};
use forebay_checkpoint::save::OurMetadata;
use forebay_error::{Code, Error, Result};
use forebay_format::shown;
use forebay_store::PosixStore;

/// A checkpoint to look at.
pub(super) struct Step {
    /// Its folder.
    pub(super) folder: PathBuf,
    /// Its number, where it is one of a root.
    pub(super) step: Option<u64>,
    /// Holds off its removal. Only what Forebay wrote is ever removed by others of its kind, so only that has one.
    pub(super) lease: Option<ReadLease>,
}

/// Opens a folder of steps.
pub(super) fn root(path: &Path) -> Result<Root> {
    let root = open(path)?;
    // A step is no root, and a list of nothing would say that all is lost.
    if path.join(METADATA).exists() && numbers(&root)?.is_empty() {
        let error = Error::new(Code::Usage, "the folder is a checkpoint, not a folder of steps");
        return Err(error.at(shown(path)).hint("name the folder above it, or use `ckpt show`"));
    }
    Ok(root)
}

/// Opens a folder to collect in: of steps, or one that is a checkpoint by itself.
pub(super) fn collected(path: &Path) -> Result<Root> {
    open(path)
}

fn open(path: &Path) -> Result<Root> {
    Ok(Root {
        store: Arc::new(PosixStore::open(path)?),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    })
}

/// Links that are called like steps: they are not listed, so somebody must say so.
pub(super) fn links(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    let names = links.filter_map(|link| link.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| step_of_folder(name).is_some()).collect();
    names.sort_unstable();
    names
}

/// Finds the step that a path means: of a root the one with that number, or the latest.
pub(super) fn step(path: &Path, number: Option<u64>) -> Result<Step> {
    let path = match path.file_name().is_some_and(|name| name == METADATA) {
        true => path.parent().unwrap_or(path),
        false => path,
    };
    let is_root = path.is_dir() && !path.join(METADATA).exists() && {
        let root = open(path)?;
        number.is_some() || !numbers(&root)?.is_empty()
    };
    if is_root {
        let root = open(path)?;
        let state = match number {
            Some(number) => require(&root, number)?,
            None => latest(&root)?.ok_or_else(|| nothing(&root))?,
        };
        return Ok(of_root(&root, path, state.step));
    }
    if number.is_some() {
        let error = Error::new(Code::Usage, "--step is for folders of steps");
        return Err(error.at(shown(path)).hint("leave it out: the path is one checkpoint"));
    }
    let step = path.file_name().and_then(|name| step_of_folder(name.to_str()?));
    if let Some(step) = step.filter(|_| path.is_dir() && !path.join(METADATA).exists()) {
        say_if_lost(path, step)?;
    }
    let lease = lease_on(path);
    Ok(Step { folder: path.to_owned(), step, lease })
}

/// Fails where the records of a step's folder say that it was committed, and its `.metadata` is gone. Other reasons are
/// told by whoever opens it.
fn say_if_lost(path: &Path, step: u64) -> Result<()> {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    match open(above.unwrap_or(Path::new("."))).and_then(|root| require(&root, step)) {
        Err(error) if error.code() == Code::InvalidMetadata => Err(error),
        _ => Ok(()),
    }
}

/// A step of a root.
pub(super) fn of_root(root: &Root, path: &Path, step: u64) -> Step {
    let layout = Layout::of_step(step);
    let ours = is_ours(root, &layout);
    let lease = ours.then(|| ReadLease::on(root, &layout).ok()).flatten();
    Step { folder: path.join(step_folder(step)), step: Some(step), lease }
}

/// The error where nothing is committed.
pub(super) fn nothing(root: &Root) -> Error {
    Error::new(Code::NotFound, "no step is committed there")
        .at(root.store.name())
        .hint("`forebay ckpt list` shows what is pending or dead")
}

/// A lease on a folder by itself, if it is a checkpoint of ours.
fn lease_on(path: &Path) -> Option<ReadLease> {
    if !path.join(METADATA).exists() {
        return None;
    }
    // Records of a step are found from the step itself as well.
    let root = open(path).ok()?;
    let layout = Layout::new("");
    is_ours(&root, &layout).then(|| ReadLease::on(&root, &layout).ok()).flatten()
}

fn is_ours(root: &Root, layout: &Layout) -> bool {
    let source = root.store.open_data(&layout.metadata());
    source.is_ok_and(|source| matches!(OurMetadata.attempt(source.as_ref()), Ok(Some(_))))
}
