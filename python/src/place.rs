//! Places by path or URL: a folder, or a prefix of a bucket.
//!
//! A URL comes from the package as it was written; a path is what the system takes. Buckets are reached by the
//! providers' own variables, and one that the process has open is used again.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_checkpoint::open::Place;
use forebay_store::{
    PosixStore, Store, StoreSettings, create_split, local_path, shared_store, split_folder,
    split_url,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Result;
use crate::wait::interruptible;

/// The most names of a folder that are listed.
const NAMES_MAX: usize = 1 << 22;
/// The most bytes of a small object.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// How buckets are reached that a configuration has named: by the starts of their URLs.
static KNOWN: Mutex<Vec<(String, StoreSettings)>> = Mutex::new(Vec::new());

/// A bucket's prefix is reached like this from now on, and what is below it.
pub(crate) fn remember_settings(url: &str, settings: &StoreSettings) {
    if *settings == StoreSettings::default() {
        return;
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|(start, _)| start != url);
    known.push((url.to_owned(), settings.clone()));
}

fn settings_of(path: &Path) -> StoreSettings {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let text = path.to_str().unwrap_or_default();
    let below = |start: &str| {
        text.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let found = known.iter().find(|(start, _)| below(start));
    found.map(|(_, settings)| settings.clone()).unwrap_or_default()
}

/// What is at a path or URL.
pub(crate) fn place(path: &Path) -> forebay_error::Result<Place> {
    Place::parse(path, &settings_of(path))
}

/// A folder's path, or the store of a bucket's prefix.
pub(crate) enum Home {
    /// On this machine.
    Folder(PathBuf),
    /// In a bucket.
    Bucket(Arc<dyn Store>),
}

/// Where a path or URL leads.
pub(crate) fn home(path: &Path) -> forebay_error::Result<Home> {
    // What is no text is no URL.
    let Some(text) = path.to_str() else { return Ok(Home::Folder(path.to_owned())) };
    Ok(match local_path(text)? {
        Some(folder) => Home::Folder(folder),
        None => Home::Bucket(shared_store(text, &settings_of(path))?),
    })
}

/// The folder that a `file:` URL or a path names; None where it is the URL of a bucket. Errors: `usage` for others.
#[pyfunction]
#[pyo3(name = "local_path")]
pub(crate) fn folder_of(url: &str) -> Result<Option<PathBuf>> {
    Ok(local_path(url)?)
}

fn store(path: &Path) -> forebay_error::Result<Arc<dyn Store>> {
    Ok(match home(path)? {
        Home::Folder(folder) => Arc::new(PosixStore::open(&folder)?),
        Home::Bucket(store) => store,
    })
}

/// Names directly below a prefix of a place; none where there is nothing. The prefix is empty or ends in a slash.
#[pyfunction]
pub(crate) fn place_names(py: Python<'_>, place: PathBuf, prefix: String) -> Result<Vec<String>> {
    interruptible(py, move |_| {
        let names = store(&place)?.names(&prefix, NAMES_MAX)?;
        Ok(names.into_iter().map(|(name, _)| name).collect())
    })
}

/// A small object of a place; None where it is not there. Errors: `unsupported` above a mebibyte.
#[pyfunction]
pub(crate) fn place_object(
    py: Python<'_>,
    place: PathBuf,
    key: String,
) -> Result<Option<Bound<'_, PyBytes>>> {
    let found = interruptible(py, move |_| store(&place)?.get(&key, SMALL_BYTES_MAX))?;
    Ok(found.map(|(bytes, _)| PyBytes::new(py, &bytes)))
}

/// Whether an object is there. Errors: `not_found` for a folder that is not there.
#[pyfunction]
pub(crate) fn place_has(py: Python<'_>, place: PathBuf, key: String) -> Result<bool> {
    interruptible(py, move |_| match store(&place)?.open_data(&key) {
        Ok(_) => Ok(true),
        Err(error) if error.code() == forebay_error::Code::NotFound => Ok(false),
        Err(error) => Err(error),
    })
}

/// The URL of a folder of this node with a place that all nodes share: `node:` with records there, or `near:` to read
/// what is there.
#[pyfunction]
pub(crate) fn split_place(whole: &str, folder: &str, near: bool) -> String {
    split_url(whole, folder, near)
}

/// The folder of this node of a `node:` or `near:` place; None where it is another place.
#[pyfunction]
#[pyo3(name = "split_folder")]
pub(crate) fn folder_of_split(place: &str) -> Result<Option<PathBuf>> {
    Ok(split_folder(place)?)
}

/// Makes the folders of a `node:` place. Errors: `not_found` where those above are not there, `already_exists` where
/// the node's folder has whole checkpoints.
#[pyfunction]
pub(crate) fn make_node_place(py: Python<'_>, place: String) -> Result<()> {
    interruptible(py, move |_| create_split(&place, &settings_of(Path::new(&place))))
}

/// Adds the functions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(folder_of, module)?)?;
    module.add_function(wrap_pyfunction!(place_names, module)?)?;
    module.add_function(wrap_pyfunction!(place_object, module)?)?;
    module.add_function(wrap_pyfunction!(place_has, module)?)?;
    module.add_function(wrap_pyfunction!(split_place, module)?)?;
    module.add_function(wrap_pyfunction!(folder_of_split, module)?)?;
    module.add_function(wrap_pyfunction!(make_node_place, module)?)
}
