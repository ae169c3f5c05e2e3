//! A zip archive of stored records as `torch.save` makes it, of any number and size. Little endian, no gaps:
//!
//! ```text
//! local header     "PK\3\4" needs flags method time date crc size size name_len extra_len   30 bytes
//!                  name; extra: [1, 16, size, size] where a size needs 64 bits; [0x4246, n, n zeros] to pad
//! record           its bytes, from a multiple of 64 on
//! central header   "PK\1\2" by needs flags method time date crc size size name_len extra_len
//!                  comment_len disk attributes attributes offset                            46 bytes
//!                  name; extra: [1, n, size, size, offset], each only where it needs 64 bits
//! end, 64 bits     "PK\6\6" 44 by needs disk disk count count bytes offset                  56 bytes, and its
//! locator          "PK\6\7" disk offset disks                                               20 bytes; both only
//!                  where count, bytes or offset need it
//! end              "PK\5\6" disk disk count count bytes offset comment_len                  22 bytes
//! ```
//!
//! Items of checkpoints have a writer of their own in `forebay_format::dcp`: four records, whose places fit 32 bits.

/// Records start on a multiple of this, as in torch's own files.
const ALIGN: u64 = 64;
const LOCAL_BYTES: u64 = 30;
const PAD_HEADER: u64 = 4;
const PAD_ID: u16 = 0x4246;
/// Version 4.5, for fields of 64 bits; else 2.0.
const NEEDS_64: u16 = 45;
const NEEDS: u16 = 20;
/// 1980-01-01: an archive's bytes depend on its content alone.
const DATE: u16 = 0x0021;
const IN_64: u64 = u32::MAX as u64;

/// A record that has its place.
pub(super) struct Record {
    name: String,
    size: u64,
    header: u64,
    pad: u64,
    /// CRC-32 of its bytes, once that is known.
    pub(super) crc: u32,
}

impl Record {
    /// A record of `size` bytes whose header starts at byte `header`.
    pub(super) fn new(name: String, size: u64, header: u64) -> Self {
        let wide = if size >= IN_64 { 20 } else { 0 };
        let end = header + LOCAL_BYTES + name.len() as u64 + wide;
        let pad = match (ALIGN - end % ALIGN) % ALIGN {
            0 => 0,
            // The padding has a header of its own, which may not fit the gap.
            short @ 1..PAD_HEADER => short + ALIGN,
            short => short,
        };
        Self { name, size, header, pad, crc: 0 }
    }

    /// Where its header starts.
    pub(super) fn header_offset(&self) -> u64 {
        self.header
    }

    /// Its first byte.
    pub(super) fn offset(&self) -> u64 {
        let wide = if self.size >= IN_64 { 20 } else { 0 };
        self.header + LOCAL_BYTES + self.name.len() as u64 + wide + self.pad
    }

    /// The byte after its last.
    pub(super) fn end(&self) -> u64 {
        self.offset() + self.size
    }

    /// Appends its local header.
    pub(super) fn local(&self, out: &mut Vec<u8>) {
        let wide = self.size >= IN_64;
        let extra = self.pad + if wide { 20 } else { 0 };
        out.extend_from_slice(b"PK\x03\x04");
        put16(out, if wide { NEEDS_64 } else { NEEDS });
        self.common(out, wide);
        put16(out, self.name.len() as u16);
        put16(out, extra as u16);
        out.extend_from_slice(self.name.as_bytes());
        if wide {
            wide_field(out, &[self.size, self.size]);
        }
        if self.pad > 0 {
            put16(out, PAD_ID);
            put16(out, (self.pad - PAD_HEADER) as u16);
            out.resize(out.len() + (self.pad - PAD_HEADER) as usize, 0);
        }
    }

    /// Appends its entry in the central directory.
    fn central(&self, out: &mut Vec<u8>) {
        let (wide_size, wide_offset) = (self.size >= IN_64, self.header >= IN_64);
        let mut wide = Vec::new();
        if wide_size {
            wide.extend([self.size, self.size]);
        }
        if wide_offset {
            wide.push(self.header);
        }
        let needs = if wide.is_empty() { NEEDS } else { NEEDS_64 };
        out.extend_from_slice(b"PK\x01\x02");
        put16(out, needs);
        put16(out, needs);
        self.common(out, wide_size);
        put16(out, self.name.len() as u16);
        put16(out, if wide.is_empty() { 0 } else { 4 + 8 * wide.len() as u16 });
        // Comment, disk, attributes.
        out.extend_from_slice(&[0; 10]);
        put32(out, self.header.min(IN_64) as u32);
        out.extend_from_slice(self.name.as_bytes());
        if !wide.is_empty() {
            wide_field(out, &wide);
        }
    }

    /// Flags to sizes, which both headers have.
    fn common(&self, out: &mut Vec<u8>, wide: bool) {
        // Flags, method, time.
        out.extend_from_slice(&[0; 6]);
        put16(out, DATE);
        put32(out, self.crc);
        let size = if wide { u32::MAX } else { self.size as u32 };
        put32(out, size);
        put32(out, size);
    }
}

/// What follows the last record, which ends at byte `offset`.
pub(super) fn directory(records: &[Record], offset: u64) -> Vec<u8> {
    let mut out = Vec::new();
    records.iter().for_each(|record| record.central(&mut out));
    let (count, bytes) = (records.len() as u64, out.len() as u64);
    if count >= u64::from(u16::MAX) || bytes >= IN_64 || offset >= IN_64 {
        out.extend_from_slice(b"PK\x06\x06");
        put64(&mut out, 44);
        put16(&mut out, NEEDS_64);
        put16(&mut out, NEEDS_64);
        out.extend_from_slice(&[0; 8]);
        for value in [count, count, bytes, offset] {
            put64(&mut out, value);
        }
        out.extend_from_slice(b"PK\x06\x07");
        put32(&mut out, 0);
        put64(&mut out, offset + bytes);
        put32(&mut out, 1);
    }
    out.extend_from_slice(b"PK\x05\x06");
    put32(&mut out, 0);
    let short = count.min(u64::from(u16::MAX)) as u16;
    put16(&mut out, short);
    put16(&mut out, short);
    put32(&mut out, bytes.min(IN_64) as u32);
    put32(&mut out, offset.min(IN_64) as u32);
    put16(&mut out, 0);
    out
}

fn wide_field(out: &mut Vec<u8>, values: &[u64]) {
    put16(out, 1);
    put16(out, 8 * values.len() as u16);
    values.iter().for_each(|&value| put64(out, value));
}

fn put16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_error::Result;
    use forebay_format::torch_zip::{Archive, ReadAt};

    /// An archive whose records are zeros that take no memory: headers and directory by their places.
    struct Sparse {
        parts: Vec<(u64, Vec<u8>)>,
        size: u64,
    }

    impl ReadAt for Sparse {
        fn name(&self) -> String {
            "sparse".to_owned()
        }

        fn size(&self) -> u64 {
            self.size
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            buffer.fill(0);
            for (start, bytes) in &self.parts {
                for (at, &byte) in (*start..).zip(bytes) {
                    let place = at.checked_sub(offset).and_then(|at| buffer.get_mut(at as usize));
                    if let Some(place) = place {
                        *place = byte;
                    }
                }
            }
            Ok(())
        }
    }

    #[test]
    fn the_reader_of_archives_finds_every_record_even_beyond_4_gib() {
        for sizes in [&[3, 0, 64][..], &[IN_64 - 1, 5, IN_64, 1 << 40, 7]] {
            let (mut records, mut at, mut parts) = (Vec::new(), 0, Vec::new());
            let names = ["data.pkl".to_owned()].into_iter();
            let names = names.chain((0..).map(|number: usize| format!("data/{number}")));
            for (name, &size) in names.zip(sizes) {
                let record = Record::new(format!("archive/{name}"), size, at);
                assert_eq!(record.offset() % ALIGN, 0);
                let mut header = Vec::new();
                record.local(&mut header);
                assert_eq!(at + header.len() as u64, record.offset());
                parts.push((at, header));
                at = record.end();
                records.push(record);
            }
            let end = directory(&records, at);
            let size = at + end.len() as u64;
            parts.push((at, end));
            let sparse = Sparse { parts, size };
            let archive = Archive::open(&sparse, 0, size).unwrap();
            for record in &records {
                let name = record.name.strip_prefix("archive/").unwrap();
                let found = archive.record(name).unwrap().unwrap();
                assert_eq!((found.offset, found.bytes), (record.offset(), record.size), "{name}");
            }
        }
    }
}
