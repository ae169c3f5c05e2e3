//! The checksums of a save, from blocks to whole files: each is stored once and read when all that it needs is there.

use std::sync::atomic::{AtomicU32, Ordering};

use forebay_format::crc::{crc32, crc32_join};
use forebay_format::dcp::FileLayout;

use crate::model::BLOCK_BYTES;
use crate::save::files::{Files, Placed};

pub(super) struct Sums {
    blocks: Vec<AtomicU32>,
    /// For each file and segment its CRC, once it is written.
    segments: Vec<Vec<AtomicU32>>,
}

impl Sums {
    pub(super) fn new(files: &Files) -> Self {
        let blank = |count: usize| (0..count).map(|_| AtomicU32::new(0)).collect();
        let segments = files.files.iter().map(|file| blank(file.segments.len()));
        Self { blocks: blank(files.crcs), segments: segments.collect() }
    }

    /// Takes the bytes of an item from block number `first` on.
    pub(super) fn see(&self, placed: &Placed, first: u64, bytes: &[u8]) {
        let own = self.blocks.iter().skip(placed.first_crc + first as usize);
        for (block, crc) in bytes.chunks(BLOCK_BYTES as usize).zip(own) {
            crc.store(crc32(block), Ordering::Release);
        }
    }

    /// The checksums of an item's blocks.
    pub(super) fn blocks(&self, placed: &Placed) -> Vec<u32> {
        let count = placed.item.data_bytes.div_ceil(BLOCK_BYTES) as usize;
        let own = self.blocks.get(placed.first_crc..placed.first_crc + count);
        own.unwrap_or_default().iter().map(|crc| crc.load(Ordering::Acquire)).collect()
    }

    /// The CRC of all bytes of an item.
    pub(super) fn whole(&self, placed: &Placed) -> u32 {
        let mut left = placed.item.data_bytes;
        self.blocks(placed).iter().fold(crc32(&[]), |whole, &block| {
            let len = BLOCK_BYTES.min(left);
            left -= len;
            crc32_join(whole, block, len)
        })
    }

    /// Notes the CRC of an item's body, for that of the file. `end` is the CRC of what the last block gives to it,
    /// where the body ends inside of that block.
    pub(super) fn note_body(&self, layout: &FileLayout, placed: &Placed, end: u32) {
        let body = placed.item.body_bytes;
        if body == 0 {
            return;
        }
        let blocks = self.blocks(placed);
        let whole = (body / BLOCK_BYTES) as usize;
        let mut crc = blocks
            .iter()
            .take(whole)
            .fold(crc32(&[]), |crc, &block| crc32_join(crc, block, BLOCK_BYTES));
        let rest = body % BLOCK_BYTES;
        if rest > 0 {
            // All of the last block, or what the body has of it.
            let all = placed.item.data_bytes == body;
            let last = if all { blocks.get(whole).copied().unwrap_or_default() } else { end };
            crc = crc32_join(crc, last, rest);
        }
        let offset = placed.item.data_offset;
        let segment = layout.segments.partition_point(|segment| segment.offset() < offset);
        self.note_segment(placed.file, segment, crc);
    }

    pub(super) fn note_segment(&self, file: usize, segment: usize, crc: u32) {
        if let Some(place) = self.segments.get(file).and_then(|row| row.get(segment)) {
            place.store(crc, Ordering::Release);
        }
    }

    /// The CRC of a whole file, once everything is written.
    pub(super) fn file(&self, layout: &FileLayout, file: usize) -> Option<u32> {
        let crcs = self.segments.get(file)?;
        let joined = layout.segments.iter().zip(crcs).fold(crc32(&[]), |crc, (segment, own)| {
            crc32_join(crc, own.load(Ordering::Acquire), segment.len())
        });
        Some(joined)
    }
}
