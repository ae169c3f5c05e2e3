//! Finding an interpreter, and environments of our own for each task.
//!
//! An environment is a folder `.venv-NAME` in the root. A stamp in it holds the interpreter's
//! version and the list of what was installed; while both match, nothing is installed again.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::command::{ask, command, run};
use crate::failure::{Failure, Result};
use crate::{target_dir, workspace};

/// The oldest minor version of Python 3 that the module supports.
const MINOR_MIN: u32 = 10;

/// Names to try, when PYTHON does not give one; `python3` first, because that is what the user
/// calls Python.
const NAMES: [&str; 8] = [
    "python3",
    "python3.15",
    "python3.14",
    "python3.13",
    "python3.12",
    "python3.11",
    "python3.10",
    "python",
];

const STAMP: &str = "forebay-requirements.txt";

/// An interpreter and its version, such as `3.12.4`.
#[derive(Debug)]
pub(crate) struct Python {
    pub(crate) program: String,
    version: String,
}

impl Python {
    /// PYTHON, or the first one that is new enough.
    pub(crate) fn find() -> Result<Self> {
        if let Ok(program) = std::env::var("PYTHON") {
            let found = Self::try_program(&program)?;
            return found.ok_or_else(|| Failure::new(format!("PYTHON={program} does not run")));
        }
        let mut too_old = None;
        for name in NAMES {
            match Self::try_program(name) {
                Ok(Some(python)) => return Ok(python),
                Ok(None) => {}
                Err(failure) => too_old = too_old.or(Some(failure)),
            }
        }
        Err(too_old.unwrap_or_else(|| {
            Failure::new("no Python was found")
                .hint(format!("install Python 3.{MINOR_MIN} or newer, or set PYTHON"))
        }))
    }

    /// `None` when there is no such program.
    fn try_program(program: &str) -> Result<Option<Self>> {
        let code = "import sys; print('%d.%d.%d' % sys.version_info[:3])";
        let Some(version) = ask(command(program).args(["-c", code])) else { return Ok(None) };
        if !new_enough(&version) {
            let what = format!("{program} is Python {version}, 3.{MINOR_MIN} or newer is needed");
            return Err(Failure::new(what).hint("set PYTHON to a newer one"));
        }
        Ok(Some(Self { program: program.to_owned(), version }))
    }
}

fn new_enough(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    (major, minor) >= (3, MINOR_MIN)
}

/// An environment of one task.
pub(crate) struct Venv {
    folder: PathBuf,
}

impl Venv {
    /// Makes `.venv-NAME`, or takes the one that is there, and installs `requirements` unless the
    /// stamp says they are. Each item is one call of pip: its words.
    pub(crate) fn ready(name: &str, requirements: &[&[&str]]) -> Result<Self> {
        let python = Python::find()?;
        let venv = Self { folder: workspace().join(format!(".venv-{name}")) };
        let mut stamp = format!("python {}\n", python.version);
        for words in requirements {
            stamp.push_str(&words.join(" "));
            stamp.push('\n');
        }
        let stamp_path = venv.folder.join(STAMP);
        if fs::read_to_string(&stamp_path).is_ok_and(|found| found == stamp) {
            println!(".venv-{name} has all that it needs");
            return Ok(venv);
        }
        venv.make(&python)?;
        for words in requirements {
            run(venv
                .python()
                .args(["-m", "pip", "install", "--disable-pip-version-check"])
                .args(*words))
            .map_err(|failure| {
                failure.hint("pip needs a package index it can reach; PIP_INDEX_URL names another")
            })?;
        }
        fs::write(&stamp_path, stamp).map_err(|error| {
            Failure::new(format!("cannot write {}: {error}", stamp_path.display()))
        })?;
        Ok(venv)
    }

    /// A new environment each time: one of another interpreter, or half installed, is of no use.
    fn make(&self, python: &Python) -> Result {
        let venv = |extra: &[&str]| {
            let mut command = command(&python.program);
            command.args(["-m", "venv", "--clear"]).args(extra).arg(&self.folder);
            command
        };
        let Err(failure) = run(&mut venv(&[])) else { return Ok(()) };
        // Debian splits ensurepip off; a pip outside can fill an environment that has none.
        println!("trying without the pip that comes with Python");
        let outside = || {
            run(&mut venv(&["--without-pip"]))?;
            run(command(&python.program)
                .args(["-m", "pip", "--python"])
                .arg(self.bin("python"))
                .args(["install", "pip"]))
        };
        outside().map_err(|_| {
            failure.hint("on Debian and Ubuntu: apt-get install python3-venv, then try again")
        })
    }

    /// A program of the environment.
    pub(crate) fn bin(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// A command that runs a program of the environment, as if it were activated.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = command(self.bin(name));
        let before = std::env::var_os("PATH").unwrap_or_default();
        let own = [self.folder.join("bin")];
        let path = std::env::join_paths(own.into_iter().chain(std::env::split_paths(&before)));
        if let Ok(path) = path {
            command.env("PATH", path);
        }
        // maturin refuses to choose between two kinds of environment.
        command.env("VIRTUAL_ENV", &self.folder).env_remove("CONDA_PREFIX");
        command.env_remove("PYTHONHOME").env_remove("PYTHONPATH");
        command
    }

    /// Where the interpreter of the environment is.
    pub(crate) fn interpreter(&self) -> PathBuf {
        self.bin("python")
    }

    /// The interpreter of the environment, to be run.
    pub(crate) fn python(&self) -> Command {
        self.program("python")
    }

    /// Builds the wheel of the Python module in release form and installs it.
    pub(crate) fn install_forebay(&self) -> Result {
        let folder = target_dir().join("wheels");
        // A wheel of an older version must not be the one installed.
        let _ = fs::remove_dir_all(&folder);
        run(self
            .program("maturin")
            .args(["build", "--release", "--locked", "--manifest-path", "python/Cargo.toml"])
            .args([OsStr::new("--interpreter"), self.bin("python").as_os_str()])
            .args([OsStr::new("--out"), folder.as_os_str()]))?;
        let wheels =
            fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut wheels = wheels.filter(|path| path.extension() == Some(OsStr::new("whl")));
        let wheel = wheels.next().ok_or_else(|| {
            Failure::new(format!("maturin left no wheel in {}", folder.display()))
        })?;
        run(self
            .python()
            .args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps"])
            .arg("--force-reinstall")
            .arg(wheel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(new_enough("3.10.0") && new_enough("3.15.1") && new_enough("4.0.0"));
        assert!(!new_enough("3.9.18") && !new_enough("2.7.18") && !new_enough("x"));
    }

    #[test]
    fn a_program_that_is_not_python_is_none() {
        assert!(Python::try_program("/no/such/python").unwrap().is_none());
        assert!(Python::try_program("false").unwrap().is_none());
    }
}
