//! `cargo xtask test`: every test that this machine can run.
//!
//! Rust first, because it is the quicker to fail. The Python tests get an environment of their own
//! with torch, which is several GB on disk; it is kept between runs. `--full` sets
//! `FOREBAY_FULL=1`, which the tests of both languages read to add what takes long.

use std::process::Command;

use crate::command::{ask, cargo, command, run};
use crate::failure::Result;
use crate::python::{Python, Venv};
use crate::{heading, workspace};

/// torch is the plain one of the index. `safetensors` is pinned, because the tests compare verdicts
/// with it.
const REQUIREMENTS: &[&[&str]] =
    &[&["maturin>=1.9,<2", "pytest", "numpy", "hypothesis", "safetensors==0.8.0", "torch"]];

/// torch and what it brings (CUDA libraries included) unpack to about 7 GB; pip holds the archives
/// beside them.
const FREE_KIB_MIN: u64 = 12 << 20;

pub(crate) fn run_tests(full: bool) -> Result {
    heading(if full { "tests, with those that take long" } else { "tests" });
    rust(full)?;
    python(full)?;
    if !full {
        println!("\nleft out: what takes long, see `cargo xtask test --full` and docs/STATUS.md");
    }
    Ok(())
}

fn rust(full: bool) -> Result {
    heading("the simulated GPU");
    // A C library, which tests find by its file: Cargo builds none for a test.
    run(cargo().args(["build", "--locked", "--package", "forebay-simgpu"]))?;
    heading("Rust tests");
    let mut tests = cargo();
    // The Python module is a library for an interpreter to load: it has no test program.
    tests.args(["test", "--locked", "--workspace", "--exclude", "forebay-python"]);
    tests.env("PYO3_PYTHON", Python::find()?.program);
    run(with_full(&mut tests, full))
}

fn python(full: bool) -> Result {
    heading("Python tests");
    warn_of_a_full_disk();
    let venv = Venv::ready("test", REQUIREMENTS)?;
    let manifest = "python/Cargo.toml";
    run(venv.program("maturin").args([
        "develop",
        "--release",
        "--locked",
        "--manifest-path",
        manifest,
    ]))?;
    let mut tests = venv.python();
    tests.args(["-m", "pytest", "-ra", "python/tests"]);
    run(with_full(&mut tests, full))
}

fn with_full(command: &mut Command, full: bool) -> &mut Command {
    if full { command.env("FOREBAY_FULL", "1") } else { command.env_remove("FOREBAY_FULL") }
}

fn warn_of_a_full_disk() {
    let made = workspace().join(".venv-test").is_dir();
    if let (false, Some(free)) = (made, free_kib())
        && free < FREE_KIB_MIN
    {
        let (free, needed) = (free >> 20, FREE_KIB_MIN >> 20);
        println!("warning: {free} GiB are free here, torch needs up to {needed} GiB to install");
    }
}

/// The standard library has no statvfs; df is everywhere.
fn free_kib() -> Option<u64> {
    parse_df(&ask(command("df").args(["-Pk", "."]))?)
}

/// The fourth field of the second line.
fn parse_df(text: &str) -> Option<u64> {
    text.lines().nth(1)?.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn df_is_read() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                    /dev/vda 263174212 16006244 79318276 17% /\n";
        assert_eq!(parse_df(text), Some(79_318_276));
        assert_eq!(parse_df(""), None);
        assert!(free_kib().is_some());
    }
}
