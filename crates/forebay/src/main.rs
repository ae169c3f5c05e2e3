//! The `forebay` command.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`args`] | the command line: flags, their environment variables, how values are spelled |
//! | [`load`] | `forebay load`: from a path to the report |
//! | [`inspect`] | `forebay inspect`: what a model holds |
//! | [`ckpt`] | `forebay ckpt`: checkpoints listed, checked, written out, cleaned up |
//! | [`tier`] | `forebay tier`: several stores, seen, drained, told what stays |
//! | [`config`] | `forebay config`: what is configured, and where that comes from |
//! | [`agent`] | `forebay agent`: the daemon of a node |
//! | [`top`] | `forebay top`: what the agent does, live |
//! | [`mod@bench`] | `forebay bench`: rates beside the limits of the machine |
//! | [`select`] | names, shards and regions: which bytes of a model are wanted |
//! | [`targets`] | the memory that a load goes to |
//! | [`verify`] | digests: of files against the caller's word, of what arrived |
//! | [`limits`] | what the machine can do: link, memory, disk |
//! | [`report`] | the report of a load, for people and as JSON |
//! | [`progress`] | the progress bar |
//! | [`console`] | stdout and stderr: who may write what, colours, escapes |
//! | [`interrupt`] | Ctrl-C and its kin |
//! | [`parallel`] | one function over many items, on threads |
//! | [`spread`] | median and range |
//! | [`units`] | sizes, rates and times as people read and write them |
//!
//! Here: from arguments to an exit code. What goes wrong anywhere comes up as a [`forebay_error::Error`] and is printed
//! in one place, below; the exit code follows from its code. Results go to stdout, all else to stderr. With
//! `--json`, stdout holds one whole JSON document or, after an error, nothing.

mod agent;
mod args;
mod bench;
mod ckpt;
mod config;
mod console;
mod inspect;
mod interrupt;
mod limits;
mod load;
mod parallel;
mod progress;
mod report;
mod select;
mod spread;
mod targets;
mod tier;
mod top;
mod units;
mod verify;

use std::process::ExitCode;

use clap::Parser;
use forebay_error::{Code, Result};

use args::{Bench, Cli, Command};
use ckpt::Outcome;
use console::Console;

/// The data or the system is at fault.
const EXIT_FAULT: u8 = 1;

/// Wrong usage; clap uses the same for what it finds itself.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // `--help` and `--version` come this way too.
            console::usage_error(&error);
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE));
        }
    };
    let console = Console::new(&cli.global);
    let result = run(&cli, &console);
    // To the agent a signal is the way to end.
    let ends_well = matches!(cli.command, Command::Agent(_)) && result.is_ok();
    if let Some(signal) = interrupt::received().filter(|_| !ends_well) {
        console.note("interrupted");
        return ExitCode::from(interrupt::exit_code(signal));
    }
    match result {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Bad) => ExitCode::from(EXIT_FAULT),
        // Whoever read stdout has seen enough (`forebay inspect | head`).
        Err(error) if console.stdout_closed() => {
            tracing::debug!(%error, "stdout was closed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            console.error(&error);
            ExitCode::from(exit_code(error.code()))
        }
    }
}

/// What a person must type differently is wrong usage. That two files have other shapes than each other, or that data
/// need what is not supported, is no more so than damage: codes that are of the call in a library are of the data here.
fn exit_code(code: Code) -> u8 {
    match code {
        Code::Usage | Code::NoSuchTensor | Code::BadSlice => EXIT_USAGE,
        _ => EXIT_FAULT,
    }
}

fn run(cli: &Cli, console: &Console) -> Result<Outcome> {
    interrupt::watch()?;
    if let Command::Agent(args) = &cli.command {
        // It has a log of its own kind.
        agent::run(args, &cli.global, console)?;
        return Ok(Outcome::Good);
    }
    console::start_log(cli.global.verbose)?;
    match &cli.command {
        // Above.
        Command::Agent(_) => {}
        Command::Load(args) => load::run(args, console)?,
        Command::Inspect(args) => inspect::run(args, console)?,
        Command::Bench(Bench::Load(args)) => bench::run(args, console)?,
        Command::Top(args) => top::run(args, console)?,
        Command::Ckpt(command) => return ckpt::run(command, console),
        Command::Tier(command) => return tier::run(command, console),
        Command::Config(args) => return config::run(args, console),
    }
    Ok(Outcome::Good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_must_be_typed_differently_is_wrong_usage() {
        let wrong: Vec<Code> =
            Code::ALL.iter().copied().filter(|code| exit_code(*code) == EXIT_USAGE).collect();
        assert_eq!(wrong, [Code::Usage, Code::NoSuchTensor, Code::BadSlice]);
    }
}
