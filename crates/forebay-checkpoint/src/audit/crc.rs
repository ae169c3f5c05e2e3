//! CRC-32 by the book: polynomial 0x04C11DB7, reflected, all ones before and inverted after.

/// The CRC-32 of bytes, one table look-up a byte.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    let mut table = [0u32; 256];
    for (entry, index) in table.iter_mut().zip(0u32..) {
        let mut value = index;
        for _ in 0..8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xEDB8_8320 } else { value >> 1 };
        }
        *entry = value;
    }
    let mut state = u32::MAX;
    for byte in bytes {
        let low = (state & 0xFF) as u8 ^ byte;
        state = state >> 8 ^ table.get(usize::from(low)).copied().unwrap_or_default();
    }
    !state
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_check_value_of_the_standard() {
        assert_eq!(super::crc(b"123456789"), 0xCBF4_3926);
        assert_eq!(super::crc(b""), 0);
    }
}
