//! The records of the protocol. Each is JSON in a [frame](super::frame); unknown fields are ignored, so that a newer
//! writer may add some within a version.

use forebay_error::{Code, Error, Result};
use forebay_store::Version;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::frame;
use super::marks::{Hold, Pin};

/// Most bytes of each text in a [`Failure`], so that it always fits the room that was set aside for it.
const TEXT_BYTES_MAX: usize = 360;
/// Most hints of a [`Failure`].
const HINTS_MAX: usize = 3;

/// A kind of record.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// Its number in the frame.
    const KIND: u16;
    /// What errors call it.
    const NAME: &'static str;
}

macro_rules! records {
    ($($kind:literal $name:literal $record:ty;)+) => {
        $(impl Record for $record {
            const KIND: u16 = $kind;
            const NAME: &'static str = $name;
        })+
    };
}

records! {
    1 "begin record" Begin;
    2 "part record" PartHead;
    3 "counter" Beat;
    4 "decision" Decision;
    5 "outcome" Outcome;
    6 "epoch" EpochClaim;
    7 "notice" Notice;
    8 "pin" Pin;
    9 "hold" Hold;
}

/// The bytes of a record with `body` after it. Errors: `unsupported` if it is too large.
pub(crate) fn encode<R: Record>(record: &R, body: &[u8]) -> Result<Vec<u8>> {
    let head = serde_json::to_vec(record).map_err(|error| {
        let what = format!("cannot write a {}", R::NAME);
        Error::new(Code::Internal, what).with_source(error)
    })?;
    frame::seal(R::KIND, &head, body)
}

/// A record and its body from bytes; `None` where there is only room for it.
pub(crate) fn decode<R: Record>(bytes: &[u8]) -> Result<Option<(R, &[u8])>> {
    let Some(frame) = frame::open(R::KIND, bytes)? else { return Ok(None) };
    let record = serde_json::from_slice(frame.head).map_err(|error| {
        let what = format!("the {} has other fields than it must have", R::NAME);
        Error::new(Code::InvalidMetadata, what).with_source(error)
    })?;
    Ok(Some((record, frame.body)))
}

/// A rank takes part in an attempt. As long as this record is there the rank may publish; removing it takes that right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) attempt: String,
    pub(crate) step: u64,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) structure: String,
    pub(crate) epoch: u64,
    pub(crate) parent: Option<u64>,
    /// Host and process, for people.
    pub(crate) who: String,
    /// Random, so that a second writer under the same identity is told from a reply that got lost.
    pub(crate) nonce: u64,
    /// What was at the commit point when rank 0 began: an overwrite replaces this and nothing else.
    pub(crate) base: Option<Base>,
}

/// A commit that is to be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    /// The store's version of `.metadata`.
    pub(crate) version: Vec<u8>,
    /// Whose it is, where Forebay wrote it.
    pub(crate) attempt: Option<String>,
}

impl Base {
    pub(crate) fn version(&self) -> Version {
        Version(self.version.clone())
    }
}

/// In front of what a rank contributes: must agree with every other rank's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartHead {
    pub(crate) attempt: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) structure: String,
    pub(crate) epoch: u64,
}

/// A counter that its owner bumps while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Beat {
    pub(crate) rank: u32,
    pub(crate) count: u64,
}

/// One file that a commit refers to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Its name in the step's folder.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
}

/// What an attempt commits: written before the commit point, and from then on the record of the commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Commit {
    pub(crate) attempt: String,
    pub(crate) step: u64,
    /// The committer: its `metadata-<by>` is the one source that may be published.
    pub(crate) by: u32,
    pub(crate) world: u32,
    pub(crate) structure: String,
    pub(crate) epoch: u64,
    pub(crate) parent: Option<u64>,
    pub(crate) base: Option<Base>,
    pub(crate) manifest: String,
    /// Every file that the commit needs, the manifest included.
    pub(crate) files: Vec<FileRef>,
    pub(crate) metadata_bytes: u64,
}

/// Made once per attempt, by an atomic create: after a commit decision nothing can fail but the publication itself,
/// after an abort nothing of the attempt can ever be published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Decision {
    /// All parts are there; the source is staged.
    Commit(Commit),
    /// Given up.
    Abort(Failure),
}

/// How a commit decision ended, for ranks that look later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// `.metadata` is this attempt's.
    Committed {
        /// Whether the store could promise that it survives a loss of power.
        durable: bool,
    },
    /// It is not and will not be.
    Failed(Failure),
}

/// A writer of a checkpoint root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpochClaim {
    pub(crate) epoch: u64,
    pub(crate) run: u32,
    /// Where it goes on: the step that it restored, and the epoch of that step (0: unknown).
    pub(crate) parent: Option<(u64, u64)>,
    /// Which save of its run that step was, where it is Forebay's. Earlier writers did not record it.
    #[serde(default)]
    pub(crate) parent_save: Option<u32>,
    pub(crate) who: String,
    pub(crate) nonce: u64,
}

/// News of an attempt, as a hint: see [`super::hints`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    /// Which attempt, again: a key-value store may mix up its keys.
    pub(crate) attempt: String,
    /// Why it failed; `None`: something is decided.
    pub(crate) failure: Option<Failure>,
}

/// An error as it travels between ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that met it; `None` where it is nobody's (a collector gave the attempt up).
    pub rank: Option<u32>,
    /// The stable code.
    pub code: String,
    /// What went wrong.
    pub what: String,
    /// Where.
    pub place: Option<String>,
    /// What to do.
    pub hints: Vec<String>,
}

impl Failure {
    /// What `rank` tells the others about its error; long texts are cut.
    pub fn of(rank: u32, error: &Error) -> Self {
        let mut failure = Self::new(error.code(), error.what());
        failure.rank = Some(rank);
        failure.place = error.place().map(cut);
        failure.hints = error.hints().iter().take(HINTS_MAX).map(|hint| cut(hint)).collect();
        failure
    }

    pub(crate) fn new(code: Code, what: &str) -> Self {
        let code = code.as_str().to_owned();
        Self { rank: None, code, what: cut(what), place: None, hints: Vec::new() }
    }

    /// The error that every rank gets.
    pub fn to_error(&self) -> Error {
        let known = Code::ALL.iter().find(|code| code.as_str() == self.code);
        let what = match self.rank {
            Some(rank) => format!("the save failed on rank {rank}: {}", self.what),
            None => self.what.clone(),
        };
        let mut error = Error::new(known.copied().unwrap_or(Code::Io), what);
        if let Some(place) = &self.place {
            error = error.at(place);
        }
        self.hints.iter().fold(error, |error, hint| error.hint(hint))
    }
}

fn cut(text: &str) -> String {
    // Without control characters JSON writes a byte as two at the most.
    let printable = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    let mut kept = String::new();
    for char in printable {
        if kept.len() + char.len_utf8() > TEXT_BYTES_MAX {
            kept.push('…');
            break;
        }
        kept.push(char);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commit::attempt::FAIL_ROOM_BYTES;

    #[test]
    fn failures_travel_with_code_place_and_hints_and_fit_their_room() {
        let error = Error::new(Code::NoSpace, "cannot write").at("x.distcp").hint("free some");
        let failure = Failure::of(3, &error);
        let bytes = encode(&Decision::Abort(failure.clone()), &[]).unwrap();
        let (read, _) = decode::<Decision>(&bytes).unwrap().unwrap();
        assert_eq!(read, Decision::Abort(failure.clone()));
        let shown = failure.to_error();
        assert_eq!(shown.code(), Code::NoSpace);
        assert_eq!(shown.place(), Some("x.distcp"));
        assert_eq!(shown.hints(), ["free some"]);
        assert!(shown.what().contains("rank 3"));

        let mut huge = Error::new(Code::Io, "\u{1}\"\\é".repeat(9999)).at("\"".repeat(9999));
        for _ in 0..9 {
            huge = huge.hint("\\".repeat(9999));
        }
        let abort = Decision::Abort(Failure::of(u32::MAX, &huge));
        assert!(encode(&abort, &[]).unwrap().len() as u64 <= FAIL_ROOM_BYTES);
    }

    #[test]
    fn a_code_of_a_newer_version_is_still_an_error() {
        let mut failure = Failure::new(Code::Io, "x");
        failure.code = "not_invented_yet".to_owned();
        assert_eq!(failure.to_error().code(), Code::Io);
    }

    #[test]
    fn a_record_with_other_fields_is_named() {
        let bytes = frame::seal(Beat::KIND, b"{\"rank\":1}", &[]).unwrap();
        let error = decode::<Beat>(&bytes).unwrap_err();
        assert_eq!(error.code(), Code::InvalidMetadata);
        assert!(error.what().contains("counter"));
    }
}
