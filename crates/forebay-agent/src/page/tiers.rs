//! A card for each tier.

use forebay_tier::status::{Health, TierStatus};

use super::html::Html;
use super::{View, forms, spark};
use crate::words;

pub(super) fn section(html: &mut Html, view: &View<'_>) {
    html.constant("<section aria-labelledby=\"tiers\"><h2 id=\"tiers\">Tiers</h2>");
    if view.status.tiers.is_empty() {
        html.element("p", &[("class", &"none")], "No tiers are configured.");
    }
    html.constant("<ol class=\"tiers\">");
    for (number, tier) in view.status.tiers.iter().enumerate() {
        html.open("li", &[("class", &"card")]);
        card(html, view, number, tier);
        html.close("li");
    }
    html.constant("</ol></section>");
}

fn card(html: &mut Html, view: &View<'_>, number: usize, tier: &TierStatus) {
    html.constant("<div class=\"top\">");
    html.open("h3", &[]);
    html.element("span", &[("class", &"number")], number).text(" ").text(&tier.name).close("h3");
    let (class, word) = health(tier.health);
    html.constant("<span class=\"pills\">");
    if tier.paused {
        html.element("span", &[("class", &"pill warn")], "paused");
    }
    html.element("span", &[("class", &format_args!("pill {class}"))], word);
    html.constant("</span></div>");
    html.element("p", &[("class", &"place")], &tier.place);
    fill(html, tier);
    flow(html, view, number, tier);
    if !tier.notes.is_empty() {
        html.element("p", &[("class", &"note")], tier.notes.join(" · "));
    }
    forms::tier(html, view, tier);
}

fn fill(html: &mut Html, tier: &TierStatus) {
    html.open("p", &[("class", &"fill")]);
    html.element("strong", &[], words::bytes(tier.used_bytes));
    match tier.capacity_bytes {
        Some(capacity) => html.text(format_args!(" of {}", words::bytes(capacity))),
        None => html.text(" used"),
    };
    let steps = words::count(tier.committed, "checkpoint");
    let free = tier.free_bytes.map(|free| format!("{} free · ", words::bytes(free)));
    let right = free.unwrap_or_default() + &steps;
    html.element("span", &[("class", &"right")], right).close("p");
    if let Some(capacity) = tier.capacity_bytes.filter(|&capacity| capacity > 0) {
        let percent = (tier.used_bytes as f64 / capacity as f64 * 100.0).min(100.0);
        let class = match percent {
            95.0.. => "bad",
            85.0.. => "warn",
            _ => "good",
        };
        let label = format!("{percent:.0} % full");
        let attributes: [(&'static str, &dyn std::fmt::Display); 5] = [
            ("class", &class),
            ("max", &100),
            ("value", &format_args!("{percent:.1}")),
            ("aria-label", &label),
            ("title", &label),
        ];
        html.element("progress", &attributes, &label);
    }
}

fn flow(html: &mut Html, view: &View<'_>, number: usize, tier: &TierStatus) {
    let limit = |cap: Option<u64>| match cap {
        Some(cap) => format!(" (limit {}/s)", words::bytes(cap)),
        None => String::new(),
    };
    html.constant("<dl class=\"flow\"><div class=\"in\"><dt>in</dt>");
    let written = format!("{}{}", words::rate(tier.write_rate), limit(tier.write_cap));
    html.element("dd", &[("title", &total(tier.written_bytes))], written);
    html.constant("</div><div class=\"out\"><dt>out</dt>");
    let read = format!("{}{}", words::rate(tier.read_rate), limit(tier.read_cap));
    html.element("dd", &[("title", &total(tier.read_bytes))], read);
    html.constant("</div></dl>");
    if let Some(rates) = view.rates.get(number) {
        spark::curves(html, rates);
    }
}

fn total(bytes: u64) -> String {
    format!("{} since the agent started", words::bytes(bytes))
}

fn health(health: Health) -> (&'static str, &'static str) {
    match health {
        Health::Unknown => ("idle", "not asked yet"),
        Health::Ok => ("good", "ok"),
        Health::Troubled => ("warn", "troubled"),
        Health::Full => ("bad", "full"),
        Health::ReadOnly => ("bad", "read only"),
        Health::Down => ("bad", "down"),
    }
}
