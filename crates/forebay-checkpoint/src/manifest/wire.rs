//! The primitives of the manifest's encoding, and a reader of them that believes nothing.
//!
//! - *varint*: an unsigned number of up to 64 bits, seven bits a byte, lowest first, the top bit set on all but the
//!   last byte; never longer than needed, so that each value has one spelling.
//! - *difference*: a varint of the zigzag of a wrapping 64-bit difference to the number before it.
//! - *text*: a varint length and that many bytes of UTF-8.
//! - `u16`, `u32`, `u64`: little-endian, of fixed width.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;

/// Bytes of the head of a sealed text: magic and version, checksum, length.
pub(crate) const HEAD_BYTES: usize = 24;
/// Where its checksum ends: what follows is summed up in it.
pub(crate) const CRC_END: usize = 16;

/// Puts the length of all bytes, then their checksum, into a head that has room for them.
pub(crate) fn seal_head(out: &mut [u8]) {
    let bytes = out.len() as u64;
    if let Some(place) = out.get_mut(CRC_END..HEAD_BYTES) {
        place.copy_from_slice(&bytes.to_le_bytes());
    }
    let crc = crc32(out.get(CRC_END..).unwrap_or_default());
    if let Some(place) = out.get_mut(CRC_END - 4..CRC_END) {
        place.copy_from_slice(&crc.to_le_bytes());
    }
}

/// Appends primitives to bytes.
pub(crate) trait Put {
    /// A varint.
    fn put_varint(&mut self, value: u64);
    /// A difference from `before` to `value`.
    fn put_difference(&mut self, before: u64, value: u64);
    /// A text.
    fn put_text(&mut self, text: &str);
    /// A field: tag, length, bytes.
    fn put_field(&mut self, tag: u64, bytes: &[u8]);
}

impl Put for Vec<u8> {
    fn put_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.push(value as u8);
    }

    fn put_difference(&mut self, before: u64, value: u64) {
        let step = value.wrapping_sub(before).cast_signed();
        self.put_varint(((step << 1) ^ (step >> 63)).cast_unsigned());
    }

    fn put_text(&mut self, text: &str) {
        self.put_varint(text.len() as u64);
        self.extend_from_slice(text.as_bytes());
    }

    fn put_field(&mut self, tag: u64, bytes: &[u8]) {
        self.put_varint(tag);
        self.put_varint(bytes.len() as u64);
        self.extend_from_slice(bytes);
    }
}

/// Takes primitives from bytes whose checksum was right; what does not fit is `invalid_metadata` at `place`.
pub(crate) struct Take<'a> {
    bytes: &'a [u8],
    at: usize,
    place: &'a str,
}

impl<'a> Take<'a> {
    pub(crate) fn new(bytes: &'a [u8], place: &'a str) -> Self {
        Self { bytes, at: 0, place }
    }

    /// An error here.
    pub(crate) fn bad(&self, what: impl Into<String>) -> Error {
        Error::new(Code::InvalidMetadata, what).at(format!("{}, byte {}", self.place, self.at))
    }

    /// What errors call the bytes.
    pub(crate) fn place(&self) -> &'a str {
        self.place
    }

    /// Bytes that were not taken yet.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let end = usize::try_from(count).ok().and_then(|count| self.at.checked_add(count));
        match end.and_then(|end| self.bytes.get(self.at..end)) {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(self.bad(format!("{count} bytes are announced, {} are left", self.left()))),
        }
    }

    pub(crate) fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let Some(&byte) = self.bytes.get(self.at) else {
                return Err(self.bad("ends inside a number"));
            };
            self.at += 1;
            let bits = u64::from(byte & 0x7F);
            let fits = bits << shift >> shift == bits;
            if !fits || (byte == 0 && shift > 0) {
                return Err(self.bad("a number is longer than it may be"));
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.bad("a number is longer than it may be"))
    }

    /// A varint that may not be above `limit`.
    pub(crate) fn at_most(&mut self, limit: u64, what: &str) -> Result<u64> {
        let value = self.varint()?;
        if value > limit {
            return Err(self.bad(format!("{value} {what}, at most {limit} are allowed")));
        }
        Ok(value)
    }

    /// The same for what is kept in 32 bits.
    pub(crate) fn small(&mut self, limit: u64, what: &str) -> Result<u32> {
        let value = self.at_most(limit, what)?;
        u32::try_from(value).map_err(|_| self.bad(format!("{value} {what} do not fit 32 bits")))
    }

    /// A count of things that take at least `each` bytes of what is left, and may not be above `limit`: such a count
    /// can be trusted with an allocation.
    pub(crate) fn count(&mut self, limit: u64, each: usize, what: &str) -> Result<usize> {
        let count = self.at_most(limit, what)?;
        match usize::try_from(count) {
            Ok(count) if count <= self.left() / each.max(1) => Ok(count),
            _ => Err(self.bad(format!("{count} {what} do not fit in {} bytes", self.left()))),
        }
    }

    pub(crate) fn difference(&mut self, before: u64) -> Result<u64> {
        let coded = self.varint()?;
        Ok(before.wrapping_add((coded >> 1) ^ (coded & 1).wrapping_neg()))
    }

    pub(crate) fn text(&mut self, limit: u64, what: &str) -> Result<&'a str> {
        let len = self.at_most(limit, what)?;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| self.bad("a text is not UTF-8"))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte)))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        Ok(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    pub(crate) fn digest(&mut self) -> Result<[u8; 32]> {
        let mut digest = [0; 32];
        digest.copy_from_slice(self.take(32)?);
        Ok(digest)
    }

    /// Fails unless all was taken.
    pub(crate) fn end(&self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            left => Err(self.bad(format!("{left} bytes too many"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_have_one_spelling() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            let mut bytes = Vec::new();
            bytes.put_varint(value);
            bytes.put_difference(value, 5);
            bytes.put_difference(5, value);
            let mut take = Take::new(&bytes, "here");
            assert_eq!(take.varint().unwrap(), value);
            assert_eq!(take.difference(value).unwrap(), 5);
            assert_eq!(take.difference(5).unwrap(), value);
            take.end().unwrap();
        }
        for long in [&[0x80, 0x00][..], &[0xFF; 10], &[0x80; 11], &[0x80]] {
            let error = Take::new(long, "here").varint().unwrap_err();
            assert_eq!(error.code(), Code::InvalidMetadata);
            assert!(error.place().unwrap().starts_with("here, byte"));
        }
    }

    #[test]
    fn counts_are_bounded_by_what_is_there() {
        let mut bytes = Vec::new();
        bytes.put_varint(100);
        bytes.extend([0; 399]);
        assert!(Take::new(&bytes, "").count(1000, 4, "things").is_err());
        assert_eq!(Take::new(&bytes, "").count(1000, 3, "things").unwrap(), 100);
        assert!(Take::new(&bytes, "").count(99, 1, "things").is_err());
    }
}
