//! What is in deploy/ works with this command.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Site;
use crate::util::{forebay, stderr, stdout, text};

fn deploy(name: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    let content = std::fs::read_to_string(&path).unwrap();
    (path, content)
}

#[test]
fn the_service_starts_the_agent_as_it_is() {
    let (path, unit) = deploy("systemd/forebay-agent.service");
    let site = Site::new("", "");
    for key in ["ExecStartPre=", "ExecStart=", "ExecReload="] {
        let line = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let line = line.replace("/etc/forebay/forebay.toml", text(&site.config));
        let args: Vec<&str> = line.split(' ').skip(1).collect();
        let mut command = forebay();
        command.args(&args);
        if key == "ExecStart=" {
            // It would go on.
            command.arg("--check");
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
    }
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    match verified {
        Err(error) => eprintln!("skipped: no systemd-analyze: {error}"),
        Ok(output) => {
            let said = format!("{}{}", stdout(&output), stderr(&output));
            // The command is not installed where this runs, nor is there such a user.
            let ours = |line: &&str| {
                line.contains("forebay-agent.service") && !line.contains("/usr/bin/forebay")
            };
            let found: Vec<_> = said.lines().filter(ours).collect();
            assert!(found.is_empty(), "{found:#?}");
        }
    }
}

#[test]
fn the_configuration_of_the_daemon_set_is_understood() {
    let (_, manifest) = deploy("kubernetes/daemonset.yaml");
    let block = manifest.split("forebay.toml: |\n").nth(1).unwrap();
    let lines = block.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    let config: String = lines.map(|line| format!("{}\n", line.trim_start())).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forebay.toml");
    std::fs::write(&file, &config).unwrap();
    let output = forebay().args(["config", "--json", "--config", text(&file)]).output().unwrap();
    assert!(output.status.success(), "{config}: {}", stderr(&output));
    assert!(stdout(&output).contains("tier.archive.takes"), "{}", stdout(&output));
}
