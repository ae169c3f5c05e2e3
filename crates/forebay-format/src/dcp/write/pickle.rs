//! The few pickle opcodes that checkpoints are made of.

pub(super) const MARK: u8 = b'(';
pub(super) const STOP: u8 = b'.';
pub(super) const NONE: u8 = b'N';
pub(super) const REDUCE: u8 = b'R';
pub(super) const BUILD: u8 = b'b';
pub(super) const TUPLE: u8 = b't';
pub(super) const EMPTY_TUPLE: u8 = b')';
pub(super) const EMPTY_LIST: u8 = b']';
pub(super) const EMPTY_DICT: u8 = b'}';
pub(super) const APPENDS: u8 = b'e';
pub(super) const SETITEMS: u8 = b'u';
pub(super) const BINPERSID: u8 = b'Q';
pub(super) const PROTO: u8 = 0x80;
pub(super) const NEWOBJ: u8 = 0x81;
pub(super) const TUPLE1: u8 = 0x85;
pub(super) const NEWTRUE: u8 = 0x88;
pub(super) const NEWFALSE: u8 = 0x89;
pub(super) const STACK_GLOBAL: u8 = 0x93;
pub(super) const MEMOIZE: u8 = 0x94;
pub(super) const FRAME: u8 = 0x95;
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const BINUNICODE: u8 = b'X';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE8: u8 = 0x8d;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
/// Tuples of one, two and three are marked by their opcode alone.
const TUPLES: [u8; 3] = [0x85, 0x86, 0x87];

/// An integer, in the shortest form.
#[inline]
pub(super) fn int(out: &mut Vec<u8>, value: u64) {
    if let Ok(byte) = u8::try_from(value) {
        out.extend_from_slice(&[BININT1, byte]);
    } else if let Ok(word) = u16::try_from(value) {
        let [low, high] = word.to_le_bytes();
        out.extend_from_slice(&[BININT2, low, high]);
    } else if let Ok(word) = i32::try_from(value) {
        let [a, b, c, d] = word.to_le_bytes();
        out.extend_from_slice(&[BININT, a, b, c, d]);
    } else {
        // Two's complement: one bit more than the value has, for the sign.
        let used = (64 - value.leading_zeros() as usize) / 8 + 1;
        let mut bytes = [0; 11];
        bytes[0] = LONG1;
        bytes[1] = used as u8;
        bytes[2..10].copy_from_slice(&value.to_le_bytes());
        out.extend_from_slice(&bytes[..2 + used]);
    }
}

/// An integer that may be negative.
pub(super) fn signed(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u64::try_from(value) {
        int(out, value);
    } else if let Ok(word) = i32::try_from(value) {
        out.push(BININT);
        out.extend_from_slice(&word.to_le_bytes());
    } else {
        out.extend_from_slice(&[LONG1, 8]);
        out.extend_from_slice(&value.to_le_bytes());
    }
}

/// A truth value.
pub(super) fn boolean(out: &mut Vec<u8>, value: bool) {
    out.push(if value { NEWTRUE } else { NEWFALSE });
}

/// Text, in the form of protocol 4.
#[inline]
pub(super) fn text(out: &mut Vec<u8>, value: &str) {
    if let Ok(len) = u8::try_from(value.len()) {
        out.extend_from_slice(&[SHORT_BINUNICODE, len]);
        out.extend_from_slice(value.as_bytes());
    } else {
        long_text(out, value);
    }
}

/// Text, in the form of protocol 2 (below 4 GiB; beyond it the reader must know protocol 4).
#[inline]
pub(super) fn long_text(out: &mut Vec<u8>, value: &str) {
    if let Ok(len) = u32::try_from(value.len()) {
        out.push(BINUNICODE);
        out.extend_from_slice(&len.to_le_bytes());
    } else {
        out.push(BINUNICODE8);
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    }
    out.extend_from_slice(value.as_bytes());
}

/// What was memoized as number `id`.
#[inline]
pub(super) fn get(out: &mut Vec<u8>, id: u32) {
    if let Ok(byte) = u8::try_from(id) {
        out.extend_from_slice(&[BINGET, byte]);
    } else {
        let [a, b, c, d] = id.to_le_bytes();
        out.extend_from_slice(&[LONG_BINGET, a, b, c, d]);
    }
}

/// A tuple of integers.
#[inline]
pub(super) fn int_tuple(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = u64>) {
    let count = values.len();
    if count == 0 {
        return out.push(EMPTY_TUPLE);
    }
    let short = TUPLES.get(count - 1);
    if short.is_none() {
        out.push(MARK);
    }
    for value in values {
        int(out, value);
    }
    out.push(*short.unwrap_or(&TUPLE));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(write: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    #[test]
    fn integers_are_as_python_writes_them() {
        let cases: [(i64, &[u8]); 12] = [
            (0, b"K\x00"),
            (255, b"K\xff"),
            (256, b"M\x00\x01"),
            (65_535, b"M\xff\xff"),
            (65_536, b"J\x00\x00\x01\x00"),
            (0x7fff_ffff, b"J\xff\xff\xff\x7f"),
            (0x8000_0000, b"\x8a\x05\x00\x00\x00\x80\x00"),
            (0x7f_ffff_ffff, b"\x8a\x05\xff\xff\xff\xff\x7f"),
            (0x80_0000_0000, b"\x8a\x06\x00\x00\x00\x00\x80\x00"),
            (i64::MAX, b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
            (-1, b"J\xff\xff\xff\xff"),
            (i64::MIN, b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"),
        ];
        for (value, bytes) in cases {
            assert_eq!(of(|out| signed(out, value)), bytes, "{value}");
        }
        assert_eq!(of(|out| int(out, u64::MAX)), b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00");
    }

    #[test]
    fn tuples_up_to_three_have_no_mark() {
        assert_eq!(of(|out| int_tuple(out, [].into_iter())), b")");
        assert_eq!(of(|out| int_tuple(out, [1, 2].into_iter())), b"K\x01K\x02\x86");
        assert_eq!(of(|out| int_tuple(out, [1, 2, 3, 4].into_iter())), b"(K\x01K\x02K\x03K\x04t");
    }
}
