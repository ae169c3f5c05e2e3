//! Versions of the formats.
//!
//! Manifests and parts carry a major and a minor version, both of them the constants here. A minor version may add
//! sections to a manifest, tags to a part and keys to the info text; whoever does not know them passes over them, and a
//! reader accepts every minor version. Whatever else changes is a new major version, and a reader refuses one that it
//! does not know: it cannot tell what it would misread.

use forebay_error::{Code, Error, Result};

use super::wire::Take;

/// The major version that is written and read.
pub const MAJOR: u16 = 1;
/// The minor version that is written.
pub const MINOR: u16 = 0;

pub(crate) fn check_version(take: &mut Take<'_>, of: &str) -> Result<()> {
    let words = take.u32()?;
    let (major, minor) = (words & 0xFFFF, words >> 16);
    if major == u32::from(MAJOR) {
        return Ok(());
    }
    let what = format!("{of} of version {major}.{minor}, this version reads {MAJOR}.x");
    Err(Error::new(Code::Unsupported, what).at(take.place()).hint(match major > u32::from(MAJOR) {
        true => "a later version of forebay wrote it: use that version or a newer one",
        false => "no released version of forebay wrote it: look for damage",
    }))
}
