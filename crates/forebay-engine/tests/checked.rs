//! Loads whose blocks have checksums: the right bytes arrive, and a wrong one never does.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use forebay_engine::{Check, EngineConfig, LoadOptions, Move, PathChoice, Plan};
use forebay_error::Code;
use proptest::prelude::*;

const PIECE: u64 = 256 << 10;

/// What a plan's moves should put into its targets.
fn expected(moves: &[Move], targets: &[u64], bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut out: Vec<Vec<u8>> = targets.iter().map(|&len| vec![0xa5; len as usize]).collect();
    for part in moves {
        for row in 0..part.rows {
            let from = (part.from + row * part.from_stride) as usize;
            let to = (part.to + row * part.to_stride) as usize;
            let run = part.run as usize;
            out[part.target as usize][to..to + run].copy_from_slice(&bytes[from..from + run]);
        }
    }
    out
}

fn a_move(object_bytes: u64) -> impl Strategy<Value = Move> {
    (1..400_u64, 1..3000_u64, 0..5000_u64, 0..100_u64).prop_map(move |(rows, run, gap, pad)| {
        let from_stride = run + gap;
        let rows = rows.min((object_bytes - run) / from_stride).max(1);
        let span = (rows - 1) * from_stride + run;
        let from = (pad * 7919) % (object_bytes - span + 1);
        Move { object: 0, target: 0, from, from_stride, to: pad, to_stride: run + pad, run, rows }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_moves_over_any_blocks(
        moves in prop::collection::vec(a_move(900_000), 1..6),
        step in 1000..200_000_usize,
        batched: bool,
        path in prop::sample::select(
            vec![PathChoice::Auto, PathChoice::Direct, PathChoice::Buffered]
        ),
        remote: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let bytes = pattern(1, 900_000);
        let file = write_file(folder.path(), "a", &bytes);
        let mut moves = moves;
        let mut sizes = Vec::new();
        for (target, part) in moves.iter_mut().enumerate() {
            part.target = target as u32;
            sizes.push(part.to + (part.rows - 1) * part.to_stride + part.run);
        }
        let batches: Vec<u32> = if batched { (0..moves.len() as u32).collect() } else { vec![] };
        let wanted = expected(&moves, &sizes, &bytes);
        let checks = blocks(0, &bytes, 0, bytes.len(), step);
        let plan = Plan::build_checked(moves, sizes, PIECE, &batches, checks).unwrap();
        for piece in plan.pieces() {
            prop_assert!(piece.len <= PIECE && !plan.checks_of(piece).is_empty());
        }
        let config = EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() };
        let options = LoadOptions { path, ..LoadOptions::default() };
        let engine = host_engine(config);
        let source = if remote { Object::new(&bytes) } else { source(&file) };
        let (targets, _) = load_host(&engine, plan, vec![source], options).unwrap();
        prop_assert!(targets == wanted);
    }
}

#[test]
fn one_flipped_bit_anywhere_in_a_block_that_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(2, 700_000);
    let checks = blocks(0, &bytes, 100, 700_000, 100_000);
    let engine = host_engine(EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() });
    let load = |at: usize, from: u64, len: u64| {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let file = write_file(folder.path(), "b", &damaged);
        let moves = vec![Move::contiguous(0, 0, from, 0, len)];
        let plan = Plan::build_checked(moves, vec![len], PIECE, &[], checks.clone()).unwrap();
        load_host(&engine, plan, vec![source(&file)], LoadOptions::default())
    };
    for at in [100, 99_000, 100_100, 555_555, 699_999] {
        let error = load(at, 100, 699_900).unwrap_err();
        assert_eq!(error.code(), Code::Checksum, "byte {at}: {error}");
        assert!(error.place().unwrap().ends_with("/b"), "{error}");
    }
    // Also where the bit itself is not wanted, but its block is; and never in a block that is not.
    assert_eq!(load(250_000, 200_200, 5).unwrap_err().code(), Code::Checksum);
    assert!(load(350_000, 200_200, 5).is_ok());
    assert!(load(50, 100, 5).is_ok());
}

#[test]
fn pieces_of_objects_are_read_at_once_and_checked() {
    let bytes = pattern(5, 3 << 20);
    let checks = blocks(0, &bytes, 0, 3 << 20, 64 << 10);
    let engine = host_engine(EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() });
    let load = |object: &Arc<Object>, moves: Vec<Move>| {
        let size = moves.iter().map(|part| part.to + part.bytes()).max().unwrap();
        let plan = Plan::build_checked(moves, vec![size], PIECE, &[], checks.clone()).unwrap();
        let pieces = plan.pieces().len();
        let loaded =
            load_host(&engine, plan, vec![object.clone()], LoadOptions { ..Default::default() });
        (loaded.map(|(targets, report)| (targets, report.threads)), pieces)
    };
    // One read a piece, though each has four blocks.
    let object = Object::new(&bytes);
    let (loaded, pieces) = load(&object, vec![Move::contiguous(0, 0, 0, 0, 3 << 20)]);
    let (targets, threads) = loaded.unwrap();
    assert!(targets[0] == bytes && pieces == 12);
    assert_eq!((object.reads.load(Ordering::Relaxed), threads), (12, 32));
    // A part of a block, and the end of another: through a slot.
    let object = Object::new(&bytes);
    let (loaded, _) = load(&object, vec![Move::contiguous(0, 0, 70_000, 0, 140_000)]);
    assert!(loaded.unwrap().0[0] == bytes[70_000..210_000]);
    assert_eq!(object.reads.load(Ordering::Relaxed), 1);
    for at in [0, 100_000, (3 << 20) - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let object = Object::new(&damaged);
        let error = load(&object, vec![Move::contiguous(0, 0, 0, 0, 3 << 20)]).0.unwrap_err();
        assert_eq!((error.code(), error.place()), (Code::Checksum, Some("store:object")), "{at}");
    }
}

#[test]
fn only_touched_blocks_are_read() {
    let bytes = pattern(3, 1_000_000);
    let checks = blocks(0, &bytes, 0, 1_000_000, 10_000);
    let moves =
        vec![Move::contiguous(0, 0, 15_000, 0, 10), Move::contiguous(0, 0, 505_000, 10, 10_000)];
    let plan = Plan::build_checked(moves, vec![10_010], PIECE, &[], checks).unwrap();
    assert_eq!((plan.bytes(), plan.read_bytes(), plan.checked_bytes()), (10_010, 30_000, 30_000));
    assert_eq!(plan.pieces().len(), 2);
}

#[test]
fn blocks_that_cannot_be_are_refused() {
    let check = |offset, len| Check { object: 0, offset, len, crc: 0 };
    let build = |from, blocks| {
        let moves = vec![Move::contiguous(0, 0, from, 0, 10)];
        Plan::build_checked(moves, vec![10], PIECE, &[], blocks).map(|_| ()).unwrap_err().code()
    };
    assert_eq!(build(0, vec![check(0, 10), check(5, 10)]), Code::Internal);
    assert_eq!(build(0, vec![check(0, PIECE + 1)]), Code::Internal);
    assert_eq!(build(5, vec![check(0, 10)]), Code::Internal);
    assert_eq!(build(5, vec![check(u64::MAX, 10)]), Code::Internal);
    assert_eq!(build(0, vec![check(0, 5), check(6, 10)]), Code::Internal);
}

#[test]
fn blocks_are_whole_where_every_target_has_all_of_them() {
    let bytes = pattern(4, 40_000);
    let checks = || blocks(0, &bytes, 0, 40_000, 10_000);
    let whole = |moves: Vec<Move>| {
        let sizes = (0..3).map(|target| {
            let own = moves.iter().filter(|part| part.target == target);
            own.map(|part| part.to + (part.rows - 1) * part.to_stride + part.run).max().unwrap_or(0)
        });
        let sizes = sizes.collect();
        let plan = Plan::build_checked(moves, sizes, PIECE, &[], checks()).unwrap();
        plan.whole_checked_bytes()
    };
    let run = Move::contiguous;
    let rows = |from_stride, to_stride| Move {
        from_stride,
        to_stride,
        run: 100,
        rows: 100,
        ..run(0, 0, 0, 0, 100)
    };
    assert_eq!(whole(vec![run(0, 0, 0, 0, 40_000)]), 40_000);
    assert_eq!(whole(vec![run(0, 0, 5000, 0, 30_000)]), 20_000, "the inner two");
    // In parts that are neighbours on both sides, in any order; or not neighbours.
    assert_eq!(whole(vec![run(0, 0, 4000, 4000, 6000), run(0, 0, 0, 0, 4000)]), 10_000);
    assert_eq!(whole(vec![run(0, 0, 4000, 4001, 6000), run(0, 0, 0, 0, 4000)]), 0);
    assert_eq!(whole(vec![run(0, 0, 4000, 4000, 6000), run(0, 1, 0, 0, 4000)]), 0);
    // By two targets.
    assert_eq!(whole(vec![run(0, 0, 0, 7, 20_000), run(0, 2, 0, 0, 20_000)]), 20_000);
    assert_eq!(whole(vec![run(0, 0, 0, 0, 20_000), run(0, 2, 0, 0, 15_000)]), 10_000);
    assert_eq!(whole(vec![run(0, 0, 0, 0, 10_000), run(0, 0, 0, 10_000, 10_000)]), 0);
    // Rows: without gaps they are one run.
    assert_eq!(whole(vec![rows(100, 100)]), 10_000);
    assert_eq!(whole(vec![rows(100, 200)]), 0);
    assert_eq!(whole(vec![rows(200, 100)]), 0);
}
