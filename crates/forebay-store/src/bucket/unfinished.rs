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
use http::Method;
use object_store::Error as Raw;
use object_store::aws::{AmazonS3, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use serde::Deserialize;
use url::Url;

use super::client::Client;
use crate::object::{Age, Listed};

/// Most uploads in one answer: S3's limit.
const PAGE: &str = "1000";
/// Most bytes of an answer: a thousand uploads have keys of at most 1 KiB, escaped at worst six times as long.
const ANSWER_BYTES_MAX: usize = 16 << 20;

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
        let body = response.into_body().bytes().await.map_err(generic)?;
        if body.len() > ANSWER_BYTES_MAX {
            return Err(generic("an answer that is too long"));
        }
        if status == http::StatusCode::NOT_FOUND {
            let path = url.path().to_owned();
            return Err(Raw::NotFound { path, source: said(&body).into() });
        }
        match status.is_success() {
            true => Ok(body.to_vec()),
            false => Err(generic(said(&body))),
        }
    }

    fn page(&self, prefix: &str, after: Option<&(String, String)>) -> Url {
        let mut url = self.bucket.clone();
        let mut query = url.query_pairs_mut();
        query.append_pair("uploads", "").append_pair("prefix", prefix);
        query.append_pair("max-uploads", PAGE);
        if let Some((key, id)) = after {
            query.append_pair("key-marker", key).append_pair("upload-id-marker", id);
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
        let mut after: Option<(String, String)> = None;
        loop {
            let url = uploads.page(&below, after.as_ref());
            let ask = self.ask("cannot list unfinished uploads", prefix, ANSWER_BYTES_MAX as u64);
            let asked = self.retries.ask(&ask, || uploads.ask(Method::GET, &url)).await;
            let (body, note) = match asked {
                Ok(answer) => answer,
                // Servers that do not know the request; and who may write need not be let list.
                Err(failed) if matches!(failed.status, Some(400 | 403 | 404 | 405 | 501)) => {
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
            let next = answer.next_key_marker.zip(answer.next_upload_id_marker);
            // A server that gives the same mark again would be asked for ever.
            after = match next.filter(|next| answer.is_truncated && after.as_ref() != Some(next)) {
                Some(next) => Some(next),
                None => return Ok(found),
            };
        }
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
        match self.retries.ask(&ask, || uploads.ask(Method::DELETE, &url)).await {
            Ok(_) => Ok(()),
            Err(failed) if failed.status == Some(404) => Ok(()),
            Err(failed) => Err(failed.into()),
        }
    }
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
