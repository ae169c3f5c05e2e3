//! From a path on the command line to a root of steps, or to the folder of one step.

use std::path::Path;

use forebay_checkpoint::commit::{
    Identify, Layout, ReadLease, Root, latest, numbers, require, step_folder, step_of_folder,
};
use forebay_checkpoint::open::Place;
use forebay_checkpoint::save::OurMetadata;
use forebay_error::{Code, Error, Result};
use forebay_format::{Folder, shown};

use super::home::Home;

/// A checkpoint to look at.
pub(super) struct Step {
    /// Where it is: its folder, or the file of a model.
    pub(super) place: Place,
    /// Its number, where it is one of a root.
    pub(super) step: Option<u64>,
    /// Holds off its removal. Only what Forebay wrote is ever removed by others of its kind, so only that has one.
    pub(super) lease: Option<ReadLease>,
}

impl Step {
    /// Its folder.
    pub(super) fn folder(&self) -> Folder {
        self.place.checkpoint()
    }

    /// Its path or URL.
    pub(super) fn shown(&self) -> String {
        self.place.path().display().to_string()
    }
}

/// Opens a folder of steps.
pub(super) fn root(path: &Path) -> Result<Root> {
    let home = Home::parse(path)?;
    let root = home.root()?;
    // A step is no root, and a list of nothing would say that all is lost.
    if home.has_metadata()? && numbers(&root)?.is_empty() {
        let error = Error::new(Code::Usage, "the folder is a checkpoint, not a folder of steps");
        return Err(error.at(shown(path)).hint("name the folder above it, or use `ckpt show`"));
    }
    Ok(root)
}

/// Opens a folder to collect in: of steps, or one that is a checkpoint by itself.
pub(super) fn collected(path: &Path) -> Result<Root> {
    Home::parse(path)?.root()
}

/// Links that are called like steps: they are not listed, so somebody must say so. Buckets have none.
pub(super) fn links(path: &Path) -> Vec<String> {
    let Ok(Home::Local(folder)) = Home::parse(path) else { return Vec::new() };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    let names = links.filter_map(|link| link.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| step_of_folder(name).is_some()).collect();
    names.sort_unstable();
    names
}

/// Finds the step that a path means: of a root the one with that number, or the latest.
pub(super) fn step(path: &Path, number: Option<u64>) -> Result<Step> {
    let home = Home::parse(path)?;
    let is_step = !home.is_there() || home.has_metadata()?;
    let is_root = !is_step && {
        let root = home.root()?;
        number.is_some() || !numbers(&root)?.is_empty()
    };
    if is_root {
        let root = home.root()?;
        let state = match number {
            Some(number) => require(&root, number)?,
            None => latest(&root)?.ok_or_else(|| nothing(&root))?,
        };
        return Ok(of_root(&root, &home.folder(), state.step));
    }
    if number.is_some() {
        let error = Error::new(Code::Usage, "--step is for folders of steps");
        return Err(error.at(shown(path)).hint("leave it out: the path is one checkpoint"));
    }
    let step = home.name().and_then(|name| step_of_folder(&name));
    if let Some(step) = step.filter(|_| home.is_there() && !is_step) {
        say_if_lost(&home, step)?;
    }
    let lease = lease_on(&home, is_step);
    Ok(Step { place: Place::from(&home.folder()), step, lease })
}

/// Fails where the records of a step's folder say that it was committed, and its `.metadata` is gone. Other reasons are
/// told by whoever opens it.
fn say_if_lost(home: &Home, step: u64) -> Result<()> {
    match home.above().and_then(|above| above.root()).and_then(|root| require(&root, step)) {
        Err(error) if error.code() == Code::InvalidMetadata => Err(error),
        _ => Ok(()),
    }
}

/// A step of a root, whose folder is given.
pub(super) fn of_root(root: &Root, folder: &Folder, step: u64) -> Step {
    let layout = Layout::of_step(step);
    let ours = is_ours(root, &layout);
    let lease = ours.then(|| ReadLease::on(root, &layout).ok()).flatten();
    let place = Place::from(&folder.folder(&step_folder(step)));
    Step { place, step: Some(step), lease }
}

/// The folder that a path or URL of a root means.
pub(super) fn folder(path: &Path) -> Result<Folder> {
    Ok(Home::parse(path)?.folder())
}

/// The error where nothing is committed.
pub(super) fn nothing(root: &Root) -> Error {
    Error::new(Code::NotFound, "no step is committed there")
        .at(root.store.name())
        .hint("`forebay ckpt list` shows what is pending or dead")
}

/// A lease on a folder by itself, if it is a checkpoint of ours.
fn lease_on(home: &Home, is_step: bool) -> Option<ReadLease> {
    if !is_step || !home.is_there() {
        return None;
    }
    // Records of a step are found from the step itself as well.
    let root = home.root().ok()?;
    let layout = Layout::new("");
    is_ours(&root, &layout).then(|| ReadLease::on(&root, &layout).ok()).flatten()
}

fn is_ours(root: &Root, layout: &Layout) -> bool {
    let source = root.store.open_data(&layout.metadata());
    source.is_ok_and(|source| matches!(OurMetadata.attempt(source.as_ref()), Ok(Some(_))))
}
