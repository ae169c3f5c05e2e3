//! What a load did: which way the bytes went and why.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay_device::ArenaStats;
use rustix::time::{ClockId, clock_gettime};

/// A way that bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// The GPU read the page cache.
    PageCacheDma,
    /// The CPU copied from the page cache.
    PageCacheCopy,
    /// Direct reads through io_uring.
    Direct,
    /// Reads through the page cache of bytes that were not there.
    Buffered,
    /// Direct reads by threads, because io_uring is refused.
    DirectThreads,
}

impl Path {
    /// Every path.
    pub const ALL: [Path; 5] = [
        Path::PageCacheDma,
        Path::PageCacheCopy,
        Path::Direct,
        Path::Buffered,
        Path::DirectThreads,
    ];

    /// The name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Path::PageCacheDma => "page-cache-dma",
            Path::PageCacheCopy => "page-cache-copy",
            Path::Direct => "direct",
            Path::Buffered => "buffered",
            Path::DirectThreads => "direct-threads",
        }
    }
}

/// One path's part in a load.
#[derive(Clone, Debug)]
pub struct PathShare {
    /// The path.
    pub path: Path,
    /// Payload bytes that went this way.
    pub bytes: u64,
    /// Pieces that went this way.
    pub pieces: u64,
    /// Why, a line for each reason.
    pub reasons: Vec<String>,
}

/// What a load did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Payload bytes.
    pub bytes: u64,
    /// Bytes read: payload and gaps.
    pub read_bytes: u64,
    /// Seconds from the start of the session to the last byte.
    pub seconds: f64,
    /// CPU seconds of the worker threads.
    pub cpu_seconds: f64,
    /// Worker threads.
    pub threads: usize,
    /// The paths, those without bytes left out.
    pub paths: Vec<PathShare>,
    /// Bytes whose checksums a GPU compared where they had arrived, in its memory; whole blocks.
    pub verified_gpu_bytes: u64,
    /// Bytes whose checksums the CPU compared on their way; whole blocks.
    pub verified_cpu_bytes: u64,
    /// Payload bytes that there was nothing to compare with: without a checksum, or parts of what has one as a whole.
    pub unverified_bytes: u64,
    /// What was refused, by whom, and what was done instead.
    pub refusals: Vec<String>,
    /// The arena.
    pub arena: ArenaStats,
    /// Most page cache registered with the GPU at one time, in bytes.
    pub registered_peak_bytes: u64,
    /// Limit of that, in bytes.
    pub registered_limit_bytes: u64,
    /// Page cache that was still registered when the load was done, other loads' included, in bytes: its release goes
    /// on in the background.
    pub registered_left_bytes: u64,
    /// Bytes a second at which page cache was mapped and registered for DMA, all batches together; 0 without any.
    pub registering_bytes_per_s: f64,
    /// Whether DMA ended before the load did, because registering was slower than copies are.
    pub dma_ended_early: bool,
    /// Files whose size, mtime and ctime were the same after the load as before.
    pub files_unchanged: usize,
}

impl Report {
    /// Payload bytes a second, in GB (10^9).
    pub fn gigabytes_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / 1e9 / self.seconds } else { 0.0 }
    }
}

/// Counters that the workers share.
#[derive(Default)]
pub(crate) struct Tally {
    bytes: [AtomicU64; Path::ALL.len()],
    pieces: [AtomicU64; Path::ALL.len()],
    cpu_nanos: AtomicU64,
    verified_gpu: AtomicU64,
    verified_cpu: AtomicU64,
    registered_bytes: AtomicU64,
    registering_nanos: AtomicU64,
    dma_ended_early: AtomicBool,
    words: Mutex<Words>,
}

#[derive(Default)]
struct Words {
    reasons: BTreeMap<Path, Vec<String>>,
    refusals: Vec<String>,
}

/// Reasons and refusals kept at the most: a model of 10,000 files must not make a report of 10,000 lines.
const WORDS_MAX: usize = 16;

impl Tally {
    pub(crate) fn count(&self, path: Path, bytes: u64) {
        let index = path as usize;
        if let (Some(total), Some(pieces)) = (self.bytes.get(index), self.pieces.get(index)) {
            total.fetch_add(bytes, Ordering::Relaxed);
            pieces.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds what this thread has spent since it was last here. Called at each piece, so that the sum is complete when
    /// the last piece is, whatever the threads do after it.
    pub(crate) fn settle_cpu(&self) {
        thread_local! {
            static COUNTED: Cell<u64> = const { Cell::new(0) };
        }
        let spent = clock_gettime(ClockId::ThreadCPUTime);
        let spent = spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64;
        let before = COUNTED.replace(spent);
        self.cpu_nanos.fetch_add(spent.saturating_sub(before), Ordering::Relaxed);
    }

    pub(crate) fn cpu_seconds(&self) -> f64 {
        self.cpu_nanos.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Counts bytes whose checksums were right.
    pub(crate) fn verified(&self, by_gpu: u64, by_cpu: u64) {
        self.verified_gpu.fetch_add(by_gpu, Ordering::Relaxed);
        self.verified_cpu.fetch_add(by_cpu, Ordering::Relaxed);
    }

    /// Bytes that the GPU has verified, and those that the CPU has.
    pub(crate) fn verified_bytes(&self) -> (u64, u64) {
        (self.verified_gpu.load(Ordering::Relaxed), self.verified_cpu.load(Ordering::Relaxed))
    }

    /// Counts a batch that was mapped and registered.
    pub(crate) fn registered(&self, bytes: u64, took: Duration) {
        self.registered_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.registering_nanos.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn registering_bytes_per_s(&self) -> f64 {
        let seconds = self.registering_nanos.load(Ordering::Relaxed) as f64 / 1e9;
        let bytes = self.registered_bytes.load(Ordering::Relaxed) as f64;
        if seconds > 0.0 { bytes / seconds } else { 0.0 }
    }

    /// DMA has ended for its slowness; `why` goes to those who still had bytes by it, and to those who take over.
    pub(crate) fn dma_ends_early(&self, why: &str) {
        self.dma_ended_early.store(true, Ordering::Relaxed);
        self.reason(Path::PageCacheDma, &format!("ended early: {why}"));
        self.reason(Path::PageCacheCopy, why);
    }

    pub(crate) fn dma_ended_early(&self) -> bool {
        self.dma_ended_early.load(Ordering::Relaxed)
    }

    pub(crate) fn reason(&self, path: Path, text: &str) {
        let mut words = self.words();
        let reasons = words.reasons.entry(path).or_default();
        if reasons.len() < WORDS_MAX && !reasons.iter().any(|known| known == text) {
            reasons.push(text.to_owned());
        }
    }

    pub(crate) fn refusal(&self, text: &str) {
        let mut words = self.words();
        if words.refusals.len() < WORDS_MAX && !words.refusals.iter().any(|known| known == text) {
            words.refusals.push(text.to_owned());
        }
    }

    pub(crate) fn refusals(&self) -> Vec<String> {
        self.words().refusals.clone()
    }

    pub(crate) fn shares(&self) -> Vec<PathShare> {
        let words = self.words();
        let share = |path: Path| {
            let bytes = self.bytes.get(path as usize)?.load(Ordering::Relaxed);
            let pieces = self.pieces.get(path as usize)?.load(Ordering::Relaxed);
            let reasons = words.reasons.get(&path).cloned().unwrap_or_default();
            (pieces > 0).then_some(PathShare { path, bytes, pieces, reasons })
        };
        Path::ALL.into_iter().filter_map(share).collect()
    }

    fn words(&self) -> std::sync::MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
