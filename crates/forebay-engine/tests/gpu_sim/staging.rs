//! Slots of a job that fails while copies into them are on their way. **unsafe**: memory is given by address.
//!
//! Ignored, because each needs the simulator with settings of its own: `main` runs them with those.

use std::sync::Arc;
use std::time::Duration;

use forebay_device::cuda::DeviceBuffer;
use forebay_device::{Arena, ArenaConfig, Device, Slot};
use forebay_engine::stage::{MemoryRun, Place, StageConsumer, StageOptions, StagePiece, Staging};
use forebay_engine::{Engine, EngineConfig};
use forebay_error::{Code, Result};

use crate::gpu::gpu;

const RUN_BYTES: u64 = 64;
const LONG: Duration = Duration::from_secs(30);

struct Nobody;

impl StageConsumer for Nobody {
    fn take(&self, _piece: usize, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// A job of one piece with many runs, in a pool of one slot.
struct Setup {
    pool: Arc<Arena>,
    staging: Staging,
    _buffer: DeviceBuffer,
}

fn start(runs: u64) -> Setup {
    let device = gpu().unwrap();
    let Device::Cuda(gpu) = &device else { panic!("no GPU") };
    gpu.bind_thread().unwrap();
    let buffer = DeviceBuffer::new(gpu, runs * RUN_BYTES).unwrap();
    let slot_bytes = (runs * RUN_BYTES) as usize;
    let config = ArenaConfig { size_bytes: slot_bytes.next_multiple_of(4096), slot_bytes };
    let pool = Arena::without_margin(&device, &config).unwrap();
    assert_eq!(pool.slot_count(), 1);
    // Pinned now, so that the job has it at once.
    drop(take(&pool));
    let run = |at: u64| MemoryRun { address: buffer.address() + at * RUN_BYTES, len: RUN_BYTES };
    let list: Vec<_> = (0..runs).map(run).collect();
    let pieces = vec![StagePiece { place: Place::Device, runs: 0..list.len() }];
    let engine = Engine::new(device.clone(), EngineConfig::default());
    let options = StageOptions::default();
    // SAFETY: the buffer is dropped after the job.
    let staging = unsafe { engine.stage(&pool, pieces, list, Arc::new(Nobody), options) };
    Setup { pool, staging: staging.unwrap(), _buffer: buffer }
}

fn take(pool: &Arc<Arena>) -> Slot {
    pool.acquire(1, &|| false).unwrap().pop().unwrap()
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT=200 and copies that take their time"]
fn a_slot_comes_back_after_the_copies_into_it() {
    let setup = start(200);
    // By now the last copy has failed, and most of the others have not run.
    std::thread::sleep(Duration::from_millis(50));
    let mut slot = take(&setup.pool);
    let whole = slot.len();
    slot.bytes_mut(whole).fill(0xaa);
    assert!(setup.staging.wait_settled(LONG));
    assert_eq!(setup.staging.wait_done(LONG).unwrap_err().code(), Code::Device);
    assert!(slot.bytes(whole).iter().all(|byte| *byte == 0xaa), "a copy came after all");
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT=1 and SIMGPU_COPY_FAIL_LATE=1"]
fn a_slot_is_given_up_where_nobody_knows_what_the_device_does() {
    let setup = start(20_000);
    assert_eq!(setup.staging.wait_done(LONG).unwrap_err().code(), Code::Device);
    assert!(setup.staging.wait_settled(LONG));
    let error = setup.pool.acquire(1, &|| true).err().unwrap();
    assert_eq!(error.code(), Code::Cancelled, "all are out for good");
}
