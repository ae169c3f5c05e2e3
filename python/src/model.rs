//! Opened models. **unsafe**: [`Model::read_cached`] writes to an address that Python gave.

use std::io::IoSliceMut;
use std::path::PathBuf;
use std::sync::Arc;

use forebay_checkpoint::open::open_files;
use forebay_error::{Code, Error};
use forebay_format::Stored;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::{Result, internal};
use crate::place::place;
use crate::wait::interruptible;

/// A model: its catalog and its open files. It may be used in any process and thread.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Model {
    pub(crate) inner: Arc<forebay_format::Model>,
}

/// One tensor of a catalog. A class of its own and no tuple: the garbage collector has nothing to look at, which is
/// most of the time that a list of 20,000 would take.
#[pyclass(frozen, get_all, module = "forebay._native")]
pub(crate) struct Entry {
    name: Py<PyString>,
    dtype: Py<PyString>,
    shape: Py<PyTuple>,
    file: usize,
    offset: u64,
    bytes: u64,
}

#[pymethods]
impl Model {
    /// Opens one path or URL (folder, index or file), or with `listed` the files of a list as one model.
    #[staticmethod]
    fn open(py: Python<'_>, mut paths: Vec<PathBuf>, listed: bool) -> Result<Self> {
        let model = interruptible(py, move |_| match (listed, paths.pop()) {
            (false, Some(path)) => {
                forebay_checkpoint::open::open_model(place(&path)?)?.resolve_all()
            }
            (_, last) => {
                paths.extend(last);
                let places: forebay_error::Result<Vec<_>> =
                    paths.iter().map(|path| place(path)).collect();
                open_files(&places?)
            }
        })?;
        Ok(Self { inner: Arc::new(model) })
    }

    /// The tensors in order of (file, offset).
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, Entry>>> {
        let entry = |entry: &forebay_format::TensorEntry| {
            Bound::new(
                py,
                Entry {
                    name: PyString::new(py, &entry.name).unbind(),
                    dtype: PyString::intern(py, entry.dtype.name()).unbind(),
                    shape: PyTuple::new(py, &entry.shape)?.unbind(),
                    file: entry.file,
                    offset: entry.offset,
                    bytes: entry.bytes,
                },
            )
        };
        self.inner.catalog.tensors.iter().map(entry).collect()
    }

    /// Places in `tensors()`, ordered by name.
    fn by_name(&self) -> Vec<usize> {
        self.inner.catalog.by_name().collect()
    }

    /// The text that came with the tensors; `None` where there is none.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let catalog = &self.inner.catalog;
        if !catalog.has_metadata {
            return Ok(None);
        }
        let dict = PyDict::new(py);
        for (key, value) in &catalog.metadata {
            dict.set_item(key, value)?;
        }
        Ok(Some(dict))
    }

    /// The files, as (name, path, bytes).
    fn files(&self) -> Vec<(String, PathBuf, u64)> {
        let files = self.inner.catalog.files.iter();
        files.map(|file| (file.name.clone(), file.path.clone(), file.size)).collect()
    }

    /// What was accepted but is worth telling.
    fn warnings(&self) -> Vec<String> {
        self.inner.catalog.warnings.clone()
    }

    /// The name of the format.
    fn format(&self) -> &'static str {
        self.inner.catalog.format.name()
    }

    /// Fails with `file_changed` if a file changed since it was opened.
    fn check_unchanged(&self, py: Python<'_>) -> Result<()> {
        let model = self.inner.clone();
        interruptible(py, move |_| model.check_unchanged())
    }

    /// The same for some files (numbers in `files()`), which is to take microseconds: no thread of its own, no look
    /// for signals. Objects of buckets are passed over: each of their reads is of the state that was opened.
    fn check_files(&self, py: Python<'_>, files: Vec<usize>) -> Result<()> {
        py.detach(|| {
            for number in files {
                let file = self.inner.files.get(number);
                let file = file.ok_or_else(|| internal("no such file number"))?;
                if file.local().is_some() {
                    file.check_unchanged()?;
                }
            }
            Ok(())
        })
    }

    /// Reads a whole tensor to `address` if the page cache has all of it, and says whether it did. Never waits for a
    /// disk. Afterwards the file is known to be unchanged.
    ///
    /// `address` must be valid for the bytes of the tensor, and nobody else may use them meanwhile.
    fn read_cached(&self, tensor: usize, address: usize) -> Result<bool> {
        let catalog = &self.inner.catalog;
        let Some(entry) = catalog.tensors.get(tensor) else {
            return Err(internal("no such tensor number"));
        };
        let Some(file) = self.inner.files.get(entry.file) else {
            return Err(internal("no such file number"));
        };
        let Some(handle) = file.local().filter(|_| entry.stored == Stored::Run) else {
            return Ok(false);
        };
        if entry.bytes == 0 {
            return Ok(true);
        }
        if address == 0 {
            return Err(Error::new(Code::Usage, "null address").into());
        }
        let len = usize::try_from(entry.bytes).map_err(|_| internal("tensor too large"))?;
        // SAFETY: valid and unshared for `len` bytes by this function's contract, which the package keeps: it passes
        // the address of a tensor that it has just made with the catalog's size.
        let into = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) };
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = entry.offset + done as u64;
            let mut parts = [IoSliceMut::new(rest)];
            match rustix::io::preadv2(&handle.file, &mut parts, at, ReadWriteFlags::NOWAIT) {
                Ok(0) => return Ok(false),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP) if is_in_memory(&handle.file) => {
                    let Some(rest) = into.get_mut(done..) else { return Ok(false) };
                    file.read_exact_at(rest, at)?;
                    break;
                }
                // Not there, or a file system that cannot say: the engine finds out what is the matter.
                Err(_) => return Ok(false),
            }
        }
        file.check_unchanged()?;
        Ok(true)
    }
}

/// Whether a file lies on tmpfs, which has no disk to wait for.
fn is_in_memory(file: &std::fs::File) -> bool {
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == TMPFS_MAGIC)
}
