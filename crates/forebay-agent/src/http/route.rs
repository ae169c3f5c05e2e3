//! From a request to an answer.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use forebay_error::{Code, Error, Result};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use tokio::time::timeout;

use super::access::Rights;
use super::answer::{self, Answer};
use super::body::{form_of, is_same_site};
use super::{Site, act, copies, form};
use crate::session::Visitor;
use crate::{metrics, page};

/// For what a page is made of.
const WORK_TIME: Duration = Duration::from_secs(20);
/// Before a wrong token is answered: guesses are slow, and each holds one of the connections.
pub(super) const WRONG_TIME: Duration = Duration::from_millis(300);

/// Answers, and counts it.
pub(super) async fn answer(
    site: &Arc<Site>,
    peer: IpAddr,
    busy: &AtomicBool,
    request: Request<Incoming>,
) -> Answer {
    let route = route_of(request.uri().path());
    let head_only = request.method() == Method::HEAD;
    let mut answer = match route {
        copies::PATH => copies::answer(site, busy, request).await,
        _ => routed(site, route, peer, request).await,
    };
    if head_only {
        *answer.body_mut() = Bytes::new().into();
    }
    if site.access.is_tls() {
        answer::only_tls(&mut answer);
    }
    site.counts.answered(route, answer.status().as_u16());
    answer
}

/// What metrics call a path.
fn route_of(path: &str) -> &'static str {
    const ROUTES: [&str; 12] = [
        "/",
        "/checkpoints",
        "/icon.svg",
        "/style.css",
        "/page.js",
        "/healthz",
        "/metrics",
        "/login",
        "/logout",
        "/actions",
        "/api/v1/status",
        "/api/v1/actions",
    ];
    if path.starts_with(copies::PATH) {
        return copies::PATH;
    }
    ROUTES.iter().find(|route| **route == path).copied().unwrap_or("other")
}

async fn routed(
    site: &Arc<Site>,
    route: &'static str,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Answer {
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    let post = request.method() == Method::POST;
    // What says nothing needs nothing.
    match route {
        "/healthz" if get => return answer::text(StatusCode::OK, "ok\n"),
        "/icon.svg" if get => return answer::file("image/svg+xml", page::ICON),
        "/style.css" if get => return answer::file("text/css; charset=utf-8", page::STYLE),
        "/page.js" if get => return answer::file("text/javascript; charset=utf-8", page::SCRIPT),
        "/login" if get => return answer::html(StatusCode::OK, page::login(false)),
        "/login" if post => return login(site, peer, request).await,
        _ => {}
    }
    let rights = site.access.rights(request.headers(), &site.sessions);
    if !rights.read {
        return refused(site, route, &rights).await;
    }
    match route {
        "/" | "/checkpoints" if get => show(site, route, &request, rights.visitor).await,
        "/metrics" if get => {
            let shared = Arc::clone(site);
            let text = work(move || Ok(metrics::render(&shared.jobs.all(), &shared.counts))).await;
            let kind = "text/plain; version=0.0.4; charset=utf-8";
            text.map_or_else(
                |error| answer::error(&error),
                |text| answer::of(StatusCode::OK, kind, text),
            )
        }
        "/api/v1/status" if get => status(site, &request).await,
        "/api/v1/actions" if post => act::by_api(site, &rights, peer, request).await,
        "/actions" | "/logout" if post => {
            act::by_form(site, route, rights.visitor, peer, request).await
        }
        "other" => answer::text(StatusCode::NOT_FOUND, "there is no such page\n"),
        _ => answer::text(StatusCode::METHOD_NOT_ALLOWED, "not with this method\n"),
    }
}

/// For those who may not read. A wrong token is answered late.
async fn refused(site: &Site, route: &str, rights: &Rights) -> Answer {
    site.counts.denied();
    if rights.wrong {
        tokio::time::sleep(WRONG_TIME).await;
    }
    if site.access.is_open() && !rights.wrong {
        let what = "without a token only localhost and loopback addresses are answered\n";
        return answer::text(StatusCode::MISDIRECTED_REQUEST, what);
    }
    let page = matches!(route, "/" | "/checkpoints");
    answer::needs_token(match page {
        true => answer::html(StatusCode::UNAUTHORIZED, page::login(false)),
        false => answer::text(StatusCode::UNAUTHORIZED, "a token is needed\n"),
    })
}

async fn login(site: &Site, peer: IpAddr, request: Request<Incoming>) -> Answer {
    if !is_same_site(request.headers()) {
        return answer::text(StatusCode::FORBIDDEN, "not from another site\n");
    }
    let fields = match form_of(request).await {
        Ok(fields) => fields,
        Err(answer) => return *answer,
    };
    let guess = form::field(&fields, "token").unwrap_or_default().trim();
    let session = site.access.login(guess.as_bytes()).map(|may_act| site.sessions.start(may_act));
    match session {
        Some(Ok((cookie, session))) => {
            tracing::info!(%peer, session, "logged in");
            answer::see("/", Some(&site.access.set_cookie(&cookie)))
        }
        Some(Err(error)) => answer::error(&error),
        None => {
            site.counts.denied();
            tracing::warn!(%peer, "somebody tried to log in with a text that is no token");
            tokio::time::sleep(WRONG_TIME).await;
            answer::html(StatusCode::UNAUTHORIZED, page::login(true))
        }
    }
}

async fn show(
    site: &Arc<Site>,
    route: &'static str,
    request: &Request<Incoming>,
    visitor: Option<Visitor>,
) -> Answer {
    let query = form::fields(request.uri().query().unwrap_or_default()).unwrap_or_default();
    let number = form::field(&query, "page").and_then(|page| page.parse().ok()).unwrap_or(1);
    let name = form::field(&query, "job").map(str::to_owned);
    let site = Arc::clone(site);
    let page = work(move || {
        let job = site.jobs.find(name.as_deref())?;
        let status = job.status();
        let view = page::View {
            jobs: site.jobs.all().iter().map(|job| job.name().to_owned()).collect(),
            job: job.name(),
            status: &status,
            rates: job.rates(),
            may_login: site.access.may_login(visitor.as_ref()),
            visitor,
            now: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64()),
        };
        Ok(match route {
            "/" => page::overview(&view),
            _ => page::checkpoints(&view, number),
        })
    });
    match page.await {
        Ok(page) => answer::html(StatusCode::OK, page),
        Err(error) => {
            let status = answer::error(&error).status();
            answer::html(status, page::message("Not possible", &error.render()))
        }
    }
}

async fn status(site: &Arc<Site>, request: &Request<Incoming>) -> Answer {
    let query = form::fields(request.uri().query().unwrap_or_default()).unwrap_or_default();
    let name = form::field(&query, "job").map(str::to_owned);
    let site = Arc::clone(site);
    let found = work(move || {
        let job = site.jobs.find(name.as_deref())?;
        serde_json::to_value(job.status().as_ref()).map_err(|error| {
            Error::new(Code::Internal, "cannot write the status as JSON").with_source(error)
        })
    });
    match found.await {
        Ok(value) => answer::json(StatusCode::OK, &value),
        Err(error) => answer::error(&error),
    }
}

/// Runs what may block. Errors: its own; `timeout` where it goes on longer than [`WORK_TIME`].
pub(super) async fn work<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match timeout(WORK_TIME, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => {
            Err(Error::new(Code::Internal, "the work was broken off").with_source(error))
        }
        Err(_) => Err(Error::new(Code::Timeout, "it takes long, and goes on")),
    }
}
