//! A CRC-32 of all of `.metadata`, in `.metadata`: of the pickle's bytes nothing else guards each one.
//!
//! The attribute `forebay` has it as `metadata`, a text of fixed length: `crc32:` and eight hex digits. It is made over
//! the file with zeros for the digits, and put in when all else is written. The first versions wrote none.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};

use crate::commit::MANIFEST_PREFIX;

/// The key in the attribute's dict.
pub(crate) const KEY: &str = "metadata";
/// The value before the CRC is known.
pub(super) const BLANK: &str = "crc32:00000000";

/// How the value looks in the pickle: a text of one byte of length.
const BEFORE: &[u8] = b"\x8c\x0ecrc32:";
const DIGITS: usize = 8;
/// The attribute is the last thing in the file, and a few hundred bytes.
const TAIL_BYTES: usize = 4096;

/// Puts the CRC in, where there is a blank for it.
pub(super) fn stamp(bytes: &mut [u8]) {
    let Some(at) = place(bytes) else { return };
    let text = format!("{:08x}", crc_without(bytes, at));
    if let Some(digits) = bytes.get_mut(at..at + DIGITS) {
        digits.copy_from_slice(text.as_bytes());
    }
}

/// Compares the bytes of a `.metadata` with the CRC in them; whether there is one.
///
/// Errors: `checksum`.
pub(crate) fn check(bytes: &[u8]) -> Result<bool> {
    let Some(at) = place(bytes) else { return Ok(false) };
    let found = format!("{:08x}", crc_without(bytes, at));
    let said = bytes.get(at..at + DIGITS).unwrap_or_default();
    if said == found.as_bytes() {
        return Ok(true);
    }
    let said = String::from_utf8_lossy(said);
    let what = format!("its bytes have the CRC-32 {found}, it says {said:?} itself");
    Err(Error::new(Code::Checksum, what))
}

/// Where the digits are, in what is ours.
fn place(bytes: &[u8]) -> Option<usize> {
    let tail_at = bytes.len().saturating_sub(TAIL_BYTES);
    let tail = bytes.get(tail_at..)?;
    let find = |what: &[u8]| tail.windows(what.len()).rposition(|window| window == what);
    find(MANIFEST_PREFIX.as_bytes())?;
    let at = tail_at + find(BEFORE)? + BEFORE.len();
    (at + DIGITS <= bytes.len()).then_some(at)
}

/// Of all bytes, with zeros for the digits at `at`.
fn crc_without(bytes: &[u8], at: usize) -> u32 {
    let (before, rest) = bytes.split_at(at.min(bytes.len()));
    let after = rest.get(DIGITS..).unwrap_or_default();
    let digits = crc32(&[b'0'; DIGITS]);
    let joined = crc32_join(crc32(before), digits, DIGITS as u64);
    crc32_join(joined, crc32(after), after.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flip_of_any_bit_is_found_and_what_has_no_stamp_is_told() {
        let mut bytes = b"some table ".to_vec();
        bytes.extend_from_slice(BEFORE);
        bytes.extend_from_slice(b"00000000 forebay.manifest-00000abc-1_0 the end");
        stamp(&mut bytes);
        assert!(check(&bytes).unwrap());
        let marks = [BEFORE, MANIFEST_PREFIX.as_bytes()];
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            // Without its marks it is none; what else they say is looked at by others.
            let marked = marks.iter().all(|mark| bad.windows(mark.len()).any(|one| one == *mark));
            match check(&bad) {
                Ok(stamped) => assert!(!stamped && !marked, "{at}"),
                Err(error) => assert_eq!((error.code(), marked), (Code::Checksum, true), "{at}"),
            }
        }
        assert!(!check(b"a stock pickle").unwrap());
    }
}
