//! What `.metadata` says of us: one line of text in it names the attempt and the manifest.
//!
//! The pickle of a large job takes a while to read, and all that we want of it comes last: the attribute `forebay` of
//! the metadata object, a dict with (for people and other tools) `attempt`, `manifest`, `manifest_sha256`, `version`,
//! and `seal`, which holds all four as one text:
//!
//! ```text
//! forebay:1 <attempt> <name of the manifest> <sha-256 of its head, 64 hex digits>
//! ```
//!
//! [`Seal::find`] looks for that text in the last 4 KiB. Whoever forges it gains nothing: the manifest must have that
//! hash, and the files the checksums that are in it.

use forebay_engine::{RangeSource, read_exact_at};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::PlainValue;
use forebay_format::hex;

use crate::commit::{AttemptId, Identify};

/// The attribute's name.
pub(crate) const ATTRIBUTE: &str = "forebay";

const MAGIC: &str = "forebay:1 ";
/// The dict is a few hundred bytes, and the last thing in the file.
const TAIL_BYTES: u64 = 4096;

/// Attempt, manifest and its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seal {
    /// Who committed.
    pub attempt: AttemptId,
    /// The manifest's name in the step's folder.
    pub manifest: String,
    /// [`Manifest::seal`](crate::manifest::Manifest::seal).
    pub hash: [u8; 32],
}

impl Seal {
    /// The attribute's value.
    pub(crate) fn value(&self) -> PlainValue {
        let text = |text: &str| PlainValue::Text(text.to_owned());
        let (attempt, hash) = (self.attempt.to_string(), hex(&self.hash));
        let line = format!("{MAGIC}{attempt} {} {hash}", self.manifest);
        PlainValue::Dict(vec![
            ("attempt".to_owned(), text(&attempt)),
            ("manifest".to_owned(), text(&self.manifest)),
            ("manifest_sha256".to_owned(), text(&hash)),
            ("version".to_owned(), PlainValue::Int(1)),
            ("seal".to_owned(), text(&line)),
        ])
    }

    /// What a `.metadata` says; `None` where it is not of ours.
    ///
    /// Errors: I/O; `invalid_metadata` where the line is there and cannot be read.
    pub fn find(metadata: &dyn RangeSource) -> Result<Option<Self>> {
        let len = metadata.len().min(TAIL_BYTES);
        let mut tail = vec![0; len as usize];
        read_exact_at(metadata, &mut tail, metadata.len() - len)?;
        let Some(start) = find_last(&tail, MAGIC.as_bytes()) else { return Ok(None) };
        let line = tail.get(start..).unwrap_or_default();
        // A text of a pickle has its length before it: one byte, or four.
        let before = tail.get(..start).unwrap_or_default();
        let long = match before {
            [.., b'X', a, b, c, d] => Some(u32::from_le_bytes([*a, *b, *c, *d]) as usize),
            _ => None,
        };
        let short = match before {
            [.., 0x8c, len] => Some(*len as usize),
            _ => None,
        };
        let line = short.or(long).and_then(|len| line.get(..len));
        line.and_then(parse).map(Some).ok_or_else(|| {
            let what = "the line that names its manifest cannot be read";
            Error::new(Code::InvalidMetadata, what).at(metadata.name())
        })
    }
}

fn parse(line: &[u8]) -> Option<Seal> {
    let text = std::str::from_utf8(line).ok()?.strip_prefix(MAGIC)?;
    let mut words = text.split(' ');
    let (attempt, manifest, hash) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || hash.len() != 64 || !is_plain(manifest) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, digits) in bytes.iter_mut().zip(hash.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(Seal { attempt: attempt.parse().ok()?, manifest: manifest.to_owned(), hash: bytes })
}

/// A name in the folder: nothing that leads out of it.
fn is_plain(name: &str) -> bool {
    let odd = |c: char| c == '/' || c == '\\' || c.is_control();
    !name.is_empty() && !name.starts_with('.') && !name.contains(odd)
}

fn find_last(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).rposition(|window| window == what)
}

/// Reads `.metadata` for the commit protocol.
#[derive(Clone, Copy, Debug, Default)]
pub struct OurMetadata;

impl Identify for OurMetadata {
    fn attempt(&self, metadata: &dyn RangeSource) -> Result<Option<AttemptId>> {
        Ok(Seal::find(metadata)?.map(|seal| seal.attempt))
    }

    fn files(&self, metadata: &dyn RangeSource) -> Result<Vec<String>> {
        let mut bytes = vec![0; usize::try_from(metadata.len()).unwrap_or(usize::MAX)];
        read_exact_at(metadata, &mut bytes, 0)?;
        let parsed = forebay_format::dcp::metadata::DcpMetadata::read(&bytes)?;
        let mut files = parsed.files().to_vec();
        files.extend(Seal::find(metadata)?.map(|seal| seal.manifest));
        Ok(files)
    }
}
