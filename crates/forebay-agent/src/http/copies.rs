//! What other agents ask: which files of a step are here, and to take one. They need the token of peers, which opens
//! nothing else.
//!
//! Four files are taken at a time; more get 503. A body may be as long as the file: instead of the time that other
//! connections have, it has to come at 64 KiB/s at least, on average but for half a minute, as long as this side is
//! ready to take it. Nothing of a path is decoded or opened: job, step and file are looked for among what is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use forebay_tier::copies::DriveId;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, Method, Request, StatusCode};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::timeout;

use super::Site;
use super::answer::{self, Answer};
use super::route::{WRONG_TIME, work};
use crate::copies::{Answered, DRIVE_HEADER, Drive, TO_HEADER};

/// Files that are taken at a time.
pub(super) const TAKEN_AT_ONCE: usize = 4;
/// How all its paths begin.
pub(super) const PATH: &str = "/api/v1/peers/";
/// How long the next bytes of a file may take, and how late all of it may be.
const STALL_TIME: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 30 });
/// Bytes a second that it has to come at.
const LEAST_RATE: f64 = 65536.0;
/// Parts of a body that wait to be written.
const PARTS_MAX: usize = 4;

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
struct Asked<'a> {
    job: &'a str,
    step: u64,
    file: Option<&'a str>,
}

/// Takes a path apart.
fn asked(path: &str) -> Option<Asked<'_>> {
    let mut names = path.strip_prefix(PATH)?.split('/');
    let (job, steps, step) = (names.next()?, names.next()?, names.next()?);
    let is_number = !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit());
    let step = step.parse().ok().filter(|_| is_number)?;
    let file = names.next();
    let is_whole = steps == "steps" && names.next().is_none() && file != Some("");
    is_whole.then_some(Asked { job, step, file })
}

/// Answers. `busy` is set while a file comes, which may take longer than a connection has otherwise.
pub(super) async fn answer(
    site: &Arc<Site>,
    busy: &AtomicBool,
    request: Request<Incoming>,
) -> Answer {
    if !site.access.is_peer(request.headers()) {
        site.counts.denied();
        tokio::time::sleep(WRONG_TIME).await;
        let what = "a token of peers is needed\n";
        return answer::needs_token(answer::text(StatusCode::UNAUTHORIZED, what));
    }
    let path = request.uri().path().to_owned();
    let Some(asked) = asked(&path) else {
        return answer::text(StatusCode::NOT_FOUND, "there is no such page\n");
    };
    let Some(drive) = site.copies.find(asked.job) else {
        let error = Error::new(Code::NotFound, "no job of that name has a drive here");
        return refusal(&error);
    };
    match (request.method(), asked.file) {
        (&Method::GET, None) => has(site, drive, asked.step).await,
        (&Method::PUT, Some(file)) => {
            busy.store(true, Ordering::Relaxed);
            let answer = take(site, drive, (asked.step, file), request).await;
            busy.store(false, Ordering::Relaxed);
            answer.unwrap_or_else(|error| refusal(&error))
        }
        _ => answer::text(StatusCode::METHOD_NOT_ALLOWED, "not with this method\n"),
    }
}

/// An error of a copy.
fn refusal(error: &Error) -> Answer {
    let status = match error.code() {
        Code::NotCommitted => StatusCode::NOT_FOUND,
        Code::Checksum | Code::Truncated => StatusCode::BAD_REQUEST,
        Code::Timeout => StatusCode::SERVICE_UNAVAILABLE,
        code => answer::status_of(code),
    };
    let mut answer = answer::error_of(status, error);
    if status == StatusCode::SERVICE_UNAVAILABLE {
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
    }
    answer
}

async fn has(site: &Site, drive: Arc<Drive>, step: u64) -> Answer {
    let busy = site.taking.available_permits() == 0;
    let found = work(move || {
        serde_json::to_value(drive.has(step, busy)?).map_err(|error| {
            Error::new(Code::Internal, "cannot write what is here as JSON").with_source(error)
        })
    });
    match found.await {
        Ok(found) => answer::json(StatusCode::OK, &found),
        Err(error) => refusal(&error),
    }
}

async fn take(
    site: &Site,
    drive: Arc<Drive>,
    (step, file): (u64, &str),
    request: Request<Incoming>,
) -> Result<Answer> {
    let bytes = length(request.headers())?;
    let drives =
        (drive_in(request.headers(), DRIVE_HEADER)?, drive_in(request.headers(), TO_HEADER)?);
    let Ok(place) = Arc::clone(&site.taking).try_acquire_owned() else {
        return Err(Error::new(Code::Timeout, "as many copies as are taken at a time are coming"));
    };
    let (ready, begun) = oneshot::channel();
    let (parts, coming) = mpsc::channel(PARTS_MAX);
    let file = file.to_owned();
    let done = in_thread(place, move || drive.take((step, &file, bytes), drives, ready, coming))?;
    if begun.await.is_ok() {
        pump(request.into_body(), parts).await?;
    }
    let lost = |_| Error::new(Code::Internal, "the work was broken off");
    let is_there = done.await.map_err(lost)?? == Answered::There;
    Ok(answer::json(StatusCode::OK, &json!({ "ok": { "was_there": is_there } })))
}

/// On a thread of its own: a file may take minutes, and the threads for short work are few.
fn in_thread<T: Send + 'static>(
    place: OwnedSemaphorePermit,
    take: impl FnOnce() -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>> {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::Builder::new().name("forebay-take".to_owned());
    let started = thread.spawn(move || {
        let done = take();
        drop(place);
        // Who asked may be gone.
        let _ = sender.send(done);
    });
    started.map_err(|error| Error::io("cannot start a thread", error))?;
    Ok(receiver)
}

/// Gives the bytes on as they come. Errors: `timeout` where they come too slowly; what takes them says what else is
/// wrong.
async fn pump(mut body: Incoming, parts: mpsc::Sender<Bytes>) -> Result<()> {
    let (mut waited, mut came) = (Duration::ZERO, 0u64);
    loop {
        let since = Instant::now();
        let frame = timeout(STALL_TIME, body.frame()).await;
        waited += since.elapsed();
        let late = waited.saturating_sub(STALL_TIME).as_secs_f64() * LEAST_RATE;
        let Ok(frame) = frame else { return Err(slow()) };
        // The end, or a connection that broke off: the length tells them apart.
        let Some(Ok(frame)) = frame else { return Ok(()) };
        let Ok(data) = frame.into_data() else { continue };
        came += data.len() as u64;
        if late > came as f64 {
            return Err(slow());
        }
        if parts.send(data).await.is_err() {
            return Ok(());
        }
    }
}

fn slow() -> Error {
    Error::new(Code::Truncated, "the bytes of the file come too slowly")
}

fn length(head: &HeaderMap) -> Result<u64> {
    let text = head.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let length = text.and_then(|text| text.parse().ok());
    length.ok_or_else(|| Error::new(Code::Usage, "a Content-Length is needed"))
}

fn drive_in(head: &HeaderMap, name: &str) -> Result<DriveId> {
    let text = head.get(name).and_then(|drive| drive.to_str().ok());
    text.unwrap_or_default().parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart_and_nothing_is_decoded() {
        let path = |rest: &str| format!("{PATH}{rest}");
        let whole = path("run7/steps/12/00000abc-1_0_0.distcp");
        let file = Some("00000abc-1_0_0.distcp");
        assert_eq!(asked(&whole), Some(Asked { job: "run7", step: 12, file }));
        let listing = path("run7/steps/12");
        assert_eq!(asked(&listing), Some(Asked { job: "run7", step: 12, file: None }));
        let odd = path("run7/steps/12/..%2f..%2fetc");
        assert_eq!(asked(&odd).unwrap().file, Some("..%2f..%2fetc"), "as it came");
        for bad in ["", "run7", "run7/steps", "run7/steps/", "run7/steps/x", "run7/steps/+1"] {
            assert_eq!(asked(&path(bad)), None, "{bad}");
        }
        for bad in
            ["run7/step/1", "run7/steps/1/", "run7/steps/1/a/b", "run7/steps/99999999999999999999"]
        {
            assert_eq!(asked(&path(bad)), None, "{bad}");
        }
        assert_eq!(asked("/api/v1/peers"), None);
    }
}
