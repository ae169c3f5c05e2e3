//! Files, plans and targets for the tests of the engine. **unsafe**: targets are provided by address.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_device::Device;
use forebay_engine::{
    Check, Engine, EngineConfig, LoadOptions, LocalFile, Move, Plan, RangeSource, Report,
};
use forebay_error::Result;
use forebay_format::OpenFile;
use forebay_format::crc::crc32;

/// Bytes that differ at every place: the file number, then a hash of the offset.
pub(crate) fn pattern(file: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| (index ^ file << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8) as u64).flat_map(word).collect();
    bytes.truncate(len);
    bytes
}

/// Writes a file and pushes it to the disk, so that it can be dropped from the cache.
pub(crate) fn write_file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    path
}

pub(crate) fn drop_cache(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

pub(crate) fn source(path: &Path) -> Arc<dyn RangeSource> {
    Arc::new(LocalFile::new(Arc::new(OpenFile::open(path).unwrap())).unwrap())
}

/// An object that is no file of this machine, as one of a bucket. Counts its reads.
pub(crate) struct Object {
    pub(crate) bytes: Vec<u8>,
    pub(crate) reads: AtomicUsize,
}

impl Object {
    pub(crate) fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self { bytes: bytes.to_vec(), reads: AtomicUsize::new(0) })
    }
}

impl RangeSource for Object {
    fn name(&self) -> String {
        "store:object".to_owned()
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let rest = &self.bytes[offset as usize..];
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

pub(crate) fn host_engine(config: EngineConfig) -> Arc<Engine> {
    Engine::new(Device::Host, config)
}

/// Host memory for each target of a plan, filled with a value that tells untouched bytes.
pub(crate) fn host_targets(plan: &Plan) -> Vec<Vec<u8>> {
    plan.target_bytes().iter().map(|&len| vec![0xa5; len as usize]).collect()
}

pub(crate) fn addresses(targets: &mut [Vec<u8>]) -> Vec<u64> {
    targets.iter_mut().map(|target| target.as_mut_ptr() as u64).collect()
}

/// Loads to the host and gives the targets back.
pub(crate) fn load_host(
    engine: &Arc<Engine>,
    plan: Plan,
    sources: Vec<Arc<dyn RangeSource>>,
    options: LoadOptions,
) -> Result<(Vec<Vec<u8>>, Report)> {
    let mut targets = host_targets(&plan);
    let session = engine.start(plan, sources, options)?;
    let places = addresses(&mut targets);
    // SAFETY: the targets live until the session has been finished, or cancelled and idle.
    let provided = unsafe { session.provide(&places, None, None) };
    let result = provided.and_then(|()| session.finish());
    assert!(session.cancel() || session.wait_idle(Duration::from_secs(10)), "workers went home");
    result.map(|report| (targets, report))
}

/// Blocks of `step` bytes over `[start, end)` of an object.
pub(crate) fn blocks(
    object: u32,
    bytes: &[u8],
    start: usize,
    end: usize,
    step: usize,
) -> Vec<Check> {
    (start..end)
        .step_by(step)
        .map(|at| {
            let block = &bytes[at..(at + step).min(end)];
            let (offset, len) = (at as u64, block.len() as u64);
            Check { object, offset, len, crc: crc32(block) }
        })
        .collect()
}

/// A plan of one file whose blocks arrive in every way: a tensor as a whole, rows with gaps, a slice that begins and
/// ends inside of blocks. Bytes, at least 1 MB of them, in thirds; `step` is the length of a block.
pub(crate) fn mixed_plan(bytes: &[u8], piece_bytes: u64, step: usize) -> Plan {
    let len = bytes.len();
    let (second, third) = (len / 3, len / 3 * 2);
    let rows = ((third - second) / 4000) as u64;
    let rows = Move {
        object: 0,
        target: 1,
        from: second as u64,
        from_stride: 4000,
        to: 0,
        to_stride: 1000,
        run: 1000,
        rows,
    };
    let (from, slice) = (third + step / 2, len - third - step);
    let moves = vec![
        Move::contiguous(0, 0, 0, 0, second as u64),
        rows,
        Move::contiguous(0, 2, from as u64, 0, slice as u64),
    ];
    let sizes = vec![second as u64, rows.bytes(), slice as u64];
    let mut checks = blocks(0, bytes, 0, second, step);
    checks.extend(blocks(0, bytes, second, third, step));
    checks.extend(blocks(0, bytes, third, len, step));
    Plan::build_checked(moves, sizes, piece_bytes, &[], checks).unwrap()
}

/// Checks the targets of `mixed_plan`.
pub(crate) fn check_mixed(targets: &[Vec<u8>], bytes: &[u8], step: usize) {
    let (second, third) = (bytes.len() / 3, bytes.len() / 3 * 2);
    assert!(targets[0] == bytes[..second], "the whole");
    for (row, found) in targets[1].chunks(1000).enumerate() {
        let at = second + row * 4000;
        assert!(found == &bytes[at..at + 1000], "row {row}");
    }
    let from = third + step / 2;
    assert!(targets[2] == bytes[from..from + targets[2].len()], "the slice");
}

/// Ten targets of uneven sizes that cover a file from byte 11 on.
pub(crate) fn uneven_plan(files: &[usize], piece_bytes: u64) -> Plan {
    uneven_plan_in_batches(files, piece_bytes, &[])
}

pub(crate) fn uneven_plan_in_batches(files: &[usize], piece_bytes: u64, batches: &[u32]) -> Plan {
    let (mut moves, mut sizes) = (Vec::new(), Vec::new());
    for (object, &len) in files.iter().enumerate() {
        let mut at = 11;
        for share in 1..=10_u64 {
            let size = ((len as u64 - 11) * share / 55).min(len as u64 - at);
            moves.push(Move::contiguous(object as u32, sizes.len() as u32, at, 0, size));
            sizes.push(size);
            at += size;
        }
    }
    Plan::build(moves, sizes, piece_bytes, batches).unwrap()
}

/// Checks the targets of `uneven_plan`.
pub(crate) fn check_uneven(targets: &[Vec<u8>], files: &[Vec<u8>]) {
    for (object, bytes) in files.iter().enumerate() {
        let mut at = 11;
        for (index, target) in targets[object * 10..object * 10 + 10].iter().enumerate() {
            assert!(target == &bytes[at..at + target.len()], "file {object} target {index}");
            at += target.len();
        }
    }
}
