//! `cargo xtask test`: every test that this machine can run.
//!
//! Rust first, because it is the quicker to fail. The Python tests run in an environment with torch, and so does what
//! Rust tests have stock torch read. Servers that tests need are installed before.
//! `--full` sets `FOREBAY_FULL=1`, which the tests of both languages read to add what takes long.

use std::process::Command;

use crate::command::{cargo, run};
use crate::failure::Result;
use crate::python::Python;
use crate::servers::Servers;
use crate::{heading, torch_env};

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
    heading("servers for tests");
    let servers = Servers::ready()?;
    heading("Rust tests");
    let mut tests = cargo();
    // The Python module is a library for an interpreter to load: it has no test program.
    tests.args(["test", "--locked", "--workspace", "--exclude", "forebay-python"]);
    tests.env("PYO3_PYTHON", Python::find()?.program);
    tests.env("FOREBAY_TEST_PYTHON", torch_env::ready()?.interpreter());
    servers.tell(&mut tests);
    run(with_full(&mut tests, full))
}

fn python(full: bool) -> Result {
    heading("Python tests");
    let venv = torch_env::ready()?;
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
