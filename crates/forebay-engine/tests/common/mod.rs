//! Files, plans and targets for the tests of the engine. **unsafe**: targets are provided by address.

#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_device::Device;
use forebay_engine::{
    Engine, EngineConfig, LoadOptions, LocalFile, Move, Plan, RangeSource, Report,
};
use forebay_error::Result;
use forebay_format::OpenFile;

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
