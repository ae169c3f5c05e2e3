//! From what a store said to what it means, and to an error that tells no secret.
//!
//! Answers of servers may repeat what was sent: S3 puts access keys and the text that was signed, tokens included, into
//! the body of a refusal. So an error names the status, and the server's own code and message cut short; nothing else.

use std::error::Error as StdError;

use forebay_error::{Code, Error};
use object_store::Error as Raw;

use super::place::Provider;
use super::wire::Note;

/// Most characters of a server's text that are told.
const TEXT_MAX: usize = 200;

/// What a request's failure means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// There is no such object.
    NotFound,
    /// An object is there and none should be, or it is not in the state that was asked for.
    Precondition,
    /// It may go better next time.
    Transient {
        /// The store has too much to do, or did not answer in time.
        slow: bool,
    },
    /// It will not.
    Permanent,
}

/// A request that failed for good.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) kind: Kind,
    /// Some try may have been carried out without our hearing of it.
    pub(super) unsure: bool,
    /// Status of the last answer; `None` where there was none.
    pub(super) status: Option<u16>,
    pub(super) error: Error,
}

impl Failed {
    /// One that was found out here.
    pub(super) fn permanent(error: Error) -> Self {
        Self { kind: Kind::Permanent, unsure: false, status: None, error }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// What a failure means.
pub(super) fn kind_of(raw: &Raw, note: &Note, provider: Option<Provider>) -> Kind {
    let status = note.status.unwrap_or(0);
    match raw {
        Raw::NotFound { .. } if names_bucket(raw) => Kind::Permanent,
        Raw::NotFound { .. } => Kind::NotFound,
        // S3 says so to who writes a key at the same moment as somebody else, and asks for another try.
        Raw::AlreadyExists { .. } if status == 409 && provider == Some(Provider::S3) => {
            Kind::Transient { slow: false }
        }
        Raw::AlreadyExists { .. } | Raw::Precondition { .. } | Raw::NotModified { .. } => {
            Kind::Precondition
        }
        Raw::Generic { .. } if note.requests == 0 => Kind::Permanent,
        Raw::Generic { .. } => match status {
            429 | 503 => Kind::Transient { slow: true },
            // A server that does not know the request will not know it later.
            501 | 505 => Kind::Permanent,
            408 | 500.. => Kind::Transient { slow: false },
            400..=499 if is_damage(raw) => Kind::Transient { slow: false },
            300..=499 => Kind::Permanent,
            _ => Kind::Transient { slow: false },
        },
        _ => Kind::Permanent,
    }
}

/// Whether a refusal says that bytes were damaged or lost on their way.
fn is_damage(raw: &Raw) -> bool {
    let code = told(&raw.to_string(), "<Code>", "</Code>");
    let damage = ["BadDigest", "InvalidDigest", "IncompleteBody", "RequestTimeout"];
    code.is_some_and(|code| {
        damage.contains(&code.as_str()) || code.starts_with("XAmzContent") || code == "Md5Mismatch"
    })
}

fn names_bucket(raw: &Raw) -> bool {
    let text = raw.to_string();
    ["NoSuchBucket", "ContainerNotFound", "The specified bucket"].iter().any(|w| text.contains(w))
}

/// The error for whoever called; `what` says what could not be done.
pub(super) fn error_of(what: &str, raw: &Raw, note: &Note, tries: u32) -> Error {
    let mut said = said(raw, note);
    if tries > 1 {
        said.push_str(&format!(", {tries} tries"));
    }
    let error = Error::new(code_of(raw, note), format!("{what}: {said}"));
    match hint_of(raw, note) {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// Whether a store does not take the credentials, or not for this.
pub(super) fn is_refusal(raw: &Raw, note: &Note) -> bool {
    let expired = || {
        let code = told(&raw.to_string(), "<Code>", "</Code>");
        code.is_some_and(|code| code.starts_with("ExpiredToken") || code == "InvalidAccessKeyId")
    };
    match note.status {
        Some(401 | 403) => true,
        Some(400) => expired(),
        _ => false,
    }
}

/// Whether a refusal is of the credentials, by the store's own code for it, and not of a permission that is lacking.
pub(super) fn is_of_credentials(error: &Error) -> bool {
    let codes = [
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "InvalidSecurity",
        "RequestTimeTooSkewed",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    ];
    codes.iter().any(|code| error.what().contains(code))
}

fn code_of(raw: &Raw, note: &Note) -> Code {
    use object_store::client::HttpErrorKind as Kind;
    match (raw, note.status) {
        _ if note.credentials => Code::PermissionDenied,
        (Raw::NotFound { .. }, _) => Code::NotFound,
        (Raw::AlreadyExists { .. }, _) => Code::AlreadyExists,
        (Raw::PermissionDenied { .. } | Raw::Unauthenticated { .. }, _) | (_, Some(401 | 403)) => {
            Code::PermissionDenied
        }
        (Raw::NotSupported { .. } | Raw::NotImplemented { .. }, _) | (_, Some(405 | 501)) => {
            Code::Unsupported
        }
        (Raw::InvalidPath { .. }, _) => Code::UnsafePath,
        (_, Some(507)) => Code::NoSpace,
        (_, None) if note.transport == Some(Kind::Timeout) => Code::Timeout,
        _ => Code::Io,
    }
}

fn said(raw: &Raw, note: &Note) -> String {
    let text = raw.to_string();
    if note.checksum == Some(false) {
        return "the checksum that came back is not the one that was sent".to_owned();
    }
    if note.credentials {
        return "no credentials were to be had".to_owned();
    }
    let Some(status) = note.status.filter(|status| !(200..300).contains(status)) else {
        return shortened(&deepest(raw));
    };
    let code = told(&text, "<Code>", "</Code>").or_else(|| told(&text, "\"reason\": \"", "\""));
    let message =
        told(&text, "<Message>", "</Message>").or_else(|| told(&text, "\"message\": \"", "\""));
    let mut said = format!("the store says {status}");
    for part in [code, message].into_iter().flatten() {
        said.push_str(if said.contains(' ') && said.ends_with(char::is_numeric) {
            " "
        } else {
            ": "
        });
        said.push_str(&part);
    }
    said
}

fn hint_of(raw: &Raw, note: &Note) -> Option<&'static str> {
    let text = raw.to_string();
    let code = told(&text, "<Code>", "</Code>").unwrap_or_default();
    match (code.as_str(), note.status) {
        _ if note.credentials => Some(
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the provider's own",
        ),
        ("ExpiredToken" | "ExpiredTokenException", _) => {
            Some("the credentials have expired: log in again")
        }
        ("RequestTimeTooSkewed", _) => Some("this machine's clock is wrong"),
        ("InvalidAccessKeyId" | "SignatureDoesNotMatch", _) => {
            Some("the credentials are not this store's")
        }
        ("NoSuchBucket" | "ContainerNotFound", _) => {
            Some("make the bucket first: Forebay makes none")
        }
        (
            "PermanentRedirect"
            | "AuthorizationHeaderMalformed"
            | "IllegalLocationConstraintException",
            _,
        )
        | (_, Some(301 | 307)) => Some("the bucket is in another region: set the region"),
        (_, Some(429 | 503)) => Some("the store is overloaded: fewer requests at once help"),
        (_, Some(403)) => {
            Some("the credentials lack a permission: to get, put, delete and list objects")
        }
        _ => None,
    }
}

/// The cause below all others. Only for failures without an answer: an answer's body is not told whole.
fn deepest(raw: &Raw) -> String {
    let mut error: &dyn StdError = raw;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// What is between two marks.
fn told(text: &str, from: &str, to: &str) -> Option<String> {
    let (_, rest) = text.split_once(from)?;
    let (inside, _) = rest.split_once(to)?;
    (!inside.is_empty()).then(|| shortened(inside))
}

fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(TEXT_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(TEXT_MAX).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(body: &str) -> Raw {
        Raw::Generic { store: "S3", source: body.to_owned().into() }
    }

    fn answered(status: u16) -> Note {
        Note { requests: 1, status: Some(status), ..Note::default() }
    }

    #[test]
    fn a_refusal_tells_code_and_message_and_no_secret() {
        let body = "<Error><Code>SignatureDoesNotMatch</Code><Message>no match</Message>\
                    <AWSAccessKeyId>AKIASECRET</AWSAccessKeyId><CanonicalRequest>token\
                    </CanonicalRequest></Error>";
        let error = error_of("cannot put", &raw(body), &answered(403), 1);
        assert_eq!(error.code(), Code::PermissionDenied);
        assert_eq!(error.what(), "cannot put: the store says 403 SignatureDoesNotMatch: no match");
        assert!(!error.render().contains("SECRET") && !error.render().contains("token"));
    }

    #[test]
    fn what_may_get_better_is_told_from_what_will_not() {
        let kind = |body: &str, status| kind_of(&raw(body), &answered(status), Some(Provider::S3));
        assert_eq!(kind("", 503), Kind::Transient { slow: true });
        assert_eq!(kind("", 500), Kind::Transient { slow: false });
        assert_eq!(kind("", 501), Kind::Permanent, "not implemented");
        assert_eq!(kind("<Code>BadDigest</Code>", 400), Kind::Transient { slow: false });
        assert_eq!(kind("<Code>InvalidArgument</Code>", 400), Kind::Permanent);
        assert_eq!(kind("", 206), Kind::Transient { slow: false }, "a body that broke off");
        assert_eq!(kind_of(&raw(""), &Note::default(), None), Kind::Permanent);
    }
}
