//! Loads to the host over every path, with the faults that files and systems have. **unsafe**: targets are given by
//! address.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use forebay_engine::{
    CacheChoice, EngineConfig, LoadOptions, LocalFile, Move, Path, PathChoice, Plan, RangeSource,
};
use forebay_error::{Code, Error, Result};

const PIECE: u64 = 256 << 10;

fn config() -> EngineConfig {
    EngineConfig { piece_bytes: PIECE, arena_bytes: 16 << 20, ..EngineConfig::default() }
}

fn options(path: PathChoice) -> LoadOptions {
    LoadOptions { path, threads: Some(3), ..LoadOptions::default() }
}

#[test]
fn every_path_gives_the_same_bytes_cold_and_warm() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = [pattern(1, 5_000_003), pattern(2, 700_001)];
    let paths: Vec<_> = files
        .iter()
        .enumerate()
        .map(|(index, bytes)| write_file(folder.path(), &format!("{index}"), bytes))
        .collect();
    let engine = host_engine(config());
    for path in [
        PathChoice::Auto,
        PathChoice::Copy,
        PathChoice::Direct,
        PathChoice::Buffered,
        PathChoice::Fallback,
    ] {
        for cold in [false, true] {
            for cache in [CacheChoice::Auto, CacheChoice::Keep, CacheChoice::Bypass] {
                if cold {
                    paths.iter().for_each(|path| drop_cache(path));
                }
                let sources = paths.iter().map(|path| source(path)).collect();
                let plan = uneven_plan(&files.each_ref().map(Vec::len), PIECE);
                let bytes = plan.bytes();
                let options = LoadOptions { cache, ..options(path) };
                let (targets, report) = load_host(&engine, plan, sources, options).unwrap();
                check_uneven(&targets, &files);
                assert_eq!(report.bytes, bytes);
                assert_eq!(report.paths.iter().map(|share| share.bytes).sum::<u64>(), bytes);
                assert_eq!(report.files_unchanged, 2);
                assert!(report.arena.peak_bytes <= 16 << 20);
            }
        }
    }
}

#[test]
fn cold_bytes_go_direct_and_warm_bytes_do_not() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(3, 8 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    if source(&path).local().unwrap().profile().direct != forebay_topology::DirectAdvice::Good {
        println!("skipped: the build folder is on a file system that is not read directly");
        return;
    }
    let engine = host_engine(config());
    let load = || {
        let plan = uneven_plan(&[bytes.len()], PIECE);
        load_host(&engine, plan, vec![source(&path)], options(PathChoice::Auto)).unwrap().1
    };
    drop_cache(&path);
    let cold = load();
    assert!(cold.paths.iter().all(|share| share.path == Path::Direct), "{:?}", cold.paths);
    std::fs::read(&path).unwrap();
    let warm = load();
    assert!(warm.paths.iter().all(|share| share.path == Path::PageCacheCopy), "{:?}", warm.paths);
    assert!(warm.paths.iter().all(|share| !share.reasons.is_empty()));
}

#[test]
fn rows_of_inner_slices_land_in_place() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(4, 6 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    for (run, from_stride, rows) in [(100, 1000, 5000), (500, 40_000, 150), (30_000, 64_000, 90)] {
        for cold in [false, true] {
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
            let plan = Plan::build(vec![part], vec![run * rows], PIECE, &[]).unwrap();
            if cold {
                drop_cache(&path);
            }
            let sources = vec![source(&path)];
            let (targets, _) =
                load_host(&engine, plan, sources, options(PathChoice::Auto)).unwrap();
            for row in 0..rows {
                let (to, from) = ((row * run) as usize, (17 + row * from_stride) as usize);
                let run = run as usize;
                assert!(targets[0][to..to + run] == bytes[from..from + run], "row {row}");
            }
        }
    }
}

#[test]
fn targets_arrive_one_by_one_as_they_are_provided() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(5, 3 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    let each: Vec<u32> = (0..10).collect();
    let plan = uneven_plan_in_batches(&[bytes.len()], PIECE, &each);
    let mut targets = host_targets(&plan);
    let places = addresses(&mut targets);
    let session = engine.start(plan, vec![source(&path)], options(PathChoice::Auto)).unwrap();
    for (target, place) in places.iter().enumerate() {
        // SAFETY: the targets outlive the session.
        unsafe { session.provide(&[*place], None, None).unwrap() };
        let ready = session.next_ready(Duration::from_secs(10)).unwrap();
        assert_eq!(ready, [target as u32]);
    }
    assert!(session.next_ready(Duration::from_millis(1)).unwrap().is_empty());
    session.finish().unwrap();
    check_uneven(&targets, &[bytes]);
    // SAFETY: nothing is written for an address too many.
    let error = unsafe { session.provide(&[1], None, None) }.unwrap_err();
    assert_eq!(error.code(), Code::Usage);
}

#[test]
fn empty_targets_and_empty_plans_complete() {
    let engine = host_engine(config());
    let plan = Plan::build(Vec::new(), vec![0, 0], PIECE, &[]).unwrap();
    let (targets, report) = load_host(&engine, plan, Vec::new(), LoadOptions::default()).unwrap();
    assert_eq!((targets.len(), report.bytes), (2, 0));
    let plan = Plan::build(Vec::new(), vec![0], PIECE, &[]).unwrap();
    let session = engine.start(plan, Vec::new(), LoadOptions::default()).unwrap();
    // SAFETY: the target has no bytes.
    unsafe { session.provide(&[0], None, None).unwrap() };
    assert_eq!(session.next_ready(Duration::from_secs(1)).unwrap(), [0]);
}

#[test]
fn a_file_that_shrank_is_an_error_on_every_path() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let engine = host_engine(config());
    for path_choice in [PathChoice::Auto, PathChoice::Direct, PathChoice::Fallback] {
        let bytes = pattern(6, 4 << 20);
        let path = write_file(folder.path(), "model", &bytes);
        let opened = source(&path);
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        let plan = uneven_plan(&[bytes.len()], PIECE);
        let result = load_host(&engine, plan, vec![opened], options(path_choice));
        let error = result.err().unwrap();
        assert_eq!(error.code(), Code::FileChanged, "{error:?}");
        assert!(error.place().unwrap().contains("model"));
    }
}

#[test]
fn a_file_that_changed_is_an_error() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let engine = host_engine(config());
    let bytes = pattern(7, 1 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    let opened = source(&path);
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(&path, &bytes).unwrap();
    let result = load_host(
        &engine,
        uneven_plan(&[bytes.len()], PIECE),
        vec![opened],
        options(PathChoice::Auto),
    );
    assert_eq!(result.err().unwrap().code(), Code::FileChanged);
}

/// A source that gives its bytes in small portions, and fails where it is told to.
struct Faulty {
    file: Arc<dyn RangeSource>,
    portion: usize,
    fail_at: Option<(u64, i32)>,
    hang: Option<Arc<Mutex<()>>>,
    calls: AtomicU64,
}

impl RangeSource for Faulty {
    fn name(&self) -> String {
        self.file.name()
    }

    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(gate) = &self.hang
            && call == 3
        {
            drop(gate.lock());
        }
        if call % 5 == 1 {
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        let most = into.len().min(self.portion);
        if let Some((at, errno)) = self.fail_at
            && (offset..offset + most as u64).contains(&at)
        {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.file.read_at(&mut into[..most], offset)
    }

    fn local(&self) -> Option<&LocalFile> {
        None
    }

    fn check_unchanged(&self) -> Result<(), Error> {
        self.file.check_unchanged()
    }
}

fn faulty(file: Arc<dyn RangeSource>, portion: usize) -> Faulty {
    Faulty { file, portion, fail_at: None, hang: None, calls: AtomicU64::new(0) }
}

#[test]
fn short_reads_and_interruptions_are_gone_through() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(8, 2_000_000);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    let slow: Arc<dyn RangeSource> = Arc::new(faulty(source(&path), 777));
    let plan = uneven_plan(&[bytes.len()], PIECE);
    let (targets, _) = load_host(&engine, plan, vec![slow], options(PathChoice::Auto)).unwrap();
    check_uneven(&targets, &[bytes]);
}

#[test]
fn an_io_error_names_file_and_byte_and_ends_the_load() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(9, 2_000_000);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    for (errno, code) in [(libc::EIO, Code::Io), (libc::ENOMEM, Code::OutOfMemory)] {
        let mut broken = faulty(source(&path), 1 << 20);
        broken.fail_at = Some((1_234_567, errno));
        let plan = uneven_plan(&[bytes.len()], PIECE);
        let sources: Vec<Arc<dyn RangeSource>> = vec![Arc::new(broken)];
        let error = load_host(&engine, plan, sources, options(PathChoice::Auto)).err().unwrap();
        assert_eq!(error.code(), code);
        assert!(error.render().contains("model") && error.render().contains("byte"), "{error:?}");
    }
}

#[test]
fn a_hung_read_does_not_hold_the_caller_and_keeps_its_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(10, 2_000_000);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock().unwrap();
    let mut hung = faulty(source(&path), 1 << 20);
    hung.hang = Some(gate.clone());
    let plan = uneven_plan(&[bytes.len()], PIECE);
    let mut targets = host_targets(&plan);
    let places = addresses(&mut targets);
    let owner = Arc::new(targets);
    let session = engine.start(plan, vec![Arc::new(hung)], options(PathChoice::Auto)).unwrap();
    // SAFETY: the owner keeps the targets for as long as a worker may write to them.
    unsafe { session.provide(&places, None, Some(Box::new(owner.clone()))).unwrap() };
    std::thread::sleep(Duration::from_millis(50));
    let asked = Instant::now();
    assert!(!session.cancel(), "one worker hangs");
    assert!(asked.elapsed() < Duration::from_secs(1), "cancelling took {:?}", asked.elapsed());
    assert_eq!(session.finish().err().unwrap().code(), Code::Cancelled);
    drop(session);
    assert!(Arc::strong_count(&owner) > 1, "the hung worker keeps the targets");
    drop(closed);
    let deadline = Instant::now() + Duration::from_secs(10);
    while Arc::strong_count(&owner) > 1 {
        assert!(Instant::now() < deadline, "the worker never let go");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn loads_side_by_side_share_a_small_arena() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(11, 6 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    // Two slots for eight loads of three workers, each through staging memory.
    let small = EngineConfig { arena_bytes: 800 << 10, piece_bytes: PIECE, ..config() };
    let engine = host_engine(small);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let plan = uneven_plan(&[bytes.len()], PIECE);
                let sources = vec![source(&path)];
                let (targets, _) =
                    load_host(&engine, plan, sources, options(PathChoice::Direct)).unwrap();
                check_uneven(&targets, std::slice::from_ref(&bytes));
            });
        }
    });
    assert!(engine.arena_stats().peak_bytes <= 800 << 10);
}

#[test]
fn bypass_leaves_nothing_in_the_cache_and_keep_everything() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(12, 8 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    let engine = host_engine(config());
    let resident = || {
        let file = std::fs::File::open(&path).unwrap();
        forebay_topology::residency::probe(&file, 0, bytes.len() as u64).unwrap().share()
    };
    for (cache, low, high) in [(CacheChoice::Bypass, 0.0, 0.1), (CacheChoice::Keep, 0.9, 1.0)] {
        drop_cache(&path);
        let plan = uneven_plan(&[bytes.len()], PIECE);
        let options = LoadOptions { cache, ..options(PathChoice::Auto) };
        load_host(&engine, plan, vec![source(&path)], options).unwrap();
        let share = resident();
        assert!((low..=high).contains(&share), "{cache:?} leaves {share}");
    }
}

#[test]
fn a_load_that_nobody_feeds_gives_its_staging_memory_to_others() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(13, 4 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    // One slot in all.
    let engine = host_engine(EngineConfig { arena_bytes: 400 << 10, ..config() });
    let each: Vec<u32> = (0..10).collect();
    let plan = uneven_plan_in_batches(&[bytes.len()], PIECE, &each);
    let mut targets = host_targets(&plan);
    let places = addresses(&mut targets);
    let halted = engine.start(plan, vec![source(&path)], options(PathChoice::Direct)).unwrap();
    // SAFETY: the targets outlive the session.
    unsafe { halted.provide(&places[..5], None, None).unwrap() };
    let mut ready = 0;
    while ready < 5 {
        ready += halted.next_ready(Duration::from_secs(10)).unwrap().len();
    }
    let plan = uneven_plan(&[bytes.len()], PIECE);
    let sources = vec![source(&path)];
    let (others, _) = load_host(&engine, plan, sources, options(PathChoice::Direct)).unwrap();
    check_uneven(&others, std::slice::from_ref(&bytes));
    // And goes on when it is fed again.
    // SAFETY: as above.
    unsafe { halted.provide(&places[5..], None, None).unwrap() };
    halted.finish().unwrap();
    check_uneven(&targets, &[bytes]);
}

#[test]
fn bypass_drops_what_was_resident() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = pattern(14, 8 << 20);
    let path = write_file(folder.path(), "model", &bytes);
    std::fs::read(&path).unwrap();
    let engine = host_engine(config());
    let options = LoadOptions { cache: CacheChoice::Bypass, ..options(PathChoice::Copy) };
    let plan = uneven_plan(&[bytes.len()], PIECE);
    load_host(&engine, plan, vec![source(&path)], options).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let share = forebay_topology::residency::probe(&file, 0, 8 << 20).unwrap().share();
    assert!(share < 0.1, "{share} is still resident");
}
