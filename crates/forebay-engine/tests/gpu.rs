//! Loads to a GPU over every path. Skipped, with a line that says so, where there is none. **unsafe**: targets are
//! provided by address, and results copied back.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

pub(crate) mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use forebay_device::Device;
use forebay_device::cuda::{ChecksumKernel, CudaDevice, DeviceBuffer, Stream};
use forebay_engine::{
    CacheChoice, Check, Engine, EngineConfig, FileSink, LoadOptions, Move, Part, Path, PathChoice,
    Plan, RangeSource, Report, WriteOptions,
};
use forebay_error::{Code, Result};

pub(crate) fn gpu() -> Option<Device> {
    match Device::open("cuda:0") {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

pub(crate) fn folders() -> Vec<tempfile::TempDir> {
    // A disk and a tmpfs: their pages differ. The build folder may be missing on a machine that only runs tests.
    let disk = std::env::temp_dir();
    let mut folders = vec![tempfile::tempdir_in(disk).unwrap()];
    if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
        folders.push(memory);
    }
    folders
}

/// Loads to the GPU and copies the targets back.
fn load(
    engine: &Arc<Engine>,
    plan: Plan,
    paths: &[PathBuf],
    options: LoadOptions,
) -> (Vec<Vec<u8>>, Report) {
    try_load(engine, plan, paths, options).unwrap()
}

pub(crate) fn try_load(
    engine: &Arc<Engine>,
    plan: Plan,
    paths: &[PathBuf],
    options: LoadOptions,
) -> Result<(Vec<Vec<u8>>, Report)> {
    load_from(engine, plan, paths.iter().map(|path| source(path)).collect(), options)
}

fn load_from(
    engine: &Arc<Engine>,
    plan: Plan,
    sources: Vec<Arc<dyn RangeSource>>,
    options: LoadOptions,
) -> Result<(Vec<Vec<u8>>, Report)> {
    let Device::Cuda(gpu) = engine.device() else { panic!("no GPU") };
    gpu.with_context(|| {
        let sizes = plan.target_bytes().to_vec();
        let buffers: Vec<_> =
            sizes.iter().map(|&len| DeviceBuffer::new(gpu, len)).collect::<Result<_, _>>()?;
        let places: Vec<u64> = buffers.iter().map(|buffer| buffer.address()).collect();
        let session = engine.start(plan, sources, options)?;
        // In two portions, to have a feed that is behind.
        let (first, rest) = places.split_at(places.len() / 3);
        // SAFETY: the buffers outlive the session.
        unsafe {
            session.provide(first, Some(0), None)?;
            std::thread::sleep(Duration::from_millis(5));
            session.provide(rest, Some(0), None)?;
        }
        let report = session.finish();
        assert!(session.wait_idle(Duration::from_secs(30)));
        let report = report?;
        let stream = Stream::new(gpu)?;
        let mut targets = Vec::new();
        for (buffer, &len) in buffers.iter().zip(&sizes) {
            let mut bytes = vec![0_u8; len as usize];
            // SAFETY: both are `len` bytes long, and the stream is synchronized before either goes.
            unsafe { stream.copy_to_host(bytes.as_mut_ptr() as usize, buffer.address(), len)? };
            stream.synchronize()?;
            targets.push(bytes);
        }
        Ok((targets, report))
    })
}

#[test]
fn every_path_gives_the_same_bytes() {
    let Some(device) = gpu() else { return };
    let config = EngineConfig { arena_bytes: 128 << 20, ..EngineConfig::default() };
    let engine = Engine::new(device, config);
    let files = [pattern(1, 300_000_007), pattern(2, 11_000_001)];
    for folder in folders() {
        let paths: Vec<_> = files
            .iter()
            .enumerate()
            .map(|(index, bytes)| write_file(folder.path(), &format!("{index}"), bytes))
            .collect();
        for path in [
            PathChoice::Auto,
            PathChoice::Dma,
            PathChoice::Copy,
            PathChoice::Direct,
            PathChoice::Buffered,
            PathChoice::Fallback,
        ] {
            for (cold, threads) in [(false, 1), (false, 6), (true, 2)] {
                if cold {
                    paths.iter().for_each(|path| drop_cache(path));
                }
                let plan = uneven_plan(&files.each_ref().map(Vec::len), 4 << 20);
                let options =
                    LoadOptions { path, threads: Some(threads), cache: CacheChoice::Auto };
                let (targets, report) = load(&engine, plan, &paths, options);
                check_uneven(&targets, &files);
                println!("{path:?} cold {cold} threads {threads}: {:?}", report.paths);
                assert!(report.registered_peak_bytes <= report.registered_limit_bytes);
                assert!(report.arena.peak_bytes <= 128 << 20);
            }
        }
    }
    assert_eq!(engine.registered_now(), 0, "registrations are released");
}

#[test]
fn a_small_window_is_kept_and_the_rest_is_copied_or_waits() {
    let Some(device) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = [pattern(3, 400_000_000)];
    let path = write_file(folder.path(), "model", &files[0]);
    let config = EngineConfig {
        dma_window_bytes: 150 << 20,
        arena_bytes: 64 << 20,
        ..EngineConfig::default()
    };
    let engine = Engine::new(device, config);
    let plan = uneven_plan(&[files[0].len()], 4 << 20);
    let options = LoadOptions { path: PathChoice::Dma, ..LoadOptions::default() };
    let (targets, report) = load(&engine, plan, &[path], options);
    check_uneven(&targets, &files);
    assert!(report.registered_peak_bytes <= 150 << 20);
    assert!(report.paths.iter().any(|share| share.path == Path::PageCacheDma), "{report:?}");
}

#[test]
fn rows_of_inner_slices_land_in_place() {
    let Some(device) = gpu() else { return };
    let engine = Engine::new(device, EngineConfig::default());
    for folder in folders() {
        let bytes = pattern(4, 60 << 20);
        let path = write_file(folder.path(), "model", &bytes);
        for choice in [PathChoice::Auto, PathChoice::Dma, PathChoice::Copy, PathChoice::Direct] {
            for (run, from_stride, rows) in
                [(100, 1000, 50_000), (5000, 40_000, 1500), (30_000, 64_000, 900)]
            {
                let part = Move {
                    object: 0,
                    target: 0,
                    from: 17,
                    from_stride,
                    to: 0,
                    to_stride: run,
                    run,
                    rows,
                };
                let plan = Plan::build(vec![part], vec![run * rows], 4 << 20, &[]).unwrap();
                let options = LoadOptions { path: choice, ..LoadOptions::default() };
                let paths = std::slice::from_ref(&path);
                let (targets, report) = load(&engine, plan, paths, options);
                for row in 0..rows {
                    let (to, from) = ((row * run) as usize, (17 + row * from_stride) as usize);
                    let run = run as usize;
                    assert!(
                        targets[0][to..to + run] == bytes[from..from + run],
                        "{choice:?} run {run} row {row}"
                    );
                }
                println!("{choice:?} run {run}: {:?}", report.paths);
            }
        }
    }
}

#[test]
fn targets_in_allocations_side_by_side_are_copied_one_by_one() {
    let Some(device) = gpu() else { return };
    let engine = Engine::new(device, EngineConfig::default());
    // The driver hands out whole 2 MiB pages, neighbours one after the other: no gap between these targets.
    let len = 2 << 20;
    let bytes = pattern(5, 64 * len);
    for folder in folders() {
        let path = write_file(folder.path(), "model", &bytes);
        for choice in [PathChoice::Auto, PathChoice::Dma, PathChoice::Copy, PathChoice::Direct] {
            let part = |index: usize| {
                let from = (index * len) as u64;
                Move::contiguous(0, index as u32, from, 0, len as u64)
            };
            let moves = (0..64).map(part).collect();
            let plan = Plan::build(moves, vec![len as u64; 64], 4 << 20, &[]).unwrap();
            let options = LoadOptions { path: choice, ..LoadOptions::default() };
            let (targets, _) = load(&engine, plan, std::slice::from_ref(&path), options);
            for (target, wanted) in targets.iter().zip(bytes.chunks(len)) {
                assert!(target == wanted, "{choice:?}");
            }
        }
    }
}

/// Makes the kernel ready, so that no block is checked by the CPU meanwhile.
pub(crate) fn load_kernel(gpu: &Arc<CudaDevice>) {
    assert!(gpu.with_context(|| ChecksumKernel::get(gpu)).unwrap().is_some());
}

#[test]
fn objects_that_are_no_files_arrive_and_are_checked() {
    let Some(device) = gpu() else { return };
    let bytes = pattern(6, 9_000_077);
    for from_bytes in [0, u64::MAX] {
        let mut config = EngineConfig { piece_bytes: 256 << 10, ..EngineConfig::default() };
        config.tuning.gpu_checks_from_bytes = from_bytes;
        let engine = Engine::new(device.clone(), config);
        let plan = || mixed_plan(&bytes, 256 << 10, 64 << 10);
        let load = |bytes: &[u8]| {
            load_from(&engine, plan(), vec![Object::new(bytes)], LoadOptions::default())
        };
        let (targets, report) = load(&bytes).unwrap();
        check_mixed(&targets, &bytes, 64 << 10);
        let checked = report.verified_gpu_bytes + report.verified_cpu_bytes;
        assert_eq!(checked, plan().checked_bytes(), "{report:?}");
        assert!(report.paths.iter().all(|share| share.path == Path::Buffered), "{report:?}");
        let mut damaged = bytes.clone();
        damaged[1_000_000] ^= 1;
        assert_eq!(load(&damaged).unwrap_err().code(), Code::Checksum);
    }
}

/// Whole records, two of them small, and a part of a large one: as a rank of several takes of a `.pt` file.
fn rank_of_records(bytes: &[u8]) -> (Vec<Move>, Vec<u64>, Vec<Check>) {
    let record = |(offset, len): (u64, u64)| {
        let crc = forebay_format::crc::crc32(&bytes[offset as usize..(offset + len) as usize]);
        Check { object: 0, offset, len, crc }
    };
    let records = [(64, 1000), (2000, 700_001), (800_000, 8_200_000)].map(record).to_vec();
    let moves = vec![
        Move::contiguous(0, 0, 64, 0, 1000),
        Move::contiguous(0, 1, 2000, 0, 700_001),
        Move::contiguous(0, 2, 900_000, 0, 7_000_000),
    ];
    (moves, vec![1000, 700_001, 7_000_000], records)
}

#[test]
fn records_are_compared_and_parts_of_them_come_by_dma() {
    const PIECE: u64 = 256 << 10;
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { return };
    load_kernel(gpu);
    let bytes = pattern(8, 9_000_077);
    let (moves, sizes, records) = rank_of_records(&bytes);
    let dma = |report: &Report| {
        let shares = report.paths.iter().filter(|share| share.path == Path::PageCacheDma);
        shares.map(|share| share.bytes).sum::<u64>()
    };
    for folder in folders() {
        for from_bytes in [0, u64::MAX] {
            let mut config = EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() };
            config.tuning.gpu_checks_from_bytes = from_bytes;
            let engine = Engine::new(device.clone(), config);
            let load = |bytes: &[u8], recorded: bool| {
                let path = write_file(folder.path(), "model", bytes);
                let (moves, sizes) = (moves.clone(), sizes.clone());
                let plan = match recorded {
                    true => Plan::build_recorded(moves, sizes, PIECE, &[], records.clone()),
                    false => Plan::build(moves, sizes, PIECE, &[]),
                };
                let options = LoadOptions { path: PathChoice::Dma, ..LoadOptions::default() };
                try_load(&engine, plan.unwrap(), &[path], options)
            };
            let plain = load(&bytes, false).unwrap().1;
            let (targets, report) = load(&bytes, true).unwrap();
            let parts = [(64, 1000), (2000, 700_001), (900_000, 7_000_000)];
            for (target, (from, len)) in targets.iter().zip(parts) {
                assert!(target == &bytes[from..from + len], "{from}");
            }
            let checked = (report.verified_gpu_bytes, report.verified_cpu_bytes);
            let expected = if from_bytes == 0 { (701_001, 0) } else { (0, 701_001) };
            assert_eq!((checked, report.unverified_bytes), (expected, 7_000_000), "{report:?}");
            // What nothing is known of goes the way that it goes without records.
            assert!(dma(&report) > 0 || dma(&plain) == 0, "{report:?}\n{plain:?}");
            for at in [64, 1063, 2000, 500_000, 702_000] {
                let mut damaged = bytes.clone();
                damaged[at] ^= 4;
                assert_eq!(load(&damaged, true).unwrap_err().code(), Code::Checksum, "{at}");
            }
            let mut damaged = bytes.clone();
            damaged[1_000_000] ^= 4;
            assert!(load(&damaged, true).is_ok(), "a part cannot be compared");
        }
    }
}

#[test]
fn blocks_are_checked_where_they_arrive() {
    const STEP: usize = 1 << 20;
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { return };
    load_kernel(gpu);
    let engine_of = |gpu_checks| {
        let mut config = EngineConfig::default();
        config.tuning.gpu_checks = gpu_checks;
        config.tuning.gpu_checks_from_bytes = 0;
        Engine::new(device.clone(), config)
    };
    let (engine, by_cpu) = (engine_of(true), engine_of(false));
    let bytes = pattern(7, 36_000_123);
    let plan = mixed_plan(&bytes, 4 << 20, STEP);
    let (all, whole) = (plan.checked_bytes(), plan.whole_checked_bytes());
    assert!(whole > all / 2 && all > whole);
    for folder in folders() {
        let path = write_file(folder.path(), "model", &bytes);
        let paths = std::slice::from_ref(&path);
        for choice in [PathChoice::Auto, PathChoice::Dma, PathChoice::Copy, PathChoice::Direct] {
            let options = LoadOptions { path: choice, ..LoadOptions::default() };
            let (targets, report) = load(&engine, plan.clone(), paths, options.clone());
            check_mixed(&targets, &bytes, STEP);
            let verified = (report.verified_gpu_bytes, report.verified_cpu_bytes);
            assert_eq!(verified, (whole, all - whole), "{choice:?}");
            let dma = report.paths.iter().any(|share| share.path == Path::PageCacheDma);
            assert!(dma || choice != PathChoice::Dma, "{report:?}");
            let (targets, report) = load(&by_cpu, plan.clone(), paths, options);
            check_mixed(&targets, &bytes, STEP);
            assert_eq!((report.verified_gpu_bytes, report.verified_cpu_bytes), (0, all));
        }
        // The last two are in rows, and in the half of a block that is not wanted.
        for at in [0, STEP - 1, STEP, 12_000_040, 13_000_000, 24_000_100] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            write_file(folder.path(), "model", &damaged);
            for choice in [PathChoice::Dma, PathChoice::Copy] {
                let options = LoadOptions { path: choice, ..LoadOptions::default() };
                let fails = |engine| {
                    let result = try_load(engine, plan.clone(), paths, options.clone());
                    result.map(|_| ()).unwrap_err()
                };
                let (found, wanted) = (fails(&engine), fails(&by_cpu));
                assert_eq!(found.code(), Code::Checksum, "byte {at}: {found}");
                assert_eq!(found.render(), wanted.render(), "byte {at}");
                assert!(found.place().unwrap().ends_with("/model"), "{found}");
            }
        }
    }
}

#[test]
fn what_was_loaded_can_be_saved_again() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { return };
    let engine = Engine::new(device.clone(), EngineConfig::default());
    let bytes = pattern(6, 70_000_003);
    let folder = tempfile::tempdir().unwrap();
    let path = write_file(folder.path(), "model", &bytes);
    let saved = folder.path().join("saved");
    gpu.with_context(|| {
        let buffer = DeviceBuffer::new(gpu, bytes.len() as u64)?;
        let whole = Move::contiguous(0, 0, 0, 0, buffer.len());
        let plan = Plan::build(vec![whole], vec![buffer.len()], 4 << 20, &[])?;
        let session = engine.start(plan, vec![source(&path)], LoadOptions::default())?;
        // SAFETY: the buffer outlives the session.
        unsafe { session.provide(&[buffer.address()], Some(0), None)? };
        session.finish()?;
        let file = std::fs::File::create(&saved).unwrap();
        let sink = FileSink::new(&file, "saved");
        let part = Part { sink: 0, offset: 5, address: buffer.address(), len: buffer.len() };
        let options = WriteOptions { threads: Some(3), stream: Some(0) };
        let stop = std::sync::atomic::AtomicBool::new(false);
        // SAFETY: the buffer outlives the call, and nobody writes to it.
        let report = unsafe { engine.write(&[part], &[&sink], options, &stop)? };
        assert_eq!(report.bytes, buffer.len());
        Ok(())
    })
    .unwrap();
    assert!(std::fs::read(&saved).unwrap()[5..] == bytes);
}
