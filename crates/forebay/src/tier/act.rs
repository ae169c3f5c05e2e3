//! Everything that is an action: pins, holds, promotion, pauses, limits, prune.
//!
//! JSON: the outcome, `{"done", "notes", "removed": [{"tier", "step", "attempt", "bytes"}], "failed"}`.

use std::io::Write;
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_tier::config::Config;
use forebay_tier::runner::{Action, Duties, Outcome as Done, Runner};

use super::args::{ConfigArgs, Tier};
use super::{agent, here};
use crate::ckpt::Outcome;
use crate::console::{Console, clean};
use crate::interrupt;
use crate::units::decimal;

/// Runs one of them.
pub(super) fn run(command: &Tier, console: &Console) -> Result<Outcome> {
    let Some((args, action)) = action_of(command) else {
        return Err(Error::new(Code::Internal, "not an action"));
    };
    let config = args.load()?;
    let done = match agent::find(args, &config)? {
        Some(mut agent) => agent.act(&action)?,
        None => act_here(&config, &action, console)?,
    };
    tell(&done, console)
}

fn action_of(command: &Tier) -> Option<(&ConfigArgs, Action)> {
    Some(match command {
        Tier::Status(_) | Tier::Drain(_) | Tier::Jobs(_) | Tier::Track(_) | Tier::Untrack(_) => {
            return None;
        }
        Tier::Pin(args) => (&args.config, Action::Pin { step: args.step, name: args.name.clone() }),
        Tier::Unpin(args) => (&args.config, Action::Unpin { name: args.name.clone() }),
        Tier::Hold(args) => (&args.config, Action::Hold { step: args.step, why: args.why.clone() }),
        Tier::Release(args) => (&args.config, Action::Release { step: args.step }),
        Tier::Promote(args) => {
            let (name, to) = (args.name.clone(), args.to.clone());
            let (step, export) = (args.step, args.export);
            (&args.config, Action::Promote { step, name, to, export })
        }
        Tier::Pause(args) => (&args.config, Action::Pause { tier: args.tier.clone() }),
        Tier::Resume(args) => (&args.config, Action::Resume { tier: args.tier.clone() }),
        Tier::Limit(args) => {
            let (tier, read, write) = (args.tier.clone(), args.read, args.write);
            (&args.config, Action::SetCaps { tier, read, write })
        }
        Tier::Prune(args) => (&args.config, Action::Prune { dry_run: args.dry_run }),
    })
}

/// Does it in this process.
fn act_here(config: &Config, action: &Action, console: &Console) -> Result<Done> {
    if matches!(action, Action::Pause { .. } | Action::Resume { .. } | Action::SetCaps { .. }) {
        let what = "no agent answers: nothing moves that could be paused or limited";
        let error = Error::new(Code::NotFound, what).at(config.agent.socket.display());
        return Err(error.hint("limits of what this command moves are set with --set"));
    }
    let removes = matches!(action, Action::Prune { dry_run: false });
    let runner = here::open(config, Duties::Look)?;
    here::look(&runner, console)?;
    let mut done = runner.act(action, &who())?;
    if removes {
        drop(runner);
        done.failed.extend(remove(config, console)?);
    }
    Ok(done)
}

/// Applies the rules of what stays, until there is nothing left that can be removed; says what cannot.
fn remove(config: &Config, console: &Console) -> Result<Option<String>> {
    let runner = here::open(config, Duties::Remove)?;
    here::look(&runner, console)?;
    while runner.pending().removing > 0 {
        interrupt::check()?;
        wait(&runner);
    }
    let stuck = runner.pending().stuck;
    let why = runner.status().errors.pop().map(|error| format!(": {}", clean(&error.what)));
    Ok((stuck > 0).then(|| format!("{stuck} copies cannot be removed{}", why.unwrap_or_default())))
}

fn wait(runner: &Runner) {
    runner.look(Duration::from_millis(500));
}

/// Who asks, for the audit log: the user, and this process.
fn who() -> String {
    let user = rustix::process::getuid().as_raw();
    let name = std::env::var("USER").ok().filter(|name| !name.is_empty());
    let name = name.map(|name| format!("{name} ")).unwrap_or_default();
    format!("{name}(uid {user}), forebay tier, process {}", std::process::id())
}

fn tell(done: &Done, console: &Console) -> Result<Outcome> {
    for line in &done.failed {
        console.warning(line);
    }
    let written = match console.is_json() {
        true => console.json(done),
        false => console.print(|out| print(out, done)),
    };
    Outcome::good_if(done.failed.is_empty()).told(written, console)
}

fn print(out: &mut dyn Write, done: &Done) -> std::io::Result<()> {
    for removed in &done.removed {
        let (tier, bytes) = (clean(&removed.tier), decimal(removed.bytes));
        writeln!(out, "tier {tier}: step {}, {bytes}", removed.step)?;
    }
    writeln!(out, "{}", clean(&done.done))?;
    for note in &done.notes {
        writeln!(out, "{}", clean(note))?;
    }
    Ok(())
}
