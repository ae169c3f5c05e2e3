//! Checksums by the GPU when the driver refuses, in bad company and in random plans. **unsafe**: targets are provided
//! by address.
//!
//! Ignored, because most need the simulator with settings of their own: `main` runs them with those.

use std::sync::Arc;
use std::time::Duration;

use forebay_device::cuda::{CudaDevice, DeviceBuffer};
use forebay_device::{Device, cuda::ChecksumKernel};
use forebay_engine::{
    Check, Engine, EngineConfig, LoadOptions, Move, Path, PathChoice, Plan, Report, Session,
};
use forebay_error::{Code, Result};

use crate::gpu::common::*;
use crate::gpu::{folders, gpu, load_kernel, try_load};

const PIECE: u64 = 256 << 10;
const STEP: usize = 64 << 10;
const LEN: usize = 9_000_077;

struct Setup {
    engine: Arc<Engine>,
    bytes: Vec<u8>,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

fn gpu_of(engine: &Arc<Engine>) -> &Arc<CudaDevice> {
    let Device::Cuda(gpu) = engine.device() else { panic!("no GPU") };
    gpu
}

fn setup() -> Setup {
    let device = gpu().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(1, LEN);
    let path = write_file(folder.path(), "model", &bytes);
    let mut config =
        EngineConfig { piece_bytes: PIECE, arena_bytes: 8 << 20, ..EngineConfig::default() };
    config.tuning.dma_batch_bytes = 1 << 20;
    config.tuning.gpu_checks_from_bytes = 0;
    Setup { engine: Engine::new(device, config), bytes, path, _folder: folder }
}

impl Setup {
    fn plan(&self) -> Plan {
        mixed_plan(&self.bytes, PIECE, STEP)
    }

    /// Loads; the bytes arrive, and every block was checked once.
    fn arrives(&self, choice: PathChoice) -> Report {
        let options = LoadOptions { path: choice, threads: Some(3), ..LoadOptions::default() };
        let plan = self.plan();
        let all = plan.checked_bytes();
        let paths = std::slice::from_ref(&self.path);
        let (targets, report) = try_load(&self.engine, plan, paths, options).unwrap();
        check_mixed(&targets, &self.bytes, STEP);
        assert_eq!(report.verified_gpu_bytes + report.verified_cpu_bytes, all, "{report:?}");
        report
    }
}

fn dma_bytes(report: &Report) -> u64 {
    let dma = report.paths.iter().filter(|share| share.path == Path::PageCacheDma);
    dma.map(|share| share.bytes).sum()
}

/// The lines of the report that say who checks instead.
fn refusals(report: &Report) -> Vec<&String> {
    report.refusals.iter().filter(|text| text.starts_with("checksums by the GPU: ")).collect()
}

/// The CPU checked all, nothing came by DMA, and one line says why.
fn assert_by_cpu(report: &Report, why: &str) {
    assert_eq!((report.verified_gpu_bytes, dma_bytes(report)), (0, 0), "{report:?}");
    let refusals = refusals(report);
    assert!(refusals.len() == 1 && refusals[0].contains(why), "{report:?}");
    assert!(refusals[0].contains("the CPU computes them"), "{refusals:?}");
}

#[test]
#[ignore = "needs SIMGPU_MODULE_FAIL=222"]
fn the_kernel_is_refused() {
    let setup = setup();
    for choice in [PathChoice::Dma, PathChoice::Copy, PathChoice::Auto] {
        assert_by_cpu(&setup.arrives(choice), "CUDA error 222");
    }
}

#[test]
#[ignore = "needs a driver that lacks functions"]
fn there_are_no_kernels() {
    let setup = setup();
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        assert_by_cpu(&setup.arrives(choice), "cannot launch kernels");
    }
}

#[test]
#[ignore = "needs SIMGPU_LAUNCH_FAIL=701"]
fn launches_are_refused_after_dma() {
    launches_are_refused(PathChoice::Dma);
}

#[test]
#[ignore = "needs SIMGPU_LAUNCH_FAIL=701"]
fn launches_are_refused_after_copies() {
    launches_are_refused(PathChoice::Copy);
}

/// What had come already comes again; the next load knows.
fn launches_are_refused(choice: PathChoice) {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    for _ in 0..3 {
        assert_by_cpu(&setup.arrives(choice), "CUDA error 701");
    }
}

/// What the GPU had summed of records counts; what it had not comes again, and the joins are right all the same.
#[test]
#[ignore = "needs SIMGPU_LAUNCH_FAIL=701"]
fn launches_are_refused_amid_records() {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    let len = LEN as u64 - 177;
    let crc = |bytes: &[u8]| forebay_format::crc::crc32(&bytes[77..77 + len as usize]);
    let record = Check { object: 0, offset: 77, len, crc: crc(&setup.bytes) };
    let plan = || {
        let moves = vec![Move::contiguous(0, 0, 77, 0, len)];
        Plan::build_recorded(moves, vec![len], PIECE, &[], vec![record]).unwrap()
    };
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        let options = LoadOptions { path: choice, threads: Some(3), ..LoadOptions::default() };
        let paths = std::slice::from_ref(&setup.path);
        let (targets, report) = try_load(&setup.engine, plan(), paths, options).unwrap();
        assert!(targets[0] == setup.bytes[77..77 + len as usize]);
        assert_eq!(report.verified_gpu_bytes + report.verified_cpu_bytes, len, "{report:?}");
        let mut damaged = setup.bytes.clone();
        damaged[4_000_000] ^= 1;
        let path = write_file(setup.path.parent().unwrap(), "damaged", &damaged);
        let options = LoadOptions { path: choice, threads: Some(3), ..LoadOptions::default() };
        let error = try_load(&setup.engine, plan(), &[path], options).unwrap_err();
        assert_eq!(error.code(), Code::Checksum, "{error}");
    }
}

#[test]
#[ignore = "needs SIMGPU_ALLOC_LIMIT for the targets and less than one list"]
fn device_memory_is_full() {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    // No verdict of the driver's: the next load may find memory again, and here it finds none.
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        assert_by_cpu(&setup.arrives(choice), "out of memory");
    }
}

#[test]
#[ignore = "needs a driver"]
fn the_first_load_makes_the_kernel_ready() {
    let setup = setup();
    for choice in [PathChoice::Dma, PathChoice::Copy] {
        // Of the first what the readers checked meanwhile is the CPU's.
        let report = setup.arrives(choice);
        assert!(refusals(&report).is_empty(), "{report:?}");
        assert!(dma_bytes(&report) > 0 || choice == PathChoice::Copy, "{report:?}");
    }
    assert!(matches!(ChecksumKernel::loaded(gpu_of(&setup.engine)), Some(Ok(Some(_)))));
    let report = setup.arrives(PathChoice::Copy);
    assert_eq!(report.verified_gpu_bytes, setup.plan().whole_checked_bytes());
}

#[test]
#[ignore = "needs a driver"]
fn small_loads_are_the_cpus() {
    let mut setup = setup();
    let mut config = setup.engine.config().clone();
    config.tuning.gpu_checks_from_bytes = setup.plan().whole_checked_bytes() + 1;
    setup.engine = Engine::new(setup.engine.device().clone(), config);
    let report = setup.arrives(PathChoice::Dma);
    assert!(report.verified_gpu_bytes == 0 && refusals(&report).is_empty(), "{report:?}");
    assert_eq!(dma_bytes(&report), 0);
}

/// A load whose targets are looked at as they are said to be ready.
fn ready_until_error(engine: &Arc<Engine>, plan: Plan, path: &std::path::Path) -> Vec<u32> {
    let gpu = gpu_of(engine);
    let sizes = plan.target_bytes().to_vec();
    let load = || -> Result<(Session, Vec<DeviceBuffer>)> {
        let buffers: Vec<_> =
            sizes.iter().map(|&len| DeviceBuffer::new(gpu, len)).collect::<Result<_>>()?;
        let session = engine.start(plan.clone(), vec![source(path)], LoadOptions::default())?;
        let places: Vec<u64> = buffers.iter().map(DeviceBuffer::address).collect();
        // SAFETY: the buffers outlive the workers: see below.
        unsafe { session.provide(&places, Some(0), None)? };
        Ok((session, buffers))
    };
    let (session, buffers) = gpu.with_context(load).unwrap();
    let mut ready = Vec::new();
    let error = loop {
        match session.next_ready(Duration::from_secs(10)) {
            Ok(more) => {
                assert!(!more.is_empty(), "the load ends with an error");
                ready.extend(more);
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::Checksum, "{error}");
    assert!(session.wait(Duration::ZERO).is_err() && session.finish().is_err());
    assert!(session.wait_idle(Duration::from_secs(10)));
    drop(buffers);
    ready
}

#[test]
#[ignore = "needs a driver"]
fn a_target_with_a_wrong_block_is_never_ready() {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    let targets = 40_u32;
    let len = LEN as u64 / u64::from(targets);
    let moves = (0..targets).map(|at| Move::contiguous(0, at, u64::from(at) * len, 0, len));
    let moves: Vec<Move> = moves.collect();
    let mut checks = Vec::new();
    for part in &moves {
        let from = part.from as usize;
        checks.extend(blocks(0, &setup.bytes, from, from + len as usize, STEP));
    }
    let sizes = vec![len; targets as usize];
    let plan = Plan::build_checked(moves, sizes, PIECE, &[], checks).unwrap();
    assert_eq!(plan.whole_checked_bytes(), plan.checked_bytes());
    for bad in [0, 13, targets - 1] {
        let mut damaged = setup.bytes.clone();
        damaged[(u64::from(bad) * len) as usize + 70_000] ^= 0x80;
        let path = write_file(setup.path.parent().unwrap(), "damaged", &damaged);
        let ready = ready_until_error(&setup.engine, plan.clone(), &path);
        assert!(!ready.contains(&bad), "{bad} is wrong, ready: {ready:?}");
    }
}

#[test]
#[ignore = "needs a driver"]
fn many_loads_at_a_time_share_the_lists() {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    let whole = setup.plan().whole_checked_bytes();
    std::thread::scope(|scope| {
        let load = |number: usize| {
            let choice = [PathChoice::Dma, PathChoice::Copy][number % 2];
            let report = setup.arrives(choice);
            assert_eq!(report.verified_gpu_bytes, whole, "{report:?}");
            assert!(refusals(&report).is_empty(), "{report:?}");
        };
        let loads: Vec<_> = (0..6).map(|number| scope.spawn(move || load(number))).collect();
        loads.into_iter().for_each(|load| load.join().unwrap());
    });
}

#[test]
#[ignore = "needs a driver"]
fn files_with_and_without_checksums_in_one_load() {
    let setup = setup();
    load_kernel(gpu_of(&setup.engine));
    let other = pattern(2, 5_000_011);
    for folder in folders() {
        let plain = write_file(folder.path(), "plain", &other);
        let len = (LEN / STEP * STEP) as u64;
        let moves = vec![
            Move::contiguous(0, 0, 0, 0, other.len() as u64),
            Move::contiguous(1, 1, 0, 0, len),
        ];
        let checks = blocks(1, &setup.bytes, 0, len as usize, STEP);
        let sizes = vec![other.len() as u64, len];
        for choice in [PathChoice::Dma, PathChoice::Auto, PathChoice::Direct] {
            let checks = checks.clone();
            let plan =
                Plan::build_checked(moves.clone(), sizes.clone(), PIECE, &[], checks).unwrap();
            let options = LoadOptions { path: choice, threads: Some(3), ..LoadOptions::default() };
            let paths = [plain.clone(), setup.path.clone()];
            let (targets, report) = try_load(&setup.engine, plan, &paths, options).unwrap();
            assert!(targets[0] == other && targets[1] == setup.bytes[..len as usize]);
            assert_eq!((report.verified_gpu_bytes, report.verified_cpu_bytes), (len, 0));
        }
    }
}
