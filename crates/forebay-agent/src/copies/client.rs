//! Requests to other agents.
//!
//! Each goes over a connection of its own: an agent ends connections after a minute, and one that has just ended would
//! look like a failure. Redirections are not followed, and no proxy is asked: the token is for agents alone. It goes
//! by TLS only, to who can prove its name, or over loopback where this agent itself listens there without TLS: else
//! any user of the machine could announce a port there, and be given the token.

use std::cell::RefCell;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_checkpoint::commit::FileRef;
use forebay_error::{Code, Error, Result};
use forebay_tier::copies::{DriveId, Peer};
use hyper::body::{Body, Frame, SizeHint};
use reqwest::{RequestBuilder, Response, Url};
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{Receiver, channel};

use super::{DRIVE_HEADER, PeerSettings, TO_HEADER};
use crate::http::{Stamp, stamp};
use crate::secret::{PEER_TOKEN, read_public, read_token};
use crate::socket::message::{Answer, check_name};

/// For a connection.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// For an answer to a question.
pub(super) const ASK_TIME: Duration = Duration::from_secs(20);
/// How long the other may take nothing of a file.
const STALL_TIME: Duration = Duration::from_secs(120);
/// For an answer after the last byte: the file is being forced to the disk.
const END_TIME: Duration = Duration::from_secs(300);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// See the module.
const HTTPS_ALONE: &str = "the token of agents goes by https alone";
/// Most bytes of an answer.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// See the module. For one thread.
pub(super) struct Client {
    runtime: Runtime,
    /// And how the file of certificates was that it trusts.
    http: RefCell<Option<(Stamp, reqwest::Client)>>,
    settings: PeerSettings,
    /// Whether it may talk to loopback without TLS.
    is_plain: bool,
}

/// What another agent has of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct There {
    /// On which drive.
    pub(crate) drive: String,
    pub(crate) files: Vec<ThereFile>,
    /// Whether the step is in one place, as far as it knows.
    pub(crate) landed: bool,
    /// Bytes that it has room for; none where that is not limited.
    pub(crate) room: Option<u64>,
    /// Whether it takes no more at the moment.
    pub(crate) busy: bool,
}

/// A file there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ThereFile {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

impl There {
    pub(super) fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.name == name)
    }
}

/// What is sent.
pub(super) struct Sending<'a> {
    pub(super) to: &'a Peer,
    pub(super) step: u64,
    pub(super) file: &'a FileRef,
    pub(super) own: DriveId,
}

/// On which side something went wrong.
#[derive(Debug)]
pub(super) enum Failed {
    Here(Error),
    There(Error),
}

impl Client {
    /// `is_plain`: whether this agent listens on loopback, without TLS. Errors: no runtime.
    pub(super) fn new(settings: &PeerSettings, is_plain: bool) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::io("cannot start a runtime", error))?;
        Ok(Self { runtime, http: RefCell::default(), settings: settings.clone(), is_plain })
    }

    /// What requests go by. Certificates that were replaced are read anew; where that fails the old ones count.
    ///
    /// Errors: certificates that could never be read.
    fn http(&self) -> Result<reqwest::Client> {
        let stamp = self.settings.ca_file.as_deref().and_then(stamp);
        let mut http = self.http.borrow_mut();
        if let Some((seen, http)) = &*http
            && *seen == stamp
        {
            return Ok(http.clone());
        }
        let new = match (http_of(&self.settings), &*http) {
            (Err(error), Some((_, old))) => {
                tracing::error!(%error, "the certificates of other agents stay as they were");
                old.clone()
            }
            (made, _) => made?,
        };
        *http = Some((stamp, new.clone()));
        Ok(new)
    }

    /// What another agent has of a step, if it says so in that time.
    ///
    /// Errors: its own; it is not reached; `not_found` where somebody else answers.
    pub(super) fn files(&self, peer: &Peer, step: u64, time: Duration) -> Result<There> {
        let url = self.url_of(peer, step, None)?;
        let request = self.signed(self.http()?.get(url.clone()).timeout(time))?;
        let ask = async {
            let answer = request.send().await.map_err(|error| unreached(&url, &error))?;
            read(answer, &url).await
        };
        let found: There = self.runtime.block_on(ask)?;
        if found.drive != peer.drive.to_string() {
            let what = format!("drive {} answers there, not {}", found.drive, peer.drive);
            let error = Error::new(Code::NotFound, what).at(&url);
            return Err(error.hint("agent.peer_url of each node must lead to that node alone"));
        }
        Ok(found)
    }

    /// Sends a file, which `read` gives part by part from a thread of its own.
    pub(super) fn send(
        &self,
        what: &Sending<'_>,
        is_stopping: &dyn Fn() -> bool,
        read: impl FnOnce(&mut dyn FnMut(Vec<u8>) -> Result<()>) -> Result<()> + Send,
    ) -> std::result::Result<(), Failed> {
        let url = self.url_of(what.to, what.step, Some(&what.file.name)).map_err(Failed::There)?;
        let http = self.http().map_err(Failed::Here)?;
        let request = self.signed(http.put(url.clone())).map_err(Failed::Here)?;
        let request = request.header(DRIVE_HEADER, what.own.to_string());
        let request = request.header(TO_HEADER, what.to.drive.to_string());
        let (parts, coming) = channel::<Bytes>(1);
        let flow = Arc::new(Flow::new());
        let body = Parts { coming, left: what.file.bytes, flow: Arc::clone(&flow) };
        let request = request.body(reqwest::Body::wrap(body));
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                read(&mut |part| {
                    let ended = |_| Error::new(Code::Cancelled, "nobody takes what is read");
                    parts.blocking_send(part.into()).map_err(ended)
                })
            });
            let sent = self.runtime.block_on(put(request, &url, &flow, is_stopping));
            let panicked = |_| Err(Error::new(Code::Internal, "the reader has panicked"));
            match (reader.join().unwrap_or_else(panicked), sent) {
                (Err(error), _) if error.code() != Code::Cancelled => Err(Failed::Here(error)),
                (_, Ok(())) => Ok(()),
                (_, Err(error)) if error.code() == Code::Cancelled => Err(Failed::Here(error)),
                (_, Err(error)) => Err(Failed::There(error)),
            }
        })
    }

    fn url_of(&self, peer: &Peer, step: u64, file: Option<&str>) -> Result<Url> {
        let url = url_of(peer, step, file)?;
        match url.scheme() == "https" || self.is_plain {
            true => Ok(url),
            false => Err(Error::new(Code::Usage, HTTPS_ALONE).at(&url)),
        }
    }

    /// With the token, which is read anew: it may have been replaced.
    fn signed(&self, request: RequestBuilder) -> Result<RequestBuilder> {
        Ok(request.bearer_auth(read_token(&self.settings.token_file, PEER_TOKEN)?))
    }
}

/// Errors: a CA that cannot be read.
fn http_of(settings: &PeerSettings) -> Result<reqwest::Client> {
    // Its own cryptography for TLS, unless the process has chosen one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut http = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIME)
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(0)
        .no_proxy();
    if let Some(path) = &settings.ca_file {
        http = http.tls_certs_only(certificates(path)?);
    }
    let no = |error| Error::new(Code::Io, "cannot make an HTTP client").with_source(error);
    http.build().map_err(no)
}

async fn put(
    request: RequestBuilder,
    url: &Url,
    flow: &Flow,
    is_stopping: &dyn Fn() -> bool,
) -> Result<()> {
    let sent = async {
        let answer = request.send().await.map_err(|error| unreached(url, &error))?;
        read::<serde::de::IgnoredAny>(answer, url).await.map(drop)
    };
    let mut sent = std::pin::pin!(sent);
    loop {
        match tokio::time::timeout(LOOK, sent.as_mut()).await {
            Ok(sent) => return sent,
            Err(_) if is_stopping() => {
                return Err(Error::new(Code::Cancelled, "copies were stopped"));
            }
            Err(_) if flow.is_stuck() => {
                let what = "it takes nothing of a copy any more";
                return Err(Error::new(Code::Timeout, what).at(url));
            }
            Err(_) => {}
        }
    }
}

/// Where a request goes. Errors: `usage` for an announcement that leads nowhere, or where a token must not go.
fn url_of(peer: &Peer, step: u64, file: Option<&str>) -> Result<Url> {
    let told = &peer.told;
    check_name(&told.job)?;
    let mut url = check_url(&told.url)?;
    let file = file.map(|file| format!("/{file}")).unwrap_or_default();
    url.set_path(&format!("/api/v1/peers/{}/steps/{step}{file}", told.job));
    Ok(url)
}

/// Takes the URL of an agent. Errors: `usage` for what is none, or where a token must not go.
pub(super) fn check_url(text: &str) -> Result<Url> {
    let wrong = |what: &str| Error::new(Code::Usage, what).at(text);
    let url = Url::parse(text).map_err(|_| wrong("the URL of an agent is none"))?;
    let is_bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
    if !is_bare || !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("the URL of an agent is not https://HOST:PORT"));
    }
    let is_near = url.host_str().is_some_and(|host| {
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.to_canonical().is_loopback())
    });
    if url.scheme() != "https" && !(url.scheme() == "http" && is_near) {
        return Err(wrong(HTTPS_ALONE));
    }
    Ok(url)
}

pub(super) fn certificates(path: &std::path::Path) -> Result<Vec<reqwest::Certificate>> {
    let text = read_public(path, "the certificates of peers (agent.peer_ca_file)")?;
    let found = reqwest::Certificate::from_pem_bundle(&text).unwrap_or_default();
    match found.is_empty() {
        false => Ok(found),
        true => Err(Error::new(Code::Usage, "no certificates in PEM").at(path.display())),
    }
}

/// An error of the network. The cause says what; the URL has no secrets.
fn unreached(url: &Url, error: &reqwest::Error) -> Error {
    let mut text = String::new();
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!(": {error}");
        cause = error.source();
    }
    let code = if error.is_timeout() { Code::Timeout } else { Code::Io };
    Error::new(code, format!("the agent is not reached{text}")).at(url)
}

/// What a good answer says; the error that another one does.
async fn read<T: serde::de::DeserializeOwned>(mut answer: Response, url: &Url) -> Result<T> {
    let status = answer.status();
    let mut bytes = Vec::new();
    while let Some(part) = answer.chunk().await.map_err(|error| unreached(url, &error))? {
        bytes.extend_from_slice(&part);
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(Error::new(Code::Unsupported, "the answer is too long").at(url));
        }
    }
    if status.is_success() {
        let no = |error| Error::new(Code::Io, "the answer is none").at(url).with_source(error);
        return serde_json::from_slice(&bytes).map_err(no);
    }
    if let Ok(Answer::Error(refusal)) = serde_json::from_slice(&bytes) {
        return Err(Error::from(refusal).at(url));
    }
    let code = match status.as_u16() {
        401 | 403 => Code::PermissionDenied,
        404 => Code::NotFound,
        503 => Code::Timeout,
        _ => Code::Io,
    };
    Err(Error::new(code, format!("the agent answers {status}")).at(url))
}

/// How a file goes on its way.
struct Flow(Mutex<(Instant, Going)>);

#[derive(Clone, Copy)]
enum Going {
    /// The other is to take more.
    Sending,
    /// This side has to read more.
    Reading,
    /// All was taken.
    Sent,
}

impl Flow {
    fn new() -> Self {
        Self(Mutex::new((Instant::now(), Going::Sending)))
    }

    fn set(&self, going: Going) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Instant::now(), going);
    }

    fn is_stuck(&self) -> bool {
        let (since, going) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match going {
            Going::Sending => since.elapsed() >= STALL_TIME,
            Going::Reading => false,
            Going::Sent => since.elapsed() >= END_TIME,
        }
    }
}

/// The parts of a file as the body of a request.
struct Parts {
    coming: Receiver<Bytes>,
    left: u64,
    flow: Arc<Flow>,
}

impl Body for Parts {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        if self.left == 0 {
            self.flow.set(Going::Sent);
            return Poll::Ready(None);
        }
        match self.coming.poll_recv(context) {
            Poll::Pending => {
                self.flow.set(Going::Reading);
                Poll::Pending
            }
            Poll::Ready(Some(part)) => {
                self.left = self.left.saturating_sub(part.len() as u64);
                self.flow.set(if self.left == 0 { Going::Sent } else { Going::Sending });
                Poll::Ready(Some(Ok(Frame::data(part))))
            }
            // What was to be read could not be.
            Poll::Ready(None) => Poll::Ready(Some(Err(std::io::ErrorKind::BrokenPipe.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
