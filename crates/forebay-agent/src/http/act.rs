//! Actions: of the API, by a token in the head; of the page's forms, by a session. Either way the audit log gets to
//! know from where, and by what.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::access::Rights;
use super::answer::{self, Answer};
use super::body::{body_of, form_of, is_same_site};
use super::pool::Kind;
use super::{Site, form};
use crate::job::busy;
use crate::page;
use crate::session::{Visitor, same};

/// For an action; what takes longer goes on, and the answer says so.
const ACT_TIME: Duration = Duration::from_secs(20);

/// `POST /api/v1/actions`: an action as JSON; `job` beside it says whose.
pub(super) async fn by_api(
    site: &Arc<Site>,
    rights: &Rights,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Answer {
    if !rights.act {
        site.counts.denied();
        let what = match site.access.allows_actions() {
            true => "actions need the token for actions, as Authorization: Bearer\n",
            false => "actions by HTTP are off: no agent.action_token_file is configured\n",
        };
        return answer::text(StatusCode::FORBIDDEN, what);
    }
    let kind = request.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes().to_ascii_lowercase());
    if !kind.is_some_and(|kind| kind.starts_with(b"application/json")) {
        let what = "an action is sent as application/json\n";
        return answer::text(StatusCode::UNSUPPORTED_MEDIA_TYPE, what);
    }
    let bytes = match body_of(request).await {
        Ok(bytes) => bytes,
        Err(answer) => return *answer,
    };
    let action: Value = match serde_json::from_slice(&bytes) {
        Ok(action @ Value::Object(_)) => action,
        _ => return answer::error(&Error::new(Code::Usage, "the body is no JSON object")),
    };
    match carry_out(site, action, format!("http {peer} bearer")).await {
        Ok(outcome) => answer::json(StatusCode::OK, &json!({ "ok": outcome })),
        Err((status, error)) => answer::error_of(status, &error),
    }
}

/// `POST /actions` and `/logout`: what buttons of the page send.
pub(super) async fn by_form(
    site: &Arc<Site>,
    route: &'static str,
    visitor: Option<Visitor>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Answer {
    let allowed = is_same_site(request.headers());
    let cookie = site.access.cookie(request.headers()).unwrap_or_default().to_owned();
    let fields = match form_of(request).await {
        Ok(fields) => fields,
        Err(answer) => return *answer,
    };
    let sent = form::field(&fields, "form").unwrap_or_default();
    let visitor = visitor.filter(|visitor| allowed && same(&visitor.form, sent));
    let Some(visitor) = visitor.filter(|visitor| visitor.may_act || route == "/logout") else {
        site.counts.denied();
        let text = match site.access.is_tls() {
            true => "Log in with the token for actions, and try again from this site.",
            false => "Buttons need TLS: agent.tls_certificate and agent.tls_key.",
        };
        return answer::html(StatusCode::FORBIDDEN, page::message("Not allowed", text));
    };
    if route == "/logout" {
        site.sessions.end(&cookie);
        return answer::see("/", Some(&site.access.set_cookie("")));
    }
    let Some(mut action) = form::action(&fields) else {
        let page = page::message("Not possible", "The form asks for nothing that there is.");
        return answer::html(StatusCode::BAD_REQUEST, page);
    };
    let job = form::field(&fields, "job").unwrap_or_default().to_owned();
    action["job"] = json!(job);
    let shows = action["action"] == "prune";
    let who = format!("http {peer} session {}", visitor.name);
    match carry_out(site, action, who).await {
        Ok(outcome) if shows => {
            let text = format!("{outcome:#}");
            answer::html(StatusCode::OK, page::message("Prune", &text))
        }
        Ok(_) if site.jobs.all().len() > 1 && is_plain(&job) => {
            answer::see(&format!("/?job={job}"), None)
        }
        Ok(_) => answer::see("/", None),
        Err((status, error)) => {
            answer::html(status, page::message("Not possible", &error.render()))
        }
    }
}

/// Whether a name needs no escapes in a URL.
fn is_plain(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Finds the job and lets it act, for `who`, as the audit log says it. Errors: with the status that tells them; those
/// of the action.
async fn carry_out(
    site: &Arc<Site>,
    mut action: Value,
    who: String,
) -> Result<Value, (StatusCode, Error)> {
    let told = |error: Error| (answer::status_of(error.code()), error);
    let name = job_of(&mut action).map_err(told)?;
    let shared = Arc::clone(site);
    let word = action.get("action").and_then(Value::as_str).unwrap_or_default().to_owned();
    let (kind, refused) = (Kind::of(&word), word.clone());
    let act = move || {
        let job = shared.jobs.find(name.as_deref());
        let done = job.and_then(|job| job.act_for_others(&action, &who));
        shared.counts.acted(&word, done.is_ok());
        done
    };
    let Some(done) = site.pool.run(kind, act).map_err(told)? else {
        site.counts.acted(&refused, false);
        return Err((StatusCode::SERVICE_UNAVAILABLE, busy()));
    };
    match timeout(ACT_TIME, done).await {
        Ok(Ok(done)) => done.map_err(told),
        Ok(Err(error)) => {
            Err(told(Error::new(Code::Internal, "the action was broken off").with_source(error)))
        }
        Err(_) => {
            let error = Error::new(Code::Timeout, "it takes long, and goes on");
            Err((StatusCode::ACCEPTED, error))
        }
    }
}

/// Takes the job's name out of an action. A name that is none must not be taken for nobody's: that is the configured
/// job's. Errors: `usage`.
fn job_of(action: &mut Value) -> Result<Option<String>> {
    match action.as_object_mut().and_then(|action| action.remove("job")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => Ok(Some(name)),
        Some(_) => Err(Error::new(Code::Usage, "`job` is not the name of a job: a text")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_a_name_or_left_out() {
        let of = |mut action: Value| job_of(&mut action).map(|job| (job, action));
        let wake = json!({"action": "wake"});
        assert_eq!(of(wake.clone()).unwrap(), (None, wake.clone()));
        assert_eq!(of(json!({"action": "wake", "job": null})).unwrap(), (None, wake.clone()));
        assert_eq!(of(json!({"action": "wake", "job": "a"})).unwrap(), (Some("a".into()), wake));
        for bad in [json!(7), json!(true), json!(["a"]), json!({"name": "a"})] {
            let refused = of(json!({"action": "prune", "job": bad})).unwrap_err();
            assert_eq!(refused.code(), Code::Usage);
        }
    }
}
