//! The agent as a whole: what listens, started and stopped together.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_error::{Error, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use crate::copies::Copies;
use crate::http::{Files, Http};
use crate::job::{Jobs, SAMPLE_EVERY};
use crate::metrics::Counts;
use crate::settings::Settings;
use crate::socket::{Socket, Tracker};
use crate::staged::Saves;

/// Threads that move bytes of requests: a page a second is nothing.
const THREADS: usize = 2;
/// Threads for what may block in the tiers.
const BLOCKING_THREADS: usize = 8;
/// How long requests under way may take when the agent stops.
const STOP_TIME: Duration = Duration::from_secs(2);

/// A running agent. Dropping it stops it.
pub(crate) struct Agent {
    runtime: Option<Runtime>,
    end: watch::Sender<bool>,
    sampler: Option<JoinHandle<()>>,
    stopping: Arc<Stopping>,
    http: Option<SocketAddr>,
}

#[derive(Default)]
struct Stopping {
    flag: Mutex<bool>,
    changed: Condvar,
}

impl Agent {
    /// Checks the settings, binds socket and address, and answers from then on.
    ///
    /// Errors: those of the settings; `already_exists` where another agent has the socket; addresses in use; no
    /// threads.
    pub(crate) fn start(
        settings: &Settings,
        jobs: Arc<Jobs>,
        counts: Arc<Counts>,
        tracker: Arc<dyn Tracker>,
        copies: &Arc<Copies>,
        saves: Arc<Saves>,
    ) -> Result<Self> {
        let files = Files::new(settings.clone());
        let checked = settings.check_http()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("forebay-agent")
            .enable_all()
            .build()
            .map_err(|error| Error::io("cannot start threads", error))?;
        let (end, ended) = watch::channel(false);
        let mut agent =
            Self { runtime: None, end, sampler: None, stopping: Arc::default(), http: None };
        if let Some(path) = &settings.socket {
            let users = &settings.socket_users;
            let (own, seen) = (Arc::clone(&jobs), Arc::clone(&counts));
            let socket = Socket::bind(path, users, own, seen, tracker, saves)?;
            tracing::info!(socket = %path.display(), "listening");
            runtime.spawn(told(socket.serve(ended.clone())));
        }
        if let Some(checked) = checked {
            let tls = checked.tls.is_some();
            let http = Http::bind(checked, files, Arc::clone(&jobs), counts, Arc::clone(copies))?;
            let address = http.address()?;
            copies.listens_at(address, tls);
            tracing::info!(%address, tls, "listening");
            agent.http = Some(address);
            runtime.spawn(told(http.serve(ended)));
        }
        agent.runtime = Some(runtime);
        agent.sampler = Some(sampler(jobs, Arc::clone(&agent.stopping))?);
        Ok(agent)
    }

    /// Where HTTP listens, if it does: with the port that the system chose for port 0.
    pub(crate) fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Ends: no new requests, those under way get two seconds.
    fn stop(&mut self) {
        let _ = self.end.send(true);
        *self.stopping.flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopping.changed.notify_all();
        if let Some(sampler) = self.sampler.take()
            && sampler.join().is_err()
        {
            tracing::error!("the thread that looks at the jobs has panicked");
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_TIME);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn told(serve: impl Future<Output = Result<()>>) {
    if let Err(error) = serve.await {
        tracing::error!(%error, "does not listen any more");
    }
}

/// Looks at all jobs every two seconds, for the curves and the counts of errors.
fn sampler(jobs: Arc<Jobs>, stopping: Arc<Stopping>) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name("forebay-look".to_owned());
    let look = move || {
        let mut flag = stopping.flag.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = Instant::now();
        while !*flag {
            let now = Instant::now();
            if now >= next {
                drop(flag);
                jobs.all().iter().for_each(|job| job.sample());
                next = now + SAMPLE_EVERY;
                flag = stopping.flag.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = stopping.changed.wait_timeout(flag, next - now);
            flag = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    };
    thread.spawn(look).map_err(|error| Error::io("cannot start a thread", error))
}
