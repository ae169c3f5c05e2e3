//! The parts of a zip archive whose records are stored, not compressed. Little endian, no gaps:
//!
//! ```text
//! local header     "PK\3\4" needs flags method time date crc size size name_len extra_len   30 bytes
//!                  name; extra: [1, 16, size, size] where a size needs 64 bits; [0x4246, n, n zeros] to pad
//! central header   "PK\1\2" by needs flags method time date crc size size name_len extra_len
//!                  comment_len disk attributes attributes offset                            46 bytes
//!                  name; extra as above, without padding
//! end, 64 bits     "PK\6\6" 44 by needs disk disk count count bytes offset                  56 bytes, and its
//! locator          "PK\6\7" disk offset disks                                               20 bytes; both
//!                  only where the directory's offset needs 64 bits
//! end              "PK\5\6" disk disk count count bytes offset comment_len                  22 bytes
//! ```
//!
//! Sizes and CRC are in the local header too (no data descriptors), so that the archive can be read from either end.

/// Bytes of a central directory entry before its name.
const CENTRAL_BYTES: u64 = 46;
/// Bytes of a local header before the name.
const LOCAL_BYTES: u64 = 30;
/// Bytes of the extra field that holds two 64-bit sizes.
const SIZES_BYTES: u64 = 20;
/// In a field of 32 bits: see the field of 64 bits.
const IN_64: u32 = u32::MAX;
/// Version 2.0, for archives with folders in names; 4.5 where fields of 64 bits are used.
const NEEDS: u16 = 20;
const NEEDS_64: u16 = 45;
/// 1980-01-01, the earliest date that the format has: an archive's bytes depend on its content alone.
const DATE: u16 = 0x0021;
/// The extra field for padding: a header of four bytes, then zeros.
const PAD_ID: u16 = 0x4246;
const PAD_HEADER: u64 = 4;

/// One record: its name, content's size and CRC, and where its local header is in the archive.
pub(super) struct Record<'a> {
    pub(super) name: &'a str,
    pub(super) size: u64,
    pub(super) crc: u32,
    pub(super) offset: u32,
}

fn is_64(size: u64) -> bool {
    size >= u64::from(IN_64)
}

/// Bytes of the local header of a record, padding not counted.
pub(super) fn local_len(name: &str, size: u64) -> u64 {
    let sizes = if is_64(size) { SIZES_BYTES } else { 0 };
    LOCAL_BYTES + name.len() as u64 + sizes
}

/// Bytes of padding in a local header such that what would end at `end` ends on a multiple of `align`, at most 32 Ki.
pub(super) fn padding(end: u64, align: u64) -> u64 {
    let short = (align - end % align) % align;
    match short {
        0 => 0,
        // The padding has a header of its own, which may not fit the gap.
        1..PAD_HEADER => short + align,
        _ => short,
    }
}

/// The local header of `record`; `pad` as [`padding`] gave it.
pub(super) fn local_header(out: &mut Vec<u8>, record: &Record<'_>, pad: u64) {
    let wide = is_64(record.size);
    let size = if wide { IN_64 } else { record.size as u32 };
    let extra = pad + if wide { SIZES_BYTES } else { 0 };
    let mut fixed = [0; LOCAL_BYTES as usize];
    fixed[..4].copy_from_slice(b"PK\x03\x04");
    fixed[4..6].copy_from_slice(&needs(wide).to_le_bytes());
    fixed[12..14].copy_from_slice(&DATE.to_le_bytes());
    fixed[14..18].copy_from_slice(&record.crc.to_le_bytes());
    fixed[18..22].copy_from_slice(&size.to_le_bytes());
    fixed[22..26].copy_from_slice(&size.to_le_bytes());
    fixed[26..28].copy_from_slice(&(record.name.len() as u16).to_le_bytes());
    fixed[28..30].copy_from_slice(&(extra as u16).to_le_bytes());
    out.extend_from_slice(&fixed);
    out.extend_from_slice(record.name.as_bytes());
    if wide {
        sizes(out, record.size);
    }
    if pad > 0 {
        out.extend_from_slice(&PAD_ID.to_le_bytes());
        out.extend_from_slice(&((pad - PAD_HEADER) as u16).to_le_bytes());
        out.resize(out.len() + (pad - PAD_HEADER) as usize, 0);
    }
}

/// Bytes of the central directory entry of a record.
pub(super) fn central_len(name: &str, size: u64) -> u64 {
    let sizes = if is_64(size) { SIZES_BYTES } else { 0 };
    CENTRAL_BYTES + name.len() as u64 + sizes
}

/// The central directory entry of `record`.
pub(super) fn central_header(out: &mut Vec<u8>, record: &Record<'_>) {
    let wide = is_64(record.size);
    let size = if wide { IN_64 } else { record.size as u32 };
    let extra = if wide { SIZES_BYTES } else { 0 };
    let mut fixed = [0; CENTRAL_BYTES as usize];
    fixed[..4].copy_from_slice(b"PK\x01\x02");
    fixed[4..6].copy_from_slice(&needs(wide).to_le_bytes());
    fixed[6..8].copy_from_slice(&needs(wide).to_le_bytes());
    fixed[14..16].copy_from_slice(&DATE.to_le_bytes());
    fixed[16..20].copy_from_slice(&record.crc.to_le_bytes());
    fixed[20..24].copy_from_slice(&size.to_le_bytes());
    fixed[24..28].copy_from_slice(&size.to_le_bytes());
    fixed[28..30].copy_from_slice(&(record.name.len() as u16).to_le_bytes());
    fixed[30..32].copy_from_slice(&(extra as u16).to_le_bytes());
    fixed[42..46].copy_from_slice(&record.offset.to_le_bytes());
    out.extend_from_slice(&fixed);
    out.extend_from_slice(record.name.as_bytes());
    if wide {
        sizes(out, record.size);
    }
}

/// Bytes of the end of an archive whose central directory starts at `directory_offset`.
pub(super) fn end_len(directory_offset: u64) -> u64 {
    if is_64(directory_offset) { 56 + 20 + 22 } else { 22 }
}

/// The end of an archive of `count` records.
pub(super) fn end(out: &mut Vec<u8>, count: u16, directory_offset: u64, directory_bytes: u32) {
    let wide = is_64(directory_offset);
    if wide {
        out.extend_from_slice(b"PK\x06\x06");
        out.extend_from_slice(&44u64.to_le_bytes());
        out.extend_from_slice(&NEEDS_64.to_le_bytes());
        out.extend_from_slice(&NEEDS_64.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&u64::from(count).to_le_bytes());
        out.extend_from_slice(&u64::from(count).to_le_bytes());
        out.extend_from_slice(&u64::from(directory_bytes).to_le_bytes());
        out.extend_from_slice(&directory_offset.to_le_bytes());
        out.extend_from_slice(b"PK\x06\x07");
        out.extend_from_slice(&[0; 4]);
        let end_64 = directory_offset + u64::from(directory_bytes);
        out.extend_from_slice(&end_64.to_le_bytes());
        out.extend_from_slice(&1u32.to_le_bytes());
    }
    let offset = if wide { IN_64 } else { directory_offset as u32 };
    let mut fixed = [0; 22];
    fixed[..4].copy_from_slice(b"PK\x05\x06");
    fixed[8..10].copy_from_slice(&count.to_le_bytes());
    fixed[10..12].copy_from_slice(&count.to_le_bytes());
    fixed[12..16].copy_from_slice(&directory_bytes.to_le_bytes());
    fixed[16..20].copy_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&fixed);
}

fn needs(wide: bool) -> u16 {
    if wide { NEEDS_64 } else { NEEDS }
}

/// The extra field with both sizes, which are equal: nothing is compressed.
fn sizes(out: &mut Vec<u8>, size: u64) {
    out.extend_from_slice(&1u16.to_le_bytes());
    out.extend_from_slice(&16u16.to_le_bytes());
    out.extend_from_slice(&size.to_le_bytes());
    out.extend_from_slice(&size.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_what_is_written() {
        for size in [0, 5, 0xffff_fffe, 0xffff_ffff, 1 << 40] {
            let record = Record { name: "archive/data/0", size, crc: 1, offset: 9 };
            let written = |write: &dyn Fn(&mut Vec<u8>)| {
                let mut out = Vec::new();
                write(&mut out);
                out.len() as u64
            };
            let local = written(&|out| local_header(out, &record, 77));
            assert_eq!(local, local_len(record.name, size) + 77);
            let central = written(&|out| central_header(out, &record));
            assert_eq!(central, central_len(record.name, size));
            assert_eq!(written(&|out| end(out, 4, size, 300)), end_len(size));
        }
    }

    #[test]
    fn padding_reaches_the_boundary_and_holds_its_own_header() {
        for align in [64, 4096] {
            for end in 0..2 * align {
                let pad = padding(end, align);
                assert_eq!((end + pad) % align, 0);
                assert!(pad == 0 || (PAD_HEADER..align + PAD_HEADER).contains(&pad));
            }
        }
    }
}
