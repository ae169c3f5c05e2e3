//! Sends spans to a collector, from a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

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
/// For all that is left at the end, tries and pauses included: a collector that hangs must not keep the agent.
const END_TIME: Duration = Duration::from_secs(3);

/// The thread that sends; [`finish`](Self::finish), or dropping it, sends what is left.
pub struct Exporter {
    thread: Option<JoinHandle<()>>,
    queue: SyncSender<Option<Span>>,
    /// When everything is over, once it ends.
    end: watch::Sender<Option<Instant>>,
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
        let (queue, receiver) = sync_channel(QUEUE_MAX);
        let (end, ended) = watch::channel(None);
        let shared = Arc::clone(&counts);
        let sending = Sending { url, client, runtime, counts: shared, host: host(), ended };
        let thread = std::thread::Builder::new().name("forebay-traces".to_owned());
        let thread = thread.spawn(move || sending.run(&receiver));
        let thread = thread.map_err(|error| Error::io("cannot start a thread", error))?;
        let layer = SpanLayer::new(queue.clone(), counts);
        Ok((Self { thread: Some(thread), queue, end }, layer))
    }

    /// Sends what is left, for three seconds at most; what could not be sent is counted.
    pub fn finish(&mut self) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert_with(|| Instant::now() + END_TIME);
            first
        });
        // Wakes a thread that waits for spans; where the queue is full it does not wait.
        let _ = self.queue.try_send(None);
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
    /// When everything is over, once it ends.
    ended: watch::Receiver<Option<Instant>>,
}

impl Sending {
    fn run(&self, from: &Receiver<Option<Span>>) {
        loop {
            let (batch, is_closed) = collect(from, &self.ended);
            let sent = batch.is_empty() || self.send(&batch);
            if !sent {
                self.lost(batch.len());
            }
            let end = *self.ended.borrow();
            let over = end.is_some_and(|end| Instant::now() >= end);
            if over {
                self.lost(from.try_iter().flatten().count());
            }
            if is_closed || over || (end.is_some() && batch.len() < BATCH_MAX) {
                return;
            }
        }
    }

    fn lost(&self, spans: usize) {
        self.counts.spans_lost.fetch_add(spans as u64, Ordering::Relaxed);
    }

    /// Whether a batch was sent.
    fn send(&self, batch: &[Span]) -> bool {
        let body = otlp::request(&self.host, batch).to_string();
        let mut pause = PAUSE;
        for attempt in 1..=TRIES {
            let request = self
                .client
                .post(self.url.clone())
                .header("content-type", "application/json")
                .body(body.clone());
            let sent = self.in_time(async { request.send().await });
            match sent.map(|sent| sent.and_then(reqwest::Response::error_for_status)) {
                Some(Ok(_)) => return true,
                Some(Err(error)) => {
                    tracing::debug!(error = %error.without_url(), attempt, "not sent");
                }
                None => return false,
            }
            // At the end a second try would be at the cost of what comes after.
            let is_last = attempt == TRIES || self.ended.borrow().is_some();
            if is_last || self.in_time(async { tokio::time::sleep(pause).await }).is_none() {
                return false;
            }
            pause *= 2;
        }
        false
    }

    /// What comes of something, unless everything is over before.
    fn in_time<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut ended = self.ended.clone();
        let over = async {
            // The exporter waits for this thread, so the sender is there as long as this is.
            match ended.wait_for(Option::is_some).await.ok().and_then(|end| *end) {
                Some(end) => tokio::time::sleep_until(end.into()).await,
                None => std::future::pending().await,
            }
        };
        self.runtime.block_on(async {
            tokio::select! {
                done = work => Some(done),
                () = over => None,
            }
        })
    }
}

/// The spans of the next request; whether there will be no more.
fn collect(
    from: &Receiver<Option<Span>>,
    ended: &watch::Receiver<Option<Instant>>,
) -> (Vec<Span>, bool) {
    let mut batch = Vec::new();
    let until = Instant::now() + BATCH_TIME;
    while batch.len() < BATCH_MAX {
        let time = match ended.borrow().is_some() {
            true => Duration::ZERO,
            false => until.saturating_duration_since(Instant::now()),
        };
        match from.recv_timeout(time) {
            Ok(Some(span)) => batch.push(span),
            // The end: what is there is taken, and nothing is waited for.
            Ok(None) => {}
            Err(RecvTimeoutError::Timeout) => return (batch, false),
            Err(RecvTimeoutError::Disconnected) => return (batch, true),
        }
    }
    (batch, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    /// Spans for a collector that takes connections and never answers.
    fn hanging(spans: usize) -> (Exporter, Arc<Counts>, std::net::TcpListener) {
        let collector = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", collector.local_addr().unwrap());
        let counts = Arc::new(Counts::default());
        let (exporter, layer) = Exporter::start(&url, Arc::clone(&counts)).unwrap();
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..spans {
                tracing::info_span!(target: "forebay", "hop").in_scope(|| ());
            }
        });
        (exporter, counts, collector)
    }

    #[test]
    fn a_collector_that_hangs_keeps_the_end_for_three_seconds() {
        let (mut exporter, counts, _collector) = hanging(BATCH_MAX * 3);
        // The first request is under way.
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        exporter.finish();
        let time = start.elapsed();
        assert!(time < Duration::from_secs(4), "{time:?}");
        assert_eq!(counts.spans_lost.load(Ordering::Relaxed), 3 * BATCH_MAX as u64);
    }

    #[test]
    fn a_pause_between_tries_ends_with_the_rest() {
        let (mut exporter, counts, collector) = hanging(BATCH_MAX);
        // Refused at once: it pauses.
        drop(collector);
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        exporter.finish();
        assert!(start.elapsed() < END_TIME, "{:?}", start.elapsed());
        assert_eq!(counts.spans_lost.load(Ordering::Relaxed), BATCH_MAX as u64);
    }

    #[test]
    fn with_nothing_to_send_the_end_is_at_once() {
        let (mut exporter, counts, _collector) = hanging(0);
        // It waits for spans.
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        exporter.finish();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert_eq!(counts.spans_lost.load(Ordering::Relaxed), 0);
    }
}
