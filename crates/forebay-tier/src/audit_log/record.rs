//! One record: a line of text.

use std::time::{SystemTime, UNIX_EPOCH};

use forebay_error::{Code, Error, Result};
use forebay_format::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Most bytes of a line, its end included.
pub const LINE_BYTES_MAX: usize = 64 << 10;
/// What the first record follows.
pub(super) const GENESIS: [u8; 32] = [0; 32];
/// Digits of a hash.
const DIGITS: usize = 64;

/// What happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Who did it: user, host, process, or the token's name.
    pub who: String,
    /// What: `move`, `remove` (noted before it goes; `stay` where it did not after all), `pin`, `promote`, ...; of the
    /// log itself `torn`, `cut`, `lost`.
    pub what: String,
    /// From where the request came: a socket, an address.
    pub origin: String,
    /// The step, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The attempt that committed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<String>,
    /// The store it was in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The store that it went to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// What its bytes are known by: of a step the hash of its manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
    /// Anything else, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// An event in its place.
///
/// In the file a record is one line:
///
/// ```text
/// <hash: 64 hex digits> <JSON object>\n
/// hash   SHA-256 of the hash of the record before (32 bytes; zeros before the first) and the bytes of the JSON object
/// JSON   {"number":0,"unix_ms":1767225600000,"who":..,"what":..,"origin":.., ...}    see Event for the rest
/// ```
///
/// JSON has no line ends within it, so lines are records. Fields that a later version adds are under the hash too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Counted from 0.
    pub number: u64,
    /// When it was written, by the clock of who wrote it: milliseconds since 1970.
    pub unix_ms: u64,
    /// What happened.
    pub event: Event,
    /// Of this record and, by those, of all before.
    pub hash: [u8; 32],
}

/// The JSON object.
#[derive(Serialize, Deserialize)]
struct Line {
    number: u64,
    unix_ms: u64,
    #[serde(flatten)]
    event: Event,
}

impl Event {
    pub(super) fn torn(bytes: u64) -> Self {
        let note =
            format!("{bytes} bytes of a record that was not written to its end were removed");
        Self::of_the_log("torn", note)
    }

    /// The end of the log is gone: so many records were there, the last of this hash.
    pub(super) fn cut(records: u64, head: &[u8; 32]) -> Self {
        let head = hex(head);
        Self::of_the_log("cut", format!("the end is gone: {records}:{head} was the last record"))
    }

    fn of_the_log(what: &str, note: String) -> Self {
        let (who, what) = ("forebay".to_owned(), what.to_owned());
        Self { who, what, note: Some(note), ..Self::default() }
    }
}

pub(super) fn encode(number: u64, before: &[u8; 32], event: &Event) -> Result<(Vec<u8>, Record)> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    let line = Line { number, unix_ms, event: event.clone() };
    let json = serde_json::to_vec(&line).map_err(|error| {
        Error::new(Code::Internal, "an audit record cannot be written as JSON").with_source(error)
    })?;
    let hash = hash_of(before, &json);
    let bytes = [hex(&hash).as_bytes(), b" ", &json, b"\n"].concat();
    if bytes.len() > LINE_BYTES_MAX {
        let what =
            format!("an audit record of {} bytes, {LINE_BYTES_MAX} are the most", bytes.len());
        return Err(Error::new(Code::Unsupported, what));
    }
    Ok((bytes, Record { number, unix_ms, event: event.clone(), hash }))
}

/// Takes a line apart that must be the `number`-th and follow `before`.
pub(super) fn parse(line: &[u8], number: u64, before: &[u8; 32]) -> Result<Record> {
    let bad = |what: &str| Error::new(Code::InvalidMetadata, format!("record {number} {what}"));
    if line.len() >= LINE_BYTES_MAX {
        return Err(bad("is longer than any can be"));
    }
    let (digits, json) = line.split_at_checked(DIGITS).ok_or_else(|| bad("is no record"))?;
    let json = json.strip_prefix(b" ").ok_or_else(|| bad("is no record"))?;
    let hash = hash_of(before, json);
    if digits != hex(&hash).as_bytes() {
        let what = format!("record {number} does not follow from those before it");
        let error = Error::new(Code::Checksum, what);
        return Err(error.hint("it was changed, or a record before it was changed or removed"));
    }
    let parsed: Line = serde_json::from_slice(json)
        .map_err(|error| bad("has other fields than it must have").with_source(error))?;
    if parsed.number != number {
        return Err(bad("has another number"));
    }
    Ok(Record { number, unix_ms: parsed.unix_ms, event: parsed.event, hash })
}

fn hash_of(before: &[u8; 32], json: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(before).chain_update(json).finalize().into()
}
