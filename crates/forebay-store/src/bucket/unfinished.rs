//! Uploads that were begun and never ended: parts of writers that were killed, which no listing of objects shows and
//! which are paid for all the same.
//!
//! Only S3's interface can list them, and the crate that speaks it does not: so the request (`GET /BUCKET?uploads`) is
//! made here, through the same connection, signed by the crate with the credentials of the store. Azure drops blocks
//! that were never committed after a week by itself; for GCS there is the bucket's lifecycle rule
//! `AbortIncompleteMultipartUpload`.
//!
//! An age is the `Date` of the answer less the upload's `Initiated`, both by the server's clock.

use std::time::Duration;

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use futures_util::TryStreamExt;
use http::Method;
use object_store::Error as Raw;
use object_store::aws::{AmazonS3, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody, HttpResponseBody};
use serde::Deserialize;
use url::Url;

use super::client::Client;
use super::failure::{Failed, is_of_credentials};
use crate::object::{Age, Listed};

/// Most uploads in one answer: S3's limit.
const PAGE: &str = "1000";
/// Most bytes of an answer: a thousand uploads have keys of at most 1 KiB, escaped at worst six times as long.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Most answers that one list is made of: a server that gives one upload at a time has a thousand.
const PAGES_MAX: u32 = 1000;

/// After which upload a page begins: its key, and its id where the server told that.
type Mark = (String, Option<String>);

/// What it takes to ask S3 by hand.
pub(super) struct Uploads {
    http: HttpClient,
    /// `None`: requests are not signed.
    credentials: Option<AwsCredentialProvider>,
    region: String,
    /// The bucket's own URL.
    bucket: Url,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) key: String,
    id: String,
    age: Duration,
}

impl Unfinished {
    pub(super) fn new(key: &str, id: &str) -> Self {
        Self { key: key.to_owned(), id: id.to_owned(), age: Duration::ZERO }
    }

    /// The store's name of it.
    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_key_marker: Option<String>,
    #[serde(default)]
    next_upload_id_marker: Option<String>,
    #[serde(default, rename = "Upload")]
    uploads: Vec<Upload>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Upload {
    key: String,
    upload_id: String,
    initiated: Option<String>,
}

impl Uploads {
    pub(super) fn new(
        http: HttpClient,
        s3: &AmazonS3,
        bucket: Url,
        region: String,
        sign: bool,
    ) -> Self {
        let credentials = sign.then(|| s3.credentials().clone());
        Self { http, credentials, region, bucket }
    }

    /// One request; the body of a good answer.
    pub(super) async fn ask(&self, method: Method, url: &Url) -> object_store::Result<Vec<u8>> {
        self.ask_with(method, url, Bytes::new()).await
    }

    /// One that has a body.
    pub(super) async fn ask_with(
        &self,
        method: Method,
        url: &Url,
        body: Bytes,
    ) -> object_store::Result<Vec<u8>> {
        let mut request = HttpRequest::new(HttpRequestBody::from(body));
        *request.method_mut() = method;
        *request.uri_mut() = url.as_str().parse().map_err(generic)?;
        if let Some(provider) = &self.credentials {
            let credential = provider.get_credential().await?;
            AwsAuthorizer::new(&credential, "s3", &self.region)
                .try_authorize(&mut request, None)?;
        }
        let response = self.http.execute(request).await.map_err(generic)?;
        let status = response.status();
        let body = bounded(response.into_body()).await?;
        if status == http::StatusCode::NOT_FOUND {
            let path = url.path().to_owned();
            return Err(Raw::NotFound { path, source: said(&body).into() });
        }
        match status.is_success() {
            true => Ok(body),
            false => Err(generic(said(&body))),
        }
    }

    fn page(&self, prefix: &str, after: Option<&Mark>) -> Url {
        let mut url = self.bucket.clone();
        let mut query = url.query_pairs_mut();
        query.append_pair("uploads", "").append_pair("prefix", prefix);
        query.append_pair("max-uploads", PAGE);
        if let Some((key, id)) = after {
            query.append_pair("key-marker", key);
            if let Some(id) = id {
                query.append_pair("upload-id-marker", id);
            }
        }
        drop(query);
        url
    }

    /// The URL of an upload; `key` with the store's prefix.
    pub(super) fn of(&self, key: &str, id: &str) -> Result<Url> {
        let mut url = self.bucket.clone();
        let no_path = || Error::new(Code::Unsupported, "the store's URL takes no keys");
        url.path_segments_mut().map_err(|()| no_path())?.pop_if_empty().extend(key.split('/'));
        url.query_pairs_mut().append_pair("uploadId", id);
        Ok(url)
    }
}

pub(super) fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Raw {
    Raw::Generic { store: "S3", source: source.into() }
}

/// A body, if it is not longer than any answer; no more of it is read.
async fn bounded(body: HttpResponseBody) -> object_store::Result<Vec<u8>> {
    let (mut pieces, mut all) = (body.bytes_stream(), Vec::new());
    while let Some(piece) = pieces.try_next().await.map_err(generic)? {
        if all.len() + piece.len() > ANSWER_BYTES_MAX {
            // It would be as long the next time.
            let source = format!("an answer of more than {ANSWER_BYTES_MAX} bytes").into();
            return Err(Raw::NotSupported { source });
        }
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

/// The body of a refusal, for what is told of it to be picked from.
fn said(body: &[u8]) -> String {
    String::from_utf8_lossy(body.get(..4096).unwrap_or(body)).into_owned()
}

impl Client {
    /// Uploads whose key starts with `prefix`, relative to the store; none where the store cannot list them.
    pub(super) async fn unfinished(&self, prefix: &str, limit: usize) -> Result<Vec<Unfinished>> {
        let Some(uploads) = &self.uploads_by_hand else { return Ok(Vec::new()) };
        let below = self.full(prefix);
        let mut found = Vec::new();
        let mut after: Option<Mark> = None;
        for _ in 0..PAGES_MAX {
            let url = uploads.page(&below, after.as_ref());
            let ask = self.ask("cannot list unfinished uploads", prefix, ANSWER_BYTES_MAX as u64);
            let asked = self.retries.ask_beside(&ask, || uploads.ask(Method::GET, &url)).await;
            let (body, note) = match asked {
                Ok(answer) => answer,
                Err(failed) if is_unknown(&failed) => {
                    tracing::debug!(error = %failed.error, "unfinished uploads are not known");
                    return Ok(Vec::new());
                }
                Err(failed) => return Err(failed.into()),
            };
            let answer = self.parse(&body)?;
            for upload in answer.uploads {
                let Some(key) = self.key_of(&upload.key) else { continue };
                let age = age_of(upload.initiated.as_deref(), note.date);
                found.push(Unfinished { key, id: upload.upload_id, age });
            }
            if found.len() > limit {
                let what = format!("more than {limit} unfinished uploads");
                return Err(Error::new(Code::Unsupported, what).at(self.place(prefix)));
            }
            if !answer.is_truncated {
                return Ok(found);
            }
            let next = answer.next_key_marker.map(|key| (key, answer.next_upload_id_marker));
            // A server that gives no mark, or the same again, would be asked the same for ever.
            if next.is_none() || next == after {
                return Err(self.unlisted(prefix, "says that there are more, and not from where"));
            }
            after = next;
        }
        Err(self.unlisted(prefix, "has more pages of them than anybody reads"))
    }

    /// Where not all can be listed, none is taken for all.
    fn unlisted(&self, prefix: &str, what: &str) -> Error {
        let what = format!("unfinished uploads cannot be listed: the store {what}");
        Error::new(Code::Unsupported, what).at(self.place(prefix))
    }

    fn parse(&self, body: &[u8]) -> Result<Answer> {
        let wrong = |what: &str| {
            let what = format!("the list of unfinished uploads is not to be read: {what}");
            Error::new(Code::Io, what).at(&self.name)
        };
        let text = std::str::from_utf8(body).map_err(|_| wrong("no UTF-8"))?;
        quick_xml::de::from_str(text).map_err(|_| wrong("no XML of that kind"))
    }

    /// The bucket's key of a key.
    pub(super) fn full(&self, key: &str) -> String {
        match self.prefix.is_empty() {
            true => key.to_owned(),
            false => format!("{}/{key}", self.prefix),
        }
    }

    /// A bucket's key, relative to the store.
    fn key_of(&self, key: &str) -> Option<String> {
        match self.prefix.is_empty() {
            true => Some(key.to_owned()),
            false => Some(key.strip_prefix(&self.prefix)?.strip_prefix('/')?.to_owned()),
        }
    }

    /// Has the store forget an upload with its parts. One that is not there any more is fine.
    pub(super) async fn forget(&self, upload: &Unfinished) -> Result<()> {
        let Some(uploads) = &self.uploads_by_hand else { return Ok(()) };
        let url = uploads.of(&self.full(&upload.key), &upload.id)?;
        let ask = self.ask("cannot abort an unfinished upload", &upload.key, 0);
        match self.retries.ask_beside(&ask, || uploads.ask(Method::DELETE, &url)).await {
            Ok(_) => Ok(()),
            Err(failed) if failed.status == Some(404) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }
}

/// Servers that do not know the request; and who may write need not be let list. What is wrong with the credentials, or
/// with a clock, is told.
fn is_unknown(failed: &Failed) -> bool {
    let refused = matches!(failed.status, Some(400 | 403 | 404 | 405 | 501));
    refused && !is_of_credentials(&failed.error)
}

/// Nothing where either time is not told: then it counts as new.
fn age_of(initiated: Option<&str>, date: Option<i64>) -> Duration {
    let initiated = initiated.and_then(|text| chrono::DateTime::parse_from_rfc3339(text).ok());
    let age = initiated.zip(date).map(|(then, now)| now.saturating_sub(then.timestamp()));
    Duration::from_secs(age.and_then(|age| u64::try_from(age).ok()).unwrap_or(0))
}

impl From<Unfinished> for Listed {
    fn from(upload: Unfinished) -> Self {
        Self { key: upload.key, bytes: 0, age: Age(upload.age) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let text = r#"<?xml version="1.0" encoding="UTF-8"?>
            <ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
            <Bucket>b</Bucket><KeyMarker/><UploadIdMarker/><NextKeyMarker>k</NextKeyMarker>
            <NextUploadIdMarker>i</NextUploadIdMarker><MaxUploads>1000</MaxUploads>
            <IsTruncated>true</IsTruncated>
            <Upload><Key>a/b&amp;c</Key><UploadId>1</UploadId><Initiator><ID>x</ID></Initiator>
            <Initiated>2026-11-30T10:00:00.000Z</Initiated></Upload>
            <Upload><Key>d</Key><UploadId>2</UploadId></Upload></ListMultipartUploadsResult>"#;
        let answer: Answer = quick_xml::de::from_str(text).unwrap();
        assert!(answer.is_truncated && answer.next_key_marker.as_deref() == Some("k"));
        let keys: Vec<_> = answer.uploads.iter().map(|upload| upload.key.as_str()).collect();
        assert_eq!(keys, ["a/b&c", "d"]);
        let at = answer.uploads[0].initiated.as_deref();
        let ten = chrono::DateTime::parse_from_rfc3339("2026-11-30T10:00:07Z").unwrap().timestamp();
        assert_eq!(age_of(at, Some(ten)), Duration::from_secs(7));
        assert_eq!(age_of(at, Some(ten - 100)), Duration::ZERO, "in the future");
        assert_eq!(age_of(None, Some(ten)), Duration::ZERO);
    }
}
