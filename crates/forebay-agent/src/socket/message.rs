//! Requests and answers, as JSON in frames.

use forebay_error::{Code, Error};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a client asks for. As JSON: `{"request": "act", "action": {"action": "wake"}}`. `job` is a name, or the
/// configured job where it is left out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// How a job stands; answered with a [`Status`](forebay_tier::status::Status).
    Status {
        /// Whose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<String>,
    },
    /// The names of jobs.
    Jobs,
    /// An action, as `forebay_tier::runner::Action`; answered with its outcome.
    Act {
        /// Whose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<String>,
        /// Which.
        action: Value,
    },
    /// Something was saved: look now. Answered with nothing.
    Wake {
        /// Whose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<String>,
    },
    /// Moves what is saved in a folder, which comes as an open descriptor with the frame, to the configured tiers
    /// after the first, there below `job`. It goes on when the client is gone. Answered with its name, the folder and
    /// where copies go.
    Track {
        /// What the job is called: 1 to 64 letters, digits, `.`, `-` and `_`, the first a letter or digit.
        job: String,
    },
    /// Keeps a staged save for the case that its process dies; see [`crate::staged`]. Three descriptors come with the
    /// frame: the checkpoint folder, the memory of the tensors, the bequest. Until `let_go`, or the end of the
    /// connection, which means that the process has died. Answered with `{"step", "bytes"}`.
    Stage {
        /// What the job is called, for people.
        job: String,
    },
    /// The save that this connection has staged has ended: it is kept no more.
    LetGo,
    /// The saves that are kept, or being finished: of the folder whose descriptor comes with the frame, or all.
    /// Answered with a list of [`StagedSave`].
    Staged,
    /// Stops moving a job's steps, within one part. The folder and what is in the tiers stays.
    Untrack {
        /// Which.
        job: String,
    },
}

/// A save that is kept for its process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagedSave {
    /// The job.
    pub job: String,
    /// The step.
    pub step: u64,
    /// The attempt of the process.
    pub attempt: String,
    /// Its rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world: u32,
    /// Bytes of its memory that are kept.
    pub bytes: u64,
    /// Whether the process has died and its save is being finished.
    pub finishing: bool,
    /// Seconds since it was staged, or since the process died.
    pub seconds: f64,
    /// Bytes that were written since then.
    pub written: u64,
    /// Ranks whose saves are being finished, on any node, as far as it shows.
    pub begun: u32,
}

/// What comes back: one of both.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// It was done.
    Ok(Value),
    /// It was not.
    Error(Refusal),
}

/// An error as it crosses the socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Refusal {
    /// The stable code.
    pub(crate) code: String,
    /// What went wrong.
    pub(crate) what: String,
    /// Where.
    #[serde(default)]
    pub(crate) place: Option<String>,
    /// What to do.
    #[serde(default)]
    pub(crate) hints: Vec<String>,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        Self {
            code: error.code().as_str().to_owned(),
            what: error.what().to_owned(),
            place: error.place().map(str::to_owned),
            hints: error.hints().to_vec(),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let code = Code::ALL.iter().find(|code| code.as_str() == refusal.code);
        let mut error = Error::new(code.copied().unwrap_or(Code::Io), refusal.what);
        if let Some(place) = refusal.place {
            error = error.at(place);
        }
        refusal.hints.into_iter().fold(error, Error::hint)
    }
}

/// Whether a text may be a job's name. It becomes a folder, a label and a part of URLs.
pub(crate) fn check_name(name: &str) -> forebay_error::Result<()> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts && name.len() <= 64 && name.bytes().all(is_word) {
        return Ok(());
    }
    let what = "a job's name is 1 to 64 letters, digits, `.`, `-` and `_`, first a letter or digit";
    Err(Error::new(Code::Usage, what).at(format!("{name:.80?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_jobs_are_plain() {
        for good in ["run7", "7", "a.b-c_d"] {
            check_name(good).unwrap();
        }
        for bad in ["", ".", "..", ".a", "-a", "a/b", "a b", "é", &"x".repeat(65)] {
            assert_eq!(check_name(bad).unwrap_err().code(), Code::Usage, "{bad}");
        }
    }

    #[test]
    fn errors_cross_the_socket() {
        let error = Error::new(Code::NoSpace, "full").at("tier a").hint("make room");
        let text = serde_json::to_string(&Answer::Error(Refusal::from(&error))).unwrap();
        let Answer::Error(refusal) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
        assert_eq!(Error::from(refusal).render(), error.render());
        let ok = serde_json::to_string(&Answer::Ok(Value::Null)).unwrap();
        assert!(matches!(serde_json::from_str(&ok).unwrap(), Answer::Ok(Value::Null)), "{ok}");
    }

    #[test]
    fn unknown_requests_and_fields_are_errors() {
        let read = |text: &str| serde_json::from_str::<Request>(text);
        read(r#"{"request":"status"}"#).unwrap();
        read(r#"{"request":"wake","job":"a"}"#).unwrap();
        read(r#"{"request":"let_go"}"#).unwrap();
        for bad in [r#"{"request":"open","path":"/"}"#, r#"{"request":"track"}"#, "[]", "{}"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
