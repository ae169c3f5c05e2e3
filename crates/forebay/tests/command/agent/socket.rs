//! Local processes.

use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_agent::Client;
use forebay_error::Code;
use forebay_tier::status::CopyState;
use serde_json::json;

use super::{Site, all_there, verify};
use crate::ckpt_make::State;
use crate::util::{forebay, stderr, stdout, text};

#[test]
fn local_processes_look_and_act_without_a_token() {
    let site = Site::new("", "");
    site.save("local", &[1], &State::new(1));
    let agent = site.start();
    assert_eq!(agent.http, None, "no HTTP where none is configured");
    let mut client = agent.client();
    assert_eq!(client.jobs().unwrap(), ["default"]);
    agent.until(None, "everything everywhere", |status| all_there(status, 1));
    client.act(None, &json!({"action": "pause", "tier": "archive"})).unwrap();
    site.save("local", &[2], &State::new(2));
    client.wake(None).unwrap();
    let archived = |status: &forebay_tier::status::Status| {
        status.steps.iter().filter(|step| step.copies[2] == CopyState::Committed).count()
    };
    agent.until(None, "step 2 on the shared tier", |status| {
        status
            .steps
            .last()
            .is_some_and(|step| step.step == 2 && step.copies[1] == CopyState::Committed)
    });
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(archived(&agent.status(None)), 1, "paused");
    client.act(None, &json!({"action": "resume", "tier": "archive"})).unwrap();
    agent.until(None, "everything everywhere", |status| all_there(status, 2));
    let error = client.act(None, &json!({"action": "burn"})).unwrap_err();
    assert_eq!(error.code(), Code::Usage);
    assert_eq!(client.status(Some("none")).unwrap_err().code(), Code::NotFound);
    client.status(None).unwrap();
}

#[test]
fn a_folder_that_is_handed_over_is_moved_when_its_client_is_gone() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let agent = site.start();
    let folder = std::fs::File::open(site.path("job")).unwrap();
    let mut client = agent.client();
    let places = client.track("run7", folder.as_fd()).unwrap();
    let shared = site.path("shared/run7");
    assert_eq!(places["places"][1], text(&shared), "{places}");
    // Once more is no error; another folder under that name is.
    client.track("run7", folder.as_fd()).unwrap();
    let other = std::fs::File::open(site.folder.path()).unwrap();
    assert_eq!(client.track("run7", other.as_fd()).unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(client.track("../x", other.as_fd()).unwrap_err().code(), Code::Usage);
    let file = std::fs::File::open(&site.config).unwrap();
    assert_eq!(client.track("file", file.as_fd()).unwrap_err().code(), Code::Usage);
    drop((client, folder));
    // The folder is renamed too: the agent has it open, and needs no path.
    std::fs::rename(site.path("job"), site.path("job.moved")).unwrap();
    site.save("job.moved", &[5, 6], &State::new(3));
    agent.client().wake(Some("run7")).unwrap();
    agent.until(Some("run7"), "everything everywhere", |status| all_there(status, 2));
    verify(&shared, 6);
    verify(&site.path("archive/run7"), 5);
    assert_eq!(agent.status(None).steps.len(), 0, "the configured job has none of it");
    let mut client = agent.client();
    assert_eq!(client.jobs().unwrap(), ["default", "run7"]);
    client.untrack("run7").unwrap();
    assert_eq!(client.untrack("run7").unwrap_err().code(), Code::NotFound);
    assert_eq!(client.jobs().unwrap(), ["default"]);
}

/// A cap is the machine's: with more jobs it is not more.
#[test]
fn all_jobs_go_through_one_limit() {
    let site = Site::new("write_limit = \"2 MB/s\"", "");
    for job in ["a", "b", "c"] {
        std::fs::create_dir(site.path(job)).unwrap();
        // 2 MB each.
        site.save(job, &[1], &State::new(1).with_rows(512));
    }
    let agent = site.start();
    let start = Instant::now();
    for job in ["a", "b", "c"] {
        let folder = std::fs::File::open(site.path(job)).unwrap();
        agent.client().track(job, folder.as_fd()).unwrap();
    }
    let mut bytes = 0;
    for job in ["a", "b", "c"] {
        let status = agent.until(Some(job), "everywhere", |status| all_there(status, 1));
        bytes += status.tiers[1].written_bytes;
    }
    let time = start.elapsed().as_secs_f64();
    assert!(bytes > 4_000_000, "{bytes}");
    assert!(bytes as f64 / time < 2.2e6, "{bytes} bytes in {time} s");
    // Set or paused for one, it is so for all.
    let mut client = agent.client();
    client.act(Some("a"), &json!({"action": "pause", "tier": "archive"})).unwrap();
    client.act(None, &json!({"action": "set_caps", "tier": "shared", "write": 77})).unwrap();
    agent.until(Some("b"), "paused, and with that cap", |status| {
        status.tiers[2].paused && status.tiers[1].write_cap == Some(77)
    });
}

#[test]
fn the_command_hands_a_folder_over_and_takes_it_back() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("run7")).unwrap();
    let agent = site.start();
    let run = |args: &[&str]| {
        let output = forebay().arg("tier").args(args).arg("--config").arg(&site.config).output();
        let output = output.unwrap();
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let (folder, shared) = (site.path("run7"), site.path("shared/run7"));
    let (code, shown, said) = run(&["track", text(&folder)]);
    assert_eq!(code, Some(0), "{said}");
    let archive = site.path("archive/run7");
    let lines: Vec<&str> = shown.lines().map(str::trim).collect();
    let first = format!("run7: steps of {} go to", text(&folder));
    assert_eq!(lines, [first.as_str(), text(&shared), text(&archive)]);
    site.save("run7", &[5], &State::new(3));
    // Again, from another process: it is no error, and looked at.
    let (code, json, said) = run(&["track", text(&folder), "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["job"], &json["places"][2]), (&json!("run7"), &json!(archive)));
    agent.until(Some("run7"), "everything everywhere", |status| all_there(status, 1));
    verify(&archive, 5);
    std::fs::create_dir(site.path("other")).unwrap();
    let other = run(&["track", text(&site.path("other")), "--name", "run7"]);
    assert_eq!(other.0, Some(1), "{other:?}");
    assert!(other.2.contains("error[already_exists]: another folder"), "{other:?}");
    // What is the configured job's already is not moved twice.
    let (code, shown, said) = run(&["track", text(&site.path("local")), "--name", "mine"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(shown.starts_with("default: steps of "), "{shown}");
    let step = folder.join(forebay_checkpoint::commit::step_folder(5));
    for wrong in [text(&step), "s3://bucket/run", text(&site.config), "/nonexistent"] {
        let (code, _, said) = run(&["track", wrong]);
        assert!(matches!(code, Some(1 | 2)) && said.contains("error["), "{wrong}: {said}");
    }
    assert_eq!(run(&["track", text(&folder), "--name", "a/b"]).0, Some(2));
    let (code, shown, said) = run(&["jobs"]);
    assert_eq!(code, Some(0), "{said}");
    let rows: Vec<Vec<&str>> =
        shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows[1..],
        [
            vec!["default", "0", "0", "0", text(&site.path("local"))],
            vec!["run7", "1", "0", "0", text(&folder)],
        ]
    );
    let (_, json, _) = run(&["jobs", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json[1]["job"], &json[1]["steps"]), (&json!("run7"), &json!(1)));
    assert_eq!(agent.client().jobs().unwrap(), ["default", "run7"]);
    let (code, shown, said) = run(&["untrack", "run7"]);
    assert_eq!((code, shown.as_str()), (Some(0), "run7 is not moved any more\n"), "{said}");
    assert_eq!(run(&["untrack", "run7"]).0, Some(1));
    assert_eq!(agent.client().jobs().unwrap(), ["default"]);
    drop(agent);
    let (code, _, said) = run(&["track", text(&folder)]);
    assert_eq!(code, Some(1));
    assert!(said.contains("no agent listens"), "{said}");
    assert_eq!(run(&["jobs"]).0, Some(1));
}

#[test]
fn a_job_is_drained_by_its_agent() {
    // 4 MB at 1 MB/s.
    let site = Site::new("write_limit = \"1 MB/s\"", "");
    let folder = site.path("run7");
    std::fs::create_dir(&folder).unwrap();
    site.save("run7", &[5], &State::new(3).with_rows(1024));
    let agent = site.start();
    let run = |args: &[&str]| {
        let tier = forebay().arg("tier").args(args).arg("--config").arg(&site.config).output();
        let output = tier.unwrap();
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let (code, _, said) = run(&["track", text(&folder)]);
    assert_eq!(code, Some(0), "{said}");
    let (code, shown, said) = run(&["drain", "--job", "run7", "--timeout", "1s", "--json"]);
    assert_eq!(code, Some(1), "{said}");
    let early: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(early["done"], false, "{early}");
    assert_eq!(agent.status(Some("run7")).transfers.len(), 1, "the agent goes on");
    let (code, shown, said) = run(&["drain", "--job", "run7", "--timeout", "60s", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let report: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&report["done"], &report["waiting"]), (&json!(true), &json!(0)));
    verify(&site.path("shared/run7"), 5);
    verify(&site.path("archive/run7"), 5);
    let log = agent.log();
    let moved = log.lines().filter(|line| line.contains("moved")).collect::<Vec<_>>();
    assert_eq!(moved.len(), 2, "{log}");
    assert!(moved.iter().all(|line| line.contains("job=\"run7\"")), "{log}");
    assert!(!log.contains("bytes_sent=0 ") && !log.contains("Some("), "{log}");
    let (code, _, said) = run(&["drain", "--job", "run8", "--timeout", "9s"]);
    assert!(
        code == Some(1) && said.contains("error[not_found]") && said.contains("run8"),
        "{said}"
    );
    drop(agent);
    let (code, _, said) = run(&["drain", "--job", "run7"]);
    assert!(code == Some(1) && said.contains("no agent listens"), "{said}");
    assert!(!said.contains("--no-agent"), "{said}");
}

#[test]
fn links_out_of_a_folder_that_was_handed_over_are_not_followed() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    site.save("job", &[1, 2], &State::new(1));
    let step = site.path("job").join(forebay_checkpoint::commit::step_folder(1));
    let data = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path());
    let data = data.filter(|path| path.extension().is_some_and(|name| name == "distcp"));
    let data: Vec<_> = data.collect();
    assert!(!data.is_empty());
    // The same bytes, outside: a link would give a copy that verifies.
    let outside = site.path("outside");
    std::fs::create_dir(&outside).unwrap();
    for path in &data {
        let to = outside.join(path.file_name().unwrap());
        std::fs::rename(path, &to).unwrap();
        symlink(&to, path).unwrap();
    }
    let agent = site.start();
    let folder = std::fs::File::open(site.path("job")).unwrap();
    agent.client().track("run7", folder.as_fd()).unwrap();
    let status = agent.until(Some("run7"), "step 2 there and an error of step 1", |status| {
        let there = status.steps.iter().any(|step| {
            step.step == 2 && step.copies.iter().all(|copy| *copy == CopyState::Committed)
        });
        there && status.errors.iter().any(|trouble| trouble.step == Some(1))
    });
    let first = status.steps.iter().find(|step| step.step == 1).unwrap();
    assert_ne!(first.copies[1], CopyState::Committed, "{status:#?}");
    let error = status.errors.iter().find(|trouble| trouble.step == Some(1)).unwrap();
    assert_eq!(error.code, "unsafe_path", "{error:?}");
}

/// The protocol, spoken by somebody else: a frame, a descriptor.
const PYTHON: &str = r#"
import json, os, socket, struct, sys
path, folder = sys.argv[1:3]
if len(sys.argv) > 3:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
def ask(request, fds=()):
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    text = json.dumps(request).encode()
    try:
        socket.send_fds(s, [struct.pack("<I", len(text)) + text], list(fds))
    except BrokenPipeError:
        pass
    head = s.recv(4, socket.MSG_WAITALL)
    return json.loads(s.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
print(json.dumps([ask({"request": "status"}), ask({"request": "track", "job": "py"}, [fd]),
                  ask({"request": "track", "job": "py"}), ask({"request": "jobs"}, [fd])]))
"#;

/// Runs it, as another user if one is given; the answers.
fn python(site: &Site, uid: Option<u32>) -> Option<Vec<serde_json::Value>> {
    let mut command = Command::new("python3");
    command.args(["-c", PYTHON, text(&site.path("run/agent.sock")), text(&site.path("job"))]);
    command.args(uid.map(|uid| uid.to_string()));
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: no python3 to be another process: {error}");
            return None;
        }
    };
    assert!(output.status.success(), "{}", stderr(&output));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn another_process_hands_its_folder_over_and_ends() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    site.save("job", &[9], &State::new(1));
    let agent = site.start();
    let Some(answers) = python(&site, None) else { return };
    assert!(answers[0]["ok"]["tiers"].is_array(), "{answers:?}");
    assert!(answers[1]["ok"]["places"].is_array(), "{answers:?}");
    assert_eq!(answers[2]["error"]["code"], "usage", "no descriptor: {answers:?}");
    assert_eq!(answers[3]["error"]["code"], "usage", "one too many: {answers:?}");
    agent.until(Some("py"), "everything everywhere", |status| all_there(status, 1));
}

#[test]
fn other_users_may_not_unless_they_are_listed_and_hand_nothing_over() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let open = |path: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    for (listed, expected) in [("1001", "permission_denied"), ("1000", "")] {
        let site = Site::new("", &format!("socket_users = \"{listed}\""));
        std::fs::create_dir(site.path("job")).unwrap();
        open(site.folder.path());
        let agent = site.start();
        let Some(answers) = python(&site, Some(1000)) else { return };
        let code = |at: usize| answers[at]["error"]["code"].as_str().unwrap_or_default();
        assert_eq!(code(0), expected, "{answers:?}");
        // The agent is root's: it does not read for others, whatever descriptor they have.
        assert_eq!(code(1), "permission_denied", "{answers:?}");
        assert!(!agent.client().jobs().unwrap().contains(&"py".to_owned()));
    }
}

#[test]
fn a_client_that_breaks_the_protocol_costs_the_others_nothing() {
    use std::io::Write;
    let site = Site::new("", "");
    let agent = site.start();
    let connect = || std::os::unix::net::UnixStream::connect(&agent.socket).unwrap();
    let mut idle: Vec<_> = (0..20).map(|_| connect()).collect();
    for stream in &mut idle {
        stream.write_all(&[3]).unwrap();
    }
    for bad in [&[0xff; 4][..], b"\x02\0\0\0{}", b"\x02\0\0\0\xff\xff", b"\x05\0\0\0{}"] {
        connect().write_all(bad).unwrap();
    }
    let mut client = Client::connect(&agent.socket).unwrap();
    client.status(None).unwrap();
}
