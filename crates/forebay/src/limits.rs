//! What the machine can do, measured: a rate alone says little, a rate beside its limit says where the time goes.
//!
//! | limit | how it is measured |
//! | --- | --- |
//! | link | pinned memory to the GPU, 256 MiB, best of several ([`forebay_engine::measure_link`]) |
//! | memory copy | threads that each copy a block to another, both touched before; best of several |
//! | disk | threads that read the files front to back with `O_DIRECT`, in large blocks; best of three settings |

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_device::Device;
use forebay_engine::{LocalFile, measure_link};
use forebay_error::{Code, Error, Result};
use forebay_format::Model;
use serde::Serialize;

use crate::parallel;
use crate::units::{count, gb_per_s};

/// Bytes of one copy over the link: long enough that starting it costs nothing.
const LINK_BYTES: usize = 256 << 20;

/// Memory that a memory-copy measurement touches, at the most: beyond every cache, and quickly done.
const COPY_BYTES: u64 = 128 << 20;

const ROUNDS: usize = 5;

/// Reads of the disk: (threads, bytes of a block).
const DISK_SETTINGS: [(usize, u64); 3] = [(4, 4 << 20), (16, 1 << 20), (16, 4 << 20)];

/// Bytes that one disk measurement reads at the most: some seconds of a fast disk.
const DISK_BYTES: u64 = 8 << 30;

/// Below this a load is over before a rate means anything, and measuring the limit would take longer.
pub(crate) const WORTH_BYTES: u64 = 32 << 20;

/// A measured limit.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Limit {
    /// `link`, `memory-copy` or `disk`.
    pub(crate) what: &'static str,
    pub(crate) gb_per_s: f64,
    /// How it was measured.
    pub(crate) how: String,
}

/// The limit of the way into a device's memory. `bytes` bounds the effort: a small load is not worth a long
/// measurement.
pub(crate) fn of_device(device: &Device, threads: usize, bytes: u64) -> Result<Limit> {
    match device {
        Device::Cuda(_) => {
            let rate = measure_link(device, LINK_BYTES, ROUNDS)?;
            Ok(Limit {
                what: "link",
                gb_per_s: rate.to_device / 1e9,
                how: format!("pinned copies of {} MiB to the GPU", LINK_BYTES >> 20),
            })
        }
        Device::Host => memory_copy(threads, bytes),
    }
}

/// The rate of copying memory with so many threads.
pub(crate) fn memory_copy(threads: usize, bytes: u64) -> Result<Limit> {
    if forebay_topology::memory_headroom().is_some_and(|free| free < 4 * COPY_BYTES) {
        return Err(Error::new(
            Code::OutOfMemory,
            "too little memory to measure the rate of copies",
        ));
    }
    let block = (bytes.clamp(COPY_BYTES / 4, COPY_BYTES) / 2 / threads.max(1) as u64) as usize;
    // Each thread makes its own, so that they lie near it.
    let make = |_, (): &()| Ok(Mutex::new((touched(block, 1)?, touched(block, 2)?)));
    let blocks = parallel::map(&vec![(); threads], threads, make)?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        parallel::map(&blocks, threads, |_, pair| {
            let mut pair = pair.lock().unwrap_or_else(PoisonError::into_inner);
            let (from, to) = &mut *pair;
            to.copy_from_slice(std::hint::black_box(from));
            std::hint::black_box(to);
            Ok(())
        })?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(Limit {
        what: "memory-copy",
        gb_per_s: gb_per_s((block * threads) as u64, best),
        how: format!("{} copying touched memory", count(threads, "thread")),
    })
}

/// Memory that is there for sure: filled, and an error where there is none.
fn touched(len: usize, value: u8) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|error| {
        Error::new(Code::OutOfMemory, "no memory to measure the rate of copies").with_source(error)
    })?;
    bytes.resize(len, value);
    Ok(bytes)
}

/// The rate of reading a model's files past the page cache; `None` where the file system has no direct reads.
pub(crate) fn disk(model: &Model) -> Result<Option<Limit>> {
    let files: Vec<LocalFile> =
        model.files.iter().map(|open| LocalFile::new(open.clone())).collect::<Result<_>>()?;
    if files.iter().any(|file| file.direct().is_err()) {
        return Ok(None);
    }
    let mut best: Option<Limit> = None;
    for (threads, block) in DISK_SETTINGS {
        let gb_per_s = read_direct(&files, model, threads, block)?;
        if best.as_ref().is_none_or(|best| gb_per_s > best.gb_per_s) {
            let how = format!(
                "O_DIRECT, {threads} threads, blocks of {} MiB, front to back",
                block >> 20
            );
            best = Some(Limit { what: "disk", gb_per_s, how });
        }
    }
    Ok(best)
}

fn read_direct(files: &[LocalFile], model: &Model, threads: usize, block: u64) -> Result<f64> {
    let mut blocks = Vec::new();
    let mut left = DISK_BYTES;
    for (file, open) in files.iter().zip(&model.files) {
        let mut offset = 0;
        while offset < open.size() && left > 0 {
            blocks.push((file, open, offset));
            offset += block;
            left = left.saturating_sub(block);
        }
    }
    let total = AtomicU64::new(0);
    // One job a thread, each with its buffer; blocks are handed out in order.
    let next = AtomicU64::new(0);
    let start = Instant::now();
    parallel::map(&vec![(); threads], threads, |_, ()| {
        let mut buffer = vec![0_u8; block as usize + (64 << 10)];
        let skip = buffer.as_ptr().align_offset(64 << 10);
        let Some(buffer) = buffer.get_mut(skip..skip + block as usize) else { return Ok(()) };
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((file, open, offset)) = blocks.get(index as usize) else { return Ok(()) };
            crate::interrupt::check()?;
            let Ok(direct) = file.direct() else { return Ok(()) };
            // The last block of a file ends where the file does.
            let read = std::os::unix::fs::FileExt::read_at(&direct.file, buffer, *offset);
            let read = read.map_err(|error| {
                Error::io("cannot read past the page cache", error).at(open.path.display())
            })?;
            total.fetch_add(read as u64, Ordering::Relaxed);
        }
    })?;
    Ok(gb_per_s(total.load(Ordering::Relaxed), start.elapsed().as_secs_f64()))
}
