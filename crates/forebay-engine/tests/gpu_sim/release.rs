//! Registrations after their load: who releases them, and when. **unsafe**: targets are provided by address.
//!
//! Ignored, because each needs a driver that takes its time to unregister: `main` runs them with that.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_device::Device;
use forebay_device::cuda::{DeviceBuffer, Stream};
use forebay_engine::{
    CacheChoice, Engine, EngineConfig, LoadOptions, Move, PathChoice, Plan, Report, Session,
};

use crate::gpu::common::*;
use crate::gpu::gpu;

/// 32 batches of 1 MiB, of 5.2 ms each at the 0.2 GB/s that `main` sets: 168 ms in all.
const LEN: usize = 32 << 20;
const BATCH: u64 = 1 << 20;
const HALF: Duration = Duration::from_millis(80);

struct Setup {
    engine: Arc<Engine>,
    bytes: Vec<u8>,
    path: PathBuf,
    target: DeviceBuffer,
    _folder: tempfile::TempDir,
}

fn setup(window_bytes: u64) -> Setup {
    let device = gpu().unwrap();
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(1, LEN);
    let path = write_file(folder.path(), "model", &bytes);
    let mut config = EngineConfig {
        piece_bytes: 256 << 10,
        arena_bytes: 4 << 20,
        dma_window_bytes: window_bytes,
        ..EngineConfig::default()
    };
    config.tuning.dma_batch_bytes = BATCH;
    let target = DeviceBuffer::new(gpu, LEN as u64).unwrap();
    Setup { engine: Engine::new(device, config), bytes, path, target, _folder: folder }
}

impl Setup {
    fn start(&self, cache: CacheChoice) -> Session {
        let len = LEN as u64;
        let whole = Move::contiguous(0, 0, 0, 0, len);
        let plan = Plan::build(vec![whole], vec![len], 256 << 10, &[]).unwrap();
        let options = LoadOptions { path: PathChoice::Dma, threads: Some(2), cache };
        self.engine.start(plan, vec![source(&self.path)], options).unwrap()
    }

    /// Loads, all by DMA.
    fn load(&self, cache: CacheChoice) -> Report {
        let session = self.start(cache);
        // SAFETY: the target outlives the workers.
        unsafe { session.provide(&[self.target.address()], Some(0), None).unwrap() };
        let report = session.finish().unwrap();
        assert!(report.refusals.is_empty(), "{report:?}");
        assert_eq!(dma_bytes(&report), LEN as u64, "{report:?}");
        report
    }

    fn check(&self) {
        let Device::Cuda(gpu) = self.engine.device() else { panic!("no GPU") };
        let stream = Stream::new(gpu).unwrap();
        let mut bytes = vec![0_u8; LEN];
        let place = bytes.as_mut_ptr() as usize;
        // SAFETY: both are `LEN` bytes long, and the stream is waited for.
        unsafe { stream.copy_to_host(place, self.target.address(), LEN as u64).unwrap() };
        stream.synchronize().unwrap();
        assert!(bytes == self.bytes);
    }
}

fn dma_bytes(report: &Report) -> u64 {
    let dma = |share: &&forebay_engine::PathShare| share.path == forebay_engine::Path::PageCacheDma;
    report.paths.iter().find(dma).map_or(0, |share| share.bytes)
}

/// Mappings of the file in this process, and threads that release.
fn left_of(path: &std::path::Path) -> (usize, usize) {
    let name = path.to_str().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mappings = maps.lines().filter(|line| line.contains(name)).count();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    (mappings, names.filter(|name| name.trim() == "forebay-release").count())
}

/// Waits until nothing is registered, without asking for it.
fn wait_by_itself(engine: &Engine, most: Duration) -> Duration {
    let started = Instant::now();
    while engine.registered_now() > 0 {
        assert!(started.elapsed() < most, "{} bytes are left", engine.registered_now());
        std::thread::sleep(Duration::from_millis(1));
    }
    started.elapsed()
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn a_load_returns_before_its_registrations_go() {
    let setup = setup(1 << 30);
    for _ in 0..3 {
        let report = setup.load(CacheChoice::Auto);
        // None is released while the load runs, and few before this thread has come to look.
        assert!(report.registered_left_bytes >= LEN as u64 / 2, "{report:?}");
        let took = wait_by_itself(&setup.engine, Duration::from_secs(5));
        assert!(took >= HALF, "{took:?}");
        setup.check();
    }
    // The thread goes with the work.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(left_of(&setup.path), (0, 0));
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn the_window_holds_over_loads_that_follow_each_other() {
    // A load and a half.
    let window = LEN as u64 * 3 / 2;
    let setup = setup(window);
    let mut left = 0;
    for _ in 0..8 {
        let report = setup.load(CacheChoice::Auto);
        assert!(report.registered_peak_bytes <= window, "{report:?}");
        left = report.registered_left_bytes.max(left);
    }
    assert!(left > LEN as u64, "what earlier loads left was there: {left}");
    assert!(setup.engine.registered_peak() <= window);
    setup.check();
    wait_by_itself(&setup.engine, Duration::from_secs(5));
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn nothing_is_released_beside_a_load_that_has_room() {
    let setup = setup(1 << 30);
    let left = setup.load(CacheChoice::Auto).registered_left_bytes;
    // Its caller is still allocating.
    let session = setup.start(CacheChoice::Auto);
    std::thread::sleep(Duration::from_millis(15));
    let paused = setup.engine.registered_now();
    assert!(paused > 0 && paused <= left);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(setup.engine.registered_now(), paused, "the releaser gives way");
    assert!(session.cancel());
    wait_by_itself(&setup.engine, Duration::from_secs(5));
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn an_engine_that_is_dropped_leaves_nothing() {
    for pause_ms in [0, 5, 40, 100] {
        let setup = setup(1 << 30);
        setup.load(CacheChoice::Auto);
        std::thread::sleep(Duration::from_millis(pause_ms));
        assert!(left_of(&setup.path).0 > 0);
        let Setup { engine, path, _folder, target, .. } = setup;
        // The load's last thread may have it for a moment longer; nothing else does.
        while Arc::strong_count(&engine) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let presence = engine.presence();
        drop(engine);
        assert_eq!((left_of(&path).0, presence.strong_count()), (0, 0), "at once");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(left_of(&path), (0, 0));
        drop(target);
    }
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn a_file_may_shrink_or_go_before_its_registrations_do() {
    let setup = setup(1 << 30);
    setup.load(CacheChoice::Auto);
    let file = std::fs::OpenOptions::new().write(true).open(&setup.path).unwrap();
    file.set_len(1000).unwrap();
    assert!(setup.engine.registered_now() > 0);
    wait_by_itself(&setup.engine, Duration::from_secs(5));
    setup.check();
    std::fs::write(&setup.path, &setup.bytes).unwrap();
    setup.load(CacheChoice::Auto);
    std::fs::remove_file(&setup.path).unwrap();
    assert!(setup.engine.registered_now() > 0);
    wait_by_itself(&setup.engine, Duration::from_secs(5));
    setup.check();
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn who_waits_for_the_release_gets_it() {
    let setup = setup(1 << 30);
    // Pages that are to leave the page cache must not be registered.
    assert_eq!(setup.load(CacheChoice::Bypass).registered_left_bytes, 0);
    let setup = self::setup(1 << 30);
    setup.load(CacheChoice::Auto);
    assert!(!setup.engine.release(Duration::ZERO), "not done at once");
    assert!(setup.engine.release(Duration::from_secs(5)));
    assert_eq!(setup.engine.registered_now(), 0);
}

#[test]
#[ignore = "takes its time"]
fn many_loads_leave_nothing() {
    let setup = setup(LEN as u64 * 3);
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let mut before = 0;
    for turn in 0..60 {
        setup.load(CacheChoice::Auto);
        if turn == 9 {
            before = resident();
        }
    }
    let grown_kib = resident().saturating_sub(before);
    assert!(grown_kib < 4096, "50 loads of 32 MiB left {grown_kib} KiB");
    wait_by_itself(&setup.engine, Duration::from_secs(2));
    setup.check();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(left_of(&setup.path), (0, 0));
}

#[test]
#[ignore = "needs SIMGPU_UNREGISTER_GBPS=0.2"]
fn a_child_leaves_the_registrations_of_its_parent_alone() {
    let setup = setup(1 << 30);
    setup.load(CacheChoice::Auto);
    let registered = setup.engine.registered_now();
    assert!(registered > 0);
    let engine = Arc::try_unwrap(setup.engine.clone());
    assert!(engine.is_err(), "the parent has it too");
    // SAFETY: the child does what is tested, and ends without running anything else.
    match unsafe { libc::fork() } {
        0 => {
            // The lock is the parent's too, and its releaser may hold it.
            let released = setup.engine.release(Duration::from_secs(5));
            let kept = setup.engine.registered_now() > 0;
            drop(engine);
            drop(setup.engine);
            // SAFETY: ends the child.
            unsafe { libc::_exit(if released && kept { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of ours, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    wait_by_itself(&setup.engine, Duration::from_secs(5));
    setup.check();
}
