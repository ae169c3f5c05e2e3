//! The client's side of the socket.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tier::status::Status;
use rustix::fd::BorrowedFd;
use serde_json::Value;

use super::frame::{ANSWER_BYTES_MAX, Reader, send};
use super::message::{Answer, Request, StagedSave};
use super::serve::CROWDED_TIME;

/// Where an agent listens that is a service, unless it is told otherwise.
const SERVICE_SOCKET: &str = "/run/forebay/agent.sock";
/// For the agent to take a request.
const SEND_TIME: Duration = Duration::from_secs(10);
/// For it to answer what it has in memory.
const ASK_TIME: Duration = Duration::from_secs(30);
/// For an action: a promotion copies a step.
const ACT_TIME: Duration = Duration::from_secs(24 * 3600);
/// For the rest of an answer that has begun.
const REST_TIME: Duration = Duration::from_secs(60);
/// A connection that was idle for longer is made again: the agent may be about to leave it, and a request that meets
/// the end is not sent twice.
const REUSE_TIME: Duration = Duration::from_millis(CROWDED_TIME.as_millis() as u64 / 2);

/// A connection to an agent.
pub struct Client {
    stream: UnixStream,
    path: PathBuf,
    used: Instant,
    patience: Duration,
}

impl Client {
    /// Connects. Errors: `not_found` where no agent listens; `permission_denied`; I/O.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = connect(path)?;
        let (path, used) = (path.to_owned(), Instant::now());
        Ok(Self { stream, path, used, patience: ASK_TIME })
    }

    /// How long an answer to a question may take; 30 s if nothing is said. Actions take the time they need.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How a job stands. Errors: `not_found` for a job that is none; I/O.
    pub fn status(&mut self, job: Option<&str>) -> Result<Status> {
        let job = job.map(str::to_owned);
        let value = self.ask(&Request::Status { job }, &[], self.patience)?;
        self.typed(value)
    }

    /// The names of the agent's jobs. Errors: I/O.
    pub fn jobs(&mut self) -> Result<Vec<String>> {
        let value = self.ask(&Request::Jobs, &[], self.patience)?;
        self.typed(value)
    }

    /// Carries out an action; its outcome. Errors: those of the action; I/O.
    pub fn act(&mut self, job: Option<&str>, action: &Value) -> Result<Value> {
        let (job, action) = (job.map(str::to_owned), action.clone());
        self.ask(&Request::Act { job, action }, &[], ACT_TIME)
    }

    /// Something was saved. Errors: I/O.
    pub fn wake(&mut self, job: Option<&str>) -> Result<()> {
        let job = job.map(str::to_owned);
        self.ask(&Request::Wake { job }, &[], self.patience).map(drop)
    }

    /// Hands a folder over: what is saved there is moved on, whatever becomes of this process. Says what the job is
    /// called, and where it goes: `{"job", "places"}`.
    ///
    /// Errors: `usage` for a name that is none; `permission_denied` for a folder of another user; `already_exists` for
    /// a job of that name; I/O.
    pub fn track(&mut self, job: &str, folder: BorrowedFd<'_>) -> Result<Value> {
        let job = job.to_owned();
        self.ask(&Request::Track { job }, &[folder], self.patience)
    }

    /// Stops what [`track`](Self::track) began. Errors: `not_found`; I/O.
    pub fn untrack(&mut self, job: &str) -> Result<()> {
        let job = job.to_owned();
        self.ask(&Request::Untrack { job }, &[], self.patience).map(drop)
    }

    /// Gives a staged save to the agent, which finishes it where this process dies before it is let go: the checkpoint
    /// folder, sealed memory, and the [`Bequest`](forebay_checkpoint::save::Bequest) in memory that is sealed for good.
    /// `job` is for people.
    ///
    /// Errors: `usage` for memory that could change its size, and what is no bequest for it; `permission_denied` for
    /// another user's folder; `unsupported` where no more is kept; I/O.
    pub fn stage(
        mut self,
        job: &str,
        folder: BorrowedFd<'_>,
        memory: BorrowedFd<'_>,
        bequest: BorrowedFd<'_>,
    ) -> Result<Staged> {
        let request = Request::Stage { job: job.to_owned() };
        self.ask(&request, &[folder, memory, bequest], self.patience)?;
        Ok(Staged(self))
    }

    /// The saves that the agent keeps or finishes: of a folder, or all. Errors: I/O.
    pub fn staged(&mut self, folder: Option<BorrowedFd<'_>>) -> Result<Vec<StagedSave>> {
        let value = self.ask(&Request::Staged, folder.as_slice(), self.patience)?;
        self.typed(value)
    }

    fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>], time: Duration) -> Result<Value> {
        if self.used.elapsed() > REUSE_TIME {
            self.stream = connect(&self.path)?;
        }
        let answer = self.exchange(request, fds, time);
        self.used = Instant::now();
        answer
    }

    fn exchange(&self, request: &Request, fds: &[BorrowedFd<'_>], time: Duration) -> Result<Value> {
        let text = serde_json::to_vec(request).map_err(|error| {
            Error::new(Code::Internal, "cannot write a request").with_source(error)
        })?;
        // Somebody who may not use it is told so before the request is read.
        let sent = send(&self.stream, &text, fds, SEND_TIME);
        let frame = Reader::new(&self.stream).next(ANSWER_BYTES_MAX, Some(time), REST_TIME);
        let frame = match (sent, frame) {
            (_, Ok(Some(frame))) => frame,
            (Err(error), _) | (Ok(()), Err(error)) => return Err(error.at(self.path.display())),
            (Ok(()), Ok(None)) => {
                let what = "the agent has ended the connection";
                return Err(Error::new(Code::Io, what).at(self.path.display()));
            }
        };
        match serde_json::from_slice(&frame.text) {
            Ok(Answer::Ok(value)) => Ok(value),
            Ok(Answer::Error(refusal)) => Err(refusal.into()),
            Err(error) => Err(self.strange(error)),
        }
    }

    fn typed<T: serde::de::DeserializeOwned>(&self, value: Value) -> Result<T> {
        serde_json::from_value(value).map_err(|error| self.strange(error))
    }

    fn strange(&self, error: serde_json::Error) -> Error {
        Error::new(Code::Unsupported, "the agent's answer is not understood")
            .with_source(error)
            .at(self.path.display())
            .hint("agent and client should be of one version")
    }
}

/// A save that an agent keeps, for as long as this lives. Dropping it is what a process does that dies.
pub struct Staged(Client);

impl Staged {
    /// It has ended: the agent forgets it. Errors: I/O; then the agent takes the process for dead.
    pub fn let_go(self) -> Result<()> {
        // On this connection, however long it was idle.
        self.0.exchange(&Request::LetGo, &[], self.0.patience).map(drop)
    }
}

fn connect(path: &Path) -> Result<UnixStream> {
    UnixStream::connect(path).map_err(|error| {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        let error = match refused {
            true => Error::new(Code::NotFound, "no agent listens").with_source(error),
            false => Error::io("cannot reach an agent", error),
        };
        error.at(path.display()).hint(hint(path, Path::new(SERVICE_SOCKET)))
    })
}

/// Where to look: a service has no XDG_RUNTIME_DIR, and the session of who asks has one.
fn hint(path: &Path, service: &Path) -> String {
    match path != service && service.exists() {
        true => format!("agent.socket = {service:?} would be that of a service: there is one"),
        false => "`forebay agent` starts one; agent.socket says where".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_service_is_named_where_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let (own, service) = (folder.path().join("own"), folder.path().join("service"));
        assert!(hint(&own, &service).contains("starts one"));
        std::fs::write(&service, "").unwrap();
        assert!(hint(&own, &service).contains("there is one"));
        assert!(hint(&service, &service).contains("starts one"));
    }
}
