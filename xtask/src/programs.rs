//! Rust test programs, two at a time.
//!
//! Many tests wait, for servers, for other processes and for times that must pass: run one after the other, as `cargo
//! test` does, their programs leave half of a machine of two processors idle. Cargo builds all of them first and says
//! where they are; here they run as it would run them, in the folder of their package. What a program prints is shown
//! when it ends. After the first that fails none is begun.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::command::{cargo, command, run, run_for_output};
use crate::failure::{Failure, Result};

/// Programs at a time.
const AT_ONCE: usize = 2;
/// Those that take longest, which begin first.
const LONG: [&str; 7] = ["command", "gpu_sim", "runner", "bucket", "commit", "durable", "hop"];

/// One program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Program {
    executable: PathBuf,
    /// Of its package.
    folder: PathBuf,
}

impl Program {
    /// As its file is called, without what Cargo adds.
    fn name(&self) -> &str {
        let name = self.executable.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.rsplit_once('-').map_or(name, |(name, _)| name)
    }
}

/// Builds and runs the tests of the packages that `select` names, with what `tell` sets in their environment; examples
/// in documentation after them.
pub(crate) fn run_tests(select: &[&str], tell: impl Fn(&mut Command) + Sync) -> Result {
    let mut build = cargo();
    build.args(["test", "--locked", "--no-run", "--message-format", "json-render-diagnostics"]);
    tell(build.args(select));
    let built = String::from_utf8(run_for_output(&mut build)?)
        .map_err(|_| Failure::new("Cargo's messages are no text"))?;
    let programs = in_order(built.lines().filter_map(program).collect());
    if programs.is_empty() {
        return Err(Failure::new("Cargo built no test program"));
    }
    run_all(programs, &tell)?;
    let mut examples = cargo();
    examples.args(["test", "--locked", "--doc"]);
    tell(examples.args(select));
    run(&mut examples)
}

/// The test program that a message of Cargo tells of.
fn program(message: &str) -> Option<Program> {
    // A target that can be tested says `"test":true` too; what counts is what it was built as.
    let (_, profile) = message.split_once("\"profile\":{")?;
    let is_test = profile.split('}').next()?.contains("\"test\":true");
    let executable = is_test.then(|| text(message, "executable"))??;
    let folder = Path::new(text(message, "manifest_path")?).parent()?.to_owned();
    Some(Program { executable: executable.into(), folder })
}

/// A field of a message that is text. Paths with characters that JSON writes otherwise are not found.
fn text<'a>(message: &'a str, field: &str) -> Option<&'a str> {
    let (_, rest) = message.split_once(&format!("\"{field}\":\""))?;
    rest.split_once('"').map(|(text, _)| text).filter(|text| !text.contains('\\'))
}

fn in_order(mut programs: Vec<Program>) -> VecDeque<Program> {
    let place = |program: &Program| {
        LONG.iter().position(|name| *name == program.name()).unwrap_or(LONG.len())
    };
    programs.sort_by_key(place);
    programs.into()
}

fn run_all(programs: VecDeque<Program>, tell: &(impl Fn(&mut Command) + Sync)) -> Result {
    let left = Mutex::new(programs);
    let failed: Mutex<Result> = Mutex::new(Ok(()));
    let work = || {
        while let Some(program) = next(&left, &failed) {
            let mut test = command(&program.executable);
            test.current_dir(&program.folder);
            tell(&mut test);
            let ended = test.output();
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            println!("\n     Running {}", program.executable.display());
            let ended = match ended {
                Ok(output) => {
                    print!("{}", String::from_utf8_lossy(&output.stdout));
                    eprint!("{}", String::from_utf8_lossy(&output.stderr));
                    if output.status.success() { Ok(()) } else { Err(output.status.to_string()) }
                }
                Err(error) => Err(error.to_string()),
            };
            if let (Ok(()), Err(why)) = (&*failed, ended) {
                let what = format!("`{}` failed: {why}", program.name());
                *failed = Err(Failure::new(what).hint("its output is above"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..AT_ONCE {
            scope.spawn(work);
        }
        work();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn next(left: &Mutex<VecDeque<Program>>, failed: &Mutex<Result>) -> Option<Program> {
    if failed.lock().unwrap_or_else(PoisonError::into_inner).is_err() {
        return None;
    }
    left.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(folder: &Path, name: &str, text: &str) -> Program {
        use std::os::unix::fs::PermissionsExt;
        let executable = folder.join(format!("{name}-0123"));
        std::fs::write(&executable, format!("#!/bin/sh\n{text}\n")).unwrap();
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&executable, mode).unwrap();
        Program { executable, folder: folder.to_owned() }
    }

    #[test]
    fn test_programs_are_found_in_what_cargo_says() {
        let message = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a b/Cargo.toml","#,
            r#""target":{"test":true},"profile":{"debuginfo":0,"test":true},"#,
            r#""executable":"/w/t/x-1"}"#
        );
        let found = program(message).unwrap();
        assert_eq!((found.name(), found.folder.as_path()), ("x", Path::new("/w/a b")));
        let library = message.replace("\"/w/t/x-1\"", "null");
        assert_eq!(program(&library), None);
        // The program itself, which tests start.
        let plain = message.replace("0,\"test\":true", "0,\"test\":false");
        assert_eq!(program(&plain), None);
        assert_eq!(program(r#"{"reason":"build-finished","success":true}"#), None);
        let order = in_order(
            ["a", "hop", "command", "b"]
                .map(|name| Program {
                    executable: format!("/t/{name}-1").into(),
                    folder: PathBuf::new(),
                })
                .to_vec(),
        );
        let names: Vec<&str> = order.iter().map(Program::name).collect();
        assert_eq!(names, ["command", "hop", "a", "b"]);
    }

    #[test]
    fn all_run_and_one_that_fails_is_named_and_ends_it() {
        let folder = std::env::temp_dir().join(format!("xtask-programs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let good =
            |name: &str| script(&folder, name, &format!("touch {name}.ran; test \"$TOLD\" = yes"));
        let tell = |command: &mut Command| {
            command.env("TOLD", "yes");
        };
        let ran = |name: &str| folder.join(format!("{name}.ran")).exists();
        run_all([good("a"), good("b"), good("c")].into(), &tell).unwrap();
        assert!(["a", "b", "c"].iter().all(|name| ran(name)));
        let bad = script(&folder, "bad", "exit 3");
        let slow = script(&folder, "slow", "sleep 1");
        let all = [slow, bad, good("late")].into();
        let failure = run_all(all, &tell).unwrap_err().to_string();
        assert!(failure.contains("`bad` failed: exit status: 3"), "{failure}");
        assert!(!ran("late"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
