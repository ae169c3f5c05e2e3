//! The progress bar: bytes, rate and time left, on stderr, ten times a second, and only where a person looks.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::console::Console;

/// How often things that take long look around: for progress to show and for signals.
pub(crate) const TICK: Duration = Duration::from_millis(100);

const TEMPLATE: &str =
    "{msg:>9} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";

/// A bar that removes itself.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar of `bytes`; nothing is shown where the console says so.
    pub(crate) fn new(console: &Console, what: &'static str, bytes: u64) -> Self {
        if !console.shows_progress() {
            return Self(ProgressBar::hidden());
        }
        let bar =
            ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what);
        Self(bar)
    }

    /// So many bytes are done.
    pub(crate) fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    /// So many more bytes are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
