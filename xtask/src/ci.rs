//! `cargo xtask ci`: what CI runs, in the order in which it fails soonest.
//!
//! All steps share one target folder and build without debug information, so that a clean clone on
//! 2 cores stays far under half an hour. The first failure ends the run; the summary says what was
//! reached.

use std::time::{Duration, Instant};

use crate::command::{cargo, run};
use crate::failure::Result;
use crate::python::Python;
use crate::{heading, test, tidy};

type Step = (&'static str, fn() -> Result);

const STEPS: &[Step] = &[
    ("format", format),
    ("tidy", tidy::run),
    ("lints", lints),
    ("docs", docs),
    ("tests", || test::run_tests(false)),
];

pub(crate) fn run_ci() -> Result {
    let mut done: Vec<(&str, Duration)> = Vec::new();
    for (name, step) in STEPS {
        heading(&format!("ci: {name}"));
        let start = Instant::now();
        let result = step();
        done.push((name, start.elapsed()));
        if result.is_err() {
            summary(&done, Some(name));
            return result;
        }
    }
    summary(&done, None);
    Ok(())
}

fn summary(done: &[(&str, Duration)], failed: Option<&str>) {
    heading("ci: summary");
    for (name, time) in done {
        let word = if failed == Some(name) { "FAILED" } else { "ok" };
        println!("{name:8} {word:6} {:6.1} s", time.as_secs_f64());
    }
    for (name, _) in STEPS.iter().skip(done.len()) {
        println!("{name:8} not run");
    }
}

fn format() -> Result {
    run(cargo().args(["fmt", "--all", "--check"]))
}

fn lints() -> Result {
    let python = Python::find()?.program;
    let args = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
    run(cargo().args(args).env("PYO3_PYTHON", python))
}

fn docs() -> Result {
    let args = ["doc", "--locked", "--no-deps", "--workspace", "--exclude", "forebay-python"];
    run(cargo().args(args).env("RUSTDOCFLAGS", "-D warnings"))
}
