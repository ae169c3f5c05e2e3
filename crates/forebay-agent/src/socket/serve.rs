//! The agent's side of the socket.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use rustix::fd::OwnedFd;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::frame::{Frame, REQUEST_BYTES_MAX, Reader, send};
use super::message::{Answer, Refusal, Request};
use super::place::{Place, bind};
use crate::accept::accept;
use crate::job::{Jobs, busy};
use crate::metrics::Counts;
use crate::staged::{Held, Saves};

/// Clients at a time; more wait in the kernel's queue.
const CLIENTS_MAX: usize = 64;
/// Of those, the ones that are neither root's nor of the agent's user.
const OTHERS_MAX: usize = 48;
/// How long a client may ask nothing; then it connects again. [`Client`](super::client::Client) does so by itself.
const IDLE_TIME: Duration = Duration::from_secs(60);
/// The same while all places are taken, so that who asks something gets one.
pub(super) const CROWDED_TIME: Duration = Duration::from_secs(5);
/// Promotions at a time, for the clients of the socket: each holds a client's place for as long as a copy takes.
const COPIES_MAX: usize = 16;
/// For the rest of a frame, and for a client to take a piece of an answer.
const FRAME_TIME: Duration = Duration::from_secs(10);
/// For what a client that has left may have sent before.
const LAST_TIME: Duration = Duration::from_millis(100);
/// Frames of it that are looked at.
const LAST_MAX: usize = 8;

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

impl Peer {
    /// Whether it could do itself whatever the agent can.
    fn is_own(self) -> bool {
        [0, rustix::process::geteuid().as_raw()].contains(&self.uid)
    }
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
    saves: Arc<Saves>,
    users: Vec<u32>,
    /// Places of those who are neither root nor the agent's user.
    others: Arc<Semaphore>,
    copies: Semaphore,
    /// Clients that have staged a save. They take no place: there are no more of them than saves that are kept.
    holders: AtomicI64,
    idle: Idle,
}

/// How long a client may ask nothing.
#[derive(Clone, Copy)]
struct Idle {
    most: Duration,
    crowded: Duration,
}

impl Socket {
    /// Binds. `users`: who may use it besides root and this process's user. Errors: those of the file.
    pub(crate) fn bind(
        path: &Path,
        users: &[u32],
        jobs: Arc<Jobs>,
        counts: Arc<Counts>,
        tracker: Arc<dyn Tracker>,
        saves: Arc<Saves>,
    ) -> Result<Self> {
        let own = rustix::process::geteuid().as_raw();
        let open = users.iter().any(|&user| user != own);
        let (listener, place) = bind(path, open)?;
        let failed = |error| Error::io("cannot listen on the socket", error).at(path.display());
        listener.set_nonblocking(true).map_err(failed)?;
        let users = users.iter().copied().chain([0, own]).collect();
        let idle = Idle { most: IDLE_TIME, crowded: CROWDED_TIME };
        let shared = Arc::new(Shared::new(jobs, counts, tracker, saves, users, idle));
        Ok(Self { listener, place, shared })
    }

    /// Answers until `end` changes. Runs on a tokio runtime; clients have threads of their own.
    pub(crate) async fn serve(self, end: watch::Receiver<bool>) -> Result<()> {
        let _place = self.place;
        let listener = UnixListener::from_std(self.listener)
            .map_err(|error| Error::io("cannot listen on the socket", error))?;
        let shared = self.shared;
        let ended = end.clone();
        let start = |stream: tokio::net::UnixStream, place| {
            let peer = stream.peer_cred()?;
            let peer = Peer { uid: peer.uid(), pid: peer.pid() };
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            shared.start(stream, peer, place, ended.clone())
        };
        accept(&listener, CLIENTS_MAX, end, start).await;
        Ok(())
    }
}

impl Shared {
    fn new(
        jobs: Arc<Jobs>,
        counts: Arc<Counts>,
        tracker: Arc<dyn Tracker>,
        saves: Arc<Saves>,
        users: Vec<u32>,
        idle: Idle,
    ) -> Self {
        let (others, copies) = (Arc::new(Semaphore::new(OTHERS_MAX)), Semaphore::new(COPIES_MAX));
        let holders = AtomicI64::new(0);
        Self { jobs, counts, tracker, saves, users, others, copies, holders, idle }
    }

    fn start(
        self: &Arc<Self>,
        stream: UnixStream,
        peer: Peer,
        place: Option<OwnedSemaphorePermit>,
        ended: watch::Receiver<bool>,
    ) -> std::io::Result<()> {
        let other = match peer.is_own() {
            true => None,
            false => match Arc::clone(&self.others).try_acquire_owned() {
                Ok(place) => Some(place),
                Err(_) => {
                    self.counts.denied();
                    let what = "as many clients of other users as are taken are connected";
                    let error = Error::new(Code::Unsupported, what).hint("try again later");
                    // A new socket has room for this. Who does not wait for it misses nothing.
                    let _ = reply(&stream, Err(error));
                    return Ok(());
                }
            },
        };
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("forebay-client".to_owned());
        let started = thread.spawn(move || {
            let mut places = Some((place, other));
            shared.counts.socket_clients.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = shared.talk(&stream, peer, &mut places, &ended) {
                tracing::debug!(%error, ?peer, "a client is left");
            }
            shared.counts.socket_clients.fetch_sub(1, Ordering::Relaxed);
            if places.is_none() {
                shared.holders.fetch_sub(1, Ordering::Relaxed);
            }
        });
        started.map(drop)
    }

    /// Until the client or the agent ends, it breaks the protocol, is idle too long, or has let a save go. `places` are
    /// given back where it holds one.
    fn talk<P>(
        &self,
        stream: &UnixStream,
        peer: Peer,
        places: &mut Option<P>,
        ended: &watch::Receiver<bool>,
    ) -> Result<()> {
        if !self.users.contains(&peer.uid) {
            self.counts.denied();
            tracing::warn!(?peer, "a user that may not use the socket");
            let what = format!("user {} may not use this agent", peer.uid);
            let hint = "agent.socket_users lists who may";
            let error = Error::new(Code::PermissionDenied, what).hint(hint);
            reply(stream, Err(error.again()))?;
            return Err(error);
        }
        let mut reader = Reader::with_fds(stream);
        let mut idle = Duration::ZERO;
        // Whatever ends this function ends the connection: what is held then is finished.
        let mut held: Option<Held> = None;
        loop {
            let wait = self.idle.crowded.min(self.idle.most - idle);
            let next = reader.next(REQUEST_BYTES_MAX, Some(wait), FRAME_TIME);
            // Where it goes on in this process, it is not for those who came before.
            // What somebody holds is held on, for this process may go on, and he let go.
            if *ended.borrow() && held.is_none() {
                let error = Error::new(Code::Cancelled, "the agent ends");
                return reply(stream, Err(error));
            }
            match next {
                Ok(None) => return Ok(()),
                Err(error) if error.code() == Code::Timeout && !reader.began() => {
                    if held.is_some() {
                        continue;
                    }
                    idle += wait;
                    if idle >= self.idle.most || self.is_crowded() {
                        // Without a word: it would be taken for the answer to what comes next.
                        return Ok(());
                    }
                }
                Ok(Some(frame)) => {
                    idle = Duration::ZERO;
                    let answered = reply(stream, self.answer(frame, peer, &mut held));
                    if answered.is_err() {
                        hear_out(&mut reader, &mut held);
                    }
                    answered?;
                    if held.is_none() && places.is_none() {
                        // It has let go, and has no place any more.
                        return Ok(());
                    }
                    if held.is_some() && places.take().is_some() {
                        self.holders.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Err(error) => {
                    // Where the next frame begins is not known any more.
                    reply(stream, Err(error.again()))?;
                    return Err(error);
                }
            }
        }
    }

    /// Whether more may wait for a place.
    fn is_crowded(&self) -> bool {
        let clients = self.counts.socket_clients.load(Ordering::Relaxed);
        let clients = clients - self.holders.load(Ordering::Relaxed);
        usize::try_from(clients).is_ok_and(|clients| clients >= CLIENTS_MAX)
    }

    fn answer(&self, frame: Frame, peer: Peer, held: &mut Option<Held>) -> Result<Value> {
        let request: Request = serde_json::from_slice(&frame.text).map_err(|error| {
            Error::new(Code::Usage, "a request is not understood").with_source(error)
        })?;
        let mut fds = frame.fds.into_iter();
        match (request, (fds.next(), fds.next(), fds.next())) {
            (Request::Track { job }, (Some(folder), None, None)) => {
                self.counts.asked("track");
                self.tracker.track(&job, folder, peer.uid)
            }
            (Request::Track { .. }, _) => {
                let what = "track needs the open folder, as a descriptor with the frame";
                Err(Error::new(Code::Usage, what))
            }
            (Request::Stage { job }, (Some(folder), Some(memory), Some(bequest))) => {
                self.counts.asked("stage");
                self.stage(&job, [folder, memory, bequest], peer, held)
            }
            (Request::Stage { .. }, _) => {
                let what = "stage needs folder, memory and bequest, as descriptors with the frame";
                Err(Error::new(Code::Usage, what))
            }
            (Request::Staged, (folder, None, None)) => {
                self.counts.asked("staged");
                let list = self.saves.list(folder.as_ref().map(|folder| (folder, peer.uid)))?;
                to_value(&list)
            }
            (_, (Some(_), _, _)) => {
                Err(Error::new(Code::Usage, "a descriptor came with no use for it"))
            }
            (request, _) => self.answer_plain(request, peer, held),
        }
    }

    /// What comes without descriptors.
    fn answer_plain(&self, request: Request, peer: Peer, held: &mut Option<Held>) -> Result<Value> {
        match request {
            Request::LetGo => {
                self.counts.asked("let_go");
                let nothing = || Error::new(Code::Usage, "this connection has staged nothing");
                held.take().ok_or_else(nothing)?.let_go();
                Ok(Value::Null)
            }
            Request::Untrack { job } => {
                self.counts.asked("untrack");
                self.tracker.untrack(&job, peer.uid).map(|()| Value::Null)
            }
            Request::Status { job } => {
                self.counts.asked("status");
                to_value(self.jobs.find(job.as_deref())?.status().as_ref())
            }
            Request::Jobs => {
                self.counts.asked("jobs");
                let names = |job: &Arc<crate::job::Job>| json!(job.name());
                Ok(self.jobs.all().iter().map(names).collect())
            }
            Request::Wake { job } => {
                self.counts.asked("wake");
                self.jobs.find(job.as_deref())?.wake();
                Ok(Value::Null)
            }
            Request::Act { job, action } => {
                self.counts.asked("act");
                self.act(job.as_deref(), &action, peer)
            }
            Request::Track { .. } | Request::Stage { .. } | Request::Staged => {
                Err(Error::new(Code::Internal, "a request with descriptors came here"))
            }
        }
    }

    fn stage(
        &self,
        job: &str,
        fds: [OwnedFd; 3],
        peer: Peer,
        held: &mut Option<Held>,
    ) -> Result<Value> {
        if held.is_some() {
            let what = "this connection has staged a save already";
            return Err(Error::new(Code::Usage, what).hint("let it go first"));
        }
        let staged = self.saves.stage(job, fds, peer.uid)?;
        let shown = staged.show();
        *held = Some(staged);
        let shown = shown.map(|shown| json!({ "step": shown.step, "bytes": shown.bytes }));
        Ok(shown.unwrap_or_default())
    }

    fn act(&self, job: Option<&str>, action: &Value, peer: Peer) -> Result<Value> {
        let name = action.get("action").and_then(Value::as_str).unwrap_or_default();
        let done = self.try_act(job, name, action, peer);
        self.counts.acted(name, done.is_ok());
        done
    }

    fn try_act(&self, job: Option<&str>, name: &str, action: &Value, peer: Peer) -> Result<Value> {
        let _copies = match name {
            "promote" => Some(self.copies.try_acquire().map_err(|_| busy())?),
            _ => None,
        };
        let job = self.jobs.find(job)?;
        let who = match peer.pid {
            Some(pid) => format!("uid {} pid {pid}", peer.uid),
            None => format!("uid {}", peer.uid),
        };
        match peer.is_own() {
            true => job.act(action, &who),
            false => job.act_for_others(action, &who),
        }
    }
}

/// Takes what a client has sent before it left without waiting for answers. It is alive if it has let go: this process
/// may have been too slow for it.
fn hear_out(reader: &mut Reader<'_>, held: &mut Option<Held>) {
    for _ in 0..LAST_MAX {
        // What there is is in the queue.
        let Ok(Some(frame)) = reader.next(REQUEST_BYTES_MAX, Some(LAST_TIME), LAST_TIME) else {
            return;
        };
        if let Ok(Request::LetGo) = serde_json::from_slice(&frame.text)
            && let Some(held) = held.take()
        {
            return held.let_go();
        }
    }
}

fn to_value<T: serde::Serialize + ?Sized>(answer: &T) -> Result<Value> {
    serde_json::to_value(answer).map_err(|error| {
        Error::new(Code::Internal, "cannot write an answer as JSON").with_source(error)
    })
}

fn reply(stream: &UnixStream, result: Result<Value>) -> Result<()> {
    let answer = match result {
        Ok(value) => Answer::Ok(value),
        Err(error) => Answer::Error(Refusal::from(&error)),
    };
    let text = serde_json::to_vec(&answer)
        .map_err(|error| Error::new(Code::Internal, "cannot write an answer").with_source(error))?;
    send(stream, &text, &[], FRAME_TIME)
}

#[cfg(test)]
mod tests;
