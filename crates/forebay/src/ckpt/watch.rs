//! Progress of long commands.

use std::sync::OnceLock;
use std::time::Instant;

use forebay_checkpoint::commit::ReadLease;
use forebay_checkpoint::progress::Progress;
use forebay_error::Result;

use super::place::Step;
use crate::console::Console;
use crate::{interrupt, progress};

/// Shows a bar, looks for signals, keeps readers' leases alive.
pub(super) struct Watch<'a> {
    console: &'a Console,
    what: &'static str,
    bar: OnceLock<progress::Progress>,
    leases: Vec<&'a ReadLease>,
    started: Instant,
}

impl<'a> Watch<'a> {
    pub(super) fn new(console: &'a Console, what: &'static str, steps: &[&'a Step]) -> Self {
        let leases = steps.iter().filter_map(|step| step.lease.as_ref()).collect();
        Self { console, what, bar: OnceLock::new(), leases, started: Instant::now() }
    }

    /// Seconds since it was made.
    pub(super) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}

impl Progress for Watch<'_> {
    fn total(&self, bytes: u64) {
        // What is said first counts: a second word comes after a fault, when the rest is checked in another way.
        self.bar.get_or_init(|| progress::Progress::new(self.console, self.what, bytes));
    }

    fn add(&self, bytes: u64) -> Result<()> {
        if let Some(bar) = self.bar.get() {
            bar.add(bytes);
        }
        self.leases.iter().for_each(|lease| lease.beat());
        interrupt::check()
    }
}
