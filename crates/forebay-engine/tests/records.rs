//! Loads of records whose checksums are known as wholes alone, as archives keep them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use forebay_engine::{Check, EngineConfig, LoadOptions, Move, PathChoice, Plan};
use forebay_error::{Code, Result};
use forebay_format::crc::crc32;

const PIECE: u64 = 256 << 10;
const BYTES: usize = 3_000_000;

/// Records of `BYTES` bytes: small ones, one of several pieces, and gaps between them.
const RECORDS: [(u64, u64); 5] =
    [(64, 1000), (1500, 1), (2000, 300_000), (400_000, 2_500_000), (2_900_001, 99_999)];

fn records(bytes: &[u8]) -> Vec<Check> {
    let record = |(offset, len): (u64, u64)| {
        let crc = crc32(&bytes[offset as usize..(offset + len) as usize]);
        Check { object: 0, offset, len, crc }
    };
    RECORDS.map(record).to_vec()
}

/// One target for each record.
fn wholes() -> (Vec<Move>, Vec<u64>) {
    let whole = |(target, (from, len)): (usize, (u64, u64))| {
        Move::contiguous(0, target as u32, from, 0, len)
    };
    let moves = RECORDS.into_iter().enumerate().map(whole).collect();
    (moves, RECORDS.map(|(_, len)| len).to_vec())
}

/// Loads what `plan` says from `bytes`; the bytes that were compared, and those that could not be.
fn load(bytes: &[u8], plan: Plan, path: Option<PathChoice>) -> Result<(Vec<Vec<u8>>, u64, u64)> {
    let folder = tempfile::tempdir().unwrap();
    let config = EngineConfig { piece_bytes: PIECE, ..EngineConfig::default() };
    let plan = plan.with_names((0..5).map(|number| format!("t{number}")).collect());
    let (from, options) = match path {
        Some(path) => {
            let file = write_file(folder.path(), "a", bytes);
            (source(&file), LoadOptions { path, ..LoadOptions::default() })
        }
        None => (Object::new(bytes) as _, LoadOptions::default()),
    };
    let (targets, report) = load_host(&host_engine(config), plan, vec![from], options)?;
    Ok((targets, report.verified_cpu_bytes, report.unverified_bytes))
}

const PATHS: [Option<PathChoice>; 4] =
    [Some(PathChoice::Auto), Some(PathChoice::Direct), Some(PathChoice::Buffered), None];

#[test]
fn whole_records_are_compared_and_a_flipped_bit_is_found() {
    let bytes = pattern(7, BYTES);
    let plan = |batches: &[u32]| {
        let (moves, sizes) = wholes();
        Plan::build_recorded(moves, sizes, PIECE, batches, records(&bytes)).unwrap()
    };
    let all: u64 = RECORDS.iter().map(|(_, len)| len).sum();
    for path in PATHS {
        for batches in [&[][..], &[0, 1, 2, 3, 4]] {
            let (targets, compared, rest) = load(&bytes, plan(batches), path).unwrap();
            assert_eq!((compared, rest), (all, 0), "{path:?}");
            for (target, (from, len)) in targets.iter().zip(RECORDS) {
                assert!(target == &bytes[from as usize..(from + len) as usize], "{path:?} {from}");
            }
        }
        // The first and the last byte of each, and one amid.
        for (number, (from, len)) in RECORDS.into_iter().enumerate() {
            for at in [from, from + len / 2, from + len - 1] {
                let mut damaged = bytes.clone();
                damaged[at as usize] ^= 0x40;
                let error = load(&damaged, plan(&[]), path).unwrap_err();
                assert_eq!(error.code(), Code::Checksum, "byte {at}: {error}");
                let text = error.to_string();
                assert!(text.contains(&format!("\"t{number}\"")), "{text}");
                assert!(text.contains(&format!("{len} bytes at byte {from} ")), "{text}");
            }
        }
        // Between the records nothing is compared.
        let mut damaged = bytes.clone();
        damaged[1200] ^= 1;
        assert!(load(&damaged, plan(&[]), path).is_ok());
    }
}

#[test]
fn a_record_in_many_moves_is_whole_and_one_in_part_is_counted() {
    let bytes = pattern(8, BYTES);
    let (from, len) = RECORDS[3];
    // Cut at odd places, into two targets, some bytes wanted by both.
    let moves = vec![
        Move::contiguous(0, 0, from, 5, 1_000_001),
        Move::contiguous(0, 1, from + 999_999, 0, len - 999_999),
        // Rows without gaps in the record, with gaps in the target.
        Move {
            object: 0,
            target: 0,
            from: RECORDS[0].0,
            from_stride: 100,
            to: 1_100_000,
            to_stride: 150,
            run: 100,
            rows: 10,
        },
        // A part of another.
        Move::contiguous(0, 0, RECORDS[2].0 + 10, 1_200_000, 200_000),
    ];
    let plan = || {
        let sizes = vec![1_400_000, len - 999_999];
        Plan::build_recorded(moves.clone(), sizes, PIECE, &[], records(&bytes)).unwrap()
    };
    for path in PATHS {
        let (targets, compared, rest) = load(&bytes, plan(), path).unwrap();
        assert_eq!((compared, rest), (len + 1000, 200_000), "{path:?}");
        assert!(targets[1] == bytes[from as usize + 999_999..(from + len) as usize]);
        let part = RECORDS[2].0 as usize + 10;
        assert!(targets[0][1_200_000..] == bytes[part..part + 200_000]);
        for at in [from + 1_000_000, from + len - 1, RECORDS[0].0 + 999] {
            let mut damaged = bytes.clone();
            damaged[at as usize] ^= 1;
            let error = load(&damaged, plan(), path).unwrap_err();
            assert_eq!(error.code(), Code::Checksum, "{path:?} byte {at}");
        }
        let mut damaged = bytes.clone();
        damaged[part + 5] ^= 1;
        assert!(load(&damaged, plan(), path).is_ok(), "nothing to compare a part with");
    }
}

#[test]
fn records_that_share_bytes_or_end_nowhere_compare_nothing() {
    let bytes = pattern(9, BYTES);
    let check = |offset, len| Check { object: 0, offset, len, crc: 1 };
    for records in [vec![check(10, u64::MAX)], vec![check(5, 100), check(90, 100)], Vec::new()] {
        let moves = vec![Move::contiguous(0, 0, 90, 0, 100)];
        let plan = Plan::build_recorded(moves, vec![100], PIECE, &[], records).unwrap();
        let (targets, compared, rest) = load(&bytes, plan, None).unwrap();
        assert!(targets[0] == bytes[90..190]);
        assert_eq!((compared, rest), (0, 100));
    }
}
