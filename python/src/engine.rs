//! Engines: a device and its arena, kept between loads.

use std::sync::Arc;

use forebay_device::Device;
use forebay_engine::{CacheChoice, EngineConfig, LoadOptions, PathChoice, Selection, Wanted};
use forebay_error::{Code, Error};
use forebay_tensor::Region;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::error::Result;
use crate::fork::Own;
use crate::model::Model;
use crate::process::{self, Holder};
use crate::session::Session;
use crate::wait::interruptible;

/// A device with its arena. Loads of one process share it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Engine {
    _holder: Holder,
    inner: Own<Arc<forebay_engine::Engine>>,
}

/// Offsets and sizes of a region; `None` for the whole tensor.
type RegionArg = Option<(Vec<u64>, Vec<u64>)>;

#[pymethods]
impl Engine {
    /// An engine for a device (`host`, `cuda:N`) with these settings; unknown ones are refused.
    #[new]
    fn new(py: Python<'_>, device: String, config: &Bound<'_, PyDict>) -> Result<Self> {
        let config = config_of(config)?;
        let device = interruptible(py, move |_| Device::open(&device))?;
        let engine = forebay_engine::Engine::new(device, config);
        process::watch(&engine);
        Ok(Self { _holder: Holder::new(), inner: Own::new(engine, "this engine") })
    }

    /// Starts a load of `wanted`, ascending by (tensor, place in the list); target `i` is `wanted[i]`. `None` is every
    /// tensor, whole. With `batch_bytes` neighbours form batches of at most so many bytes (or one tensor), each of
    /// which completes when its own targets have been provided.
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    #[pyo3(signature = (model, wanted, threads=None, path="auto", cache="auto", batch_bytes=None))]
    fn start(
        &self,
        py: Python<'_>,
        model: &Model,
        wanted: Option<Vec<(usize, RegionArg)>>,
        threads: Option<usize>,
        path: &str,
        cache: &str,
        batch_bytes: Option<u64>,
    ) -> Result<Session> {
        let engine = self.inner.get()?.clone();
        let path = PathChoice::parse(path)?;
        let cache = CacheChoice::parse(cache)?;
        let options = LoadOptions { threads, path, cache };
        let model = model.inner.clone();
        let wanted = wanted.map(wanted_of).transpose()?;
        interruptible(py, move |_| {
            let count = wanted.as_ref().map_or(model.catalog.tensors.len(), Vec::len);
            let asked: Option<Vec<usize>> =
                wanted.as_ref().map(|wanted| wanted.iter().map(|want| want.tensor).collect());
            let selection = match wanted {
                Some(wanted) => Selection::new(&model.catalog, wanted)?,
                None => Selection::all(&model.catalog)?,
            };
            let piece = engine.config().piece_bytes;
            let (order, plan) = match batch_bytes {
                Some(bytes) => selection.plan_in_batches(piece, bytes)?,
                None => selection.plan(piece)?,
            };
            let in_order = match &asked {
                Some(asked) => order.iter().map(|want| want.tensor).eq(asked.iter().copied()),
                None => order.iter().map(|want| want.tensor).eq(0..count),
            };
            if !in_order {
                return Err(Error::new(Code::Internal, "targets are not in reading order"));
            }
            let name = |want: &Wanted| {
                let tensor = model.catalog.tensors.get(want.tensor);
                tensor.map_or_else(String::new, |tensor| tensor.name.clone())
            };
            let plan = plan.with_names(order.iter().map(name).collect());
            let needs = plan.needs();
            let sources = forebay_engine::sources_of(&model.files)?;
            let session = engine.start(plan, sources, options)?;
            Ok((session, needs))
        })
        .map(|(session, needs)| Session::new(session, needs))
    }

    /// The device's name.
    #[getter]
    fn device(&self) -> Result<String> {
        Ok(self.inner.get()?.device().name())
    }
}

impl Engine {
    /// The engine itself. Errors: `forked`.
    pub(crate) fn shared(&self) -> forebay_error::Result<Arc<forebay_engine::Engine>> {
        Ok(self.inner.get()?.clone())
    }
}

fn wanted_of(wanted: Vec<(usize, RegionArg)>) -> forebay_error::Result<Vec<Wanted>> {
    let one = |(tensor, region): (usize, RegionArg)| {
        let region = region.map(|(offsets, sizes)| Region::new(offsets, sizes)).transpose()?;
        Ok(Wanted { tensor, region })
    };
    wanted.into_iter().map(one).collect()
}

fn config_of(settings: &Bound<'_, PyDict>) -> Result<EngineConfig> {
    let mut config = EngineConfig::default();
    for (key, value) in settings {
        let key = key.cast::<PyString>().map_err(PyErr::from)?.to_string();
        let tuning = &mut config.tuning;
        match key.as_str() {
            "arena_bytes" => config.arena_bytes = value.extract()?,
            "dma_window_bytes" => config.dma_window_bytes = value.extract()?,
            "piece_bytes" => config.piece_bytes = value.extract()?,
            "slots_ahead" => tuning.slots_ahead = value.extract()?,
            "readers_beside_dma" => tuning.readers_beside_dma = value.extract()?,
            "dma_batch_bytes" => tuning.dma_batch_bytes = value.extract()?,
            "dma_ahead_bytes" => tuning.dma_ahead_bytes = value.extract()?,
            "dma_on_tmpfs_threads" => tuning.dma_on_tmpfs_threads = value.extract()?,
            "direct_depth" => tuning.direct_depth = value.extract()?,
            _ => {
                let text = format!("no option is called `{key}`");
                let known = "threads, path, cache, arena_bytes, dma_window_bytes, piece_bytes";
                return Err(Error::new(Code::Usage, text).hint(format!("options: {known}")).into());
            }
        }
    }
    Ok(config)
}
