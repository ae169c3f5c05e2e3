//! The web page: HTML made here, one style sheet and a few lines of script beside it, nothing from elsewhere. It shows
//! what [`Status`] says and nothing of its own; without the script it is the same page, reloaded.
//!
//! | module | what it makes |
//! | --- | --- |
//! | [`html`] | elements, everything in them escaped |
//! | [`frame`] | what is around every page; log in; messages |
//! | [`tiers`] | a card for each tier: fill, flow, health |
//! | [`steps`] | checkpoints and their copies |
//! | [`copies`] | copies on other nodes |
//! | [`moves`] | transfers and errors |
//! | [`spark`] | the curve of the last minutes |
//! | [`forms`] | buttons, for those who may act |

mod copies;
mod forms;
mod frame;
mod html;
mod moves;
mod spark;
mod steps;
#[cfg(test)]
mod tests;
mod text;
mod tiers;

use forebay_tier::status::Status;

use crate::session::Visitor;
use html::Html;

pub(crate) use frame::{login, message};

/// The style sheet.
pub(crate) const STYLE: &str = include_str!("style.css");
/// The mark.
pub(crate) const ICON: &str = include_str!("icon.svg");
/// The script: takes the page anew every two seconds, unless somebody is typing.
pub(crate) const SCRIPT: &str = include_str!("page.js");

/// Checkpoints on the first page.
const NEWEST: usize = 8;
/// Checkpoints on a page of their own.
pub(crate) const STEPS_A_PAGE: usize = 50;

/// What a page is made of.
pub(crate) struct View<'a> {
    /// Names of all jobs.
    pub(crate) jobs: Vec<String>,
    /// Whose page it is.
    pub(crate) job: &'a str,
    pub(crate) status: &'a Status,
    /// Of each tier, the oldest first: bytes a second read and written.
    pub(crate) rates: Vec<Vec<(f64, f64)>>,
    /// Who looks, if somebody logged in.
    pub(crate) visitor: Option<Visitor>,
    /// Whether logging in would give more than this visitor has.
    pub(crate) may_login: bool,
    /// Seconds since 1970.
    pub(crate) now: f64,
}

impl View<'_> {
    /// The second text of a session that may act.
    fn form(&self) -> Option<&str> {
        self.visitor.as_ref().filter(|visitor| visitor.may_act).map(|visitor| visitor.form.as_str())
    }

    fn tier(&self, number: usize) -> &str {
        self.status.tiers.get(number).map_or("?", |tier| tier.name.as_str())
    }
}

/// `/`
pub(crate) fn overview(view: &View<'_>) -> String {
    frame::page(view, "Overview", |html| {
        tiers::section(html, view);
        moves::transfers(html, view);
        steps::newest(html, view, NEWEST);
        copies::section(html, view);
        moves::errors(html, view);
        forms::prune(html, view);
    })
}

/// `/checkpoints`, counted from page 1.
pub(crate) fn checkpoints(view: &View<'_>, page: usize) -> String {
    frame::page(view, "Checkpoints", |html: &mut Html| steps::page(html, view, page))
}
