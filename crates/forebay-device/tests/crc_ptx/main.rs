//! The checksum kernel without a GPU: its PTX, the very text that the driver is given, is read and run by a machine
//! for the part of PTX that it uses, and compared with another implementation of the CRC.
//!
//! What the machine cannot show is left to `gpu_crc.rs`: what the driver makes of the text, and how fast it is.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod machine;
mod ptx;

use machine::{Memory, Piece, launch};
use ptx::Kernel;
use sha2::{Digest, Sha256};

const SOURCE: &str = include_str!("../../kernels/crc32.cu");
const PTX: &str = include_str!("../../kernels/crc32.ptx");

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes that a device may lie at.
const DATA_AT: u64 = 0x7f00_0000_0000;
const BLOCKS_AT: u64 = 0x7f80_0000_0000;
const CRCS_AT: u64 = 0x7f90_0000_0000;

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut word = seed | 1;
    (0..len)
        .map(|_| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            (word >> 32) as u8
        })
        .collect()
}

/// Runs the kernel over blocks, given as bytes behind `DATA_AT` and length; memory between them is nobody's.
fn checksums(kernel: &Kernel, blocks: &[(usize, usize)], ctas: u64) {
    let mut memory = Memory::default();
    let mut list = Vec::new();
    let mut expected = Vec::new();
    for &(at, len) in blocks {
        let bytes = noise(len, (at + len) as u64);
        let at = DATA_AT + at as u64;
        list.extend(at.to_le_bytes());
        list.extend((len as u64).to_le_bytes());
        expected.push(crc32fast::hash(&bytes));
        memory.pieces.push(Piece { at, bytes, writable: false });
    }
    memory.pieces.push(Piece { at: BLOCKS_AT, bytes: list, writable: false });
    let crcs = vec![0xEE; 4 * blocks.len()];
    memory.pieces.push(Piece { at: CRCS_AT, bytes: crcs, writable: true });
    launch(kernel, &mut memory, ctas, &[BLOCKS_AT, CRCS_AT, blocks.len() as u64]);
    let crcs = memory.pieces.iter().find(|piece| piece.at == CRCS_AT).unwrap();
    for ((block, expected), found) in blocks.iter().zip(expected).zip(crcs.bytes.chunks(4)) {
        let found = u32::from_le_bytes(found.try_into().unwrap());
        assert_eq!(found, expected, "{found:08x} is not {expected:08x}, of {block:?}");
    }
}

#[test]
fn the_ptx_is_of_this_source() {
    let hash: String = Sha256::digest(SOURCE).iter().map(|byte| format!("{byte:02x}")).collect();
    let line = format!("// source-sha256: {hash}");
    let found = PTX.lines().any(|have| have == line);
    assert!(
        found,
        "crc32.cu has changed: make crc32.ptx again, the head of kernels/build.py says how"
    );
}

#[test]
fn the_ptx_is_for_old_drivers_and_gpus() {
    assert!(PTX.lines().any(|line| line == ".version 8.0"), "the ISA of CUDA 12.0, driver 525");
    assert!(PTX.lines().any(|line| line == ".target sm_75"), "Turing and all since");
    // What the host side passes.
    let kernel = ptx::read(PTX);
    assert_eq!((kernel.threads, &kernel.parameters[..]), (256, &[8, 8, 4][..]));
}

#[test]
fn short_blocks_of_any_alignment() {
    let kernel = ptx::read(PTX);
    for len in 0..=12 {
        for at in 0..5 {
            checksums(&kernel, &[(at, len)], 1);
        }
    }
    for len in (13..5000).step_by(89) {
        checksums(&kernel, &[(len * 7 % 1031, len)], 1);
    }
}

#[test]
fn every_length_up_to_5000() {
    if std::env::var("FOREBAY_FULL").as_deref() != Ok("1") {
        eprintln!("skipped: takes minutes, set FOREBAY_FULL=1; the test above takes some of these");
        return;
    }
    let kernel = ptx::read(PTX);
    for len in 0..=5000 {
        checksums(&kernel, &[(len * 7 % 1031, len)], 1);
    }
}

#[test]
fn around_rows_and_groups() {
    let kernel = ptx::read(PTX);
    for (at, around) in [(0, KIB), (3, KIB), (512, 32 * KIB), (1, 32 * KIB), (1022, 64 * KIB)] {
        for len in around - 5..=around + 5 {
            checksums(&kernel, &[(at, len)], 1);
        }
    }
}

#[test]
fn around_a_mib() {
    let kernel = ptx::read(PTX);
    for (at, len) in [(0, MIB), (0, MIB - 1), (2, MIB + 1), (4, MIB - 4), (333, MIB)] {
        checksums(&kernel, &[(at, len)], 1);
    }
}

#[test]
fn many_blocks_share_few_ctas() {
    let kernel = ptx::read(PTX);
    let blocks: Vec<_> =
        (0..37).map(|index| (index * 65_536 + index % 5, index * 97 % 300)).collect();
    for ctas in [1, 4, 37, 50] {
        checksums(&kernel, &blocks, ctas);
    }
}
