//! Checkpoints: which tier has which.

use forebay_tier::status::{CopyState, StepStatus};

use super::html::Html;
use super::{STEPS_A_PAGE, View, forms, frame};
use crate::words;

/// The last few, on the first page.
pub(super) fn newest(html: &mut Html, view: &View<'_>, most: usize) {
    html.constant("<section aria-labelledby=\"steps\"><h2 id=\"steps\">Checkpoints</h2>");
    let steps = &view.status.steps;
    list(html, view, steps.iter().rev().take(most));
    if steps.len() > most {
        let all = format!("All {} checkpoints", steps.len());
        html.open("p", &[]);
        html.element("a", &[("href", &frame::link("/checkpoints", view))], all).close("p");
    }
    html.close("section");
}

/// One page of all, the newest first.
pub(super) fn page(html: &mut Html, view: &View<'_>, page: usize) {
    let steps = &view.status.steps;
    let pages = steps.len().div_ceil(STEPS_A_PAGE).max(1);
    let page = page.clamp(1, pages);
    html.constant("<section aria-labelledby=\"steps\"><h2 id=\"steps\">Checkpoints</h2>");
    let held = steps.iter().filter(|step| step.held).count() as u64;
    let pinned = steps.iter().filter(|step| !step.pins.is_empty()).count();
    let count = words::count(steps.len() as u64, "checkpoint");
    let text = format!("{count}, {pinned} pinned, {held} held");
    html.element("p", &[("class", &"who")], text);
    let from = (page - 1).saturating_mul(STEPS_A_PAGE);
    list(html, view, steps.iter().rev().skip(from).take(STEPS_A_PAGE));
    if pages > 1 {
        pager(html, view, page, pages);
    }
    html.close("section");
}

fn pager(html: &mut Html, view: &View<'_>, page: usize, pages: usize) {
    let path = frame::link("/checkpoints", view);
    let join = if path.contains('?') { '&' } else { '?' };
    html.constant("<nav class=\"pager\" aria-label=\"Pages\">");
    if page > 1 {
        let href = format!("{path}{join}page={}", page - 1);
        html.element("a", &[("href", &href), ("rel", &"prev")], "Newer");
    }
    html.element("span", &[], format_args!("{page} of {pages}"));
    if page < pages {
        let href = format!("{path}{join}page={}", page + 1);
        html.element("a", &[("href", &href), ("rel", &"next")], "Older");
    }
    html.close("nav");
}

fn list<'a>(
    html: &mut Html,
    view: &View<'_>,
    steps: impl ExactSizeIterator<Item = &'a StepStatus>,
) {
    if steps.len() == 0 {
        html.element("p", &[("class", &"none")], "No checkpoint yet.");
        return;
    }
    html.constant("<ul class=\"steps\">");
    for step in steps {
        html.constant("<li class=\"step\"><div class=\"about\">");
        html.element("strong", &[], step.step);
        let about = format!("{} · {} ago", words::bytes(step.bytes), words::time(step.age_seconds));
        html.element("span", &[("title", &step.attempt)], about);
        names(html, step);
        html.constant("</div>");
        copies(html, view, step);
        forms::step(html, view, step);
        html.close("li");
    }
    html.close("ul");
}

fn names(html: &mut Html, step: &StepStatus) {
    if step.held {
        html.element("span", &[("class", &"tag held")], "held");
    }
    for pin in &step.pins {
        html.element("span", &[("class", &"tag")], pin);
    }
}

fn copies(html: &mut Html, view: &View<'_>, step: &StepStatus) {
    html.constant("<ul class=\"copies\">");
    for (number, copy) in step.copies.iter().enumerate() {
        let (class, sign, word) = state(*copy);
        let tier = view.tier(number);
        let title = format!("{tier}: {word}");
        html.open("li", &[("class", &format_args!("copy {class}")), ("title", &title)]);
        html.element("span", &[("aria-hidden", &"true")], sign);
        html.text(" ").text(tier);
        html.element("span", &[("class", &"unseen")], format_args!(": {word}")).close("li");
    }
    html.close("ul");
}

/// Class, sign, words.
fn state(copy: CopyState) -> (&'static str, &'static str, &'static str) {
    match copy {
        CopyState::Absent => ("absent", "○", "not there"),
        CopyState::Waiting => ("waiting", "◌", "will come"),
        CopyState::Moving => ("moving", "◐", "on its way"),
        CopyState::Partial => ("waiting", "◔", "some of its files"),
        CopyState::Committed => ("committed", "●", "committed"),
        CopyState::OnNodes => ("committed", "◍", "on its nodes"),
        CopyState::Copied => ("committed", "◉", "on its nodes, and copied"),
        CopyState::Other => ("other", "≠", "another commit of this step"),
    }
}
