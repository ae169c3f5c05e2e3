//! A folder of steps.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use forebay_checkpoint::commit::{self, GcOptions, PruneOptions, Retention, State};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::saver::root;
use crate::error::Result;
use crate::fork::Own;
use crate::place::{Home, home};
use crate::wait::interruptible;

/// An attempt that showed no sign of life for so long counts as dead in a listing: a lease and a half.
const ALIVE: Duration = Duration::from_secs(90);

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::ZERO)
}

/// Every step with its state, oldest first. With `read` all commits are read, in a bucket too: else damage is not seen
/// there.
#[pyfunction]
#[pyo3(signature = (folder, *, read=false))]
pub(crate) fn steps(py: Python<'_>, folder: PathBuf, read: bool) -> Result<Bound<'_, PyList>> {
    let states = interruptible(py, move |_| {
        let root = root(&folder, false)?;
        if read { commit::steps(&root, ALIVE) } else { commit::listing(&root, ALIVE) }
    })?;
    let list = PyList::empty(py);
    for state in states {
        let dict = PyDict::new(py);
        dict.set_item("step", state.step)?;
        let name = match state.state() {
            State::Committed => "committed",
            State::Pending => "pending",
            State::Removed => "removed",
            State::Lost => "lost",
            State::Dead => "dead",
        };
        dict.set_item("state", name)?;
        let commit = state.commit.as_ref();
        let attempt = commit.and_then(|commit| commit.attempt).map(|id| id.to_string());
        dict.set_item("attempt", attempt)?;
        dict.set_item("epoch", commit.map(|commit| commit.epoch))?;
        dict.set_item("age_s", state.age().as_secs_f64())?;
        dict.set_item("bytes", state.bytes())?;
        dict.set_item("ranks", state.ranks())?;
        dict.set_item("damage", commit.and_then(|commit| commit.damage.clone()))?;
        list.append(dict)?;
    }
    Ok(list)
}

/// The newest committed step of the newest writer's line.
#[pyfunction]
pub(crate) fn latest(py: Python<'_>, folder: PathBuf) -> Result<Option<u64>> {
    interruptible(py, move |_| {
        if matches!(home(&folder)?, Home::Folder(folder) if !folder.is_dir()) {
            return Ok(None);
        }
        Ok(commit::latest(&root(&folder, false)?)?.map(|state| state.step))
    })
}

/// Removes commits that are not kept; returns what was, or with `dry_run` would be: a dict of lists.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
#[pyo3(signature = (folder, *, keep_last, keep_every=None, pins=Vec::new(), grace_s=900.0,
                    wait=false, dry_run=false))]
pub(crate) fn prune(
    py: Python<'_>,
    folder: PathBuf,
    keep_last: usize,
    keep_every: Option<u64>,
    pins: Vec<u64>,
    grace_s: f64,
    wait: bool,
    dry_run: bool,
) -> Result<Bound<'_, PyDict>> {
    let retention = Retention { keep_last, keep_every, pins: BTreeSet::from_iter(pins) };
    let gc = GcOptions { grace: seconds(grace_s), dry_run, ..GcOptions::default() };
    let options = PruneOptions { gc, wait };
    let report =
        interruptible(py, move |_| commit::prune(&root(&folder, false)?, &retention, &options))?;
    let dict = PyDict::new(py);
    dict.set_item("unpublished", &report.unpublished)?;
    dict.set_item("off_line", &report.off_line)?;
    dict.set_item("removed", &report.gc.removed)?;
    let failed: Vec<(String, String)> = report
        .failed
        .iter()
        .map(|(step, error)| (format!("step {step}"), error.render()))
        .chain(report.gc.failed.iter().map(|(what, error)| (what.clone(), error.render())))
        .collect();
    dict.set_item("failed", failed)?;
    Ok(dict)
}

/// Removes what dead attempts left; returns `(name, bytes)` of each.
#[pyfunction]
#[pyo3(signature = (folder, *, grace_s=900.0, dry_run=false))]
pub(crate) fn gc(
    py: Python<'_>,
    folder: PathBuf,
    grace_s: f64,
    dry_run: bool,
) -> Result<Vec<(String, u64)>> {
    let options = GcOptions { grace: seconds(grace_s), dry_run, ..GcOptions::default() };
    let report = interruptible(py, move |_| commit::gc(&root(&folder, false)?, &options))?;
    Ok(report.removed)
}

/// Holds a step while it is read: a prune waits for it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct ReadLease {
    inner: Own<commit::ReadLease>,
}

#[pymethods]
impl ReadLease {
    /// Says that the reader is alive; cheap, to be called every few seconds.
    fn beat(&self, py: Python<'_>) -> Result<()> {
        let lease = self.inner.get()?;
        py.detach(|| lease.beat());
        Ok(())
    }
}

/// Takes a lease on a step. Errors: `not_found`, `not_committed`, with what is there.
#[pyfunction]
pub(crate) fn read_lease(py: Python<'_>, folder: PathBuf, step: u64) -> Result<ReadLease> {
    let lease = interruptible(py, move |_| commit::ReadLease::take(&root(&folder, false)?, step))?;
    Ok(ReadLease { inner: Own::new(lease, "this read lease") })
}
