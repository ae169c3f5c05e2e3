//! A store whose changes Python's audit hooks hear of before they are made, as they do of those that Python makes.
//!
//! Tools that watch or break what a program writes (sandboxes, `ckpt-chaos`) hook `sys.audit`; what native code writes
//! raises no event unless it is told to. The events are CPython's own with its arguments, so hooks need not know us:
//!
//! | change | event | arguments |
//! | --- | --- | --- |
//! | a data file, side file or set-aside room is created | `open` | path, None, flags with `O_CREAT` and `O_EXCL` |
//! | a small record, a manifest or a staged `.metadata` is written | `open` | path, None, flags with `O_CREAT` |
//! | a data file is whole and made durable | `forebay.seal` | path |
//! | a part, a decision or `.metadata` is published, a commit moved aside | `os.rename` | from, to, -1, -1 |
//! | something is removed | `os.remove` | path, -1 |
//!
//! A hook that raises stops the change: the save fails with `permission_denied`. Signs of life are no news and raise
//! nothing: they must not wait for the GIL. Without an interpreter (it is ending) nobody is there to be told.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::{RangeSink, RangeSource};
use forebay_error::{Code, Error, Result};
use forebay_store::{Abilities, DataObject, Expect, Listed, PosixStore, Published, Store, Version};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// A folder whose changes are audited.
pub(super) struct Audited {
    inner: PosixStore,
    folder: PathBuf,
}

impl Audited {
    /// `folder` is where the store is.
    pub(super) fn new(inner: PosixStore, folder: &Path) -> Self {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { inner, folder }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(key)
    }

    fn opens(&self, key: &str, exclusive: bool) -> Result<()> {
        let name = key.rsplit('/').next().unwrap_or(key);
        if name.starts_with("beat-") || name == "committer" {
            return Ok(());
        }
        let only = if exclusive { libc::O_EXCL } else { 0 };
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_CLOEXEC | only;
        let path = self.path(key);
        audit("open", &path, |py| (path.as_os_str(), py.None(), flags).into_pyobject(py))
    }
}

/// Raises an event. Errors: `permission_denied` where a hook does not let it pass.
fn audit<F>(event: &str, path: &Path, arguments: F) -> Result<()>
where
    F: for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyTuple>>,
{
    let told = Python::try_attach(|py| {
        let arguments = arguments(py)?;
        let all = PyTuple::new(py, [event])?.as_sequence().concat(arguments.as_sequence())?;
        py.import("sys")?.getattr("audit")?.call1(all.to_tuple()?)?;
        Ok::<_, PyErr>(())
    });
    match told {
        Some(Err(refusal)) => {
            let what = format!("an audit hook did not let it pass: {refusal}");
            Err(Error::new(Code::PermissionDenied, what).at(path.display()))
        }
        Some(Ok(())) | None => Ok(()),
    }
}

impl Store for Audited {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    // It is only read there, of which hooks hear nothing here either.
    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        self.inner.above()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.inner.get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.opens(key, true)?;
        self.inner.create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.opens(key, false)?;
        self.inner.put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.inner.list(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.inner.names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        let path = self.path(key);
        audit("os.remove", &path, |py| (path.as_os_str(), -1).into_pyobject(py))?;
        self.inner.remove(key)
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        for key in keys {
            let path = self.path(key);
            audit("os.remove", &path, |py| (path.as_os_str(), -1).into_pyobject(py))?;
        }
        self.inner.discard(keys)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        let (from, path) = (self.path(staged), self.path(to));
        audit("os.rename", &path, |py| {
            (from.as_os_str(), path.as_os_str(), -1, -1).into_pyobject(py)
        })?;
        self.inner.publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.opens(key, true)?;
        let inner = self.inner.create_data(key, bytes)?;
        Ok(Box::new(AuditedData { inner, path: self.path(key) }))
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        self.inner.open_data(key)
    }
}

/// A data file whose end is told.
struct AuditedData {
    inner: Box<dyn DataObject>,
    path: PathBuf,
}

impl DataObject for AuditedData {
    fn sink(&self) -> &dyn RangeSink {
        self.inner.sink()
    }

    fn seal(&self) -> Result<()> {
        audit("forebay.seal", &self.path, |py| (self.path.as_os_str(),).into_pyobject(py))?;
        self.inner.seal()
    }
}
