//! Saves under way. **unsafe**: [`Save::write`] reads from addresses that Python gave.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use std::os::unix::fs::FileExt;

use forebay_engine::{FileSink, Part, RangeSink, WriteOptions};
use forebay_error::{Code, Error};
use forebay_format::safetensors::{TensorSpec, layout};
use forebay_format::{AtomicFile, Durability, ModelSave, shown};
use forebay_tensor::Dtype;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine::Engine;
use crate::error::{Result, internal};
use crate::fork::Own;
use crate::wait::{Stop, interruptible};

/// A file or a folder being saved. Dropped before its commit, it leaves nothing.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Save {
    inner: Own<Arc<Open>>,
}

struct Open {
    /// File, offset and bytes of each tensor.
    places: Vec<(usize, u64, u64)>,
    files: Mutex<Option<Files>>,
}

enum Files {
    One(AtomicFile),
    Model(ModelSave),
}

impl Files {
    fn file(&self, index: usize) -> Option<&AtomicFile> {
        match self {
            Self::One(file) => (index == 0).then_some(file),
            Self::Model(model) => model.shards().get(index).map(|shard| &shard.file),
        }
    }
}

impl Open {
    fn write(
        &self,
        engine: &forebay_engine::Engine,
        parts: &[Part],
        options: WriteOptions,
        stop: &Stop,
    ) -> forebay_error::Result<()> {
        let files = self.files();
        let Some(files) = files.as_ref() else {
            return Err(Error::new(Code::Usage, "this save was committed or given up before"));
        };
        let sinks: Vec<FileSink<'_>> = (0..)
            .map_while(|index| files.file(index))
            .map(|file| FileSink::new(file.file(), shown(&file.dest())))
            .collect();
        let sinks: Vec<&dyn RangeSink> = sinks.iter().map(|sink| sink as &dyn RangeSink).collect();
        // SAFETY: the caller of `Save::write` keeps the memory, which nobody is to change meanwhile; its stream is the
        // framework's current one.
        unsafe { engine.write(parts, &sinks, options, stop.flag())? };
        Ok(())
    }

    fn files(&self) -> std::sync::MutexGuard<'_, Option<Files>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Text pairs, or none.
type Metadata = Option<Vec<(String, String)>>;

#[pymethods]
impl Save {
    /// Starts a file; `tensors` are (name, dtype, shape).
    #[staticmethod]
    fn file(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<(String, String, Vec<u64>)>,
        metadata: Metadata,
    ) -> Result<Self> {
        let specs = specs_of(tensors)?;
        let open = interruptible(py, move |_| {
            let plan = layout(&specs, metadata.as_deref())?;
            if let Some(folder) = path.parent() {
                let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
                // What killed processes left; a folder that cannot be listed may still be written to.
                let _ = forebay_format::clean_stale_temps(folder);
            }
            let file = AtomicFile::create(&path)?;
            file.preallocate(plan.total)?;
            let written = file.file().write_all_at(&plan.header, 0);
            written
                .map_err(|error| Error::io("cannot write the header", error).at(shown(&path)))?;
            let places = plan.offsets.iter().zip(&plan.bytes);
            let places = places.map(|(&offset, &bytes)| (0, offset, bytes)).collect();
            Ok(Open { places, files: Mutex::new(Some(Files::One(file))) })
        })?;
        Ok(Self { inner: Own::new(Arc::new(open), "this save") })
    }

    /// Starts a folder of files of at most `max_shard_bytes` of tensors each.
    #[staticmethod]
    fn folder(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<(String, String, Vec<u64>)>,
        metadata: Metadata,
        max_shard_bytes: u64,
    ) -> Result<Self> {
        let specs = specs_of(tensors)?;
        let open = interruptible(py, move |_| {
            let save = ModelSave::create(&path, &specs, metadata.as_deref(), max_shard_bytes)?;
            let mut places = vec![(0, 0, 0); specs.len()];
            for (file, shard) in save.shards().iter().enumerate() {
                let layout = shard.layout.offsets.iter().zip(&shard.layout.bytes);
                for (&tensor, (&offset, &bytes)) in shard.tensors.iter().zip(layout) {
                    if let Some(place) = places.get_mut(tensor) {
                        *place = (file, offset, bytes);
                    }
                }
            }
            Ok(Open { places, files: Mutex::new(Some(Files::Model(save))) })
        })?;
        Ok(Self { inner: Own::new(Arc::new(open), "this save") })
    }

    /// Writes tensors from the memory of an engine's device: (number, address, bytes) each. `owners` keeps the memory
    /// until no thread reads it. `stream` is the handle of the stream that device memory was last written on.
    ///
    /// Each address must be valid for its bytes as long as `owners` lives.
    #[pyo3(signature = (engine, parts, owners, threads=None, stream=None))]
    fn write(
        &self,
        py: Python<'_>,
        engine: &Engine,
        parts: Vec<(usize, u64, u64)>,
        owners: Py<PyAny>,
        threads: Option<usize>,
        stream: Option<usize>,
    ) -> Result<()> {
        let open = self.inner.get()?.clone();
        let engine = engine.shared()?;
        let placed = |(tensor, address, len): (usize, u64, u64)| match open.places.get(tensor) {
            Some(&(sink, offset, bytes)) if bytes == len && (address != 0 || len == 0) => {
                Ok(Part { sink, offset, address, len })
            }
            Some(_) => Err(internal("a tensor has other bytes than its shape says")),
            None => Err(internal("no such tensor number")),
        };
        let parts = parts.into_iter().map(placed).collect::<Result<Vec<_>>>()?;
        interruptible(py, move |stop| {
            let options = WriteOptions { threads, stream };
            let result = open.write(&engine, &parts, options, stop);
            drop(owners);
            result
        })
    }

    /// Forces everything to the disk and makes it visible, in one step; not if the caller gives up before that step.
    fn commit<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let open = self.inner.get()?.clone();
        let (files, removed, durability, warnings) = interruptible(py, move |stop| {
            let Some(files) = open.files().take() else {
                return Err(Error::new(Code::Usage, "this save was committed or given up before"));
            };
            match files {
                Files::One(file) => {
                    let name = file.dest().display().to_string();
                    let durability = file.commit_if(|| !stop.is_set())?;
                    Ok((vec![name], Vec::new(), durability, Vec::new()))
                }
                Files::Model(model) => {
                    let saved = model.commit_if(|| !stop.is_set())?;
                    Ok((saved.files, saved.removed, saved.durability, saved.warnings))
                }
            }
        })?;
        let dict = PyDict::new(py);
        dict.set_item("files", files)?;
        dict.set_item("removed", removed)?;
        dict.set_item("durable", durability == Durability::Proven)?;
        dict.set_item("warnings", warnings)?;
        Ok(dict)
    }

    /// Gives the save up and removes what was written. Where a thread is still at it (a hung disk), that happens when
    /// it lets go.
    fn abandon(&self) {
        if let Ok(open) = self.inner.get()
            && let Ok(mut files) = open.files.try_lock()
        {
            drop(files.take());
        }
    }
}

fn specs_of(tensors: Vec<(String, String, Vec<u64>)>) -> forebay_error::Result<Vec<TensorSpec>> {
    let one = |(name, dtype, shape): (String, String, Vec<u64>)| match Dtype::parse(&dtype) {
        Some(dtype) => Ok(TensorSpec { name, dtype, shape }),
        None => Err(Error::new(Code::UnknownDtype, format!("no dtype is called `{dtype}`"))),
    };
    tensors.into_iter().map(one).collect()
}
