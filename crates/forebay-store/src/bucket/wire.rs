//! What is seen of each request on the wire, below the crate that makes it.
//!
//! Every HTTP request of a store passes through [`Wire`]. It notes for the call that it belongs to ([`note`]) what
//! the layers above would hide: the status, the server's `Date` (ages are told by that clock), `Retry-After`, and
//! whether a connection or the server failed. Where a checksum was sent and one came back, it compares them: an upload
//! whose bytes the server read differently fails here, whatever its status says. Bodies and headers are never logged.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_error::Result;
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpRequestBody, HttpResponse, HttpService, ReqwestConnector,
};

use super::dial::Dial;

/// Checksums that S3 compares and gives back; base64 of a CRC-64/NVME or SHA-256.
const CHECKSUMS: [&str; 2] = ["x-amz-checksum-crc64nvme", "x-amz-checksum-sha256"];
/// Longest wait that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// What the last request of a call met.
#[derive(Clone, Debug, Default)]
pub(super) struct Note {
    /// Requests to the store so far.
    pub(super) requests: u32,
    /// Status of the last response, credentials' services left out.
    pub(super) status: Option<u16>,
    /// Seconds since 1970 by the server's clock, of the last response.
    pub(super) date: Option<i64>,
    pub(super) retry_after: Option<Duration>,
    /// The last request got no response: why.
    pub(super) transport: Option<HttpErrorKind>,
    /// A service that gives credentials did not answer, or said no.
    pub(super) credentials: bool,
    /// Whether a checksum came back; and whether it was another one than was sent.
    pub(super) checksum: Option<bool>,
}

tokio::task_local! {
    static NOTE: Arc<Mutex<Note>>;
}

/// Runs a future and gives what its requests met.
pub(super) async fn note<T>(future: impl Future<Output = T>) -> (T, Note) {
    let shared = Arc::new(Mutex::new(Note::default()));
    let result = NOTE.scope(Arc::clone(&shared), future).await;
    let note = shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (result, note)
}

fn with_note(change: impl FnOnce(&mut Note)) {
    // Requests that nobody waits for, such as those that renew a token, have no note.
    let _ = NOTE.try_with(|note| change(&mut note.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Put into a request's extensions: these bytes are sent instead of those that the checksum is of. For the probe.
#[derive(Clone)]
pub(super) struct Tampered(pub(super) Bytes);

/// Makes the clients of a store.
#[derive(Debug)]
pub(super) struct Connector {
    /// Tells requests to the store from those for credentials: it is in the URL of the former.
    bucket: String,
    /// What requests to the store go through, where it is another client.
    bound: Option<HttpClient>,
}

impl Connector {
    pub(super) fn new(bucket: &str, dial: &Dial) -> Result<Self> {
        Ok(Self { bucket: bucket.to_owned(), bound: dial.bound()? })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        let of_store = self.bound.clone().unwrap_or_else(|| inner.clone());
        Ok(HttpClient::new(Wire { inner, of_store, bucket: self.bucket.clone() }))
    }
}

#[derive(Debug)]
struct Wire {
    /// For credentials.
    inner: HttpClient,
    of_store: HttpClient,
    bucket: String,
}

/// Whether a URL has the bucket's name in its place: at the start of the host, or as a part of the path, where the
/// crate writes all but letters and digits as `%2D` for GCS.
fn names_bucket(url: &http::Uri, bucket: &str) -> bool {
    let in_host = url.host().and_then(|host| host.strip_prefix(bucket));
    let escaped = bucket.bytes().map(|byte| match byte.is_ascii_alphanumeric() {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    let escaped: String = escaped.collect();
    in_host.is_some_and(|rest| rest.starts_with('.'))
        || url.path().split('/').any(|part| part == bucket || part == escaped)
}

#[derive(Debug)]
struct Differs;

impl std::fmt::Display for Differs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the checksum that came back is not the one that was sent")
    }
}

impl std::error::Error for Differs {}

type Answer = std::result::Result<HttpResponse, HttpError>;

#[async_trait]
impl HttpService for Wire {
    async fn call(&self, mut request: HttpRequest) -> Answer {
        let of_store = names_bucket(request.uri(), &self.bucket);
        if let Some(Tampered(bytes)) = request.extensions().get::<Tampered>().cloned() {
            *request.body_mut() = HttpRequestBody::from(bytes);
        }
        let sent = CHECKSUMS.map(|name| request.headers().get(name).cloned());
        let client = if of_store { &self.of_store } else { &self.inner };
        let answer = client.execute(request).await;
        if !of_store {
            let refused = answer.as_ref().map_or(true, |response| !response.status().is_success());
            with_note(|note| note.credentials = refused);
            return answer;
        }
        let response = match answer {
            Ok(response) => response,
            Err(error) => {
                with_note(|note| note.unanswered(error.kind()));
                return Err(error);
            }
        };
        let returned = CHECKSUMS.map(|name| response.headers().get(name).cloned());
        let mut pairs = sent.iter().zip(&returned).filter(|(sent, _)| sent.is_some());
        let same = pairs.find_map(|(sent, back)| back.as_ref().map(|_| sent == back));
        with_note(|note| note.answered(&response, same));
        match same {
            Some(false) if response.status().is_success() => {
                Err(HttpError::new(HttpErrorKind::Decode, Differs))
            }
            _ => Ok(response),
        }
    }
}

impl Note {
    fn unanswered(&mut self, kind: HttpErrorKind) {
        self.requests += 1;
        (self.status, self.retry_after) = (None, None);
        self.transport = Some(kind);
    }

    fn answered(&mut self, response: &HttpResponse, same: Option<bool>) {
        let header = |name: http::HeaderName| response.headers().get(name)?.to_str().ok();
        self.requests += 1;
        self.status = Some(response.status().as_u16());
        self.transport = None;
        self.date = header(http::header::DATE).and_then(seconds).or(self.date);
        let wait = header(http::header::RETRY_AFTER).and_then(|text| text.parse().ok());
        self.retry_after = wait.map(|wait| Duration::from_secs(wait).min(RETRY_AFTER_MAX));
        self.checksum = same.or(self.checksum);
    }
}

/// Of an HTTP date.
fn seconds(text: &str) -> Option<i64> {
    chrono::DateTime::parse_from_rfc2822(text).ok().map(|date| date.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_to_a_bucket_are_told_from_those_for_credentials() {
        let is = |url: &str, bucket| names_bucket(&url.parse().unwrap(), bucket);
        for url in [
            "https://s3.eu-central-1.amazonaws.com/my-b.x/a/b?list-type=2",
            "https://my-b.x.s3.eu-central-1.amazonaws.com/a",
            "https://storage.googleapis.com/my%2Db%2Ex/a",
            "http://127.0.0.1:1/devstoreaccount1/my-b.x",
        ] {
            assert!(is(url, "my-b.x"), "{url}");
        }
        let credentials = "http://169.254.169.254/latest/meta-data/iam/security-credentials/r";
        for bucket in ["a", "iam-", "security"] {
            assert!(!is(credentials, bucket), "{bucket}");
        }
        assert!(!is("https://oauth2.googleapis.com/token", "oauth"));
    }

    #[test]
    fn dates_are_read() {
        assert_eq!(seconds("Thu, 01 Jan 1970 00:01:00 GMT"), Some(60));
        assert_eq!(seconds("yesterday"), None);
    }
}
