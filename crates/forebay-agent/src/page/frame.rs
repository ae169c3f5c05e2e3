//! What is around every page: head, navigation, foot. And the pages that show no tiers.

use forebay_tier::status::Health;

use super::View;
use super::html::Html;
use crate::words;

const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
<meta name=\"color-scheme\" content=\"light dark\">\
<meta name=\"robots\" content=\"noindex\">\
<link rel=\"icon\" href=\"/icon.svg\">\
<link rel=\"stylesheet\" href=\"/style.css\">";

const LIVE: &str = "<noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\
<script src=\"/page.js\" defer></script>";

/// The mark: three levels of water. The icon is the same, with colours of its own.
const MARK: &str = "<svg class=\"mark\" viewBox=\"0 0 24 24\" aria-hidden=\"true\">\
<path d=\"M2 6q2.5-2.5 5 0t5 0 5 0 5 0\"/><path d=\"M2 12q2.5-2.5 5 0t5 0 5 0 5 0\"/>\
<path d=\"M2 18q2.5-2.5 5 0t5 0 5 0 5 0\"/></svg>";

/// A page of a job.
pub(super) fn page(view: &View<'_>, title: &str, body: impl FnOnce(&mut Html)) -> String {
    let mut html = Html::new();
    html.constant(HEAD);
    html.constant(LIVE);
    html.element("title", &[], format_args!("{title} · {} · Forebay", view.status.who));
    html.constant("</head><body><header>");
    html.open("a", &[("class", &"brand"), ("href", &link("/", view))]).constant(MARK);
    html.text("Forebay").close("a");
    let (class, word) = overall(view);
    html.element("span", &[("class", &format_args!("pill {class}"))], word);
    html.open("nav", &[]);
    for (name, path) in [("Overview", "/"), ("Checkpoints", "/checkpoints")] {
        let current = if name == title { "page" } else { "false" };
        html.element("a", &[("href", &link(path, view)), ("aria-current", &current)], name);
    }
    login_state(&mut html, view);
    html.constant("</nav></header><main>");
    html.open("p", &[("class", &"who")]);
    html.text(&view.status.who);
    html.text(format_args!(" · up {}", words::time(view.status.up_seconds)));
    html.close("p");
    jobs(&mut html, view);
    body(&mut html);
    html.constant("</main><footer>");
    html.text(format_args!("Forebay {} · ", env!("CARGO_PKG_VERSION")));
    html.constant(
        "<a href=\"/metrics\">metrics</a> · <a href=\"/api/v1/status\">status as JSON</a>",
    );
    html.constant("</footer></body></html>");
    html.finish()
}

/// A path with the job, where it is not the first.
pub(super) fn link(path: &str, view: &View<'_>) -> String {
    match view.jobs.len() {
        0 | 1 => path.to_owned(),
        // Names of jobs have no characters that a URL gives a meaning to.
        _ => format!("{path}?job={}", view.job),
    }
}

fn login_state(html: &mut Html, view: &View<'_>) {
    if let Some(visitor) = &view.visitor {
        html.constant("<form class=\"inline\" method=\"post\" action=\"/logout\">");
        html.open("input", &[("type", &"hidden"), ("name", &"form"), ("value", &visitor.form)]);
        html.constant("<button class=\"quiet\">Log out</button></form>");
    } else if view.may_login {
        html.constant("<a href=\"/login\">Log in</a>");
    }
}

fn jobs(html: &mut Html, view: &View<'_>) {
    if view.jobs.len() < 2 {
        return;
    }
    html.constant("<nav class=\"jobs\" aria-label=\"Jobs\">");
    for job in &view.jobs {
        let current = if job == view.job { "page" } else { "false" };
        let href = format!("/?job={job}");
        html.element("a", &[("href", &href), ("aria-current", &current)], job);
    }
    html.close("nav");
}

/// The worst of all tiers, in a word.
fn overall(view: &View<'_>) -> (&'static str, &'static str) {
    let has = |health| view.status.tiers.iter().any(|tier| tier.health == health);
    if has(Health::Down) {
        ("bad", "A tier is down")
    } else if has(Health::Full) || has(Health::ReadOnly) {
        ("bad", "A tier takes no more")
    } else if has(Health::Troubled) {
        ("warn", "Troubled")
    } else if view.status.tiers.iter().any(|tier| tier.paused) {
        ("warn", "Paused")
    } else if has(Health::Unknown) {
        ("idle", "Starting")
    } else {
        ("good", "All well")
    }
}

/// Where a token is typed in.
pub(crate) fn login(wrong: bool) -> String {
    plain("Log in", |html| {
        if wrong {
            html.element("p", &[("class", &"wrong"), ("role", &"alert")], "That is not a token.");
        }
        html.constant(
            "<form class=\"login\" method=\"post\" action=\"/login\">\
             <label for=\"token\">Token</label>\
             <input id=\"token\" name=\"token\" type=\"password\" required \
             autocomplete=\"current-password\" autofocus>\
             <button>Log in</button></form>\
             <p class=\"note\">The token for reading, or the one for actions \
             (agent.token_file, agent.action_token_file).</p>",
        );
    })
}

/// What happened, and a way back.
pub(crate) fn message(title: &str, text: &str) -> String {
    plain(title, |html| {
        html.open("pre", &[("class", &"outcome")]);
        // Whole, in lines: an outcome is longer than what a line of a page shows.
        for line in text.lines().take(500) {
            html.text(line).constant("\n");
        }
        html.close("pre").constant("<p><a href=\"/\">Back</a></p>");
    })
}

fn plain(title: &str, body: impl FnOnce(&mut Html)) -> String {
    let mut html = Html::new();
    html.constant(HEAD);
    html.element("title", &[], format_args!("{title} · Forebay"));
    html.constant("</head><body><header><a class=\"brand\" href=\"/\">").constant(MARK);
    html.constant("Forebay</a></header><main class=\"narrow\">");
    html.element("h1", &[], title);
    body(&mut html);
    html.constant("</main></body></html>");
    html.finish()
}
