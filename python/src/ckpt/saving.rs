//! A save under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_checkpoint::save::Save as Inner;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::Result;
use crate::fork::Own;
use crate::process::Holder;
use crate::wait::POLL;

/// What stands for times that are too long to count: a century, which a clock can be asked for.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A save under way. Dropping it does not end it.
#[pyclass(frozen, weakref, name = "CheckpointSave", module = "forebay._native")]
pub(crate) struct Save {
    _holder: Holder,
    inner: Own<Arc<Inner>>,
    step: u64,
    attempt: String,
}

impl Save {
    pub(super) fn new(save: Inner, step: u64, attempt: String) -> Self {
        Self { _holder: Holder::new(), inner: Own::new(Arc::new(save), "this save"), step, attempt }
    }

    /// Waits in slices, without the GIL and with an ear for signals. No time is left where less than none is given.
    fn wait_for(
        &self,
        py: Python<'_>,
        timeout_s: Option<f64>,
        done: impl Fn(&Inner, Duration) -> forebay_error::Result<bool> + Sync,
    ) -> Result<bool> {
        let save = self.inner.get()?.clone();
        let until = timeout_s.map(|seconds| {
            let time = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(FOREVER);
            Instant::now() + time.min(FOREVER)
        });
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(POLL, |left| left.min(POLL));
            if py.detach(|| done(&save, slice))? {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_some_and(|left| left <= slice) {
                return Ok(false);
            }
        }
    }
}

#[pymethods]
impl Save {
    /// Waits until the memory may change; false after `timeout_s`. Raises what ended the save.
    #[pyo3(signature = (timeout_s=None))]
    fn staged(&self, py: Python<'_>, timeout_s: Option<f64>) -> Result<bool> {
        self.wait_for(py, timeout_s, |save, time| save.wait_staged(time))
    }

    /// Waits until the step is committed (or, where somebody else commits, this rank's data durable); false after
    /// `timeout_s`. Raises what ended the save, on whatever rank.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> Result<bool> {
        self.wait_for(py, timeout_s, |save, time| save.wait(time))
    }

    /// Ends the save early, on all ranks.
    fn cancel(&self, py: Python<'_>) -> Result<()> {
        let save = self.inner.get()?;
        py.detach(|| save.cancel());
        Ok(())
    }

    /// What this rank contributes, where somebody else commits.
    fn part<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let part = self.inner.get()?.part()?;
        Ok(PyBytes::new(py, &part))
    }

    /// Bytes written so far, and in all.
    fn progress(&self) -> Result<(u64, u64)> {
        Ok(self.inner.get()?.progress())
    }

    /// What it did so far; times in seconds from its start.
    fn report<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let report = self.inner.get()?.report();
        let dict = PyDict::new(py);
        dict.set_item("step", self.step)?;
        dict.set_item("attempt", &self.attempt)?;
        dict.set_item("bytes", report.bytes)?;
        dict.set_item("files", report.files)?;
        dict.set_item("tensor_bytes", report.stage.bytes)?;
        dict.set_item("staged_seconds", report.stage.staged_seconds)?;
        dict.set_item("write_seconds", report.stage.seconds)?;
        dict.set_item("durable_seconds", report.durable_seconds)?;
        dict.set_item("commit_seconds", report.commit_seconds)?;
        dict.set_item("cpu_seconds", report.stage.cpu_seconds)?;
        dict.set_item("durable", report.durable)?;
        dict.set_item("path", "buffered")?;
        Ok(dict)
    }
}
