//! Loads under way. **unsafe**: [`Session::provide`] hands addresses that Python gave to the engine.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_error::Error;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::{Result, internal};
use crate::fork::Own;
use crate::process::Holder;
use crate::report;
use crate::wait::POLL;

/// The Python objects that own the targets' memory. The engine holds the list until no worker can touch a target any
/// more; an object may leave it earlier, once its target is complete.
///
/// Objects leave it first and are dropped once it is unlocked: a finalizer may do anything, also use the session.
/// Nobody waits for the GIL while it is locked.
type Owners = Arc<Mutex<OwnerList>>;

/// By target; `None` where one has left.
type OwnerList = Vec<Option<Py<PyAny>>>;

/// A load under way.
#[pyclass(frozen, weakref, module = "forebay._native")]
pub(crate) struct Session {
    _holder: Holder,
    inner: Own<Arc<forebay_engine::Session>>,
    owners: Owners,
    needs: Vec<u32>,
    /// Whether the engine has the list. Locked while targets are provided, so that addresses and owners of two calls
    /// at once stay in the same order; only taken without the GIL, because it is held while the engine works.
    lent: Mutex<bool>,
}

impl Session {
    pub(crate) fn new(session: forebay_engine::Session, needs: Vec<u32>) -> Self {
        Self {
            _holder: Holder::new(),
            inner: Own::new(Arc::new(session), "this load"),
            owners: Owners::default(),
            needs,
            lent: Mutex::new(false),
        }
    }

    fn owners(&self) -> MutexGuard<'_, OwnerList> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Provides without the GIL. After an error the owners given are returned, to be dropped with it.
    fn provide_detached(
        &self,
        session: &forebay_engine::Session,
        addresses: &[u64],
        owners: Vec<Py<PyAny>>,
        stream: Option<usize>,
    ) -> std::result::Result<(), (Error, OwnerList)> {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let before = {
            let mut list = self.owners();
            let before = list.len();
            list.extend(owners.into_iter().map(Some));
            before
        };
        // The list goes along once; later owners join it.
        let keep = (!*lent).then(|| Box::new(self.owners.clone()) as Box<dyn Any + Send>);
        *lent = true;
        // SAFETY: the package passes addresses and sizes of tensors that it has just made or checked, and the tensors
        // themselves, which stay in the list until their target is ready or no worker is left. The stream is the
        // framework's current one.
        let provided = unsafe { session.provide(addresses, stream, keep) };
        provided.map_err(|error| {
            // Left in the list they would stand for the targets of the next call. A load that ended meanwhile has
            // taken the list.
            let mut list = self.owners();
            let before = before.min(list.len());
            (error, list.split_off(before))
        })
    }
}

#[pymethods]
impl Session {
    /// Provides the memory of the next targets, in order, and the objects that own it. `stream` is the handle of the
    /// stream that device memory was allocated on.
    ///
    /// Each address must be valid for the bytes of its target as long as its owner lives, and nobody may use it before
    /// the target is ready.
    #[pyo3(signature = (addresses, owners, stream=None))]
    fn provide(
        &self,
        py: Python<'_>,
        addresses: Vec<u64>,
        owners: Vec<Py<PyAny>>,
        stream: Option<usize>,
    ) -> Result<()> {
        if addresses.len() != owners.len() {
            return Err(internal("as many owners as addresses are needed"));
        }
        let session = self.inner.get()?;
        let provided = py.detach(|| self.provide_detached(session, &addresses, owners, stream));
        provided.map_err(|(error, refused)| {
            drop(refused);
            error.into()
        })
    }

    /// How many targets must be provided before each can be complete.
    fn needs(&self) -> Vec<u32> {
        self.needs.clone()
    }

    /// Targets that became complete, waiting for at least one; `None` after `timeout_ms`; empty when all have been
    /// returned. Their owners are let go.
    #[pyo3(signature = (timeout_ms=None))]
    fn next_ready(&self, py: Python<'_>, timeout_ms: Option<u64>) -> Result<Option<Vec<u32>>> {
        let session = self.inner.get()?.clone();
        let mut left = timeout_ms.map(Duration::from_millis);
        loop {
            let slice = left.map_or(POLL, |left| left.min(POLL));
            let ready = self.interruptible(py, || session.next_ready(slice))?;
            if !ready.is_empty() {
                let mut owners = self.owners();
                let freed: Vec<_> = ready
                    .iter()
                    .filter_map(|&target| owners.get_mut(target as usize)?.take())
                    .collect();
                drop(owners);
                drop(freed);
                return Ok(Some(ready));
            }
            if session.wait(Duration::ZERO)? && session.provided() == self.needs.len() {
                // Completion and the last targets may have come between the two questions.
                let last = session.next_ready(Duration::ZERO)?;
                return Ok(Some(last));
            }
            left = match left {
                Some(left) if left <= slice => return Ok(None),
                Some(left) => Some(left - slice),
                None => None,
            };
        }
    }

    /// Waits for the end and reports. `progress(done, total)` is called meanwhile, about ten times a second, and once
    /// at the end.
    #[pyo3(signature = (progress=None))]
    fn finish<'py>(
        &self,
        py: Python<'py>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyDict>> {
        let session = self.inner.get()?.clone();
        let tell = |session: &forebay_engine::Session| match progress {
            Some(progress) => progress.call1((session.done_bytes(), session.bytes())).map(drop),
            None => Ok(()),
        };
        let period = if progress.is_some() { POLL * 2 } else { POLL };
        while !self.interruptible(py, || session.wait(period))? {
            self.or_cancel(py, tell(&session))?;
        }
        let report = py.detach(|| session.finish())?;
        tell(&session)?;
        let owners = std::mem::take(&mut *self.owners());
        drop(owners);
        Ok(report::to_dict(py, &report)?)
    }

    /// Ends the load early; true when no worker touches the targets any more. In a child of a fork it does nothing.
    fn cancel(&self, py: Python<'_>) -> bool {
        match self.inner.get() {
            Ok(session) => py.detach(|| session.cancel()),
            Err(_) => true,
        }
    }

    /// Waits until every worker has gone home, at most `timeout_ms`.
    fn wait_idle(&self, py: Python<'_>, timeout_ms: u64) -> Result<bool> {
        let session = self.inner.get()?;
        Ok(py.detach(|| session.wait_idle(Duration::from_millis(timeout_ms))))
    }

    /// Bytes that have arrived, and bytes in all.
    fn done(&self) -> Result<(u64, u64)> {
        let session = self.inner.get()?;
        Ok((session.done_bytes(), session.bytes()))
    }

    /// Objects kept for the workers, for tests.
    fn owned<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        // Making the list may run the garbage collector, and that finalizers: not while the owners are locked.
        let owners: Vec<_> =
            self.owners().iter().flatten().map(|owner| owner.clone_ref(py)).collect();
        PyList::new(py, owners)
    }
}

impl Session {
    /// One wait without the GIL, then a look for signals. An interrupted load is cancelled.
    fn interruptible<T: Send>(
        &self,
        py: Python<'_>,
        wait: impl FnOnce() -> forebay_error::Result<T> + Send,
    ) -> Result<T> {
        let result = py.detach(wait);
        self.or_cancel(py, py.check_signals())?;
        Ok(result?)
    }

    fn or_cancel(&self, py: Python<'_>, result: PyResult<()>) -> PyResult<()> {
        if result.is_err() {
            self.cancel(py);
        }
        result
    }
}
