//! Parts as bytes.
//!
//! ```text
//! part      8 bytes magic, 89 "FBP" 0D 0A 1A 0A
//!           u16 major version, u16 minor version
//!           u32 CRC-32 of all that follows it
//!           u64 bytes of the part, magic included
//!           fields: varint tag, varint length, that many bytes; by ascending tag, each once, all of them there but 2
//!  1 who       text attempt, varint rank, varint ranks of the job
//!  2 shared    32 bytes structure hash, varint values of the structure
//!  3 files     varint count; each: text name, varint bytes, u8 1 and u32 CRC-32 or u8 0
//!  4 own       rows, see `rows`; layouts must be none
//!  5 chunks    varint count, then columns of one number a chunk, by (file, item offset):
//!              per file    varint chunks of each file
//!              value       difference to the one before (the first: to 0); own values count on after the shared
//!              gap         varint bytes from the end of the item before in its file, or from the file's start
//!              lead        varint bytes of the item before its elements
//!              bytes       varint bytes of the elements
//!              tail        difference to the one before, of the bytes of the item behind its elements
//!              places      runs of varint kind (0 implied, 1 whole, 2 box) and varint how many follow of it, until
//!                          every chunk has one
//!              boxes       for each of kind 2: varint dims; each: varint offset, varint size
//!  6 crcs      u32 each: CRC-32 of each block of 1 MiB of the elements of each chunk
//! ```
//!
//! A chunk of the usual kind takes some 9 bytes and 4 a block. Since items are stored by the gaps between them, no two
//! can share bytes. Minor versions add tags; readers skip those they do not know.

use forebay_error::{Code, Error, Result};

use super::limits::MAX_PART_BYTES;
use super::part::{Part, PartChunk, Place, ValueRef};
use super::rows::RowWriter;
use super::version::{MAJOR, MINOR};
use super::wire::{HEAD_BYTES, Put, seal_head};

pub(super) const MAGIC: &[u8; 8] = b"\x89FBP\r\n\x1a\n";

const WHO: u64 = 1;
const SHARED: u64 = 2;
const FILES: u64 = 3;
const OWN: u64 = 4;
const CHUNKS: u64 = 5;
const CRCS: u64 = 6;

impl Part {
    /// Its bytes.
    ///
    /// Errors: `unsupported` for more than 64 MiB.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.chunks.len() * 16 + self.crcs.len() * 4);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&MAJOR.to_le_bytes());
        out.extend_from_slice(&MINOR.to_le_bytes());
        out.extend_from_slice(&[0; 12]);
        let mut field = Vec::new();
        field.put_text(&self.attempt);
        field.put_varint(u64::from(self.rank));
        field.put_varint(u64::from(self.world));
        out.put_field(WHO, &field);
        if let Some(shared) = &self.structure {
            field.clear();
            field.extend_from_slice(&shared.hash);
            field.put_varint(u64::from(shared.values));
            out.put_field(SHARED, &field);
        }
        field.clear();
        self.put_files(&mut field);
        out.put_field(FILES, &field);
        field.clear();
        let mut rows = RowWriter::default();
        self.own.iter().for_each(|named| rows.push(named, false, &[]));
        rows.finish(&mut field);
        out.put_field(OWN, &field);
        field.clear();
        self.put_chunks(&mut field);
        out.put_field(CHUNKS, &field);
        field.clear();
        self.crcs.iter().for_each(|crc| field.extend_from_slice(&crc.to_le_bytes()));
        out.put_field(CRCS, &field);
        self.seal(out)
    }

    fn seal(&self, mut out: Vec<u8>) -> Result<Vec<u8>> {
        let bytes = out.len() as u64;
        if bytes > MAX_PART_BYTES {
            let what = format!("the part of rank {} has {bytes} bytes", self.rank);
            return Err(Error::new(Code::Unsupported, what)
                .hint(format!("at most {MAX_PART_BYTES} fit; store fewer or larger chunks")));
        }
        seal_head(&mut out);
        Ok(out)
    }

    fn put_files(&self, out: &mut Vec<u8>) {
        out.put_varint(self.files.len() as u64);
        for file in &self.files {
            out.put_text(&file.name);
            out.put_varint(file.bytes);
            out.push(u8::from(file.crc.is_some()));
            out.extend(file.crc.into_iter().flat_map(u32::to_le_bytes));
        }
    }

    fn put_chunks(&self, out: &mut Vec<u8>) {
        out.put_varint(self.chunks.len() as u64);
        let mut counts = vec![0u64; self.files.len()];
        for chunk in &self.chunks {
            if let Some(count) = counts.get_mut(chunk.file as usize) {
                *count += 1;
            }
        }
        counts.iter().for_each(|&count| out.put_varint(count));
        let shared = self.structure.map_or(0, |shared| u64::from(shared.values));
        let mut last = 0;
        for chunk in &self.chunks {
            let value = match chunk.value {
                ValueRef::Shared(number) => u64::from(number),
                ValueRef::Own(number) => shared + u64::from(number),
            };
            out.put_difference(last, value);
            last = value;
        }
        let (mut file, mut free) = (0, 0);
        for chunk in &self.chunks {
            if chunk.file != file {
                (file, free) = (chunk.file, 0);
            }
            // Checked when the part was made: no item starts before the end of the one before.
            out.put_varint(chunk.offset.saturating_sub(free));
            free = chunk.offset.saturating_add(chunk.length);
        }
        for chunk in &self.chunks {
            out.put_varint(chunk.data_offset.saturating_sub(chunk.offset));
        }
        self.chunks.iter().for_each(|chunk| out.put_varint(chunk.data_bytes));
        let mut last = 0;
        for chunk in &self.chunks {
            let front = chunk.data_offset.saturating_sub(chunk.offset) + chunk.data_bytes;
            let tail = chunk.length.saturating_sub(front);
            out.put_difference(last, tail);
            last = tail;
        }
        put_places(out, &self.chunks);
    }
}

fn kind_of(place: &Place) -> u64 {
    match place {
        Place::Implied => 0,
        Place::Whole => 1,
        Place::Box(_) => 2,
    }
}

fn put_places(out: &mut Vec<u8>, chunks: &[PartChunk]) {
    for run in chunks.chunk_by(|a, b| kind_of(&a.place) == kind_of(&b.place)) {
        out.put_varint(run.first().map_or(0, |chunk| kind_of(&chunk.place)));
        out.put_varint(run.len() as u64);
    }
    for chunk in chunks {
        if let Place::Box(region) = &chunk.place {
            out.put_varint(region.rank() as u64);
            for (&offset, &size) in region.offsets.iter().zip(&region.sizes) {
                out.put_varint(offset);
                out.put_varint(size);
            }
        }
    }
}
