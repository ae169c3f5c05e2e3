//! Loads with random everything: plans, feeds, settings, ends, company. **unsafe**: targets are provided by address.
//!
//! Every round is made from one number, printed first; `FOREBAY_STRESS_SEED` starts with that one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_device::cuda::{CudaDevice, DeviceBuffer, Stream};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::{
    CacheChoice, Check, Engine, EngineConfig, LoadOptions, Move, Part, PathChoice, Plan, RangeSink,
    Session, Tuning, WriteOptions,
};
use forebay_error::Code;

use crate::gpu::common::*;
use crate::gpu::{folders, gpu};

/// How long random rounds go on.
const STRESS_MAX: Duration = Duration::from_secs(12);

/// How long anything may take before it counts as hanging.
const HANG: Duration = Duration::from_secs(60);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 7
    }

    /// From `low` to `high`, both included.
    fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next() as usize % from.len()]
    }
}

struct File {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// Files of several sizes, on a disk and in memory.
fn files(folders: &[tempfile::TempDir]) -> Vec<File> {
    let sizes = [9_000_001, 2_500_000, 3 * 4096, 6_000_077];
    let file = |(number, size): (usize, usize)| {
        let bytes = pattern(number as u64, size);
        let folder = folders[number % folders.len()].path();
        File { path: write_file(folder, &format!("{number}"), &bytes), bytes }
    };
    sizes.into_iter().enumerate().map(file).collect()
}

/// Moves and sizes of targets, in order of file and offset.
struct Wish {
    moves: Vec<Move>,
    sizes: Vec<u64>,
    batches: Vec<u32>,
}

fn wish(random: &mut Random, files: &[File]) -> Wish {
    let mut wish = Wish { moves: Vec::new(), sizes: Vec::new(), batches: Vec::new() };
    for (object, file) in files.iter().enumerate() {
        if random.one_in(4) {
            continue;
        }
        let mut at = random.range(0, 5000);
        let most = random.pick(&[40, 3000, 70_000, 2_000_000]);
        // Neighbours in the file that can be neighbours on the device too: in whole steps of its allocator.
        let plain = random.one_in(3);
        while wish.sizes.len() < 400 {
            let target = wish.sizes.len() as u32;
            let run = random.range(0, most);
            let run = if plain { run.next_multiple_of(512) } else { run };
            let rows = if !plain && random.one_in(6) { random.range(2, 30) } else { 1 };
            let run = if rows > 1 { run / rows + 1 } else { run };
            let gap = if plain { 0 } else { random.pick(&[0, 0, 1, 100, 20_000]) };
            let from_stride = run + gap;
            if at + rows * from_stride > file.bytes.len() as u64 {
                break;
            }
            let (pad, to) = match plain {
                true => (0, 0),
                false => (random.pick(&[0, 0, 3]), random.pick(&[0, 0, 0, 13])),
            };
            let to_stride = run + pad;
            let object = object as u32;
            let part = Move { object, target, from: at, from_stride, to, to_stride, run, rows };
            wish.moves.push(part);
            wish.sizes.push(to + rows * to_stride);
            if random.one_in(12) {
                wish.batches.push(target);
            }
            if rows > 1 && gap > 0 && random.one_in(2) {
                // Another target takes bytes between the rows, fewer of them.
                let (target, rows) = (target + 1, random.range(1, rows));
                let (from, run) = (at + run, gap.min(50));
                let part =
                    Move { object, target, from, from_stride, to: 0, to_stride: run, run, rows };
                wish.moves.push(part);
                wish.sizes.push(rows * run);
            }
            at += rows * from_stride;
            if !plain {
                at += random.pick(&[0, 0, 0, 7, 30_000, 1_000_000]);
            }
        }
    }
    wish
}

/// Checksums of some of the files, in blocks of a size of its own each.
fn checks(random: &mut Random, files: &[File], piece: u64) -> Vec<Check> {
    let mut checks = Vec::new();
    for (object, file) in files.iter().enumerate() {
        if random.one_in(2) {
            let step = random.pick(&[3000, 50_000, 65_536, piece]).min(piece) as usize;
            checks.extend(blocks(object as u32, &file.bytes, 0, file.bytes.len(), step));
        }
    }
    checks
}

fn config(random: &mut Random) -> EngineConfig {
    let piece_bytes = random.pick(&[64 << 10, 256 << 10, 1 << 20]);
    let slots = random.range(1, 5) as usize;
    EngineConfig {
        arena_bytes: slots * (piece_bytes as usize + (128 << 10)),
        dma_window_bytes: random.pick(&[300_000, 1 << 20, 3 << 20, 1 << 30]),
        piece_bytes,
        tuning: Tuning {
            slots_ahead: random.range(0, 4) as usize,
            readers_beside_dma: random.range(1, 3) as usize,
            dma_batch_bytes: random.pick(&[256 << 10, 1 << 20, 4 << 20]),
            dma_ahead_bytes: random.pick(&[1 << 20, 8 << 20]),
            release_at_once: random.pick(&[0, 1, usize::MAX]),
            dma_on_tmpfs_threads: random.range(0, 8) as usize,
            // Never slow, now and then, and always.
            dma_rate_min_bytes_per_s: random.pick(&[0, 2_000_000_000, u64::MAX]),
            dma_trial_batches: random.range(0, 3) as usize,
            dma_retry_after: Duration::from_millis(random.pick(&[0, 5, 500])),
            direct_depth: random.range(1, 8) as usize,
            gpu_checks: !random.one_in(8),
            gpu_checks_from_bytes: random.pick(&[0, 0, 1 << 20]),
        },
    }
}

/// Memory for targets: each its own, or one after the other in a common allocation.
struct Memory {
    _buffers: Vec<DeviceBuffer>,
    addresses: Vec<u64>,
}

fn memory(random: &mut Random, gpu: &Arc<CudaDevice>, sizes: &[u64]) -> Memory {
    let mut buffers = Vec::new();
    let mut addresses = Vec::new();
    if random.one_in(2) {
        for &size in sizes {
            buffers.push(DeviceBuffer::new(gpu, size).unwrap());
            addresses.push(buffers.last().unwrap().address());
        }
    } else {
        let align = random.pick(&[1, 64, 512]);
        let total: u64 = sizes.iter().map(|size| size.next_multiple_of(align)).sum();
        let pool = DeviceBuffer::new(gpu, total).unwrap();
        let mut at = pool.address();
        for &size in sizes {
            addresses.push(at);
            at += size.next_multiple_of(align);
        }
        buffers.push(pool);
    }
    Memory { _buffers: buffers, addresses }
}

/// Provides in random portions; false when the load was cancelled on the way.
fn feed(random: &mut Random, session: &Session, addresses: &[u64], cancel: bool) -> bool {
    let mut rest = addresses;
    let last = if cancel { random.range(0, 6) } else { u64::MAX };
    let portion = random.pick(&[1, 7, 50, 1000]);
    let pause = random.pick(&[0, 0, 2, 25]);
    let mut portions = 0;
    while !rest.is_empty() {
        let count = random.range(1, portion).min(rest.len() as u64) as usize;
        let (now, later) = rest.split_at(count);
        let stream = random.one_in(2).then_some(0);
        // SAFETY: the memory outlives the session's workers: `round` waits for them.
        unsafe { session.provide(now, stream, None).unwrap() };
        rest = later;
        portions += 1;
        if portions > last {
            break;
        }
        if portions < 20 {
            std::thread::sleep(Duration::from_millis(random.range(0, pause)));
        }
    }
    if cancel {
        std::thread::sleep(Duration::from_millis(random.range(0, 30)));
        let started = Instant::now();
        assert!(session.cancel(), "no worker hangs");
        assert!(started.elapsed() < Duration::from_secs(2), "cancelled within its time");
    }
    !cancel
}

fn round(seed: u64, engine: &Arc<Engine>, gpu: &Arc<CudaDevice>, files: &[File]) {
    let random = &mut Random(seed);
    let Wish { moves, sizes, batches } = wish(random, files);
    let piece = engine.config().piece_bytes;
    let checks = checks(random, files, piece);
    let plan = Plan::build_checked(moves.clone(), sizes.clone(), piece, &batches, checks).unwrap();
    let checked = plan.checked_bytes();
    let paths = [
        PathChoice::Auto,
        PathChoice::Auto,
        PathChoice::Dma,
        PathChoice::Copy,
        PathChoice::Direct,
        PathChoice::Buffered,
        PathChoice::Fallback,
    ];
    let options = LoadOptions {
        path: random.pick(&paths),
        threads: Some(random.pick(&[1, 2, 3, 4, 5, 6, 9, 12])),
        cache: random.pick(&[CacheChoice::Auto, CacheChoice::Auto, CacheChoice::Keep]),
    };
    if random.one_in(3) {
        drop_cache(&random.pick(&files.iter().collect::<Vec<_>>()).path);
    }
    let memory = memory(random, gpu, &sizes);
    let sources = files.iter().map(|file| source(&file.path)).collect();
    let session = engine.start(plan, sources, options).unwrap();
    let cancel = random.one_in(4);
    if !feed(random, &session, &memory.addresses, cancel) {
        return;
    }
    let mut ready = 0;
    let started = Instant::now();
    while ready < sizes.len() {
        ready += session.next_ready(Duration::from_millis(100)).unwrap().len();
        assert!(started.elapsed() < HANG, "{ready} of {} targets", sizes.len());
    }
    let report = session.finish().unwrap();
    assert!(session.wait_idle(HANG));
    assert!(report.registered_peak_bytes <= engine.config().dma_window_bytes);
    assert!(report.arena.peak_bytes <= engine.config().arena_bytes);
    assert_eq!(report.verified_gpu_bytes + report.verified_cpu_bytes, checked);
    check(gpu, files, &moves, &sizes, &memory.addresses);
}

/// Compares every byte that was moved.
fn check(gpu: &Arc<CudaDevice>, files: &[File], moves: &[Move], sizes: &[u64], places: &[u64]) {
    let stream = Stream::new(gpu).unwrap();
    for part in moves {
        let (target, size) = (part.target as usize, sizes[part.target as usize]);
        if size == 0 {
            continue;
        }
        let mut bytes = vec![0_u8; size as usize];
        // SAFETY: both are `size` bytes long, and the stream is waited for before either goes.
        unsafe { stream.copy_to_host(bytes.as_mut_ptr() as usize, places[target], size).unwrap() };
        stream.synchronize().unwrap();
        for row in 0..part.rows {
            let from = (part.from + row * part.from_stride) as usize;
            let to = (part.to + row * part.to_stride) as usize;
            let run = part.run as usize;
            let wanted = &files[part.object as usize].bytes[from..from + run];
            assert!(bytes[to..to + run] == *wanted, "row {row} of {part:?}");
        }
    }
}

fn first_seed() -> u64 {
    match std::env::var("FOREBAY_STRESS_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64,
    }
}

#[test]
fn random_loads_arrive_whole_side_by_side_and_after_cancelled_ones() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    let folders = folders();
    let files = files(&folders);
    let started = Instant::now();
    let mut seed = first_seed();
    let mut rounds = 0;
    while started.elapsed() < STRESS_MAX {
        println!("FOREBAY_STRESS_SEED={seed}");
        let engine = Engine::new(device.clone(), config(&mut Random(seed)));
        std::thread::scope(|scope| {
            for company in 1..=2 {
                let (engine, files) = (&engine, &files);
                scope.spawn(move || {
                    gpu.bind_thread().unwrap();
                    for turn in 0..3 {
                        round(seed * 64 + company * 8 + turn, engine, gpu, files);
                    }
                });
            }
        });
        // Cancelled loads have not waited for it.
        assert!(engine.release(HANG));
        assert_eq!(engine.registered_now(), 0, "every registration is released");
        rounds += 6;
        seed += 1;
    }
    println!("{rounds} loads");
}

#[test]
fn rows_between_each_other_and_far_apart_arrive_warm_and_cold() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(11, 6_000_000);
    let path = write_file(folder.path(), "model", &bytes);
    let files = [File { path: path.clone(), bytes }];
    // Three parts of the columns of one matrix, the later ones with fewer rows: the piece of the first is the longest.
    let part = |target: u32, rows: u64| {
        let (from, run) = (u64::from(target) * 4000, 3000);
        let (from_stride, to_stride) = (60_000, run);
        Move { object: 0, target, from, from_stride, to: 0, to_stride, run, rows }
    };
    let moves = [part(0, 90), part(1, 5), part(2, 60)];
    let sizes = moves.map(|part| part.bytes());
    for choice in [PathChoice::Auto, PathChoice::Dma, PathChoice::Copy, PathChoice::Direct] {
        for cold in [false, true] {
            let mut config = EngineConfig::default();
            config.tuning.dma_batch_bytes = 1 << 20;
            let engine = Engine::new(device.clone(), config);
            let memory = memory(&mut Random(1), gpu, &sizes);
            if cold {
                drop_cache(&path);
            }
            let plan = Plan::build(moves.to_vec(), sizes.to_vec(), 1 << 20, &[]).unwrap();
            let options = LoadOptions { path: choice, ..LoadOptions::default() };
            let session = engine.start(plan, vec![source(&path)], options).unwrap();
            // SAFETY: the memory outlives the load.
            unsafe { session.provide(&memory.addresses, None, None).unwrap() };
            session.finish().unwrap();
            assert!(session.wait_idle(HANG));
            check(gpu, &files, &moves, &sizes, &memory.addresses);
        }
    }
}

#[test]
fn copies_wait_for_what_the_framework_has_queued() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    type Copy = unsafe extern "C" fn(u64, usize, usize, usize) -> i32;
    // SAFETY: the driver is loaded already, and the symbol has this type in cuda.h.
    let driver = unsafe { libloading::Library::new("libcuda.so.1").unwrap() };
    // SAFETY: as above.
    let copy = unsafe { driver.get::<Copy>(b"cuMemcpyHtoDAsync_v2\0").unwrap() };
    let folder = tempfile::tempdir().unwrap();
    let len = 8 << 20;
    let bytes = pattern(9, len);
    let path = write_file(folder.path(), "model", &bytes);
    gpu.bind_thread().unwrap();
    let config = ArenaConfig { size_bytes: 2 * len, slot_bytes: len };
    let garbage = Arena::new(&device, &config).unwrap().acquire(1, &|| false).unwrap();
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        let engine = Engine::new(device.clone(), EngineConfig::default());
        let target = DeviceBuffer::new(gpu, len as u64).unwrap();
        let whole = Move::contiguous(0, 0, 0, 0, len as u64);
        let plan = Plan::build(vec![whole], vec![len as u64], 4 << 20, &[]).unwrap();
        let options = LoadOptions { path: choice, ..LoadOptions::default() };
        let session = engine.start(plan, vec![source(&path)], options).unwrap();
        for _ in 0..30 {
            // SAFETY: both are `len` bytes long and outlive the load, which waits for these copies.
            let status = unsafe { copy(target.address(), garbage[0].address(), len, 0) };
            assert_eq!(status, 0);
        }
        // SAFETY: the target outlives the load.
        unsafe { session.provide(&[target.address()], Some(0), None).unwrap() };
        session.finish().unwrap();
        assert!(session.wait_idle(HANG));
        let files = [File { path: path.clone(), bytes: bytes.clone() }];
        check(gpu, &files, &[whole], &[len as u64], &[target.address()]);
    }
}

/// Fails at the third write.
struct FullDisk(AtomicUsize);

impl RangeSink for FullDisk {
    fn name(&self) -> String {
        "a full disk".to_owned()
    }

    fn write_at(&self, bytes: &[u8], _offset: u64) -> std::io::Result<usize> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            0..2 => Ok(bytes.len()),
            _ => Err(std::io::ErrorKind::StorageFull.into()),
        }
    }

    fn flush_soon(&self, _offset: u64, _len: u64) {}
}

#[test]
fn a_save_that_fails_leaves_the_slots_of_loads_alone() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let len = 4_u64 << 20;
    let bytes = pattern(13, len as usize);
    let path = write_file(folder.path(), "model", &bytes);
    let files = [File { path: path.clone(), bytes }];
    let config = EngineConfig {
        arena_bytes: 4 * ((1 << 20) + (128 << 10)),
        piece_bytes: 1 << 20,
        ..EngineConfig::default()
    };
    let engine = Engine::new(device.clone(), config);
    let (saved, target) = (DeviceBuffer::new(gpu, len), DeviceBuffer::new(gpu, len));
    let (saved, target) = (saved.unwrap(), target.unwrap());
    let part = Part { sink: 0, offset: 0, address: saved.address(), len };
    let whole = Move::contiguous(0, 0, 0, 0, len);
    for _ in 0..80 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let sink = FullDisk(AtomicUsize::new(0));
                let (options, stop) = (WriteOptions::default(), AtomicBool::new(false));
                // SAFETY: the buffer outlives the save, and nobody writes to it.
                let result = unsafe { engine.write(&[part], &[&sink], options, &stop) };
                assert_eq!(result.err().unwrap().code(), Code::NoSpace);
            });
            let plan = Plan::build(vec![whole], vec![len], 1 << 20, &[]).unwrap();
            let options = LoadOptions { path: PathChoice::Copy, ..LoadOptions::default() };
            let session = engine.start(plan, vec![source(&path)], options).unwrap();
            // SAFETY: the target outlives the load.
            unsafe { session.provide(&[target.address()], None, None).unwrap() };
            session.finish().unwrap();
            assert!(session.wait_idle(HANG));
            check(gpu, &files, &[whole], &[len], &[target.address()]);
        });
    }
}

#[test]
fn a_thread_without_a_context_can_do_a_load() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(12, 1 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        let engine = Engine::new(device.clone(), EngineConfig::default());
        let len = bytes.len() as u64;
        let whole = Move::contiguous(0, 0, 0, 0, len);
        let plan = Plan::build(vec![whole], vec![len], 1 << 20, &[]).unwrap();
        let options = LoadOptions { path: choice, ..LoadOptions::default() };
        let target = gpu.with_context(|| DeviceBuffer::new(gpu, len)).unwrap();
        let session = engine.start(plan, vec![source(&path)], options).unwrap();
        // SAFETY: the target outlives the load.
        unsafe { session.provide(&[target.address()], Some(0), None).unwrap() };
        session.finish().unwrap();
        assert!(session.wait_idle(HANG));
        // With the session goes the event that marks what the framework had queued, once no worker has it.
        std::thread::sleep(Duration::from_millis(20));
        drop((session, engine));
        let files = [File { path: path.clone(), bytes: bytes.clone() }];
        let place = [target.address()];
        gpu.with_context(|| {
            check(gpu, &files, &[whole], &[len], &place);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_finished_load_that_is_kept_leaves_the_arena_to_others() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(10, 3 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    let config = EngineConfig {
        arena_bytes: 2 * ((1 << 20) + (128 << 10)),
        piece_bytes: 1 << 20,
        ..EngineConfig::default()
    };
    let engine = Engine::new(device.clone(), config);
    let mut kept = Vec::new();
    for end in ["finished", "cancelled", "finished"] {
        let whole = Move::contiguous(0, 0, 0, 0, bytes.len() as u64);
        let sizes = vec![bytes.len() as u64];
        let plan = Plan::build(vec![whole], sizes.clone(), 1 << 20, &[]).unwrap();
        let options = LoadOptions { path: PathChoice::Copy, ..LoadOptions::default() };
        let session = engine.start(plan, vec![source(&path)], options).unwrap();
        let target = DeviceBuffer::new(gpu, sizes[0]).unwrap();
        // SAFETY: the target outlives the load.
        unsafe { session.provide(&[target.address()], None, None).unwrap() };
        if end == "finished" {
            assert!(session.wait(HANG).unwrap(), "a load waits for the slots of one that is over");
            assert!(session.wait_idle(HANG));
            let files = [File { path: path.clone(), bytes: bytes.clone() }];
            check(gpu, &files, &[whole], &sizes, &[target.address()]);
        } else {
            std::thread::sleep(Duration::from_millis(2));
            assert!(session.cancel());
        }
        kept.push((session, target));
    }
}
