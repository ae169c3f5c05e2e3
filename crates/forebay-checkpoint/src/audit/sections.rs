//! The header of a manifest, and the sections that it describes.

use sha2::{Digest, Sha256};

use super::Findings;
use super::crc::crc;
use super::cursor::{Check, Cursor};

/// The six sections that version 1 has, in their order.
pub(super) const NAMES: [&str; 6] = ["info", "meshes", "table", "index", "holders", "parts"];

struct Row {
    id: u64,
    crc: u32,
    start: u64,
    len: u64,
}

/// The bytes of the six sections; `None` where the header does not allow to find them.
pub(super) fn read<'a>(
    bytes: &'a [u8],
    seal: Option<&[u8; 32]>,
    findings: &mut Findings,
) -> Option<[&'a [u8]; 6]> {
    let (header_len, rows) = findings.keep("header", header(bytes))?;
    let mut sections = [&[] as &[u8]; 6];
    let (mut next, mut end) = (0, header_len);
    let mut sealed = 0;
    for row in &rows {
        let place = format!("section {}", row.id);
        if row.start != end {
            findings.add(&place, format!("starts at {}, the one before ends at {end}", row.start));
            return None;
        }
        end = row.start.checked_add(row.len)?;
        let inside = usize::try_from(row.start).ok().zip(usize::try_from(end).ok());
        let Some(body) = inside.and_then(|(start, end)| bytes.get(start..end)) else {
            findings.add(&place, "leaves the manifest");
            return None;
        };
        if crc(body) != row.crc {
            findings.add(&place, "wrong checksum");
        }
        if row.id == 5 {
            sealed = row.start;
        }
        if (1..=6).contains(&row.id) {
            if row.id != next + 1 {
                findings.add(&place, "sections missing, twice there or out of order");
                return None;
            }
            *sections.get_mut(next as usize)? = body;
            next += 1;
        }
    }
    if next != 6 || end != bytes.len() as u64 {
        findings.add("header", format!("{next} known sections, ending at {end}"));
        return None;
    }
    let found: [u8; 32] = Sha256::digest(bytes.get(..usize::try_from(sealed).ok()?)?).into();
    if seal.is_some_and(|seal| *seal != found) {
        findings.add("manifest", "its seal is another");
    }
    Some(sections)
}

fn header(bytes: &[u8]) -> Check<(u64, Vec<Row>)> {
    let mut cursor = Cursor(bytes);
    if cursor.slice(8)? != [0x89, b'F', b'B', b'M', 0x0D, 0x0A, 0x1A, 0x0A] {
        return Err("wrong magic".into());
    }
    let major = cursor.little(2)?;
    if major != 1 {
        return Err(format!("major version {major}"));
    }
    let _minor = cursor.little(2)?;
    let header_len = cursor.little(4)?;
    let total = cursor.little(8)?;
    if total != bytes.len() as u64 {
        return Err(format!("says {total} bytes, has {}", bytes.len()));
    }
    let count = cursor.little(4)?;
    if count > 64 || header_len != 28 + 24 * count + 4 {
        return Err(format!("{count} sections in a header of {header_len} bytes"));
    }
    let mut rows = Vec::new();
    for _ in 0..count {
        let (id, crc) = (cursor.little(4)?, cursor.crc()?);
        rows.push(Row { id, crc, start: cursor.little(8)?, len: cursor.little(8)? });
    }
    let before = bytes.len() - cursor.0.len();
    if cursor.crc()? != crc(bytes.get(..before).unwrap_or_default()) {
        return Err("wrong checksum".into());
    }
    Ok((header_len, rows))
}
