//! What `.metadata` says of us: one line of text in it names the attempt and the manifest.
//!
//! The pickle of a large job takes a while to read, and all that we want of it comes last: the attribute `forebay` of
//! the metadata object, a dict with (for people and other tools) `attempt`, `manifest`, `manifest_sha256`, `version`,
//! `metadata` (see [`stamp`](super::stamp)), and `seal`, which holds the first four as one text:
//!
//! ```text
//! forebay:1 <attempt> <name of the manifest> <sha-256 of its head, 64 hex digits>
//! ```
//!
//! [`Seal::find`] looks for that text in the last 4 KiB. Whoever forges it gains nothing: the manifest must have that
//! hash, and the files the checksums that are in it.
//!
//! **Damage is never taken for somebody else's.** A line that is lost would make a checkpoint look like torch's own: it
//! would be loaded without our checksums, and its files collected. So everything in the line is compared with the same
//! in the dict, and a `.metadata` without the line is stock's only if nothing else in it is ours: no other part of the
//! dict ([`Seal::find`]), no attribute of that name, no file with a name of ours ([`refuse_ours`]).

use forebay_engine::{RangeSource, read_exact_at};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::PlainValue;
use forebay_format::dcp::metadata::DcpMetadata;
use forebay_format::hex;
use forebay_format::pickle::Limits;

use super::stamp;
use crate::commit::{AttemptId, Identify, MANIFEST_PREFIX, attempt_of_file};

/// The attribute's name.
pub(crate) const ATTRIBUTE: &str = "forebay";

const MAGIC: &str = "forebay:1 ";
/// The key of the dict that nobody else has.
const HASH_KEY: &str = "manifest_sha256";
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
    /// The attribute's value, with room for a stamp or, as the first versions wrote it, without.
    pub(crate) fn value(&self, stamped: bool) -> PlainValue {
        let text = |text: &str| PlainValue::Text(text.to_owned());
        let (attempt, hash) = (self.attempt.to_string(), hex(&self.hash));
        let line = format!("{MAGIC}{attempt} {} {hash}", self.manifest);
        let mut pairs = vec![
            ("attempt".to_owned(), text(&attempt)),
            ("manifest".to_owned(), text(&self.manifest)),
            (HASH_KEY.to_owned(), text(&hash)),
            ("version".to_owned(), PlainValue::Int(1)),
        ];
        if stamped {
            pairs.push((stamp::KEY.to_owned(), text(stamp::BLANK)));
        }
        pairs.push(("seal".to_owned(), text(&line)));
        PlainValue::Dict(pairs)
    }

    /// What a `.metadata` says; `None` where it is not of ours.
    ///
    /// Errors: I/O; `invalid_metadata` where the line cannot be read, says something else than the dict around it, or
    /// is not there while the dict is.
    pub fn find(metadata: &dyn RangeSource) -> Result<Option<Self>> {
        let len = metadata.len().min(TAIL_BYTES);
        let mut tail = vec![0; len as usize];
        read_exact_at(metadata, &mut tail, metadata.len() - len)?;
        Self::find_in(&tail).map_err(|error| error.at(metadata.name()))
    }

    fn find_in(tail: &[u8]) -> Result<Option<Self>> {
        let Some(start) = find_last(tail, MAGIC.as_bytes()) else {
            let marks = [MANIFEST_PREFIX, HASH_KEY];
            let ours = marks.iter().any(|mark| find_last(tail, mark.as_bytes()).is_some());
            return if ours { Err(unsealed()) } else { Ok(None) };
        };
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
        let Some(seal) = line.and_then(parse) else {
            let what = "the line that names its manifest cannot be read";
            return Err(Error::new(Code::InvalidMetadata, what));
        };
        let words = [seal.attempt.to_string(), seal.manifest.clone(), hex(&seal.hash)];
        if !words.iter().all(|word| has_text(before, word)) {
            let what = "the line that names its manifest does not say what is before it";
            return Err(Error::new(Code::InvalidMetadata, what));
        }
        Ok(Some(seal))
    }
}

/// The error for a `.metadata` that is ours and has no line.
fn unsealed() -> Error {
    let what = "it was written by Forebay, and the line that names its manifest is damaged";
    Error::new(Code::InvalidMetadata, what)
}

/// Fails for metadata without a seal that has anything else of ours: see the opening.
///
/// Errors: `invalid_metadata`.
pub(crate) fn refuse_ours(metadata: &DcpMetadata) -> Result<()> {
    let named = metadata.files().iter().any(|file| attempt_of_file(file).is_some());
    match named || metadata.attribute(ATTRIBUTE).is_some() {
        true => Err(unsealed()),
        false => Ok(()),
    }
}

fn parse(line: &[u8]) -> Option<Seal> {
    let text = std::str::from_utf8(line).ok()?.strip_prefix(MAGIC)?;
    let mut words = text.split(' ');
    let (attempt, manifest, hash) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || !is_plain(manifest) {
        return None;
    }
    let attempt = attempt.parse().ok()?;
    let own = manifest.starts_with(MANIFEST_PREFIX) && attempt_of_file(manifest) == Some(attempt);
    let hash = own.then(|| digest(hash)).flatten()?;
    Some(Seal { attempt, manifest: manifest.to_owned(), hash })
}

/// Of 64 digits in their one spelling.
fn digest(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    (hex(&bytes) == text).then_some(bytes)
}

/// A name in the folder: nothing that leads out of it.
fn is_plain(name: &str) -> bool {
    let odd = |c: char| c == '/' || c == '\\' || c.is_control();
    !name.is_empty() && !name.starts_with('.') && !name.contains(odd)
}

fn find_last(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).rposition(|window| window == what)
}

/// Whether a pickle has this text as a value of its own.
fn has_text(bytes: &[u8], text: &str) -> bool {
    let length = |wide: bool| match wide {
        true => [b"X".as_slice(), &(text.len() as u32).to_le_bytes()].concat(),
        false => vec![0x8c, text.len() as u8],
    };
    let has = |wide| find_last(bytes, &[&length(wide), text.as_bytes()].concat()).is_some();
    (text.len() < 256 && has(false)) || has(true)
}

/// Reads `.metadata` for the commit protocol.
#[derive(Clone, Copy, Debug, Default)]
pub struct OurMetadata;

impl Identify for OurMetadata {
    fn attempt(&self, metadata: &dyn RangeSource) -> Result<Option<AttemptId>> {
        Ok(Seal::find(metadata)?.map(|seal| seal.attempt))
    }

    /// Errors: those of [`Seal::find`]; `unsupported` above a gibibyte; those of reading the pickle; `checksum` where
    /// its bytes are not what was written; `invalid_metadata` for what is ours and does not say whose.
    fn files(&self, metadata: &dyn RangeSource) -> Result<Vec<String>> {
        let seal = Seal::find(metadata)?;
        let at = |error: Error| error.at(metadata.name());
        let bytes = read_all(metadata)?;
        stamp::check(&bytes).map_err(at)?;
        let parsed = DcpMetadata::read(&bytes).map_err(at)?;
        if seal.is_none() {
            refuse_ours(&parsed).map_err(at)?;
        }
        let mut files = parsed.files().to_vec();
        files.extend(seal.map(|seal| seal.manifest));
        Ok(files)
    }
}

/// All bytes of a pickle. Its first and last byte are looked at before memory is taken for it: a file may be said to be
/// of any length and have no bytes.
fn read_all(metadata: &dyn RangeSource) -> Result<Vec<u8>> {
    let (len, most) = (metadata.len(), Limits::METADATA.input_bytes as u64);
    let fault = |code, what: String| Err(Error::new(code, what).at(metadata.name()));
    if len > most {
        return fault(Code::Unsupported, format!("has {len} bytes, {most} is the most"));
    }
    let (mut first, mut last) = ([0], [0]);
    if len > 0 {
        read_exact_at(metadata, &mut first, 0)?;
        read_exact_at(metadata, &mut last, len - 1)?;
    }
    if (first, last) != ([0x80], [b'.']) {
        return fault(Code::InvalidMetadata, "is no pickle, or one that was cut".to_owned());
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let Some(room) = room else {
        return fault(Code::OutOfMemory, format!("no memory for {len} bytes"));
    };
    bytes.resize(room, 0);
    read_exact_at(metadata, &mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(seal: &Seal) -> Vec<u8> {
        let mut writer = forebay_format::dcp::MetadataWriter::new(Vec::new()).unwrap();
        writer.object("x").unwrap();
        writer.stored(0, 0, "00000abc-1_0_0.distcp", 0, 10).unwrap();
        let meta = forebay_format::dcp::StorageMeta::default();
        writer.finish(&meta, &[(ATTRIBUTE, seal.value(true))]).unwrap()
    }

    fn seal() -> Seal {
        let attempt: AttemptId = "00000abc-1".parse().unwrap();
        Seal { attempt, manifest: crate::commit::manifest(attempt, 0), hash: [0xa5; 32] }
    }

    #[test]
    fn a_flip_of_any_bit_leaves_the_seal_or_is_an_error() {
        let whole = tail(&seal());
        assert_eq!(Seal::find_in(&whole).unwrap(), Some(seal()));
        let mut errors = 0;
        for at in 0..whole.len() * 8 {
            let mut bad = whole.clone();
            bad[at / 8] ^= 1 << (at % 8);
            match Seal::find_in(&bad) {
                Ok(found) => assert_eq!(found, Some(seal()), "bit {at}"),
                Err(error) => {
                    assert_eq!(error.code(), Code::InvalidMetadata, "bit {at}");
                    errors += 1;
                }
            }
        }
        // Of the line, and of the same once more: attempts, names, hashes.
        assert!(errors > 8 * 2 * (10 + 29 + 64), "{errors}");
    }

    #[test]
    fn a_line_names_the_manifest_of_its_own_attempt() {
        let hash = "a5".repeat(32);
        let read = |attempt: &str, manifest: &str, hash: &str| {
            parse(format!("{MAGIC}{attempt} {manifest} {hash}").as_bytes())
        };
        assert_eq!(read("00000abc-1", "forebay.manifest-00000abc-1_0", &hash), Some(seal()));
        assert_eq!(read("00000abd-1", "forebay.manifest-00000abc-1_0", &hash), None);
        assert_eq!(read("00000abc-1", "00000abc-1_0", &hash), None);
        assert_eq!(read("00000abc-1", "forebay.manifest-00000abc-1_0", &hash.to_uppercase()), None);
        assert_eq!(read("00000abc-1", "forebay.manifest-00000abc-1_0", &hash[2..]), None);
    }

    struct Sparse(u64);

    impl RangeSource for Sparse {
        fn name(&self) -> String {
            "sparse".to_owned()
        }

        fn len(&self) -> u64 {
            self.0
        }

        fn read_at(&self, into: &mut [u8], _: u64) -> std::io::Result<usize> {
            assert!(into.len() <= 4096, "{} bytes", into.len());
            into.fill(0);
            Ok(into.len())
        }

        fn check_unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_memory_is_taken_on_the_word_of_a_length() {
        let code = |len| OurMetadata.files(&Sparse(len)).unwrap_err().code();
        assert_eq!(code(1 << 62), Code::Unsupported);
        assert_eq!(code(1 << 29), Code::InvalidMetadata);
    }
}
