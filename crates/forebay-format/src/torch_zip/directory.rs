//! The central directory of a zip archive: end record, ZIP64 end record, entries.
//!
//! ```text
//! archive end - 22 - comment   end record, 22 bytes (signature 0x06054B50)
//!     10 u16 entries   12 u32 bytes of the directory   16 u32 its place   20 u16 bytes of the comment
//! 20 bytes before it           ZIP64 locator (0x07064B50), where there is one
//!     8 u64 place of the ZIP64 end record
//! there                        ZIP64 end record (0x06064B50), 56 bytes
//!     32 u64 entries   40 u64 bytes of the directory   48 u64 its place
//! the directory                entries, 46 bytes each (0x02014B50), then name, extra, comment
//!     8 u16 flags   10 u16 method   16 u32 CRC-32   20 u32 packed   24 u32 bytes   28 u16 name   30 u16 extra
//!     32 u16 comment   42 u32 place of the local header
//! extra                        blocks of u16 kind, u16 bytes; kind 1: u64 for each field above that is 2^32 - 1, in
//!                              the order bytes, packed, place
//! ```
//!
//! Numbers are little endian; places count from the start of the archive. torch writes the ZIP64 records always, and
//! in local headers neither sizes nor checksums (they follow the data), so that only the directory can be believed.

use super::{Entry, MAX_NAME_BYTES, MAX_RECORDS, invalid};
use forebay_error::{Code, Error, Result};

const END_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
const END64_BYTES: u64 = 56;
const ENTRY_BYTES: usize = 46;
/// The most bytes of an entry: a name that is accepted, an extra and a comment.
const MAX_ENTRY_BYTES: u64 = (ENTRY_BYTES + MAX_NAME_BYTES + 2 * u16::MAX as usize) as u64;
/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// The most bytes of all names: as much as a pickle may have that has them too.
const MAX_NAMES_BYTES: u64 = super::MAX_PICKLE_BYTES;
const END: u32 = 0x0605_4B50;
const LOCATOR: u32 = 0x0706_4B50;
const END64: u32 = 0x0606_4B50;
const ENTRY: u32 = 0x0201_4B50;
/// The extra block with the sizes that do not fit 32 bits.
const EXTRA_ZIP64: u16 = 1;
/// Flag: the bytes are encrypted.
const ENCRYPTED: u16 = 1;

/// The most bytes that the end record, its comment and the ZIP64 records before it can have.
pub(super) const END_REACH: u64 = END_BYTES + u16::MAX as u64 + LOCATOR_BYTES + END64_BYTES;

/// Where the directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) entries: u64,
}

/// A little-endian number of up to eight bytes at `at`; `None` past the end.
pub(super) fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(width)?)?;
    Some(part.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

fn is_signature(bytes: &[u8], at: usize, signature: u32) -> bool {
    number(bytes, at, 4) == Some(u64::from(signature))
}

/// Finds the directory from the last bytes of an archive of `len` bytes. `Ok(None)`: there is no end record in them.
pub(super) fn locate(tail: &[u8], len: u64) -> Result<Option<Place>> {
    let Some(end) = end_record(tail) else { return Ok(None) };
    let tail_at = len - tail.len() as u64;
    let end_at = tail_at + end as u64;
    let field = |at: usize, width| number(tail, end + at, width).unwrap_or(0);
    let short = Place { entries: field(10, 2), bytes: field(12, 4), at: field(16, 4) };
    if field(4, 2) != field(6, 2) {
        return Err(invalid("the archive is one of several volumes"));
    }
    let locator = end.checked_sub(LOCATOR_BYTES as usize);
    let (place, limit) = match locator.filter(|&at| is_signature(tail, at, LOCATOR)) {
        Some(locator) => {
            let at = number(tail, locator + 8, 8).unwrap_or(0);
            let before = at.checked_add(END64_BYTES);
            if before.is_none_or(|before| before > tail_at + locator as u64) {
                return Err(invalid("the ZIP64 end record lies outside of the archive"));
            }
            // It may lie before the tail only if something odd was put between; nobody does that.
            let end64 = at.checked_sub(tail_at).and_then(|at| usize::try_from(at).ok());
            let end64 = end64.filter(|&at| is_signature(tail, at, END64));
            let end64 =
                end64.ok_or_else(|| invalid("there is no ZIP64 end record at its place"))?;
            (long(tail, end64, &short)?, at)
        }
        None => (short, end_at),
    };
    match place.at.checked_add(place.bytes).is_some_and(|end| end <= limit) {
        true => Ok(Some(place)),
        false => Err(invalid("the directory of the archive lies outside of it")),
    }
}

/// The place of the end record in the last bytes: the last one whose comment ends where the archive does.
fn end_record(tail: &[u8]) -> Option<usize> {
    let last = tail.len().checked_sub(END_BYTES as usize)?;
    (0..=last).rev().find(|&at| {
        is_signature(tail, at, END)
            && number(tail, at + 20, 2) == Some((tail.len() - at) as u64 - END_BYTES)
    })
}

/// The ZIP64 end record, which must say what the short one says where that could say it.
fn long(tail: &[u8], at: usize, short: &Place) -> Result<Place> {
    let field = |offset: usize| number(tail, at + offset, 8).unwrap_or(0);
    let place = Place { entries: field(32), bytes: field(40), at: field(48) };
    let agree = |short: u64, most: u64, long: u64| short == most || short == long;
    let all = agree(short.entries, u64::from(u16::MAX), place.entries)
        && agree(short.bytes, u64::from(u32::MAX), place.bytes)
        && agree(short.at, u64::from(u32::MAX), place.at);
    if all { Ok(place) } else { Err(invalid("the two end records of the archive disagree")) }
}

/// Fails where a directory claims more than its bytes can hold or than anybody writes.
pub(super) fn check_size(place: &Place) -> Result<()> {
    if place.entries > place.bytes / ENTRY_BYTES as u64 {
        let what = format!("{} entries are said to be in {} bytes", place.entries, place.bytes);
        return Err(invalid(what));
    }
    if place.entries > MAX_RECORDS {
        let what = format!("the archive has {} records, {MAX_RECORDS} is the most", place.entries);
        return Err(Error::new(Code::Unsupported, what));
    }
    // No product of these overflows.
    if place.bytes > place.entries * MAX_ENTRY_BYTES {
        return Err(longer());
    }
    Ok(())
}

fn longer() -> Error {
    invalid("the directory of the archive is longer than its entries")
}

/// The entries of a directory, of which `read` gives `(place, bytes)`. It is read piece by piece: how long it is said
/// to be decides nothing, and one that is damaged is not read to its end.
pub(super) fn entries(
    place: &Place,
    read: impl Fn(u64, u64) -> Result<Vec<u8>>,
) -> Result<Vec<Entry>> {
    let (mut entries, mut names_bytes) = (Vec::new(), 0);
    let (mut window, mut taken, mut loaded) = (Vec::new(), 0, 0);
    for _ in 0..place.entries {
        let left = place.bytes - loaded;
        if left > 0 && ((window.len() - taken) as u64) < MAX_ENTRY_BYTES {
            window.drain(..taken);
            taken = 0;
            let more = read(place.at + loaded, left.min(PIECE_BYTES))?;
            loaded += more.len() as u64;
            window.extend_from_slice(&more);
        }
        let (entry, rest) = one(window.get(taken..).unwrap_or_default(), place.at)?;
        taken = window.len() - rest.len();
        names_bytes += entry.name.len() as u64;
        if names_bytes > MAX_NAMES_BYTES {
            let what = format!("the names of its records have more than {MAX_NAMES_BYTES} bytes");
            return Err(Error::new(Code::Unsupported, what));
        }
        entries.push(entry);
    }
    match loaded == place.bytes && taken == window.len() {
        true => Ok(entries),
        false => Err(longer()),
    }
}

fn one(bytes: &[u8], end: u64) -> Result<(Entry, &[u8])> {
    if !is_signature(bytes, 0, ENTRY) {
        return Err(invalid("an entry of the archive's directory is damaged"));
    }
    let cut = || invalid("the directory of the archive is cut short");
    let field = |at, width| number(bytes, at, width).ok_or_else(cut);
    let (flags, method) = (field(8, 2)? as u16, field(10, 2)?);
    let crc = field(16, 4)? as u32;
    let (packed, size, header) = (field(20, 4)?, field(24, 4)?, field(42, 4)?);
    let (name_len, extra_len) = (field(28, 2)? as usize, field(30, 2)? as usize);
    let extra_at = ENTRY_BYTES + name_len;
    let next = extra_at + extra_len + field(32, 2)? as usize;
    let name = bytes.get(ENTRY_BYTES..extra_at).ok_or_else(cut)?;
    let extra = bytes.get(extra_at..extra_at + extra_len).ok_or_else(cut)?;
    let rest = bytes.get(next..).ok_or_else(cut)?;
    if name_len > MAX_NAME_BYTES {
        return Err(invalid(format!("the name of a record has {name_len} bytes")));
    }
    let name = std::str::from_utf8(name).map_err(|_| invalid("a record's name is not UTF-8"))?;
    let mut long = zip64(extra);
    let mut widen = |short: u64| match short == u64::from(u32::MAX) {
        true => long.next().unwrap_or(short),
        false => short,
    };
    let (size, packed, header) = (widen(size), widen(packed), widen(header));
    let shown = crate::text::quoted(name);
    let refused = match (flags & ENCRYPTED != 0, method != 0 || packed != size) {
        (true, _) => Some("is encrypted"),
        (_, true) => Some("is compressed, torch stores records as they are"),
        _ => None,
    };
    let name_bytes = name.len() as u64;
    let least_end = header.checked_add(super::LOCAL_BYTES + name_bytes);
    if least_end.and_then(|at| at.checked_add(packed)).is_none_or(|last| last > end) {
        return Err(invalid(format!("record {shown} lies outside of the archive")));
    }
    Ok((Entry { name: name.to_owned(), header, bytes: packed, crc, refused }, rest))
}

/// The numbers of the ZIP64 block, in order.
fn zip64(mut extra: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let mut found: &[u8] = &[];
    while let (Some(kind), Some(len)) = (number(extra, 0, 2), number(extra, 2, 2)) {
        let end = 4 + len as usize;
        let Some(block) = extra.get(4..end) else { break };
        if kind == u64::from(EXTRA_ZIP64) {
            found = block;
            break;
        }
        extra = extra.get(end..).unwrap_or_default();
    }
    found.chunks_exact(8).filter_map(|part| number(part, 0, 8))
}
