//! What tells one state of a small object from another.
//!
//! A version is 32 bytes, little-endian:
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | inode |
//! | 8..16 | size |
//! | 16..24 | mtime, seconds |
//! | 24..28 | mtime, nanoseconds |
//! | 28..32 | CRC-32 (ISO-HDLC) of all bytes |
//!
//! A file system counts time in ticks of milliseconds and gives a removed file's inode to the next one, so inode, size
//! and times alone can call two files the same; the CRC does not, and `get` has read the bytes anyway. The change time
//! is left out: it moves when a second name of the file goes, which the staged name does after a publication by
//! link(2). So is the device: mounts of one file system on two machines have different numbers for it.

use rustix::fs::Stat;

use crate::object::Version;

/// The version of a file with these bytes.
pub(super) fn version(stat: &Stat, bytes: &[u8]) -> Version {
    let mut text = Vec::with_capacity(32);
    text.extend(head(stat));
    text.extend(forebay_format::crc::crc32(bytes).to_le_bytes());
    Version(text)
}

/// Whether a file may be of this version, as far as can be said without reading it.
pub(super) fn may_be(stat: &Stat, version: &Version) -> bool {
    version.0.len() == 32 && version.0.starts_with(&head(stat))
}

#[expect(clippy::unnecessary_cast, reason = "the fields have other widths on other systems")]
fn head(stat: &Stat) -> [u8; 28] {
    let mut head = [0; 28];
    let parts = [stat.st_ino as u64, stat.st_size as u64, stat.st_mtime as u64];
    for (target, part) in head.chunks_exact_mut(8).zip(parts) {
        target.copy_from_slice(&part.to_le_bytes());
    }
    if let Some(target) = head.get_mut(24..) {
        target.copy_from_slice(&(stat.st_mtime_nsec as u32).to_le_bytes());
    }
    head
}
