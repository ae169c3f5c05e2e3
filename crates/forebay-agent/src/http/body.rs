//! Bodies of requests: whether they may be looked at, and no more of them than anybody needs to send.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::ORIGIN;
use hyper::{HeaderMap, Request, StatusCode};
use tokio::time::timeout;

use super::answer::{self, Answer};
use super::form;

/// Bytes of a body; an action has less than a hundred.
const BODY_BYTES_MAX: usize = 64 << 10;
/// For a body to arrive.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Browsers say where a form comes from; other clients say nothing.
pub(super) fn is_same_site(head: &HeaderMap) -> bool {
    if let Some(site) = head.get("sec-fetch-site") {
        return matches!(site.as_bytes(), b"same-origin" | b"none");
    }
    let Some(origin) = head.get(ORIGIN) else { return true };
    let host = head.get(hyper::header::HOST).map(|host| host.as_bytes()).unwrap_or_default();
    let origin = origin.as_bytes();
    let rest = origin.strip_prefix(b"https://").or_else(|| origin.strip_prefix(b"http://"));
    rest == Some(host)
}

/// The fields of a form.
pub(super) async fn form_of(
    request: Request<Incoming>,
) -> Result<Vec<(String, String)>, Box<Answer>> {
    let bytes = body_of(request).await?;
    let fields = std::str::from_utf8(&bytes).ok().and_then(form::fields);
    fields.ok_or_else(|| Box::new(answer::text(StatusCode::BAD_REQUEST, "no form\n")))
}

/// The body, if it is not too large and comes in time.
pub(super) async fn body_of(request: Request<Incoming>) -> Result<Bytes, Box<Answer>> {
    let wrong = |status, text: &str| Box::new(answer::text(status, text));
    let too_large = || wrong(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n");
    if request.body().size_hint().lower() > BODY_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect();
    match timeout(BODY_TIME, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(wrong(StatusCode::BAD_REQUEST, "the body broke off\n")),
        Err(_) => Err(wrong(StatusCode::REQUEST_TIMEOUT, "the body did not come in time\n")),
    }
}
