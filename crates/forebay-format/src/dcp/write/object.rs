//! One object as `torch.save` would write it: an archive around its pickle.

use super::item::{BYTEORDER, PICKLE_NAME, VERSION};
use super::zip::{self, Record};
use crate::crc::crc32;

/// An archive of `archive/byteorder`, `archive/version` and `archive/data.pkl`, which `torch.load` reads.
///
/// The pickle comes last, so that one beyond 4 GiB makes no other field wide. It should be of protocol 2: that is what
/// `torch.load(weights_only=True)` wants.
pub struct ObjectItem;

impl ObjectItem {
    /// Bytes of the archive around a pickle of `pickle_bytes`.
    pub fn len(pickle_bytes: u64) -> u64 {
        let (head, directory) = lengths(pickle_bytes);
        let offset = head + pickle_bytes;
        offset + directory + zip::end_len(offset)
    }

    /// The archive around `pickle`.
    pub fn encode(pickle: &[u8]) -> Vec<u8> {
        let size = pickle.len() as u64;
        let (head, directory) = lengths(size);
        let mut out = Vec::with_capacity(Self::len(size) as usize);
        let mut records = Vec::with_capacity(3);
        let contents = [BYTEORDER, VERSION, (PICKLE_NAME, pickle, crc32(pickle))];
        for (name, content, crc) in contents {
            let size = content.len() as u64;
            let record = Record { name, size, crc, offset: out.len() as u32 };
            zip::local_header(&mut out, &record, 0);
            out.extend_from_slice(content);
            records.push(record);
        }
        for record in &records {
            zip::central_header(&mut out, record);
        }
        zip::end(&mut out, 3, head + size, directory as u32);
        out
    }
}

/// Bytes before the pickle, and of the central directory.
fn lengths(pickle_bytes: u64) -> (u64, u64) {
    let mut head = zip::local_len(PICKLE_NAME, pickle_bytes);
    let mut directory = zip::central_len(PICKLE_NAME, pickle_bytes);
    for (name, content, _) in [BYTEORDER, VERSION] {
        let size = content.len() as u64;
        head += zip::local_len(name, size) + size;
        directory += zip::central_len(name, size);
    }
    (head, directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_known_before() {
        for pickle in [&b""[..], b"\x80\x02K\x01.", &[b'N'; 70_000]] {
            let bytes = ObjectItem::encode(pickle);
            assert_eq!(bytes.len() as u64, ObjectItem::len(pickle.len() as u64));
            assert_eq!(&bytes[..4], b"PK\x03\x04");
            let found = bytes.windows(pickle.len().max(1)).any(|window| window == pickle);
            assert!(pickle.is_empty() || found);
        }
        let wide = ObjectItem::len(1 << 33) - (1 << 33);
        assert_eq!(wide, ObjectItem::len(0) + 20 + 20 + 76);
    }
}
