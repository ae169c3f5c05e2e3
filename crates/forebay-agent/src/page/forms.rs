//! Buttons, for those who logged in with the token for actions. Each form carries the session's second text; what a
//! form may ask for is in [`crate::http`]'s `form`.

use std::fmt::Display;

use forebay_tier::status::{StepStatus, TierStatus};

use super::View;
use super::html::Html;

pub(super) fn tier(html: &mut Html, view: &View<'_>, tier: &TierStatus) {
    let (action, word) = if tier.paused { ("resume", "Resume") } else { ("pause", "Pause") };
    button(html, view, action, &[("tier", &tier.name)], word);
}

pub(super) fn step(html: &mut Html, view: &View<'_>, step: &StepStatus) {
    if view.form().is_none() {
        return;
    }
    html.constant("<details class=\"change\"><summary>Change</summary><div>");
    let (action, word) = if step.held { ("release", "Release the hold") } else { ("hold", "Hold") };
    button(html, view, action, &[("step", &step.step)], word);
    for pin in &step.pins {
        button(html, view, "unpin", &[("name", pin)], format!("Unpin {pin}"));
    }
    if open(html, view, "pin", &[("step", &step.step)]) {
        html.constant(
            "<input name=\"name\" required maxlength=\"64\" placeholder=\"name\" \
             aria-label=\"Name to pin it as\"><button>Pin</button></form>",
        );
    }
    html.constant("</div></details>");
}

pub(super) fn prune(html: &mut Html, view: &View<'_>) {
    if view.form().is_none() {
        return;
    }
    html.constant("<section><h2>Cleaning up</h2><div class=\"buttons\">");
    button(html, view, "wake", &[], "Look now");
    button(html, view, "prune", &[], "Show what may go");
    if open(html, view, "prune", &[]) {
        html.constant(
            "<label><input type=\"checkbox\" name=\"really\" value=\"yes\" required> \
             remove it</label><button class=\"danger\">Prune</button></form>",
        );
    }
    html.constant("</div></section>");
}

fn button(
    html: &mut Html,
    view: &View<'_>,
    action: &'static str,
    fields: &[(&'static str, &dyn Display)],
    word: impl Display,
) {
    if open(html, view, action, fields) {
        html.element("button", &[], word).close("form");
    }
}

/// Starts a form; false, and nothing, for those who may not act.
fn open(
    html: &mut Html,
    view: &View<'_>,
    action: &'static str,
    fields: &[(&'static str, &dyn Display)],
) -> bool {
    let Some(form) = view.form() else { return false };
    html.constant("<form class=\"inline\" method=\"post\" action=\"/actions\">");
    let own: [(&'static str, &dyn Display); 3] =
        [("form", &form), ("job", &view.job), ("action", &action)];
    for (name, value) in own.iter().chain(fields) {
        html.open("input", &[("type", &"hidden"), ("name", name), ("value", value)]);
    }
    true
}
