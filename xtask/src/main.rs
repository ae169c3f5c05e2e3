//! Development tasks, run as `cargo xtask TASK`.
//!
//! Exit codes are those of the product: 0 done, 1 something failed, 2 wrong usage. Each task prints
//! the commands that it runs and lets their output through, so that what was run and what it said
//! is never in doubt.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a tool that talks to a terminal")]

mod bench;
mod ci;
mod command;
mod failure;
mod programs;
mod python;
mod quickstart;
mod servers;
mod test;
mod tidy;
mod torch_env;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  quickstart [--s3]
                  set up, load a small real model, train one that is interrupted in a save, move
                  steps through three tiers; with --s3 the third is a bucket of a server it starts
  test [--full]   every test, Rust and Python; --full adds those that take long
  bench [ARG...]  build, then measure loads beside other loaders; ARGs go to bench/peers/load.py
  ci              what CI runs: format, lints, docs, tidy, tests
  tidy            the house rules that a machine can check

PYTHON names the interpreter to use, 3.10 or newer; otherwise one is looked for.";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["quickstart"] => quickstart::run_quickstart(false),
        ["quickstart", "--s3"] => quickstart::run_quickstart(true),
        ["test"] => test::run_tests(false),
        ["test", "--full"] => test::run_tests(true),
        ["bench", rest @ ..] => bench::run_benches(rest),
        ["ci"] => ci::run_ci(),
        ["tidy"] => tidy::run(),
        ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace.
fn workspace() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_owned()
}

/// Where Cargo puts what it builds.
fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => workspace().join(folder),
        None => workspace().join("target"),
    }
}

/// A line that stands out from the output of the commands below it.
fn heading(text: &str) {
    println!("\n== {text}");
}
