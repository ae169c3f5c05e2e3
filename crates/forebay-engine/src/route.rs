//! Which way an object's bytes may go, decided once a load and object, with the reasons for the report.
//!
//! The decision per piece is then short: is it resident? Yes: DMA or copy. No: the object's cold mode.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_device::Device;
use forebay_topology::{DirectAdvice, FsKind};

use crate::options::{CacheChoice, LoadOptions, PathChoice, Tuning};
use crate::pace;
use crate::report::{Path, Tally};
use crate::source::{LocalFile, RangeSource};

/// How bytes are read that the page cache does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Cold {
    /// O_DIRECT through io_uring.
    Ring = 0,
    /// O_DIRECT by the copying workers.
    Threads = 1,
    /// Through the page cache by the copying workers.
    Buffered = 2,
}

/// What is known about residency before looking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Nothing: each piece is looked at.
    No,
    /// All is resident, or is to be treated so.
    Resident,
    /// All is to be read past the page cache.
    Cold,
}

/// The decision for one object.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) known: Known,
    /// What a resident piece counts as when it is copied.
    pub(crate) warm_path: Path,
    pub(crate) dma: bool,
    cold: AtomicU8,
}

impl Route {
    pub(crate) fn cold(&self) -> Cold {
        match self.cold.load(Ordering::Relaxed) {
            0 => Cold::Ring,
            1 => Cold::Threads,
            _ => Cold::Buffered,
        }
    }

    /// Switches to another cold mode, after a refusal.
    pub(crate) fn set_cold(&self, cold: Cold) {
        self.cold.store(cold as u8, Ordering::Relaxed);
    }
}

/// Decides for one object. `dma_limit` is how much page cache may be registered; none where the CPU
/// checks all of its bytes.
pub(crate) fn decide(
    source: &dyn RangeSource,
    device: &Device,
    options: &LoadOptions,
    tuning: &Tuning,
    threads: usize,
    dma_limit: Option<u64>,
    tally: &Tally,
) -> Route {
    let Some(file) = source.local() else {
        tally.reason(Path::Buffered, "not a local file");
        return route(Known::Resident, Path::Buffered, false, Cold::Buffered);
    };
    let dma = match dma_verdict(file, device, options, tuning, threads, dma_limit) {
        Ok(reason) => {
            tally.reason(Path::PageCacheDma, reason);
            tally.reason(Path::PageCacheCopy, "resident; readers share the link with DMA");
            true
        }
        Err(reason) => {
            tally.reason(Path::PageCacheCopy, &format!("resident; {reason}"));
            false
        }
    };
    if options.path == PathChoice::Dma && !dma {
        tally.refusal("page-cache DMA was asked for and is not possible here; copying instead");
    }
    let cold = cold_mode(file, options, tally);
    match options.path {
        PathChoice::Buffered => {
            tally.reason(Path::Buffered, "asked for");
            route(Known::Resident, Path::Buffered, false, Cold::Buffered)
        }
        PathChoice::Direct if cold != Cold::Buffered => {
            route(Known::Cold, Path::PageCacheCopy, false, cold)
        }
        PathChoice::Direct => {
            let kind = &file.profile().kind;
            tally.refusal(&format!("{kind}: direct reads were asked for and are not possible"));
            route(Known::No, Path::PageCacheCopy, false, cold)
        }
        _ if file.profile().kind == FsKind::Tmpfs => {
            route(Known::Resident, Path::PageCacheCopy, dma, cold)
        }
        _ => route(Known::No, Path::PageCacheCopy, dma, cold),
    }
}

fn route(known: Known, warm_path: Path, dma: bool, cold: Cold) -> Route {
    Route { known, warm_path, dma, cold: AtomicU8::new(cold as u8) }
}

/// Whether page-cache DMA may be used; the reason either way.
fn dma_verdict(
    file: &LocalFile,
    device: &Device,
    options: &LoadOptions,
    tuning: &Tuning,
    threads: usize,
    limit: Option<u64>,
) -> Result<&'static str, String> {
    let Device::Cuda(gpu) = device else { return Err("the host needs no DMA".to_owned()) };
    match options.path {
        PathChoice::Auto | PathChoice::Dma => {}
        PathChoice::Fallback => return Err("asked for without DMA and io_uring".to_owned()),
        _ => return Err("DMA not asked for".to_owned()),
    }
    if !gpu.read_only_registration() {
        return Err("this GPU cannot register read-only memory".to_owned());
    }
    let Some(limit) = limit else {
        return Err("its checksums are made by the CPU, which DMA passes by".to_owned());
    };
    // A batch is registered in whole pages; two pages of 64 KiB are more than its ends add.
    if limit < tuning.dma_batch_bytes + (2 << 16) {
        return Err("no memory to spare for registered page cache".to_owned());
    }
    if file.is_dax() {
        return Err("the file bypasses the page cache (DAX)".to_owned());
    }
    if let Some(refusal) = refused(Refused::Dma, file.device()) {
        return Err(format!("this file system's pages cannot be registered: {refusal}"));
    }
    let tmpfs = file.profile().kind == FsKind::Tmpfs;
    if tmpfs && options.path == PathChoice::Auto && threads > tuning.dma_on_tmpfs_threads {
        return Err("tmpfs pages register slower than so many threads copy".to_owned());
    }
    if may_give_up(options, threads)
        && let Some(rate) = pace::remembered(tuning, file.device(), gpu.ordinal())
    {
        return Err(pace::slow(rate));
    }
    Ok("resident, and the GPU can register it read-only")
}

/// Whether DMA ends where registering is slow: not when it was asked for, nor when copies could not do better.
pub(crate) fn may_give_up(options: &LoadOptions, threads: usize) -> bool {
    options.path == PathChoice::Auto && pace::copies_fill_link(threads)
}

/// How cold bytes of a file are read.
fn cold_mode(file: &LocalFile, options: &LoadOptions, tally: &Tally) -> Cold {
    let kind = &file.profile().kind;
    let buffered = |reason: String| {
        tally.reason(Path::Buffered, &format!("not resident; {reason}"));
        Cold::Buffered
    };
    let forced = options.path == PathChoice::Direct;
    if options.cache == CacheChoice::Keep && !forced {
        return buffered("the page cache is to hold it".to_owned());
    }
    match file.profile().direct {
        DirectAdvice::Never => return buffered(format!("{kind} has no direct reads")),
        DirectAdvice::Avoid if !forced && options.cache != CacheChoice::Bypass => {
            return buffered(format!("{kind} reads better through the cache"));
        }
        _ => {}
    }
    if let Some(refusal) = refused(Refused::Direct, file.device()) {
        return buffered(format!("direct reads refused: {refusal}"));
    }
    let why = if forced { "asked for" } else { "not resident" };
    let ring_refusal = match options.path {
        PathChoice::Fallback => Some("not asked for".to_owned()),
        _ => refused(Refused::Ring, 0),
    };
    if let Some(refusal) = ring_refusal {
        tally.reason(Path::DirectThreads, &format!("{why}; io_uring {refusal}"));
        return Cold::Threads;
    }
    if forced {
        tally.reason(Path::Direct, "asked for, resident or not");
    } else if file.profile().direct == DirectAdvice::Good {
        tally.reason(Path::Direct, &format!("not resident; {kind} is good at direct reads"));
    } else {
        tally.reason(Path::Direct, "not resident, and the page cache is not to hold it");
    }
    Cold::Ring
}

/// What can be refused for the rest of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Refused {
    /// Registering a file system's pages.
    Dma,
    /// O_DIRECT on a file system.
    Direct,
    /// io_uring, on this machine (device 0).
    Ring,
    /// The checksum kernel on a GPU (device: its ordinal).
    Checks,
}

static REFUSALS: Mutex<Option<HashMap<(Refused, u64), String>>> = Mutex::new(None);

/// Remembers a refusal, so that it is met once and not at every piece.
pub(crate) fn refuse(what: Refused, device: u64, why: &str) {
    let mut refusals = REFUSALS.lock().unwrap_or_else(PoisonError::into_inner);
    let refusals = refusals.get_or_insert_with(HashMap::new);
    // A machine with thousands of mounts that come and go must not grow this for ever.
    if refusals.len() >= 4096 {
        refusals.clear();
    }
    refusals.insert((what, device), why.to_owned());
}

/// Why something is refused, if it is.
pub(crate) fn refused(what: Refused, device: u64) -> Option<String> {
    let refusals = REFUSALS.lock().unwrap_or_else(PoisonError::into_inner);
    refusals.as_ref().and_then(|refusals| refusals.get(&(what, device)).cloned())
}
