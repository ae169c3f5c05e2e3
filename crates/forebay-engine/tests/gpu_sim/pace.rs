//! DMA ends where registering is slow and there are readers enough. **unsafe**: targets are provided by address.
//!
//! Ignored, because each needs a driver of a certain speed: `main` runs them with that. What counts as slow is given
//! here, far from what the simulator does, so that a busy machine changes nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::Device;
use forebay_device::cuda::{DeviceBuffer, Stream};
use forebay_engine::{Engine, EngineConfig, LoadOptions, Path, PathChoice, Plan, Report};

use crate::gpu::common::*;
use crate::gpu::gpu;

const LEN: usize = 24_000_003;
const PIECE: u64 = 256 << 10;
const BATCH: u64 = 1 << 20;

/// Four times what `main` has the slow driver do.
const FASTER_THAN_SLOW: u64 = 200_000_000;

/// A batch takes a tenth of a second at that.
const SLOWER_THAN_FAST: u64 = 10_000_000;

struct Setup {
    device: Device,
    bytes: Vec<u8>,
    path: PathBuf,
    rate_min: u64,
    retry_after: Duration,
    _folder: tempfile::TempDir,
}

fn setup(rate_min: u64) -> Setup {
    let device = gpu().unwrap();
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    // Where DMA is possible with many threads: not in /dev/shm.
    let folder = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
    let bytes = pattern(1, LEN);
    let path = write_file(folder.path(), "model", &bytes);
    let retry_after = Duration::from_secs(600);
    Setup { device, bytes, path, rate_min, retry_after, _folder: folder }
}

impl Setup {
    /// Loads with an engine of its own; what is remembered is the process's.
    fn load(&self, choice: PathChoice, threads: usize) -> Report {
        let mut config =
            EngineConfig { piece_bytes: PIECE, arena_bytes: 8 << 20, ..EngineConfig::default() };
        config.tuning.dma_batch_bytes = BATCH;
        config.tuning.dma_ahead_bytes = 2 * BATCH;
        // So that there is work for DMA after its trial.
        config.tuning.readers_beside_dma = 1;
        config.tuning.dma_rate_min_bytes_per_s = self.rate_min;
        config.tuning.dma_retry_after = self.retry_after;
        self.load_by(&Engine::new(self.device.clone(), config), choice, threads)
    }

    fn load_by(&self, engine: &Arc<Engine>, choice: PathChoice, threads: usize) -> Report {
        let Device::Cuda(gpu) = &self.device else { panic!("no GPU") };
        let plan: Plan = uneven_plan(&[LEN], PIECE);
        let sizes = plan.target_bytes().to_vec();
        let buffers: Vec<_> =
            sizes.iter().map(|&len| DeviceBuffer::new(gpu, len).unwrap()).collect();
        let places: Vec<_> = buffers.iter().map(DeviceBuffer::address).collect();
        let options = LoadOptions { path: choice, threads: Some(threads), ..Default::default() };
        let session = engine.start(plan, vec![source(&self.path)], options).unwrap();
        // SAFETY: the buffers outlive the workers.
        unsafe { session.provide(&places, Some(0), None).unwrap() };
        let report = session.finish().unwrap();
        assert!(session.wait_idle(Duration::from_secs(10)), "workers go home");
        let stream = Stream::new(gpu).unwrap();
        let back = |(&place, &len): (&u64, &u64)| {
            let mut bytes = vec![0_u8; len as usize];
            // SAFETY: both are `len` bytes long, and the stream is waited for.
            unsafe { stream.copy_to_host(bytes.as_mut_ptr() as usize, place, len).unwrap() };
            stream.synchronize().unwrap();
            bytes
        };
        let targets: Vec<_> = places.iter().zip(&sizes).map(back).collect();
        check_uneven(&targets, std::slice::from_ref(&self.bytes));
        assert!(report.refusals.is_empty(), "{report:?}");
        report
    }
}

fn bytes_by(report: &Report, path: Path) -> u64 {
    report.paths.iter().find(|share| share.path == path).map_or(0, |share| share.bytes)
}

fn says_slow(report: &Report) -> bool {
    let mut reasons = report.paths.iter().flat_map(|share| &share.reasons);
    reasons.any(|reason| reason.contains("copies are faster"))
}

/// DMA went on to the end.
fn assert_kept(report: &Report) {
    assert!(bytes_by(report, Path::PageCacheDma) > 0, "{report:?}");
    assert!(!report.dma_ended_early && !says_slow(report), "{report:?}");
    assert!(report.registering_bytes_per_s > 0.0);
}

/// DMA ended after its trial of three batches.
fn assert_ended(report: &Report) {
    let dma = bytes_by(report, Path::PageCacheDma);
    assert!(report.dma_ended_early && says_slow(report), "{report:?}");
    // The file's first byte is not asked for, so batches are a little smaller.
    assert!((2 * BATCH..=3 * BATCH).contains(&dma), "{dma}: {report:?}");
    assert_eq!(bytes_by(report, Path::PageCacheCopy), report.bytes - dma, "{report:?}");
}

/// DMA was not even tried.
fn assert_known(report: &Report) {
    assert_eq!(bytes_by(report, Path::PageCacheDma), 0, "{report:?}");
    assert!(says_slow(report) && !report.dma_ended_early, "{report:?}");
    assert_eq!(report.registering_bytes_per_s, 0.0);
}

#[test]
#[ignore = "needs SIMGPU_REGISTER_GBPS=0.05"]
fn slow_registering_ends_dma_for_a_while() {
    let mut setup = setup(FASTER_THAN_SLOW);
    // It does not end where copies could not take over, nor where it was asked for; nor is anything remembered.
    assert_kept(&setup.load(PathChoice::Auto, 2));
    assert_kept(&setup.load(PathChoice::Auto, 8));
    assert_kept(&setup.load(PathChoice::Dma, 16));
    let report = setup.load(PathChoice::Auto, 16);
    assert_ended(&report);
    assert!(report.registering_bytes_per_s <= 50e6, "{report:?}");
    assert_known(&setup.load(PathChoice::Auto, 16));
    assert_known(&setup.load(PathChoice::Auto, 9));
    // That is no refusal: who gains by DMA still has it.
    assert_kept(&setup.load(PathChoice::Auto, 2));
    assert_kept(&setup.load(PathChoice::Dma, 16));
    setup.retry_after = Duration::from_millis(1);
    assert_ended(&setup.load(PathChoice::Auto, 16));
    setup.retry_after = Duration::from_secs(600);
    assert_known(&setup.load(PathChoice::Auto, 16));
    // Slow is what the engine calls so.
    setup.rate_min = 0;
    assert_kept(&setup.load(PathChoice::Auto, 16));
}

#[test]
#[ignore = "needs a driver that registers fast"]
fn fast_registering_keeps_dma() {
    let setup = setup(SLOWER_THAN_FAST);
    for threads in [2, 16, 16] {
        let report = setup.load(PathChoice::Auto, threads);
        assert_kept(&report);
        assert!(report.registering_bytes_per_s > SLOWER_THAN_FAST as f64, "{report:?}");
    }
}

#[test]
#[ignore = "needs SIMGPU_REGISTER_FAIL=801"]
fn a_refusal_starts_the_other_readers_too() {
    let setup = setup(0);
    let mut config = EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() };
    config.tuning.readers_beside_dma = 1;
    let engine = Engine::new(setup.device.clone(), config);
    let Device::Cuda(gpu) = &setup.device else { panic!("no GPU") };
    let target = DeviceBuffer::new(gpu, LEN as u64).unwrap();
    let whole = forebay_engine::Move::contiguous(0, 0, 0, 0, LEN as u64);
    let plan = Plan::build(vec![whole], vec![LEN as u64], PIECE, &[]).unwrap();
    let slow = Arc::new(SlowReads(source(&setup.path)));
    let options = LoadOptions { threads: Some(16), ..LoadOptions::default() };
    let session = engine.start(plan, vec![slow], options).unwrap();
    // SAFETY: the target outlives the workers.
    unsafe { session.provide(&[target.address()], Some(0), None).unwrap() };
    let mut most = 0;
    while !session.wait(Duration::from_millis(1)).unwrap() {
        most = most.max(readers());
    }
    assert_eq!(most, 14, "two of sixteen processors are for others");
    assert_eq!(session.finish().unwrap().refusals.len(), 1);
    assert!(session.wait_idle(Duration::from_secs(10)));
}

/// A file whose reads take 2 ms each, so that its readers can be counted.
struct SlowReads(Arc<dyn forebay_engine::RangeSource>);

impl forebay_engine::RangeSource for SlowReads {
    fn name(&self) -> String {
        self.0.name()
    }

    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<usize> {
        std::thread::sleep(Duration::from_millis(2));
        self.0.read_at(into, offset)
    }

    fn local(&self) -> Option<&forebay_engine::LocalFile> {
        self.0.local()
    }

    fn check_unchanged(&self) -> forebay_error::Result<()> {
        self.0.check_unchanged()
    }
}

fn readers() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.trim() == "forebay-copy").count()
}
