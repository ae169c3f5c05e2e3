//! CRC-32 (ISO-HDLC: the one of zip archives, reflected polynomial 0xEDB88320), of blocks and joined from blocks.
//!
//! One kind of checksum serves twice: each block of a tensor has one, so that a range read can be checked, and the CRC
//! that a zip archive wants of the whole is joined from those without a second look at the bytes.

/// The CRC-32 of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// The CRC-32 of two stretches one after the other, from the CRC-32 of each; `second_bytes` is the length of the
/// second. The work grows with the logarithm of the length.
pub fn crc32_join(first: u32, second: u32, second_bytes: u64) -> u32 {
    let mut joined = crc32fast::Hasher::new_with_initial(first);
    joined.combine(&crc32fast::Hasher::new_with_initial_len(second, second_bytes));
    joined.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_and_joins() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        let bytes: Vec<u8> = (0..100_000u32).map(|at| ((at * 31) >> 3) as u8).collect();
        for cut in [0, 1, 4096, 65_537, bytes.len()] {
            let (first, second) = bytes.split_at(cut);
            let joined = crc32_join(crc32(first), crc32(second), second.len() as u64);
            assert_eq!(joined, crc32(&bytes), "cut at {cut}");
        }
    }
}
