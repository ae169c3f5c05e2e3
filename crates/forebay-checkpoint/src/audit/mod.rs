//! A second look at checkpoints' own files, which shares nothing with what writes and reads them.
//!
//! A fault of the writer that the reader shares is seen by neither. The auditors here are written from the
//! documentation of the formats alone: straightforward, slower, with their own parsing, arithmetic and checksums.
//! They take no part in saving or restoring; `verify` and the tests run them.

mod cover;
mod crc;
mod cursor;
mod cuts;
mod part;
mod rows;
mod sections;
mod structure;
mod tables;
mod whole;

use std::fmt;

/// Something that is not as it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Where: a section, a part, a tensor.
    pub place: String,
    /// What is wrong there.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// Findings of one audit; no more than [`MAX_FINDINGS`] are kept.
#[derive(Default)]
struct Findings(Vec<Finding>);

/// Findings that are kept: who sees so many needs no more.
pub const MAX_FINDINGS: usize = 1000;

impl Findings {
    fn add(&mut self, place: impl fmt::Display, what: impl fmt::Display) {
        if self.0.len() < MAX_FINDINGS {
            self.0.push(Finding { place: place.to_string(), what: what.to_string() });
        }
    }

    /// The value, or a finding.
    fn keep<T>(&mut self, place: impl fmt::Display, result: Result<T, String>) -> Option<T> {
        result.map_err(|what| self.add(place, what)).ok()
    }
}

/// Checks all bytes of a manifest: checksums, order and bounds of sections, sorted names, that every chunk fits its
/// tensor and its file and shares no byte with another, that every tensor is covered once, that the lists of who holds
/// what agree with the parts, and that the structure hash is that of the rows, meshes and layouts that parts refer to.
/// Empty where all is well.
///
/// `seal` is what `.metadata` says of the manifest. Memory: some hundred bytes a chunk.
pub fn check_manifest(bytes: &[u8], seal: Option<&[u8; 32]>) -> Vec<Finding> {
    let mut findings = Findings::default();
    whole::check(bytes, seal, &mut findings);
    findings.0
}
