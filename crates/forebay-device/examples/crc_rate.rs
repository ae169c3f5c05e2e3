//! How fast a GPU checks blocks, and what that costs beside transfers. Needs a GPU:
//!
//! `cargo run --release -p forebay-device --example crc_rate [cuda:0]`
//!
//! 1. Checksums alone, of lists of several kinds, from the call to the results.
//! 2. Copies of 64 MiB to the GPU alone, then with each checked behind its copy on a second stream: the loss is what
//!    verification costs a load.
//!
//! **unsafe**: copies and blocks are given by address.

#![allow(clippy::print_stdout, reason = "a report is its purpose")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use forebay_device::cuda::{ChecksumKernel, CudaDevice, DeviceBuffer, Event, Pending, Stream};
use forebay_device::{Arena, ArenaConfig, Device, Slot};
use forebay_error::{Code, Error, Result};

const MIB: u64 = 1 << 20;
const ROUNDS: usize = 5;
/// A batch of the engine.
const BATCH_BYTES: u64 = 64 * MIB;
/// How often a measurement of copies fills the buffer.
const PASSES: usize = 2;
/// Copies in flight, each from a slot of its own, if the arena gives as many.
const DEPTH: usize = 4;

fn main() -> Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "cuda:0".to_owned());
    let device = Device::open(&name)?;
    let Device::Cuda(gpu) = &device else {
        return Err(Error::new(Code::Usage, "the host is no GPU"));
    };
    gpu.bind_thread()?;
    let started = Instant::now();
    let Some(kernel) = ChecksumKernel::get(gpu)? else {
        return Err(Error::new(Code::Device, "the driver has no kernels"));
    };
    println!("{}: kernel ready in {:.0} ms", gpu.name(), started.elapsed().as_secs_f64() * 1e3);
    let (free, _) = gpu.memory_info()?;
    let buffer = DeviceBuffer::new(gpu, (free / 2).min(4096 * MIB) / BATCH_BYTES * BATCH_BYTES)?;
    alone(gpu, &kernel, &buffer)?;
    beside_copies(&device, gpu, &kernel, &buffer)
}

/// Blocks of `len` bytes side by side, each without its first `shift` bytes.
fn blocks(start: u64, bytes: u64, len: u64, shift: u64) -> Vec<(u64, u64)> {
    (0..bytes / len).map(|index| (start + index * len + shift, len - shift)).collect()
}

fn alone(gpu: &Arc<CudaDevice>, kernel: &Arc<ChecksumKernel>, buffer: &DeviceBuffer) -> Result<()> {
    let stream = Stream::new(gpu)?;
    let (start, all) = (buffer.address(), buffer.len());
    for (name, list) in [
        ("1 MiB", blocks(start, all, MIB, 0)),
        ("1 MiB less 3 bytes, not aligned", blocks(start, all, MIB, 3)),
        ("1 MiB, 64 of them", blocks(start, BATCH_BYTES, MIB, 0)),
        ("1 MiB, one", blocks(start, MIB, MIB, 0)),
        ("64 KiB", blocks(start, all / 4, MIB / 16, 0)),
        ("4 KiB, 20,000 of them", blocks(start, 20_000 * 4096, 4096, 0)),
        ("64 bytes, 20,000 of them", blocks(start, 20_000 * 64, 64, 0)),
    ] {
        let bytes: u64 = list.iter().map(|(_, len)| len).sum();
        let mut best = f64::MAX;
        for _ in 0..ROUNDS {
            let started = Instant::now();
            // SAFETY: parts of the buffer, which outlives the wait.
            unsafe { kernel.queue(&stream, &list) }?.wait()?;
            best = best.min(started.elapsed().as_secs_f64());
        }
        let rate = bytes as f64 / best / 1e9;
        println!("blocks of {name}: {rate:.1} GB/s, {:.0} us", best * 1e6);
    }
    Ok(())
}

fn beside_copies(
    device: &Device,
    gpu: &Arc<CudaDevice>,
    kernel: &Arc<ChecksumKernel>,
    buffer: &DeviceBuffer,
) -> Result<()> {
    let config = ArenaConfig {
        size_bytes: (DEPTH + 1) * BATCH_BYTES as usize,
        slot_bytes: BATCH_BYTES as usize,
    };
    let slots = Arena::new(device, &config)?.acquire(DEPTH, &|| false)?;
    let (mut plain, mut checked) = (0.0_f64, 0.0_f64);
    for _ in 0..ROUNDS {
        plain = plain.max(copy(gpu, None, buffer, &slots)?);
        checked = checked.max(copy(gpu, Some(kernel), buffer, &slots)?);
    }
    let loss = 100.0 * (1.0 - checked / plain);
    println!("copies alone {plain:.1} GB/s, checked {checked:.1} GB/s: {loss:.1} % lost");
    Ok(())
}

/// Copies all batches and gives the rate in GB/s; with a kernel, each is checked on a second stream.
fn copy(
    gpu: &Arc<CudaDevice>,
    kernel: Option<&Arc<ChecksumKernel>>,
    buffer: &DeviceBuffer,
    slots: &[Slot],
) -> Result<f64> {
    let (copies, checks) = (Stream::new(gpu)?, Stream::new(gpu)?);
    let mut flying: VecDeque<(Event, Option<Pending>)> = VecDeque::new();
    let places = (buffer.len() / BATCH_BYTES).max(1) as usize;
    let started = Instant::now();
    for (index, slot) in (0..PASSES * places).zip(slots.iter().cycle()) {
        if flying.len() == slots.len() {
            finish(flying.pop_front())?;
        }
        let place = buffer.address() + (index % places) as u64 * BATCH_BYTES;
        // SAFETY: a slot is used again after the copy from it was waited for; slots and buffer outlive the streams'
        // work, all of which is waited for.
        unsafe { copies.copy_to_device(place, slot.address(), BATCH_BYTES)? };
        let event = Event::new(gpu)?;
        event.record(&copies)?;
        let pending = match kernel {
            Some(kernel) => {
                checks.wait_for(&event)?;
                // SAFETY: as above.
                Some(unsafe { kernel.queue(&checks, &blocks(place, BATCH_BYTES, MIB, 0)) }?)
            }
            None => None,
        };
        flying.push_back((event, pending));
    }
    while !flying.is_empty() {
        finish(flying.pop_front())?;
    }
    Ok((PASSES * places) as f64 * BATCH_BYTES as f64 / started.elapsed().as_secs_f64() / 1e9)
}

fn finish(flying: Option<(Event, Option<Pending>)>) -> Result<()> {
    match flying {
        Some((event, None)) => event.wait(),
        Some((_, Some(pending))) => pending.wait().map(drop),
        None => Ok(()),
    }
}
