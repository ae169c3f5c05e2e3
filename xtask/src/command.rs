//! Running other programs: shown before, streamed while, checked after.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use crate::failure::{Failure, Result};
use crate::workspace;

/// A program that starts in the root of the workspace.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(workspace());
    command
}

/// The Cargo that runs this task.
pub(crate) fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command with its output going where ours goes.
pub(crate) fn run(command: &mut Command) -> Result {
    println!("$ {}", shown(command));
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() { Ok(()) } else { Err(failed(command, &status.to_string())) }
}

/// Runs a command and gives what it prints on its standard output; its errors go where ours go.
pub(crate) fn run_for_output(command: &mut Command) -> Result<Vec<u8>> {
    println!("$ {}", shown(command));
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| cannot_start(command, &error))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(failed(command, &output.status.to_string()))
    }
}

/// Asks a command quietly: its trimmed output when it works.
pub(crate) fn ask(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn cannot_start(command: &Command, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot start {}: {error}", command.get_program().display()))
}

fn failed(command: &Command, status: &str) -> Failure {
    Failure::new(format!("`{}` failed: {status}", shown(command)))
}

/// The command as one would type it; variables that the task sets stand in front.
fn shown(command: &Command) -> String {
    let mut words: Vec<String> = Vec::new();
    for (name, value) in command.get_envs() {
        // PATH says nothing and is long.
        if let (true, Some(value)) = (name != "PATH", value) {
            words.push(format!("{}={}", name.display(), quoted(value)));
        }
    }
    let cargo = std::env::var_os("CARGO").is_some_and(|cargo| cargo == command.get_program());
    words.push(if cargo { "cargo".to_owned() } else { quoted(command.get_program()) });
    words.extend(command.get_args().map(quoted));
    words.join(" ")
}

fn quoted(word: &OsStr) -> String {
    let root = workspace();
    let text = word.to_string_lossy().into_owned();
    // Places in the workspace are shown from its root.
    let text = match text.strip_prefix(&format!("{}/", root.display())) {
        Some(inside) => inside.to_owned(),
        None => text,
    };
    if text.is_empty() || text.contains([' ', '\'', '"', '$', '*', '<', '>']) {
        format!("'{}'", text.replace('\'', "'\\''"))
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed() {
        let mut command = command("pip");
        command.args(["install", "torch>=2.4"]).env("A", "b c").env("PATH", "/long");
        command.arg(workspace().join("python"));
        assert_eq!(shown(&command), "A='b c' pip install 'torch>=2.4' python");
    }

    #[test]
    fn a_failure_names_the_command() {
        let failure = run(&mut command("false")).unwrap_err().to_string();
        assert!(failure.starts_with("error: `false` failed: exit status: 1"), "{failure}");
        let failure = run(&mut command("/no/such/program")).unwrap_err().to_string();
        assert!(failure.starts_with("error: cannot start /no/such/program"), "{failure}");
        assert_eq!(ask(command("echo").arg("hi")).as_deref(), Some("hi"));
        assert_eq!(ask(&mut command("false")), None);
    }
}
