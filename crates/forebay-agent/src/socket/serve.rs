//! The agent's side of the socket.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::frame::{Frame, REQUEST_BYTES_MAX, Reader, send};
use super::message::{Answer, Refusal, Request};
use super::place::{Place, bind};
use crate::accept::accept;
use crate::job::Jobs;
use crate::metrics::Counts;

/// Clients at a time; more wait in the kernel's queue.
const CLIENTS_MAX: usize = 64;
/// For the rest of a frame, and for a client to take a piece of an answer.
const FRAME_TIME: Duration = Duration::from_secs(10);
/// Takes folders of clients, to move what is saved there.
pub(crate) trait Tracker: Send + Sync {
    /// Starts to move a job's steps out of an open folder that a process of user `uid` handed over; says where to.
    fn track(&self, job: &str, folder: OwnedFd, uid: u32) -> Result<Value>;

    /// Stops it, for that user.
    fn untrack(&self, job: &str, uid: u32) -> Result<()>;
}

/// The process at the other end.
#[derive(Clone, Copy, Debug)]
struct Peer {
    uid: u32,
    pid: Option<i32>,
}

/// A bound socket; [`serve`](Self::serve) answers.
pub(crate) struct Socket {
    listener: std::os::unix::net::UnixListener,
    place: Place,
    shared: Arc<Shared>,
}

struct Shared {
    jobs: Arc<Jobs>,
    counts: Arc<Counts>,
    tracker: Arc<dyn Tracker>,
    users: Vec<u32>,
}

impl Socket {
    /// Binds. `users`: who may use it besides root and this process's user. Errors: those of the file.
    pub(crate) fn bind(
        path: &Path,
        users: &[u32],
        jobs: Arc<Jobs>,
        counts: Arc<Counts>,
        tracker: Arc<dyn Tracker>,
    ) -> Result<Self> {
        let own = rustix::process::geteuid().as_raw();
        let open = users.iter().any(|&user| user != own);
        let (listener, place) = bind(path, open)?;
        let failed = |error| Error::io("cannot listen on the socket", error).at(path.display());
        listener.set_nonblocking(true).map_err(failed)?;
        let users = users.iter().copied().chain([0, own]).collect();
        let shared = Arc::new(Shared { jobs, counts, tracker, users });
        Ok(Self { listener, place, shared })
    }

    /// Answers until `end` changes. Runs on a tokio runtime; clients have threads of their own.
    pub(crate) async fn serve(self, end: watch::Receiver<bool>) -> Result<()> {
        let _place = self.place;
        let listener = UnixListener::from_std(self.listener)
            .map_err(|error| Error::io("cannot listen on the socket", error))?;
        let shared = self.shared;
        let start = |stream: tokio::net::UnixStream, place| {
            let peer = stream.peer_cred()?;
            let peer = Peer { uid: peer.uid(), pid: peer.pid() };
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            shared.start(stream, peer, place)
        };
        accept(&listener, CLIENTS_MAX, end, start).await;
        Ok(())
    }
}

impl Shared {
    fn start(
        self: &Arc<Self>,
        stream: UnixStream,
        peer: Peer,
        place: Option<OwnedSemaphorePermit>,
    ) -> std::io::Result<()> {
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("forebay-client".to_owned());
        let started = thread.spawn(move || {
            let _place = place;
            shared.counts.socket_clients.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = shared.talk(&stream, peer) {
                tracing::debug!(%error, ?peer, "a client is left");
            }
            shared.counts.socket_clients.fetch_sub(1, Ordering::Relaxed);
        });
        started.map(drop)
    }

    /// Until the client ends, or breaks the protocol.
    fn talk(&self, stream: &UnixStream, peer: Peer) -> Result<()> {
        if !self.users.contains(&peer.uid) {
            self.counts.denied();
            tracing::warn!(?peer, "a user that may not use the socket");
            let what = format!("user {} may not use this agent", peer.uid);
            let hint = "agent.socket_users lists who may";
            let error = Error::new(Code::PermissionDenied, what).hint(hint);
            reply(stream, Err(error.again()))?;
            return Err(error);
        }
        let mut reader = Reader::new(stream);
        loop {
            match reader.next(REQUEST_BYTES_MAX, None, FRAME_TIME) {
                Ok(None) => return Ok(()),
                Ok(Some(frame)) => reply(stream, self.answer(frame, peer))?,
                Err(error) => {
                    // Where the next frame begins is not known any more.
                    reply(stream, Err(error.again()))?;
                    return Err(error);
                }
            }
        }
    }

    fn answer(&self, frame: Frame, peer: Peer) -> Result<Value> {
        let request: Request = serde_json::from_slice(&frame.text).map_err(|error| {
            Error::new(Code::Usage, "a request is not understood").with_source(error)
        })?;
        let who = || match peer.pid {
            Some(pid) => format!("uid {} pid {pid}", peer.uid),
            None => format!("uid {}", peer.uid),
        };
        match (request, frame.fd) {
            (Request::Track { job }, Some(folder)) => {
                self.counts.asked("track");
                self.tracker.track(&job, folder, peer.uid)
            }
            (Request::Track { .. }, None) => {
                let what = "track needs the open folder, as a descriptor with the frame";
                Err(Error::new(Code::Usage, what))
            }
            (_, Some(_)) => Err(Error::new(Code::Usage, "a descriptor came with no use for it")),
            (Request::Untrack { job }, None) => {
                self.counts.asked("untrack");
                self.tracker.untrack(&job, peer.uid).map(|()| Value::Null)
            }
            (Request::Status { job }, None) => {
                self.counts.asked("status");
                let status = self.jobs.find(job.as_deref())?.status();
                serde_json::to_value(status.as_ref()).map_err(|error| {
                    Error::new(Code::Internal, "cannot write the status").with_source(error)
                })
            }
            (Request::Jobs, None) => {
                self.counts.asked("jobs");
                let names = |job: &Arc<crate::job::Job>| json!(job.name());
                Ok(self.jobs.all().iter().map(names).collect())
            }
            (Request::Wake { job }, None) => {
                self.counts.asked("wake");
                self.jobs.find(job.as_deref())?.wake();
                Ok(Value::Null)
            }
            (Request::Act { job, action }, None) => {
                self.counts.asked("act");
                let job = self.jobs.find(job.as_deref())?;
                let own = [0, rustix::process::geteuid().as_raw()].contains(&peer.uid);
                let done = match own {
                    true => job.act(&action, &who()),
                    false => job.act_for_others(&action, &who()),
                };
                let name = action.get("action").and_then(Value::as_str).unwrap_or_default();
                self.counts.acted(name, done.is_ok());
                done
            }
        }
    }
}

fn reply(stream: &UnixStream, result: Result<Value>) -> Result<()> {
    let answer = match result {
        Ok(value) => Answer::Ok(value),
        Err(error) => Answer::Error(Refusal::from(&error)),
    };
    let text = serde_json::to_vec(&answer)
        .map_err(|error| Error::new(Code::Internal, "cannot write an answer").with_source(error))?;
    send(stream, &text, None, FRAME_TIME)
}
