//! `cargo xtask test`: every test that this machine can run.
//!
//! Rust first, because it is the quicker to fail. The Python tests run in an environment with torch, and so does what
//! Rust tests have stock torch read. Servers that tests need are installed before.
//! `--full` sets `FOREBAY_FULL=1`, which the tests of both languages read to add what takes long.

use std::process::Command;

use crate::command::{cargo, run};
use crate::failure::{Failure, Result};
use crate::python::{Python, Venv};
use crate::servers::Servers;
use crate::{heading, programs, torch_env};

/// Most processes that run Python tests at once.
const WORKERS_MAX: usize = 8;

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
    heading("servers and packages for tests");
    let (servers, torch) = ready()?;
    heading("Rust tests");
    let python = Python::find()?.program;
    // The Python module is a library for an interpreter to load: it has no test program.
    programs::run_tests(&["--workspace", "--exclude", "forebay-python"], |tests| {
        tests.env("PYO3_PYTHON", &python).env("FOREBAY_TEST_PYTHON", torch.interpreter());
        servers.tell(tests);
        with_full(tests, full);
    })
}

/// One is compiled, the other is downloaded: at once, where neither is there yet.
fn ready() -> Result<(Servers, Venv)> {
    std::thread::scope(|scope| {
        let torch = scope.spawn(torch_env::ready);
        let servers = Servers::ready()?;
        let torch = torch.join().map_err(|_| Failure::new("the installation of torch panicked"))?;
        Ok((servers, torch?))
    })
}

fn python(full: bool) -> Result {
    heading("Python tests");
    let venv = torch_env::ready()?;
    let manifest = "python/Cargo.toml";
    let mut build = venv.program("maturin");
    build.args(["develop", "--locked", "--manifest-path", manifest]);
    // The dependencies are built already for the Rust tests, and overflows are found. What users get is built in full.
    if full {
        build.arg("--release");
    }
    run(&mut build)?;
    let mut tests = venv.python();
    tests.args(["-m", "pytest", "-ra", "python/tests"]);
    // They mostly wait: for other processes, and for times that must pass. With what takes long, and on a GPU, each has
    // the machine to itself.
    if !full {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        tests.args(["--numprocesses", &(processors + 1).min(WORKERS_MAX).to_string()]);
        tests.args(["--dist", "worksteal"]);
    }
    Servers::ready()?.tell(&mut tests);
    run(with_full(&mut tests, full))
}

fn with_full(command: &mut Command, full: bool) -> &mut Command {
    if full { command.env("FOREBAY_FULL", "1") } else { command.env_remove("FOREBAY_FULL") }
}
