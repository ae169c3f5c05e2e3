//! SHA-256 of bytes in a file.

use crate::open_file::OpenFile;
use forebay_error::Result;
use sha2::{Digest, Sha256};

/// Bytes read at a time: large enough for the disk, small enough for the second-level cache.
const PIECE: usize = 1 << 20;

/// SHA-256 of `len` bytes from byte `offset` on. Memory does not grow with `len`.
pub fn sha256_extent(file: &OpenFile, offset: u64, len: u64) -> Result<[u8; 32]> {
    let piece = usize::try_from(len).map_or(PIECE, |len| len.min(PIECE));
    let mut buffer = vec![0; piece];
    let mut hasher = Sha256::new();
    let mut done = 0;
    while done < len {
        let count = usize::try_from(len - done).map_or(piece, |left| left.min(piece));
        let Some(part) = buffer.get_mut(..count) else { break };
        file.read_exact_at(part, offset.saturating_add(done))?;
        hasher.update(&*part);
        done += count as u64;
    }
    Ok(hasher.finalize().into())
}

/// A digest in small hexadecimal digits.
pub fn hex(digest: &[u8]) -> String {
    use std::fmt::Write;
    digest.iter().fold(String::with_capacity(digest.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_error::Code;

    #[test]
    fn extents_have_the_digest_of_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, [b"..abc".as_slice(), &vec![7; PIECE]].concat()).unwrap();
        let file = OpenFile::open(&path).unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha256_extent(&file, 2, 3).unwrap()), abc);
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hex(&sha256_extent(&file, 5, 0).unwrap()), empty);
        let long: [u8; 32] = Sha256::digest([b"bc".as_slice(), &vec![7; PIECE]].concat()).into();
        assert_eq!(sha256_extent(&file, 3, PIECE as u64 + 2).unwrap(), long);
        assert_eq!(sha256_extent(&file, 0, u64::MAX).unwrap_err().code(), Code::Truncated);
    }
}
