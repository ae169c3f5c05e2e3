//! Staging: pieces reach their consumer whole, memory is free once it is staged, and nothing outlives the job.
//! **unsafe**: memory is given by address.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::*;
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::EngineConfig;
use forebay_engine::stage::{MemoryRun, Place, StageConsumer, StageOptions, StagePiece, Staging};
use forebay_error::{Code, Error, Result};

const SLOT: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(20);

/// Keeps what it is given; waits at a gate first.
#[derive(Default)]
struct Keeper {
    got: Mutex<Vec<(usize, Vec<u8>)>>,
    open: Mutex<bool>,
    opened: Condvar,
    fail_at: Option<usize>,
}

impl Keeper {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl StageConsumer for Keeper {
    fn take(&self, piece: usize, bytes: &[u8]) -> Result<()> {
        let guard = self.open.lock().unwrap();
        drop(self.opened.wait_while(guard, |open| !*open).unwrap());
        if self.fail_at == Some(piece) {
            return Err(Error::new(Code::NoSpace, "the disk is full"));
        }
        self.got.lock().unwrap().push((piece, bytes.to_vec()));
        Ok(())
    }
}

fn pool(slots: usize) -> Arc<Arena> {
    let size_bytes = slots * (SLOT + (256 << 10));
    Arena::new(&Device::Host, &ArenaConfig { size_bytes, slot_bytes: SLOT }).unwrap()
}

/// Two pieces in three are one run, the third gathers many small ones.
fn job(memory: &[u8]) -> (Vec<StagePiece>, Vec<MemoryRun>) {
    let (mut pieces, mut runs) = (Vec::new(), Vec::new());
    let base = memory.as_ptr() as u64;
    for (number, cell) in memory.chunks(SLOT).enumerate() {
        let first = runs.len();
        let step = if number % 3 == 2 { 777 } else { SLOT };
        for (index, run) in cell.chunks(step).enumerate() {
            let address = base + (number * SLOT + index * step) as u64;
            runs.push(MemoryRun { address, len: run.len() as u64 });
        }
        pieces.push(StagePiece { place: Place::Host, runs: first..runs.len() });
    }
    (pieces, runs)
}

fn start(memory: &[u8], slots: usize, keeper: &Arc<Keeper>, in_place: bool) -> Staging {
    let (pieces, runs) = job(memory);
    let options = StageOptions { takers: Some(2), in_place, ..StageOptions::default() };
    let engine = host_engine(EngineConfig::default());
    // SAFETY: the tests keep the memory until the job is dropped, or staged where they change it.
    unsafe { engine.stage(&pool(slots), pieces, runs, keeper.clone(), options) }.unwrap()
}

fn assembled(keeper: &Keeper) -> Vec<u8> {
    let mut got = std::mem::take(&mut *keeper.got.lock().unwrap());
    got.sort_by_key(|(piece, _)| *piece);
    got.into_iter().flat_map(|(_, bytes)| bytes).collect()
}

#[test]
fn memory_may_change_once_it_is_staged() {
    let keeper = Arc::new(Keeper::default());
    let mut memory = pattern(1, 10 * SLOT + 12_345);
    let wanted = memory.clone();
    let staging = start(&memory, 12, &keeper, false);
    assert!(staging.wait_staged(LONG).unwrap(), "the pool is large enough");
    assert!(!staging.wait_done(Duration::ZERO).unwrap(), "nobody has taken anything");
    memory.fill(0);
    keeper.open();
    assert!(staging.wait_done(LONG).unwrap());
    assert!(assembled(&keeper) == wanted);
    let report = staging.report();
    assert_eq!(report.bytes, wanted.len() as u64);
    assert!(report.staged_seconds <= report.seconds);
}

#[test]
fn a_small_pool_is_a_ring_and_blocks_until_pieces_are_taken() {
    let keeper = Arc::new(Keeper::default());
    let memory = pattern(2, 9 * SLOT);
    let staging = start(&memory, 3, &keeper, false);
    assert!(!staging.wait_staged(Duration::from_millis(200)).unwrap());
    keeper.open();
    assert!(staging.wait_staged(LONG).unwrap() && staging.wait_done(LONG).unwrap());
    assert!(assembled(&keeper) == memory);
}

#[test]
fn memory_in_place_needs_no_pool() {
    let keeper = Arc::new(Keeper::default());
    keeper.open();
    let memory = pattern(3, 7 * SLOT + 1);
    let staging = start(&memory, 1, &keeper, true);
    assert!(staging.wait_done(LONG).unwrap() && staging.wait_staged(LONG).unwrap());
    assert!(assembled(&keeper) == memory);
}

#[test]
fn an_error_of_the_consumer_ends_the_job_and_is_told() {
    for in_place in [false, true] {
        let keeper = Arc::new(Keeper { fail_at: Some(4), ..Keeper::default() });
        keeper.open();
        let memory = pattern(4, 8 * SLOT);
        let staging = start(&memory, 2, &keeper, in_place);
        let error = staging.wait_done(LONG).unwrap_err();
        assert_eq!((error.code(), error.what()), (Code::NoSpace, "the disk is full"));
        assert_eq!(staging.wait_staged(LONG).unwrap_err().code(), Code::NoSpace);
    }
}

#[test]
fn a_dropped_job_is_over_when_drop_returns() {
    let keeper = Arc::new(Keeper::default());
    let memory = pattern(5, 6 * SLOT);
    let staging = start(&memory, 2, &keeper, false);
    std::thread::sleep(Duration::from_millis(30));
    let dropped = Arc::new(AtomicBool::new(false));
    let waiter = {
        let dropped = dropped.clone();
        std::thread::spawn(move || {
            drop(staging);
            dropped.store(true, Ordering::Release);
        })
    };
    std::thread::sleep(Duration::from_millis(100));
    assert!(!dropped.load(Ordering::Acquire), "a taker is still at work");
    keeper.open();
    let asked = Instant::now();
    waiter.join().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(5));
    assert_eq!(Arc::strong_count(&keeper), 1, "no thread holds it any more");
}

#[test]
fn nothing_to_stage_is_done_at_once_and_a_large_piece_is_refused() {
    let keeper = Arc::new(Keeper::default());
    let staging = start(&[], 1, &keeper, false);
    assert!(staging.wait_done(Duration::ZERO).unwrap());
    let memory = vec![0_u8; SLOT + 1];
    let runs = vec![MemoryRun { address: memory.as_ptr() as u64, len: memory.len() as u64 }];
    let pieces = vec![StagePiece { place: Place::Host, runs: 0..1 }];
    let engine = host_engine(EngineConfig::default());
    // SAFETY: refused before anything is read.
    let made =
        unsafe { engine.stage(&pool(1), pieces, runs, keeper.clone(), StageOptions::default()) };
    assert_eq!(made.err().unwrap().code(), Code::Usage);
}

/// Notes at which priority it is called.
struct Priority(Mutex<Vec<i32>>);

impl StageConsumer for Priority {
    fn take(&self, _: usize, _: &[u8]) -> Result<()> {
        self.0.lock().unwrap().push(own_priority());
        Ok(())
    }
}

/// Of the calling thread.
fn own_priority() -> i32 {
    rustix::process::getpriority_process(None).unwrap()
}

#[test]
fn who_writes_gives_way_to_who_trains() {
    let memory = vec![7; 3 * SLOT];
    let noted = Arc::new(Priority(Mutex::default()));
    let before = own_priority();
    let (pieces, runs) = job(&memory);
    let engine = host_engine(EngineConfig::default());
    let options = StageOptions { takers: Some(2), ..StageOptions::default() };
    // SAFETY: the memory outlives the job.
    let staging = unsafe { engine.stage(&pool(4), pieces, runs, noted.clone(), options) }.unwrap();
    assert!(staging.wait_done(LONG).unwrap());
    drop(staging);
    let noted = noted.0.lock().unwrap();
    assert_eq!(noted.len(), 3);
    assert!(noted.iter().all(|priority| *priority == (before + 10).min(19)), "{noted:?}");
    assert_eq!(own_priority(), before);
}
