//! The frame around every record: what it is, how long, and whether it is whole.
//!
//! Records are read while others write them, over stores that tear writes and lose replies. A reader must tell "not
//! written yet" (zeros: room that was set aside) from "damaged", and must never take memory on the word of a length
//! that nobody checked: one flipped bit in a size word has made peers ask for an exabyte.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};

const MAGIC: &[u8; 8] = b"FBRECORD";
const VERSION: u16 = 1;
/// Bytes before the head.
pub(crate) const FIXED_BYTES: usize = 32;
/// Most bytes of a head: a commit record of a million files of 64 bytes.
const HEAD_BYTES_MAX: usize = 64 << 20;

/// A record, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    /// Small structured part, JSON.
    pub(crate) head: &'a [u8],
    /// Opaque bytes of the caller.
    pub(crate) body: &'a [u8],
}

/// Puts a record together. All words are little-endian.
///
/// ```text
/// 0   8  "FBRECORD"
/// 8   2  version, 1
/// 10  2  kind of record
/// 12  4  bytes of the head
/// 16  8  bytes of the body
/// 24  4  CRC-32 of bytes 0..24, head and body
/// 28  4  zero
/// 32     head (JSON, UTF-8), then body, then any number of zeros
/// ```
pub(crate) fn seal(kind: u16, head: &[u8], body: &[u8]) -> Result<Vec<u8>> {
    let head_bytes = u32::try_from(head.len()).ok().filter(|_| head.len() <= HEAD_BYTES_MAX);
    let Some(head_bytes) = head_bytes else {
        let what =
            format!("a record's head has {} bytes, {HEAD_BYTES_MAX} are the most", head.len());
        return Err(Error::new(Code::Unsupported, what));
    };
    let mut bytes = Vec::with_capacity(FIXED_BYTES + head.len() + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&head_bytes.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(head);
    bytes.extend_from_slice(body);
    let crc = checksum(&bytes);
    bytes[24..28].copy_from_slice(&crc.to_le_bytes());
    Ok(bytes)
}

/// Takes a record apart; `None` where nothing was written yet (no bytes, or zeros only).
///
/// Errors: `truncated` where bytes are missing, `checksum` where they are not what was written, `invalid_metadata` for
/// anything that is no record of that kind, `unsupported` for a newer version.
pub(crate) fn open(kind: u16, bytes: &[u8]) -> Result<Option<Frame<'_>>> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED_BYTES>() else {
        return Err(Error::new(Code::Truncated, "record ends inside its fixed part"));
    };
    if &fixed[..8] != MAGIC {
        return Err(Error::new(Code::InvalidMetadata, "not a record"));
    }
    let version = u16::from_le_bytes([fixed[8], fixed[9]]);
    if version != VERSION {
        let what = format!("record of version {version}, this program reads {VERSION}");
        return Err(Error::new(Code::Unsupported, what).hint("use a newer Forebay"));
    }
    let head_bytes = u32::from_le_bytes([fixed[12], fixed[13], fixed[14], fixed[15]]) as usize;
    let mut word = [0; 8];
    word.copy_from_slice(&fixed[16..24]);
    let end =
        usize::try_from(u64::from_le_bytes(word)).ok().and_then(|n| n.checked_add(head_bytes));
    let Some(end) = end.filter(|end| *end <= rest.len()) else {
        return Err(Error::new(Code::Truncated, "record is shorter than it says"));
    };
    let crc = u32::from_le_bytes([fixed[24], fixed[25], fixed[26], fixed[27]]);
    let clean = rest[end..].iter().chain(&fixed[28..]).all(|byte| *byte == 0);
    if crc != checksum(&bytes[..FIXED_BYTES + end]) || !clean {
        return Err(Error::new(Code::Checksum, "record is damaged"));
    }
    let found = u16::from_le_bytes([fixed[10], fixed[11]]);
    if found != kind {
        let what = format!("record of kind {found}, expected {kind}");
        return Err(Error::new(Code::InvalidMetadata, what));
    }
    Ok(Some(Frame { head: &rest[..head_bytes], body: &rest[head_bytes..end] }))
}

/// Of everything but the checksum's own word and the zeros after it.
fn checksum(bytes: &[u8]) -> u32 {
    let (fixed, rest) = bytes.split_at(FIXED_BYTES);
    crc32_join(crc32(&fixed[..24]), crc32(rest), rest.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn any_flipped_bit_and_any_cut_is_an_error() {
        let whole = seal(3, b"{\"a\":1}", b"body").unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(open(3, &bytes).is_err(), "bit {bit}");
        }
        for cut in 1..whole.len() {
            assert_eq!(open(3, &whole[..cut]).unwrap_err().code(), Code::Truncated, "cut at {cut}");
        }
        assert_eq!(open(4, &whole).unwrap_err().code(), Code::InvalidMetadata);
    }

    #[test]
    fn room_that_was_set_aside_is_not_a_damaged_record() {
        assert!(open(1, &[]).unwrap().is_none());
        assert!(open(1, &[0; 4096]).unwrap().is_none());
        let mut padded = seal(1, b"{}", b"").unwrap();
        padded.resize(4096, 0);
        assert_eq!(open(1, &padded).unwrap().unwrap().head, b"{}");
        padded[4000] = 1;
        assert_eq!(open(1, &padded).unwrap_err().code(), Code::Checksum);
    }

    #[test]
    fn a_length_word_of_an_exabyte_allocates_nothing() {
        let mut bytes = seal(1, b"{}", b"").unwrap();
        bytes[16..24].copy_from_slice(&(1u64 << 60).to_le_bytes());
        assert_eq!(open(1, &bytes).unwrap_err().code(), Code::Truncated);
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(open(1, &bytes).unwrap_err().code(), Code::Truncated);
    }

    proptest! {
        #[test]
        fn records_come_back_and_garbage_never_panics(
            kind in any::<u16>(), head in any::<Vec<u8>>(), body in any::<Vec<u8>>(),
            garbage in any::<Vec<u8>>(),
        ) {
            let bytes = seal(kind, &head, &body).unwrap();
            let frame = open(kind, &bytes).unwrap().unwrap();
            prop_assert_eq!((frame.head, frame.body), (&head[..], &body[..]));
            let _ = open(kind, &garbage);
            let _ = open(kind, &[&bytes[..12], &garbage].concat());
        }
    }
}
