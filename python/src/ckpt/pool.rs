//! Staging memory of saves.

use std::sync::Arc;

use forebay_device::{Arena, ArenaConfig, Device};
use forebay_error::{Code, Error};
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error::Result;
use crate::fork::Own;
use crate::process::Holder;
use crate::wait::interruptible;

/// Bytes of a slot: what is copied, checked and written at a time.
const SLOT_BYTES: usize = 4 << 20;

/// Slots that one thread makes ready at a time, when all are.
const PREWARM_THREADS: usize = 8;

/// A staging pool: pinned for a GPU, plain memory for the host. Its size is a promise.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Pool {
    _holder: Holder,
    inner: Own<Arc<Arena>>,
}

#[pymethods]
impl Pool {
    /// Sets `bytes` aside; with `prewarm` all of it is touched and pinned now, else slot by slot at first use.
    #[new]
    #[pyo3(signature = (engine, bytes, prewarm=true))]
    fn new(py: Python<'_>, engine: &Engine, bytes: usize, prewarm: bool) -> Result<Self> {
        let engine = engine.shared()?;
        let arena = interruptible(py, move |_| {
            let device = engine.device();
            // Never more than was allowed; two slots are the least that can overlap.
            let slots = (bytes / SLOT_BYTES).max(2);
            let config = ArenaConfig { size_bytes: slots * SLOT_BYTES, slot_bytes: SLOT_BYTES };
            let make = || {
                let arena = Arena::without_margin(device, &config)?;
                if prewarm {
                    warm(device, &arena, slots)?;
                }
                Ok(arena)
            };
            make().map_err(|error: Error| match error.code() {
                Code::OutOfMemory => error.hint(format!(
                    "staging_bytes={} is what saves set aside: take less, or raise the limit of \
                     memory",
                    slots * SLOT_BYTES
                )),
                _ => error,
            })
        })?;
        Ok(Self { _holder: Holder::new(), inner: Own::new(arena, "this staging pool") })
    }

    /// Its size in bytes.
    #[getter]
    fn bytes(&self) -> Result<usize> {
        let arena = self.inner.get()?;
        Ok(arena.slot_count() * arena.slot_bytes())
    }

    /// The most that was in use at one time, in bytes.
    #[getter]
    fn peak_bytes(&self) -> Result<usize> {
        Ok(self.inner.get()?.stats().peak_bytes)
    }

    /// Memory that it holds now, in bytes.
    #[getter]
    fn touched_bytes(&self) -> Result<usize> {
        Ok(self.inner.get()?.stats().touched_bytes)
    }
}

impl Pool {
    pub(super) fn shared(&self) -> forebay_error::Result<Arc<Arena>> {
        Ok(self.inner.get()?.clone())
    }
}

/// Bytes of memory that this process may still take, by the machine and its control groups; `None` where nobody says.
#[pyfunction]
pub(super) fn memory_headroom() -> Option<u64> {
    forebay_topology::memory_headroom()
}

/// Takes every slot once, from several threads: touching memory and pinning it overlap.
fn warm(device: &Device, arena: &Arc<Arena>, slots: usize) -> forebay_error::Result<()> {
    let threads = slots.clamp(1, PREWARM_THREADS);
    let taken = std::thread::scope(|scope| {
        let takers: Vec<_> = (0..threads)
            .map(|thread| {
                let share = slots / threads + usize::from(thread < slots % threads);
                scope.spawn(move || {
                    if let Device::Cuda(gpu) = device {
                        gpu.bind_thread()?;
                    }
                    let mut held = Vec::new();
                    for _ in 0..share {
                        let mut slots = arena.acquire(1, &|| true)?;
                        if !device.is_gpu() {
                            for slot in &mut slots {
                                let len = slot.len();
                                slot.bytes_mut(len).fill(0);
                            }
                        }
                        held.extend(slots);
                    }
                    Ok::<_, Error>(held)
                })
            })
            .collect();
        takers
            .into_iter()
            .map(|taker| {
                taker.join().unwrap_or_else(|_| {
                    Err(Error::new(forebay_error::Code::Internal, "a thread panicked"))
                })
            })
            .collect::<Vec<_>>()
    });
    taken.into_iter().try_for_each(|slots| slots.map(drop))
}
