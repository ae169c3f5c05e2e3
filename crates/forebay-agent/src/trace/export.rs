//! Sends spans to a collector, from a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use tokio::runtime::{Builder, Runtime};

use super::layer::{Span, SpanLayer};
use super::otlp;
use crate::metrics::Counts;

/// Spans that wait; a hop ends every few seconds at most.
const QUEUE_MAX: usize = 2048;
/// Spans of a request.
const BATCH_MAX: usize = 256;
/// How long spans are collected for one.
const BATCH_TIME: Duration = Duration::from_secs(2);
/// For a request.
const SEND_TIME: Duration = Duration::from_secs(5);
/// Tries of a request, and the pause after the first; it doubles.
const TRIES: u32 = 3;
/// See there.
const PAUSE: Duration = Duration::from_millis(500);

/// The thread that sends; [`finish`](Self::finish), or dropping it, sends what is left.
pub struct Exporter {
    thread: Option<JoinHandle<()>>,
    ended: Arc<AtomicBool>,
}

impl Exporter {
    /// Starts one for a collector at a base URL (`/v1/traces` is added), and gives the layer that fills it.
    ///
    /// Errors: `usage` for no URL of HTTP; no thread.
    pub fn start(endpoint: &str, counts: Arc<Counts>) -> Result<(Self, SpanLayer)> {
        let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let unusable = || {
            Error::new(Code::Usage, "no URL of a collector")
                .at("agent.otlp_endpoint")
                .hint("as in http://localhost:4318")
        };
        let url = reqwest::Url::parse(&url).map_err(|error| unusable().with_source(error))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(unusable());
        }
        // Its own cryptography for TLS, unless the process has chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(SEND_TIME).build().map_err(|error| {
            Error::new(Code::Io, "cannot make an HTTP client").with_source(error)
        })?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::io("cannot start a runtime", error))?;
        let (sender, receiver): (SyncSender<Span>, _) = sync_channel(QUEUE_MAX);
        let ended = Arc::new(AtomicBool::new(false));
        let sending = Sending { url, client, runtime, counts: Arc::clone(&counts), host: host() };
        let flag = Arc::clone(&ended);
        let thread = std::thread::Builder::new().name("forebay-traces".to_owned());
        let thread = thread.spawn(move || sending.run(&receiver, &flag));
        let thread = thread.map_err(|error| Error::io("cannot start a thread", error))?;
        Ok((Self { thread: Some(thread), ended }, SpanLayer::new(sender, counts)))
    }

    /// Sends what is left, for a few seconds at most.
    pub fn finish(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that sends traces has panicked");
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.finish();
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

struct Sending {
    url: reqwest::Url,
    client: reqwest::Client,
    runtime: Runtime,
    counts: Arc<Counts>,
    host: String,
}

impl Sending {
    fn run(&self, from: &Receiver<Span>, ended: &AtomicBool) {
        loop {
            let is_last = ended.load(Ordering::Relaxed);
            let (batch, is_closed) = collect(from, is_last);
            if !batch.is_empty() {
                self.send(&batch, if is_last { 1 } else { TRIES });
            }
            if is_closed || (is_last && batch.len() < BATCH_MAX) {
                return;
            }
        }
    }

    fn send(&self, batch: &[Span], tries: u32) {
        let body = otlp::request(&self.host, batch).to_string();
        let mut pause = PAUSE;
        for attempt in 1..=tries {
            let request = self
                .client
                .post(self.url.clone())
                .header("content-type", "application/json")
                .body(body.clone());
            let sent = self.runtime.block_on(async { request.send().await });
            match sent.and_then(reqwest::Response::error_for_status) {
                Ok(_) => return,
                Err(error) => tracing::debug!(error = %error.without_url(), attempt, "not sent"),
            }
            if attempt < tries {
                std::thread::sleep(pause);
                pause *= 2;
            }
        }
        self.counts.spans_lost.fetch_add(batch.len() as u64, Ordering::Relaxed);
    }
}

/// The spans of the next request; whether there will be no more.
fn collect(from: &Receiver<Span>, is_last: bool) -> (Vec<Span>, bool) {
    let mut batch = Vec::new();
    let until = Instant::now() + if is_last { Duration::ZERO } else { BATCH_TIME };
    while batch.len() < BATCH_MAX {
        let left = until.saturating_duration_since(Instant::now());
        match from.recv_timeout(left) {
            Ok(span) => batch.push(span),
            Err(RecvTimeoutError::Timeout) => return (batch, false),
            Err(RecvTimeoutError::Disconnected) => return (batch, true),
        }
    }
    (batch, false)
}
