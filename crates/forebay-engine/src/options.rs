//! What a caller may choose.

use std::time::Duration;

use forebay_error::{Code, Error, Result};

/// Which way bytes may go. `Auto` decides piece by piece; the others force one way, for measurements and for machines
/// where the decision is wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathChoice {
    /// Decide by residency, file system and device.
    #[default]
    Auto,
    /// Page-cache DMA alone (a GPU only); what it cannot do is copied.
    Dma,
    /// As `Auto`, without page-cache DMA.
    Copy,
    /// Direct reads for everything, resident or not.
    Direct,
    /// Buffered reads for everything, by many threads.
    Buffered,
    /// Buffered or direct reads by threads, without io_uring and DMA.
    Fallback,
}

impl PathChoice {
    /// The names that [`Self::parse`] knows.
    pub const NAMES: &[&str] = &["auto", "dma", "copy", "direct", "buffered", "fallback"];

    /// Reads a name. Errors: `usage`.
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "dma" => Self::Dma,
            "copy" => Self::Copy,
            "direct" => Self::Direct,
            "buffered" => Self::Buffered,
            "fallback" => Self::Fallback,
            _ => {
                return Err(Error::new(Code::Usage, format!("no path is called `{name}`"))
                    .hint(format!("paths: {}", Self::NAMES.join(", "))));
            }
        })
    }
}

/// Whether the page cache should hold the files after a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheChoice {
    /// As found: what was resident stays, what was not is read past the cache where the file system is good at that.
    #[default]
    Auto,
    /// Yes: cold bytes are read through the cache, so that the next load finds them there.
    Keep,
    /// No: cold bytes are read past the cache, and the ranges that were loaded are dropped from it afterwards.
    Bypass,
}

impl CacheChoice {
    /// The names that [`Self::parse`] knows.
    pub const NAMES: &[&str] = &["auto", "keep", "bypass"];

    /// Reads a name. Errors: `usage`.
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "keep" => Self::Keep,
            "bypass" => Self::Bypass,
            _ => {
                return Err(Error::new(Code::Usage, format!("no cache policy is called `{name}`"))
                    .hint(format!("policies: {}", Self::NAMES.join(", "))));
            }
        })
    }
}

/// How an engine is made: what it may use of the machine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Limit of the pinned staging memory, in bytes. Default 1 GiB.
    pub arena_bytes: usize,
    /// Limit of page cache registered with the GPU at one time, in bytes; further bounded by a quarter of the memory
    /// that is available and by the cgroup's headroom. Default 16 GiB.
    pub dma_window_bytes: u64,
    /// Bytes that a worker moves at a time; a power of two. Default 4 MiB: smaller pieces pay more for each copy to
    /// the GPU (measured at 16 threads: 51 GB/s with 4 MiB, 44 with 1 MiB, 29 with 256 KiB).
    pub piece_bytes: u64,
    /// Tuning that the benchmarks vary.
    pub tuning: Tuning,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            arena_bytes: 1 << 30,
            dma_window_bytes: 16 << 30,
            piece_bytes: 4 << 20,
            tuning: Tuning::default(),
        }
    }
}

/// Numbers found by measurement (docs/BENCHMARKS.md); there is no reason to change them outside of benchmarks.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Staging slots beside those that readers are filling: on their way to the GPU, or waiting for the pump. Few: a
    /// filled slot that waits long leaves the processor's cache before the GPU fetches it (measured: 16 readers with 48
    /// slots more 46 GB/s, with 16 more 52).
    pub slots_ahead: usize,
    /// Readers beside DMA, at the most: six and DMA fill the link. When DMA ends before the load does, the others
    /// that its threads allow start.
    pub readers_beside_dma: usize,
    /// Bytes that are registered at a time for DMA: filled slots wait for as long as that takes.
    pub dma_batch_bytes: u64,
    /// DMA bytes queued on the GPU before no more are registered: the readers' share of the link.
    pub dma_ahead_bytes: u64,
    /// Spent batches that are released at once, at the most, when the window is full; otherwise half of them.
    pub release_at_once: usize,
    /// Threads up to which a resident tmpfs file is worth DMA. Its pages register at 15 to 28 GB/s, so that few readers
    /// gain by it (2 threads: 26 GB/s against 12) and many lose (8 threads: 36 against 42).
    pub dma_on_tmpfs_threads: usize,
    /// Bytes a second at which page cache must map and register for DMA to go on beside enough readers to do without
    /// it (eight; with fewer DMA always goes on, as it does where it was asked for). At 27 to 33 GB/s (64 MiB in 2 ms
    /// and more) six readers added 10 to 16 to it, 43 in all, where copies alone gave 50; so it takes 37 or so to be
    /// their equal. At 48 (64 MiB in 1.4 ms) both gave 53, copies alone 51. 38 is above the one and well below the
    /// other, whose noise must not end DMA: it saves two thirds of the CPU there.
    pub dma_rate_min_bytes_per_s: u64,
    /// Batches before the first verdict on that: of three, the slowest is not counted, and with 192 MiB they cost a
    /// load that then copies 1 ms.
    pub dma_trial_batches: usize,
    /// How long a process remembers that registering is slow, by file system and GPU. Time and not bytes: what makes it
    /// slow are other files and other processes, not what was loaded since. 30 s make the trial's 1 ms nothing, and a
    /// server that loads all day notices soon when DMA pays again.
    pub dma_retry_after: Duration,
    /// Pieces that a direct worker keeps in flight, at the most; it finds by trial how many pay.
    pub direct_depth: usize,
    /// Whether a GPU checks the blocks that arrive in its memory as wholes; otherwise the CPU checks all.
    pub gpu_checks: bool,
    /// Bytes of such blocks from which a load has the GPU check them. The CPU is done with 64 MiB in 2 ms; making the
    /// kernel ready, once a process, takes from some ms to tenths of a second (beside the load).
    pub gpu_checks_from_bytes: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            slots_ahead: 8,
            readers_beside_dma: 6,
            dma_batch_bytes: 64 << 20,
            dma_ahead_bytes: 128 << 20,
            release_at_once: usize::MAX,
            dma_on_tmpfs_threads: 4,
            dma_rate_min_bytes_per_s: 38_000_000_000,
            dma_trial_batches: 3,
            dma_retry_after: Duration::from_secs(30),
            direct_depth: 16,
            gpu_checks: true,
            gpu_checks_from_bytes: 64 << 20,
        }
    }
}

/// How one load is done.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads; `None` takes what the machine, the affinity mask and the cgroup's quota allow, at most
    /// [`THREADS_DEFAULT_MAX`].
    pub threads: Option<usize>,
    /// Which way bytes may go.
    pub path: PathChoice,
    /// Whether the page cache should hold the files afterwards.
    pub cache: CacheChoice,
}

/// Threads of a load by default, at the most: 16 saturate a PCIe Gen5 x16 link.
pub const THREADS_DEFAULT_MAX: usize = 16;

/// Threads of a load from objects that are not on this machine, by default. Each waits for one piece at a time: 4 MiB
/// in some 75 ms (30 ms to the first byte, 90 MB/s a connection, as S3 gives) are 1.8 GB/s with these. They sleep, and
/// the store regulates how many requests are sent.
pub(crate) const REMOTE_THREADS: usize = 32;

/// Threads of a load at the very most.
pub const THREADS_MAX: usize = 256;
