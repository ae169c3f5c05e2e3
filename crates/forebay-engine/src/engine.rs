//! The engine: a device, an arena, and the limits of both. **unsafe**: measuring the link queues copies.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use forebay_device::{Arena, ArenaConfig, ArenaStats, Device};
use forebay_error::{Error, Result};

use crate::options::{EngineConfig, LoadOptions, REMOTE_THREADS, THREADS_DEFAULT_MAX, THREADS_MAX};
use crate::plan::Plan;
use crate::session::Session;
use crate::source::RangeSource;
use crate::window::Window;

/// Slots below which a smaller arena is not tried any more.
const ARENA_SLOTS_MIN: usize = 4;

/// Moves bytes between sources and one device. Loads may run side by side; they share the arena and the window of
/// registered page cache.
pub struct Engine {
    device: Device,
    config: EngineConfig,
    arena: OnceLock<Arc<Arena>>,
    window: Arc<Window>,
    /// The last field, so the last to go.
    presence: Arc<()>,
}

impl Engine {
    /// An engine for `device`. Nothing is allocated before the first load.
    pub fn new(device: Device, config: EngineConfig) -> Arc<Self> {
        let (arena, window, presence) = (OnceLock::new(), Window::new(), Arc::new(()));
        Arc::new(Self { device, config, arena, window, presence })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How it was made.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Starts a load. Its targets' addresses are provided next, in order: [`Session::provide`].
    pub fn start(
        self: &Arc<Self>,
        plan: Plan,
        sources: Vec<Arc<dyn RangeSource>>,
        options: LoadOptions,
    ) -> Result<Session> {
        Session::start(self.clone(), plan, sources, options)
    }

    /// What the arena holds.
    pub fn arena_stats(&self) -> ArenaStats {
        self.arena.get().map(|arena| arena.stats()).unwrap_or_default()
    }

    /// Whether a load or a save waits for a slot.
    pub(crate) fn arena_is_wanted(&self) -> bool {
        self.arena.get().is_some_and(|arena| arena.is_wanted())
    }

    /// The arena, made at first use.
    pub(crate) fn arena(&self) -> Result<&Arc<Arena>> {
        if let Some(arena) = self.arena.get() {
            return Ok(arena);
        }
        let slot_bytes = self.config.piece_bytes as usize;
        let mut size_bytes = self.config.arena_bytes;
        let arena = loop {
            match Arena::new(&self.device, &ArenaConfig { size_bytes, slot_bytes }) {
                // Address space may be limited; a load needs no more than some ten slots.
                Err(error)
                    if error.code() == forebay_error::Code::OutOfMemory
                        && size_bytes / 2 >= ARENA_SLOTS_MIN * slot_bytes =>
                {
                    tracing::warn!(%error, "trying a smaller arena");
                    size_bytes /= 2;
                }
                made => break made?,
            }
        };
        // Two loads that start at once may both have made one; the loser's has no memory yet and goes.
        Ok(self.arena.get_or_init(|| arena))
    }

    /// How much page cache may be registered now: the setting, a quarter of the memory that is available, and half of
    /// what the cgroup leaves, whichever is least.
    pub(crate) fn dma_limit(&self) -> u64 {
        let available = forebay_topology::memory_headroom();
        self.config.dma_window_bytes.min(available.map_or(u64::MAX, |bytes| bytes / 4))
    }

    /// The window of registered page cache.
    pub(crate) fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Releases page cache that loads have done with, at most for `timeout`. It goes by itself too, within a second of
    /// the last load's end; this is for who wants it gone now. True if nothing of it is left.
    pub fn release(&self, timeout: Duration) -> bool {
        self.window.release(timeout)
    }

    /// Dead once nothing is left of the engine. Its last reference may be a worker's, and then it takes the time to
    /// release what is registered, in which the engine is nobody's any more.
    pub fn presence(&self) -> Weak<()> {
        Arc::downgrade(&self.presence)
    }

    /// Most page cache registered at one time so far.
    pub fn registered_peak(&self) -> u64 {
        self.window.registered_peak()
    }

    /// Page cache registered now; 0 again within a second of the last load's end.
    pub fn registered_now(&self) -> u64 {
        self.window.registered()
    }

    /// Worker threads for a load.
    pub(crate) fn threads(&self, options: &LoadOptions, remote: bool) -> usize {
        match options.threads {
            Some(threads) => threads.clamp(1, THREADS_MAX),
            None if remote => REMOTE_THREADS,
            None => forebay_topology::worker_cpus().clamp(1, THREADS_DEFAULT_MAX),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.window.is_inherited() {
            // In the child of a fork: all of it is the parent's. Kept for ever, as references that nobody drops.
            std::mem::forget((self.window.clone(), self.arena.get().cloned()));
        } else {
            self.window.close();
        }
    }
}

/// Rates of the link between host memory and a GPU, measured with the arena's kind of memory.
#[derive(Clone, Copy, Debug)]
pub struct LinkRate {
    /// Bytes a second, host to device, best of several.
    pub to_device: f64,
}

/// Measures the link of a GPU: copies of `len` bytes from pinned memory, best of `rounds`; about 5 ms each for 256 MiB.
///
/// Errors: `unsupported` for the host, which has no link.
pub fn measure_link(device: &Device, len: usize, rounds: usize) -> Result<LinkRate> {
    let Device::Cuda(gpu) = device else {
        return Err(Error::new(forebay_error::Code::Unsupported, "the host device has no link"));
    };
    gpu.with_context(|| {
        let arena =
            Arena::new(device, &ArenaConfig { size_bytes: len + (1 << 20), slot_bytes: len })?;
        let slots = arena.acquire(1, &|| false)?;
        let stream = forebay_device::cuda::Stream::new(gpu)?;
        let target = forebay_device::cuda::DeviceBuffer::new(gpu, len as u64)?;
        let mut best = f64::INFINITY;
        for slot in &slots {
            for _ in 0..=rounds {
                let start = std::time::Instant::now();
                for _ in 0..2 {
                    // SAFETY: both are `len` bytes long and live until the stream was synchronized, below.
                    unsafe { stream.copy_to_device(target.address(), slot.address(), len as u64)? };
                }
                stream.synchronize()?;
                best = best.min(start.elapsed().as_secs_f64() / 2.0);
            }
        }
        Ok(LinkRate { to_device: len as f64 / best })
    })
}
