//! CRC-32 by the book: polynomial 0x04C11DB7, reflected, all ones before and inverted after.

/// What eight steps do to each byte.
const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut step = 0;
        while step < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xEDB8_8320 } else { value >> 1 };
            step += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
}

/// The CRC-32 of bytes, one table look-up a byte.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    let mut state = u32::MAX;
    for byte in bytes {
        let low = (state & 0xFF) as u8 ^ byte;
        state = state >> 8 ^ TABLE.get(usize::from(low)).copied().unwrap_or_default();
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
