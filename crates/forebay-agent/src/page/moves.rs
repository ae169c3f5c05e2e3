//! What is under way, and what went wrong.

use forebay_tier::status::{Transfer, Trouble};

use super::View;
use super::html::Html;
use crate::words;

pub(super) fn transfers(html: &mut Html, view: &View<'_>) {
    html.constant("<section aria-labelledby=\"moves\"><h2 id=\"moves\">Transfers</h2>");
    let waiting = view.status.waiting;
    if view.status.transfers.is_empty() {
        let text = match waiting {
            0 => "Nothing is under way.".to_owned(),
            waiting => format!("Nothing is under way; {} to be moved.", waits(waiting)),
        };
        html.element("p", &[("class", &"none")], text);
    } else {
        html.constant("<ul class=\"moves\">");
        for transfer in &view.status.transfers {
            one(html, view, transfer);
        }
        html.close("ul");
        if waiting > 0 {
            html.element("p", &[("class", &"who")], format_args!("{}.", waits(waiting)));
        }
    }
    html.close("section");
}

fn waits(waiting: u64) -> String {
    let verb = if waiting == 1 { "waits" } else { "wait" };
    format!("{} {verb}", words::count(waiting, "step"))
}

fn one(html: &mut Html, view: &View<'_>, transfer: &Transfer) {
    html.constant("<li class=\"card\"><div class=\"top\">");
    html.open("h3", &[]).text(transfer.step).close("h3");
    let way = format!("{} → {}", view.tier(transfer.from), view.tier(transfer.to));
    html.element("span", &[("class", &"way")], way);
    html.constant("</div>");
    let percent = match transfer.total_bytes {
        0 => 0.0,
        total => (transfer.done_bytes as f64 / total as f64 * 100.0).min(100.0),
    };
    let label = format!("{percent:.0} % done");
    let attributes: [(&'static str, &dyn std::fmt::Display); 4] = [
        ("class", &"move"),
        ("max", &100),
        ("value", &format_args!("{percent:.1}")),
        ("aria-label", &label),
    ];
    html.element("progress", &attributes, &label);
    let mut parts = vec![
        format!("{} of {}", words::bytes(transfer.done_bytes), words::bytes(transfer.total_bytes)),
        words::rate(transfer.rate),
    ];
    parts.push(match transfer.left_seconds {
        Some(left) => format!("{} left", words::time(left)),
        None => "time left unknown".to_owned(),
    });
    parts.push(format!("priority {}", transfer.priority));
    if transfer.tries > 0 {
        parts.push(format!("try {}", transfer.tries.saturating_add(1)));
    }
    html.element("p", &[("class", &"who")], parts.join(" · ")).close("li");
}

pub(super) fn errors(html: &mut Html, view: &View<'_>) {
    html.constant("<section aria-labelledby=\"errors\"><h2 id=\"errors\">Errors</h2>");
    if view.status.errors.is_empty() {
        html.element("p", &[("class", &"none")], "None since the agent started.");
    } else {
        html.constant("<ul class=\"errors\">");
        for trouble in view.status.errors.iter().rev() {
            error(html, view, trouble);
        }
        html.close("ul");
    }
    html.close("section");
}

fn error(html: &mut Html, view: &View<'_>, trouble: &Trouble) {
    html.open("li", &[]);
    html.open("p", &[]).element("code", &[], &trouble.code).text(" ").text(&trouble.what);
    html.close("p");
    let mut parts = vec![format!("{} ago", words::time(view.now - trouble.at))];
    parts.extend(trouble.tier.map(|tier| view.tier(tier).to_owned()));
    parts.extend(trouble.step.map(|step| format!("step {step}")));
    parts.push(match trouble.again_seconds {
        Some(again) => match trouble.at + again - view.now {
            left if left > 0.5 => format!("tried again in {}", words::time(left)),
            _ => "tried again".to_owned(),
        },
        None => "not tried again".to_owned(),
    });
    html.element("p", &[("class", &"who")], parts.join(" · ")).close("li");
}
