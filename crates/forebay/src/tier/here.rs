//! The tiers, opened in this process: for commands where no agent answers.

use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_tier::config::Config;
use forebay_tier::runner::{Duties, Runner, Tiers};

use crate::console::Console;
use crate::interrupt;

/// How long a tier may take to be seen before a command goes on without it.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a wait looks for signals.
const TICK: Duration = Duration::from_millis(100);

/// Opens them. Errors: those of [`Tiers::open`].
pub(super) fn open(config: &Config, duties: Duties) -> Result<Runner> {
    Runner::start_with(Tiers::open(config)?, duties)
}

/// Waits until every tier was seen; tiers that do not answer are warned of.
pub(super) fn look(runner: &Runner, console: &Console) -> Result<()> {
    let mut waited = Duration::ZERO;
    runner.wake();
    while runner.pending().unseen.len() > down(runner).len() && waited < PATIENCE {
        interrupt::check()?;
        std::thread::sleep(TICK.min(Duration::from_millis(10)));
        waited += Duration::from_millis(10);
    }
    let down = down(runner);
    for (name, why) in &down {
        console.warning(&format!("tier {name} does not answer: {why}"));
    }
    if down.len() == runner.tiers().count() {
        return Err(Error::new(Code::NotFound, "no tier answers"));
    }
    Ok(())
}

/// Tiers that do not answer, and why.
fn down(runner: &Runner) -> Vec<(String, String)> {
    let status = runner.status();
    let down =
        status.tiers.into_iter().filter(|tier| tier.health == forebay_tier::status::Health::Down);
    down.map(|mut tier| (tier.name, tier.notes.pop().unwrap_or_default())).collect()
}
