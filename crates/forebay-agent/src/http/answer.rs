//! Answers, with the headers that all of them have.

use bytes::Bytes;
use forebay_error::{Code, Error};
use http_body_util::Full;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION,
    REFERRER_POLICY, SET_COOKIE, STRICT_TRANSPORT_SECURITY, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::{Response, StatusCode};
use serde_json::{Value, json};

use crate::socket::message::Refusal;

/// An answer.
pub(super) type Answer = Response<Full<Bytes>>;

/// Everything from here, nothing inline, no frame around, no form elsewhere.
const POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; \
connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// An answer of a type.
pub(super) fn of(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let all = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in all {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

pub(super) fn html(status: StatusCode, page: String) -> Answer {
    of(status, HTML, page)
}

pub(super) fn text(status: StatusCode, text: impl Into<String>) -> Answer {
    of(status, TEXT, text.into())
}

pub(super) fn json(status: StatusCode, value: &Value) -> Answer {
    of(status, "application/json", format!("{value}\n"))
}

/// A file of the page, which may be kept for a while.
pub(super) fn file(kind: &'static str, text: &'static str) -> Answer {
    let mut answer = of(StatusCode::OK, kind, text);
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("max-age=300"));
    answer
}

/// To another page, by GET; sets the cookie where one is given.
pub(super) fn see(place: &str, cookie: Option<&str>) -> Answer {
    let mut answer = text(StatusCode::SEE_OTHER, "");
    if let Ok(place) = HeaderValue::from_str(place) {
        answer.headers_mut().insert(LOCATION, place);
    }
    if let Some(Ok(cookie)) = cookie.map(HeaderValue::from_str) {
        answer.headers_mut().insert(SET_COOKIE, cookie);
    }
    answer
}

/// Says that a token is needed.
pub(super) fn needs_token(mut answer: Answer) -> Answer {
    let value = HeaderValue::from_static("Bearer realm=\"forebay\"");
    answer.headers_mut().insert(WWW_AUTHENTICATE, value);
    answer
}

/// Says that this host is to be talked to by TLS alone.
pub(super) fn only_tls(answer: &mut Answer) {
    let value = HeaderValue::from_static("max-age=31536000");
    answer.headers_mut().insert(STRICT_TRANSPORT_SECURITY, value);
}

/// An error, as the API says it.
pub(super) fn error(error: &Error) -> Answer {
    error_of(status_of(error.code()), error)
}

/// The same with another status: `{"error": {"code", "what", "place", "hints"}}`.
pub(super) fn error_of(status: StatusCode, error: &Error) -> Answer {
    json(status, &json!({ "error": Refusal::from(error) }))
}

pub(super) fn status_of(code: Code) -> StatusCode {
    match code {
        Code::Usage => StatusCode::BAD_REQUEST,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::AlreadyExists | Code::LostCommit | Code::Fenced => StatusCode::CONFLICT,
        Code::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        Code::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
