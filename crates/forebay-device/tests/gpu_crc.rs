//! Checksums of blocks in device memory, on whatever driver there is. Skipped, with a line that says so, where there is
//! none. **unsafe**: blocks are given by address.
//!
//! `crc_sim` runs all of these under the simulated driver. On a GPU run the test program itself with `--nocapture`: it
//! prints rates.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::sync::Arc;
use std::time::Instant;

use forebay_device::Device;
use forebay_device::cuda::{ChecksumKernel, CudaDevice, DeviceBuffer, Stream};
use forebay_error::Code;

const MIB: usize = 1 << 20;

/// A device with noise in its memory.
pub(crate) struct Setup {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) kernel: Arc<ChecksumKernel>,
    pub(crate) stream: Stream,
    buffer: DeviceBuffer,
    bytes: Vec<u8>,
}

pub(crate) fn gpu() -> Option<Arc<CudaDevice>> {
    match Device::open("cuda:0") {
        Ok(Device::Cuda(device)) => {
            device.bind_thread().unwrap();
            Some(device)
        }
        Ok(Device::Host) => unreachable!(),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn is_simulated(device: &CudaDevice) -> bool {
    device.name() == "Simulated GPU"
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

pub(crate) fn setup(len: usize) -> Option<Setup> {
    let device = gpu()?;
    let kernel = ChecksumKernel::get(&device).unwrap().unwrap();
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::new(&device, len as u64).unwrap();
    let mut random = Random(0x5eed | 1);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    // SAFETY: both are that long, and pageable memory is waited for.
    unsafe {
        stream.copy_to_device(buffer.address(), bytes.as_ptr() as usize, len as u64).unwrap()
    };
    stream.synchronize().unwrap();
    Some(Setup { device, kernel, stream, buffer, bytes })
}

impl Setup {
    /// Device address and length of a part of the buffer.
    fn block(&self, (at, len): (usize, usize)) -> (u64, u64) {
        assert!(at + len <= self.bytes.len());
        (self.buffer.address() + at as u64, len as u64)
    }

    /// Two blocks, for whoever needs no certain ones.
    #[allow(dead_code, reason = "`crc_sim` uses it")]
    pub(crate) fn two(&self) -> [(u64, u64); 2] {
        [self.block((1, 500)), self.block((700, 300))]
    }

    /// Compares the checksums of these two.
    #[allow(dead_code, reason = "`crc_sim` uses it")]
    pub(crate) fn compare_two(&self, found: &[u32]) {
        self.compare(&[(1, 500), (700, 300)], found);
    }

    /// Compares the kernel with the CPU.
    fn check(&self, parts: &[(usize, usize)]) {
        let blocks: Vec<_> = parts.iter().map(|&part| self.block(part)).collect();
        // SAFETY: parts of the buffer, which outlives the wait.
        let pending = unsafe { self.kernel.queue(&self.stream, &blocks).unwrap() };
        self.compare(parts, &pending.wait().unwrap());
    }

    fn compare(&self, parts: &[(usize, usize)], found: &[u32]) {
        assert_eq!(parts.len(), found.len());
        for (&(at, len), found) in parts.iter().zip(found) {
            let expected = crc32fast::hash(&self.bytes[at..at + len]);
            assert_eq!(*found, expected, "{found:08x} is not {expected:08x}: {len} bytes at {at}");
        }
    }
}

#[test]
fn any_length_and_alignment() {
    let Some(setup) = setup(3 * MIB + 77) else { return };
    let short: Vec<_> = (0..3000).map(|len| (len * 37 % 4099, len)).collect();
    setup.check(&short);
    let around = [1 << 10, 32 << 10, 64 << 10, MIB].into_iter();
    let around = around.flat_map(|len| len - 5..len + 6).enumerate();
    setup.check(&around.map(|(index, len)| (index * 13 % 1027, len)).collect::<Vec<_>>());
    setup.check(&[(0, 0), (0, setup.bytes.len()), (setup.bytes.len(), 0)]);
    setup.check(&[]);
}

#[test]
fn random_blocks() {
    let Some(setup) = setup(8 * MIB) else { return };
    let mut random = Random(99);
    let rounds = if is_simulated(&setup.device) { 3 } else { 100 };
    for round in 0..rounds {
        let most = [64, 5000, 70_000, MIB][round % 4];
        let parts: Vec<_> = (0..4 * MIB / most.max(4096))
            .map(|_| {
                let len = random.below(most + 1);
                (random.below(setup.bytes.len() - len + 1), len)
            })
            .collect();
        setup.check(&parts);
    }
}

#[test]
fn long_lists() {
    let Some(setup) = setup(2 * MIB) else { return };
    setup.check(&(0..20_000).map(|index| (index * 64, 64)).collect::<Vec<_>>());
    // Three launches.
    setup.check(&(0..70_001).map(|index| (index * 29, index % 31)).collect::<Vec<_>>());
}

#[test]
fn checks_come_after_the_copies_before_them() {
    let Some(setup) = setup(4 * MIB) else { return };
    let target = DeviceBuffer::new(&setup.device, MIB as u64).unwrap();
    let mut pendings = Vec::new();
    for round in 0..3 {
        let source = setup.bytes.as_ptr() as usize + round * MIB;
        // SAFETY: a MiB of each, which stay until all was waited for.
        unsafe {
            setup.stream.copy_to_device(target.address(), source, MIB as u64).unwrap();
            let blocks = [(target.address(), MIB as u64), (target.address() + 1, 5)];
            pendings.push(setup.kernel.queue(&setup.stream, &blocks).unwrap());
        }
    }
    for (round, pending) in pendings.into_iter().enumerate() {
        setup.compare(&[(round * MIB, MIB), (round * MIB + 1, 5)], &pending.wait().unwrap());
    }
}

#[test]
fn many_lists_at_a_time() {
    let Some(setup) = setup(MIB) else { return };
    let streams = [Stream::new(&setup.device).unwrap(), Stream::new(&setup.device).unwrap()];
    let parts: Vec<_> = (0..50).map(|index| (index * 101, index * 50)).collect();
    let blocks: Vec<_> = parts.iter().map(|&part| setup.block(part)).collect();
    // SAFETY: parts of the buffer, which outlives the streams' work: see the end. So below.
    let queue = |index: usize| unsafe { setup.kernel.queue(&streams[index % 2], &blocks) };
    let mut pendings = Vec::new();
    // Others of this program use the kernel too.
    let refused = loop {
        match queue(pendings.len()) {
            Ok(pending) => pendings.push(pending),
            Err(error) => break error,
        }
    };
    assert!(pendings.len() <= 16);
    assert_eq!(refused.code(), Code::Usage);
    assert!(!refused.hints().is_empty());
    // Nobody waits for some: their memory is used again once the GPU is done with it.
    pendings.truncate(pendings.len() / 2);
    for index in 0..40 {
        let pending = queue(index).unwrap();
        if index % 3 == 0 {
            pendings.push(pending);
            setup.compare(&parts, &pendings.remove(0).wait().unwrap());
        }
    }
    for pending in pendings {
        while !pending.is_done().unwrap() {
            std::thread::yield_now();
        }
        setup.compare(&parts, &pending.wait().unwrap());
    }
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}

#[test]
fn calls_that_make_no_sense() {
    let Some(setup) = setup(1000) else { return };
    for block in [(setup.buffer.address(), (1 << 30) + 1), (u64::MAX - 3, 10)] {
        // SAFETY: refused before anything is queued.
        let error = unsafe { setup.kernel.queue(&setup.stream, &[block]) }.err().unwrap();
        assert_eq!(error.code(), Code::Usage);
    }
    assert!(Arc::ptr_eq(&setup.kernel, &ChecksumKernel::get(&setup.device).unwrap().unwrap()));
}

#[test]
fn rate() {
    let Some(device) = gpu() else { return };
    let started = Instant::now();
    let kernel = ChecksumKernel::get(&device).unwrap().unwrap();
    println!("kernel ready after {:.0} ms", started.elapsed().as_secs_f64() * 1e3);
    let len = if is_simulated(&device) { 2 * MIB } else { 4096 * MIB };
    let buffer = DeviceBuffer::new(&device, len as u64).unwrap();
    let stream = Stream::new(&device).unwrap();
    for (name, block, shift) in
        [("1 MiB", MIB, 0), ("1 MiB, not aligned", MIB, 3), ("64 KiB", MIB / 16, 0)]
    {
        let blocks: Vec<_> = (0..len / block)
            .map(|index| {
                (buffer.address() + (index * block + shift) as u64, (block - shift) as u64)
            })
            .take(32_768)
            .collect();
        let bytes: u64 = blocks.iter().map(|(_, len)| len).sum();
        let mut best = f64::MAX;
        for _ in 0..5 {
            let started = Instant::now();
            // SAFETY: parts of the buffer, which outlives the wait.
            unsafe { kernel.queue(&stream, &blocks) }.unwrap().wait().unwrap();
            best = best.min(started.elapsed().as_secs_f64());
        }
        println!("{}: blocks of {name}: {:.0} GB/s", device.name(), bytes as f64 / best / 1e9);
    }
}
