//! Files that are not archives of torch.save but may well be taken for some: what they are, and what to do.

use crate::text::quoted;
use forebay_error::{Code, Error};

/// Bytes of a file's start that [`refusal`] wants to see.
pub(crate) const START_BYTES: usize = 512;

/// The first pickle of a file of torch.save before 1.6: the number 0x1950A86A20F9469CFC6C, protocol 2.
const OLD_MAGIC: &[u8] =
    &[0x80, 0x02, 0x8A, 0x0A, 0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19, 0x2E];

/// Where a tar header has its magic word.
const TAR_MAGIC_AT: usize = 257;

/// Whether a file starts as a zip archive does.
pub(crate) fn is_zip(start: &[u8]) -> bool {
    // An archive without records starts with the end record.
    start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06")
}

/// The error for a file of this start that is no zip archive.
pub(crate) fn refusal(start: &[u8]) -> Error {
    let again = "open it with torch.load(..., weights_only=True) and save it again with torch.save \
                 of 1.6 or newer, or as safetensors";
    let word = start.get(TAR_MAGIC_AT..TAR_MAGIC_AT + 5);
    if start.starts_with(OLD_MAGIC) {
        let what =
            "is a file of torch.save before 1.6 (or without the zip format), which is not read";
        return Error::new(Code::Unsupported, what).hint(again);
    }
    if word == Some(b"ustar") {
        let what = "is a tar archive, as torch.save made them before 0.1.10; it is not read";
        return Error::new(Code::Unsupported, what).hint(again);
    }
    if let [0x80, 2..=5, ..] = start {
        let what = "is a bare pickle, no archive of torch.save";
        return Error::new(Code::UnknownFormat, what)
            .hint("pickles are never executed here: load it where you trust it, save the tensors");
    }
    let first: String = start.iter().take(16).map(|&byte| char::from(byte)).collect();
    let what = format!("is no archive of torch.save: it starts with {}", quoted(&first));
    Error::new(Code::UnknownFormat, what)
}
