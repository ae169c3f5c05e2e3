//! Checkpoints that are there.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_checkpoint::commit;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::open;
use forebay_checkpoint::restore::{Item, Reader};
use forebay_engine::{CacheChoice, LoadOptions, PathChoice};
use forebay_tensor::Region;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::structure::{elements, torch_name, torch_sides};
use super::usage;
use crate::engine::Engine;
use crate::error::{Result, internal};
use crate::place::place;
use crate::session::Session;
use crate::wait::interruptible;

/// What is wanted: the number of an entry, offsets and sizes as torch counts them.
type Want = (usize, Vec<u64>, Vec<u64>);

/// An open checkpoint: of ours, of torch, or of torch's Hugging Face writer. It may be used in any process.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Checkpoint {
    inner: Arc<Reader>,
}

#[pymethods]
impl Checkpoint {
    /// Opens a step's folder or URL, or with `step` that step of a folder of steps.
    #[new]
    #[pyo3(signature = (path, *, step=None))]
    fn new(py: Python<'_>, path: PathBuf, step: Option<u64>) -> Result<Self> {
        let inner = interruptible(py, move |_| {
            let folder = place(&path)?.checkpoint();
            let step = step.map(|step| folder.folder(&commit::step_folder(step)));
            Reader::open(step.as_ref().unwrap_or(&folder))
        })?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// `(name, path, kind, dtype, shape)` of every entry: kind 0 a tensor, 1 an object.
    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for item in self.inner.items() {
            let path = path_of(py, item)?;
            let tuple = match &item.tensor {
                Some((dtype, shape)) => {
                    let shape = PyTuple::new(py, torch_sides(*dtype, shape))?;
                    (&item.name, path, 0, Some(torch_name(*dtype)), shape).into_pyobject(py)?
                }
                None => {
                    let none = None::<&str>;
                    (&item.name, path, 1, none, PyTuple::empty(py)).into_pyobject(py)?
                }
            };
            list.append(tuple)?;
        }
        Ok(list)
    }

    /// `forebay`, `dcp` or `safetensors_shards`.
    #[getter]
    fn origin(&self) -> &'static str {
        match self.inner.origin() {
            open::Origin::Forebay(_) => "forebay",
            open::Origin::Dcp { .. } => "dcp",
            open::Origin::HfShards => "safetensors_shards",
        }
    }

    /// What the manifest of one of ours says of the save as a whole; empty for others.
    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        if let open::Origin::Forebay(info) = self.inner.origin() {
            dict.set_item("attempt", &info.attempt)?;
            dict.set_item("run", &info.run)?;
            dict.set_item("epoch", info.epoch)?;
            dict.set_item("step", info.step)?;
            dict.set_item("parent", info.parent_step)?;
            dict.set_item("world", info.world_size)?;
            dict.set_item("forebay", &info.forebay)?;
            dict.set_item("torch", &info.torch)?;
            dict.set_item("python", &info.python)?;
            dict.set_item("host", &info.host)?;
            dict.set_item("created", &info.created)?;
        }
        Ok(dict)
    }

    /// What was accepted but is worth telling.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.inner.warnings().to_vec()
    }

    /// Names of files that were committed with the step.
    #[getter]
    fn side_files(&self, py: Python<'_>) -> Result<Vec<String>> {
        let reader = self.inner.clone();
        interruptible(py, move |_| reader.side_files())
    }

    /// Regions in which a tensor is stored: `(offsets, sizes)`.
    fn chunks(&self, name: &str) -> Result<Vec<(Vec<u64>, Vec<u64>)>> {
        let Some((dtype, _)) = &self.inner.item(name)?.tensor else { return Ok(Vec::new()) };
        let sides = |region: &Region| {
            (torch_sides(*dtype, &region.offsets), torch_sides(*dtype, &region.sizes))
        };
        Ok(self.inner.regions(name)?.iter().map(sides).collect())
    }

    /// Whether two entries, by their numbers, are one tensor that was saved under both names.
    fn is_one(&self, one: usize, other: usize) -> bool {
        self.inner.is_one(one, other)
    }

    /// Whether two tensors hold the same in regions, as far as stored checksums say; None where that cannot be told.
    fn same_sums(
        &self,
        py: Python<'_>,
        one: usize,
        other: usize,
        regions: Vec<(Vec<u64>, Vec<u64>)>,
    ) -> Result<Option<bool>> {
        let reader = self.inner.clone();
        interruptible(py, move |_| {
            let item = reader.items().get(one).and_then(|item| item.tensor.as_ref());
            let Some((dtype, _)) = item else { return Ok(None) };
            let region =
                |(offsets, sizes)| Region::new(elements(*dtype, offsets), elements(*dtype, sizes));
            let regions =
                regions.into_iter().map(region).collect::<forebay_error::Result<Vec<_>>>()?;
            Ok(reader.same_sums(one, other, &regions))
        })
    }

    /// Starts to load regions: `wants` are `(number of the entry, offsets, sizes)`. Returns `(order, session)`:
    /// target `i` of the session is `wants[order[i]]`, row-major.
    #[pyo3(signature = (engine, wants, *, threads=None, path="auto", cache="auto"))]
    fn start(
        &self,
        py: Python<'_>,
        engine: &Engine,
        wants: Vec<Want>,
        threads: Option<usize>,
        path: &str,
        cache: &str,
    ) -> Result<(Vec<usize>, Session)> {
        let engine = engine.shared()?;
        let options = LoadOptions {
            threads,
            path: PathChoice::parse(path)?,
            cache: CacheChoice::parse(cache)?,
        };
        let reader = self.inner.clone();
        interruptible(py, move |_| {
            let mut regions = Vec::with_capacity(wants.len());
            for (number, offsets, sizes) in wants {
                let item = reader.items().get(number);
                let item = item.ok_or_else(|| usage(format!("there is no entry {number}")))?;
                let Some((dtype, _)) = &item.tensor else {
                    return Err(usage("an object is read with object()").at(&item.name));
                };
                let region = Region::new(elements(*dtype, offsets), elements(*dtype, sizes))?;
                regions.push((number, region));
            }
            let selected = reader.select(&regions)?;
            let (order, plan) = selected.plan(engine.config().piece_bytes)?;
            let needs = plan.needs();
            let sources = forebay_engine::sources_of(&selected.model.files)?;
            let session = engine.start(plan, sources, options)?;
            Ok((order, needs, session))
        })
        .map(|(order, needs, session)| (order, Session::new(session, needs)))
    }

    /// An object's item: an archive of `torch.save`, compared with its checksum where there is one.
    fn object<'py>(&self, py: Python<'py>, name: String) -> Result<Bound<'py, PyBytes>> {
        let reader = self.inner.clone();
        let bytes = interruptible(py, move |_| reader.object_bytes(&name))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The pickles of objects, by the numbers of their entries, at most 4096: what an archive has as `data.pkl`,
    /// compared with its checksum. `None` for what is large or odd: `object` reads it.
    fn pickles<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Result<Bound<'py, PyList>> {
        let reader = self.inner.clone();
        let pickles = interruptible(py, move |_| reader.pickles(&numbers))?;
        let bytes = pickles.iter().map(|one| one.as_ref().map(|one| PyBytes::new(py, one)));
        Ok(PyList::new(py, bytes)?)
    }

    /// The items of objects, by the numbers of their entries, at most 4096: as `object` has them. `None` for what is
    /// large or odd: `object` reads it.
    fn archives<'py>(&self, py: Python<'py>, numbers: Vec<usize>) -> Result<Bound<'py, PyList>> {
        let reader = self.inner.clone();
        let archives = interruptible(py, move |_| reader.archives(&numbers))?;
        let bytes = archives.iter().map(|one| one.as_ref().map(|one| PyBytes::new(py, one)));
        Ok(PyList::new(py, bytes)?)
    }

    /// Whether the pickle of an object may be given to Python's unpickler, which does not look ahead at what it asks
    /// for. Errors: `invalid_item`.
    #[staticmethod]
    fn check_pickle(py: Python<'_>, data: &[u8]) -> Result<()> {
        py.detach(|| forebay_format::dcp::check_pickle(data)).map_err(Into::into)
    }

    /// An object that is plain data, as JSON text (tuples as lists). Errors: `forbidden_global` or `unsupported` for
    /// others.
    fn object_json(&self, py: Python<'_>, name: String) -> Result<String> {
        let reader = self.inner.clone();
        interruptible(py, move |_| reader.object_json(&name))
    }

    /// A file that was committed with the step.
    fn side_file<'py>(&self, py: Python<'py>, name: String) -> Result<Bound<'py, PyBytes>> {
        let reader = self.inner.clone();
        let bytes = interruptible(py, move |_| reader.side_file(&name))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// An object that is plain data, as Python has it.
    fn object_value<'py>(&self, py: Python<'py>, name: String) -> Result<Bound<'py, PyAny>> {
        let text = self.object_json(py, name)?;
        let json = py.import("json")?;
        let value = json.getattr("loads").and_then(|loads| loads.call1((text,)));
        value.map_err(|_| internal("an object's JSON cannot be read"))
    }
}

fn path_of<'py>(py: Python<'py>, item: &Item) -> PyResult<Bound<'py, PyTuple>> {
    let steps: PyResult<Vec<Bound<'py, PyAny>>> = item
        .path
        .iter()
        .map(|step| match step {
            PathStep::Key(key) => Ok(key.into_pyobject(py)?.into_any()),
            PathStep::Index(index) => Ok(index.into_pyobject(py)?.into_any()),
        })
        .collect();
    PyTuple::new(py, steps?)
}
