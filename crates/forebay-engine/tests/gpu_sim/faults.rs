//! Loads on a driver that refuses. **unsafe**: targets are provided by address.
//!
//! Ignored, because each needs the simulator with settings of its own: `main` runs them with those.

use std::sync::Arc;
use std::time::Duration;

use forebay_device::cuda::DeviceBuffer;
use forebay_device::{Device, cuda::Stream};
use forebay_engine::{Engine, EngineConfig, LoadOptions, Path, PathChoice, Report, Session};
use forebay_error::{Code, Error, Result};

use crate::gpu::common::*;
use crate::gpu::gpu;

const LEN: usize = 20_000_003;
const PIECE: u64 = 256 << 10;

struct Setup {
    engine: Arc<Engine>,
    bytes: Vec<u8>,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

fn setup() -> Setup {
    let device = gpu().unwrap();
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(1, LEN);
    let path = write_file(folder.path(), "model", &bytes);
    let mut config =
        EngineConfig { piece_bytes: PIECE, arena_bytes: 8 << 20, ..EngineConfig::default() };
    config.tuning.dma_batch_bytes = 2 << 20;
    Setup { engine: Engine::new(device, config), bytes, path, _folder: folder }
}

/// Targets and report.
type Arrived = (Vec<Vec<u8>>, Report);

impl Setup {
    /// Loads; the session too, for a look at how it ended.
    fn load(&self, choice: PathChoice) -> (Session, Result<Arrived>) {
        let Device::Cuda(gpu) = self.engine.device() else { panic!("no GPU") };
        let plan = uneven_plan(&[self.bytes.len()], PIECE);
        let sizes = plan.target_bytes().to_vec();
        let buffers: Vec<_> =
            sizes.iter().map(|&len| DeviceBuffer::new(gpu, len).unwrap()).collect();
        let places: Vec<_> = buffers.iter().map(DeviceBuffer::address).collect();
        let options = LoadOptions { path: choice, threads: Some(3), ..LoadOptions::default() };
        let session = self.engine.start(plan, vec![source(&self.path)], options).unwrap();
        // SAFETY: the buffers outlive the workers.
        let provided = unsafe { session.provide(&places, Some(0), None) };
        let report = provided.and_then(|()| session.finish());
        assert!(session.wait_idle(Duration::from_secs(10)), "workers go home");
        let result = report.and_then(|report| {
            let stream = Stream::new(gpu)?;
            let mut targets = Vec::new();
            for (&place, &len) in places.iter().zip(&sizes) {
                let mut bytes = vec![0_u8; len as usize];
                // SAFETY: both are `len` bytes long, and the stream is waited for.
                unsafe { stream.copy_to_host(bytes.as_mut_ptr() as usize, place, len)? };
                stream.synchronize()?;
                targets.push(bytes);
            }
            Ok((targets, report))
        });
        (session, result)
    }

    /// Loads, and the bytes arrive.
    fn arrives(&self, choice: PathChoice) -> Report {
        let (targets, report) = self.load(choice).1.unwrap();
        check_uneven(&targets, std::slice::from_ref(&self.bytes));
        report
    }
}

fn used_dma(report: &Report) -> bool {
    report.paths.iter().any(|share| share.path == Path::PageCacheDma)
}

/// The line of the report that says that DMA was refused, and what was done instead.
fn refusal(report: &Report) -> &str {
    let refusal = report.refusals.iter().find(|text| text.starts_with("page-cache DMA: "));
    refusal.unwrap_or_else(|| panic!("{report:?}"))
}

/// The driver's error, or one whose cause it is: a reader may be the first to meet it.
fn assert_broken(error: &Error) {
    assert_eq!(error.code(), Code::Device, "{error}");
    let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {cause}").contains("CUDA error 700"), "{error}: {cause}");
}

#[test]
#[ignore = "needs SIMGPU_REGISTER_FAIL=801"]
fn registration_refused() {
    let setup = setup();
    let report = setup.arrives(PathChoice::Dma);
    assert!(!used_dma(&report));
    let refusal = refusal(&report);
    assert!(refusal.contains("CUDA error 801") && refusal.contains("copying instead"), "{refusal}");
    // The next load knows.
    let report = setup.arrives(PathChoice::Auto);
    assert!(!used_dma(&report) && report.refusals.is_empty(), "{report:?}");
    let mut reasons = report.paths.iter().flat_map(|share| &share.reasons);
    assert!(reasons.any(|reason| reason.contains("cannot be registered")), "{report:?}");
}

#[test]
#[ignore = "needs SIMGPU_READ_ONLY=0"]
fn no_read_only_registration() {
    // Asked for, it is a refusal; chosen, it is a reason.
    let report = setup().arrives(PathChoice::Dma);
    assert!(!used_dma(&report) && report.refusals.len() == 1, "{report:?}");
    let report = setup().arrives(PathChoice::Auto);
    assert!(!used_dma(&report) && report.refusals.is_empty(), "{report:?}");
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT and PathChoice::Copy"]
fn a_copy_fails() {
    let setup = setup();
    let (session, result) = setup.load(PathChoice::Copy);
    let error = result.err().unwrap();
    assert_broken(&error);
    // Whoever asks later gets the same.
    assert_eq!(session.finish().err().unwrap().what(), error.what());
    assert!(session.cancel());
    drop(session);
    if std::env::var_os("SIMGPU_COPY_FAIL_LATE").is_none() {
        setup.arrives(PathChoice::Copy);
    }
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT"]
fn a_dma_copy_fails_when_queued() {
    let report = setup().arrives(PathChoice::Dma);
    assert!(refusal(&report).contains("CUDA error 700"), "{report:?}");
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT and SIMGPU_COPY_FAIL_LATE=1"]
fn a_dma_copy_fails_when_it_runs() {
    let error = setup().load(PathChoice::Dma).1.err().unwrap();
    assert_broken(&error);
}

#[test]
#[ignore = "needs SIMGPU_ALLOC_LIMIT=8388608"]
fn device_memory_is_full() {
    let device = gpu().unwrap();
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    assert_eq!(gpu.memory_info().unwrap(), (8 << 20, 8 << 20));
    let held = DeviceBuffer::new(gpu, 6 << 20).unwrap();
    let error = DeviceBuffer::new(gpu, 3 << 20).err().unwrap();
    assert_eq!(error.code(), Code::OutOfMemory);
    drop(held);
    DeviceBuffer::new(gpu, 3 << 20).unwrap();
}

#[test]
#[ignore = "needs SIMGPU_PIN_LIMIT for three slots"]
fn little_can_be_pinned() {
    let report = setup().arrives(PathChoice::Copy);
    assert!(report.arena.touched_bytes <= 3 * (PIECE as usize + (128 << 10)), "{report:?}");
}

#[test]
#[ignore = "needs SIMGPU_PIN_LIMIT=1"]
fn nothing_can_be_pinned() {
    let error = setup().load(PathChoice::Copy).1.err().unwrap();
    assert_eq!(error.code(), Code::OutOfMemory);
    assert!(error.what().contains("cannot pin"), "{error}");
}

#[test]
#[ignore = "needs SIMGPU_REGISTER_GBPS"]
fn registering_is_slow() {
    let setup = setup();
    assert!(used_dma(&setup.arrives(PathChoice::Dma)));
    setup.arrives(PathChoice::Auto);
}
