//! How an agent starts, ends, is killed, and tells of itself.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::{Duration, Instant};

use forebay_tier::status::CopyState;

use super::{LONG, Site, all_there, verify};
use crate::ckpt_make::State;
use crate::util::{forebay, json_of, stderr, stdout, text};

#[test]
fn killed_in_the_middle_it_goes_on_where_it_was() {
    // 16 MB at 8 MB/s.
    let site = Site::new("write_limit = \"8 MB/s\"", "");
    site.save("local", &[10], &State::new(1).with_rows(4096));
    let mut kills = 0;
    let mut agent = site.start();
    while kills < 3 {
        let status = agent.until(None, "a transfer under way, or the end", |status| {
            status.transfers.iter().any(|moving| moving.done_bytes > 0) || all_there(status, 1)
        });
        if all_there(&status, 1) {
            break;
        }
        agent.signal("-KILL");
        agent.child.wait().unwrap();
        kills += 1;
        agent = site.start();
    }
    assert!(kills > 0, "it was never caught at work");
    agent.until(None, "everything everywhere", |status| all_there(status, 1));
    for tier in ["shared", "archive"] {
        verify(&site.path(tier), 10);
    }
    let output = forebay().args(["ckpt", "list", "--json", text(&site.path("archive"))]).output();
    assert_eq!(stdout(&output.unwrap()).matches("\"committed\"").count(), 1, "one commit");
}

#[test]
fn it_ends_within_a_part_and_says_so() {
    let site = Site::new("write_limit = \"1 MB/s\"", "listen = \"127.0.0.1:0\"");
    site.save("local", &[10], &State::new(1).with_rows(4096));
    for signal in ["-TERM", "-INT"] {
        let mut agent = site.start();
        agent.until(None, "a transfer under way", |status| !status.transfers.is_empty());
        let start = Instant::now();
        agent.signal(signal);
        let ended = agent.child.wait().unwrap();
        assert!(ended.success(), "{ended:?}: {}", agent.log());
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert!(!agent.socket.exists(), "the socket goes with it");
        assert!(agent.log().contains("ending"), "{}", agent.log());
    }
}

#[test]
fn stores_that_hang_hold_up_the_end_once_and_not_each() {
    let hole = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = hole.local_addr().unwrap();
    // It takes connections, and says nothing.
    std::thread::spawn(move || hole.incoming().collect::<Vec<_>>());
    let site = Site::new("", "");
    let bucket = |name: &str| {
        format!(
            "[[tier]]\nname = \"{name}\"\nplace = \"s3://bucket/{name}\"\n\
             [tier.store]\nendpoint = \"http://{endpoint}\"\nregion = \"x\"\n"
        )
    };
    let config = std::fs::read_to_string(&site.config).unwrap();
    let config = config.replace("[tiers]\n", &format!("{}{}[tiers]\n", bucket("b1"), bucket("b2")));
    std::fs::write(&site.config, config).unwrap();
    let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")];
    let mut agent = site.start_with(&[], &keys);
    agent.until(None, "the folders seen", |status| status.tiers[2].notes.len() > 1);
    let start = Instant::now();
    agent.signal("-TERM");
    let ended = agent.child.wait().unwrap();
    assert!(ended.success(), "{ended:?} after {:?}: {}", start.elapsed(), agent.log());
    assert!(agent.log().matches("is left behind").count() >= 2, "{}", agent.log());
}

#[test]
fn two_agents_on_one_socket() {
    let site = Site::new("", "");
    let agent = site.start();
    let second = forebay().args(["agent", "--config", text(&site.config)]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let message = stderr(&second);
    assert!(message.contains("error[already_exists]: another agent listens"), "{message}");
    agent.client().status(None).unwrap();
    drop(agent);
    // What a killed one left is in nobody's way.
    assert!(site.path("run/agent.sock").exists());
    site.start().client().status(None).unwrap();
}

#[test]
fn a_configuration_that_is_open_to_the_world_is_refused() {
    let check = |agent: &str| {
        let site = Site::new("", agent);
        let output = forebay().args(["agent", "--check", "--config", text(&site.config)]).output();
        let output = output.unwrap();
        (output.status.code(), stderr(&output))
    };
    assert_eq!(check("listen = \"127.0.0.1:0\"").0, Some(0));
    let (code, message) = check("listen = \"0.0.0.0:9464\"");
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("can be reached from other machines and needs TLS"), "{message}");
    let (code, message) = check("listen = \"127.0.0.1:0\"\ntoken_file = \"forebay.toml\"");
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains("is open to others"), "{message}");
    let same = "listen = \":0\"\ntoken_file = \"act.token\"\naction_token_file = \"act.token\"";
    assert_eq!(check(same).0, Some(2));
    assert_eq!(check("listen = \"nowhere\"").0, Some(2));
    let none = forebay().args(["agent", "--check", "--config", "/nonexistent"]).output().unwrap();
    assert_eq!(none.status.code(), Some(1), "{}", stderr(&none));
}

#[test]
fn the_service_manager_is_told() {
    let site = Site::new("", "");
    let path = site.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    let mut agent = site.start_with(&["--log-format", "json"], &[("NOTIFY_SOCKET", text(&path))]);
    let mut bytes = [0; 256];
    let got = manager.recv(&mut bytes).unwrap();
    assert!(bytes[..got].starts_with(b"READY=1\n"));
    agent.signal("-TERM");
    let got = manager.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..got], b"STOPPING=1");
    assert!(agent.child.wait().unwrap().success());
    let log = agent.log();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    assert!(lines.iter().any(|line| line["message"] == "started" && line["level"] == "INFO"));
}

/// The test is the service manager: it keeps the folder, and gives it to the next agent.
#[test]
fn a_folder_that_was_handed_over_outlives_a_killed_agent() {
    let site = Site::new("write_limit = \"4 MB/s\"", "");
    let path = site.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    std::fs::create_dir(site.path("job")).unwrap();
    site.save("job", &[8], &State::new(1).with_rows(4096));
    let mut agent = site.start_with(&[], &[("NOTIFY_SOCKET", text(&path))]);
    let folder = std::fs::File::open(site.path("job")).unwrap();
    agent.client().track("run7", folder.as_fd()).unwrap();
    let mut bytes = [0; 256];
    let mut told = || {
        let got = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..got].to_vec()).unwrap()
    };
    assert!(told().starts_with("READY=1"));
    assert_eq!(told(), "FDSTORE=1\nFDNAME=run7");
    agent.until(Some("run7"), "a transfer under way", |status| {
        status.transfers.iter().any(|moving| moving.done_bytes > 0)
    });
    agent.signal("-KILL");
    agent.child.wait().unwrap();
    drop(agent);
    let start = format!(
        "export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=run7:gone; exec '{}' agent --config '{}' \
         3<'{}' 4</dev/null",
        env!("CARGO_BIN_EXE_forebay"),
        text(&site.config),
        text(&site.path("job")),
    );
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &start]).env("NOTIFY_SOCKET", &path);
    let agent = site.run(shell);
    agent.until(Some("run7"), "everything everywhere", |status| all_there(status, 1));
    verify(&site.path("archive/run7"), 8);
    assert_eq!(agent.client().jobs().unwrap(), ["default", "run7"]);
    assert_eq!(told(), "FDSTOREREMOVE=1\nFDNAME=gone", "that never was a folder");
    assert!(told().starts_with("READY=1"), "what was kept is not handed in again");
    agent.client().untrack("run7").unwrap();
    assert_eq!(told(), "FDSTOREREMOVE=1\nFDNAME=run7");
}

#[test]
fn a_hangup_takes_a_new_configuration_and_none_that_has_a_mistake() {
    let mut site = Site::with_tls("write_limit = \"1 MB/s\"", "listen = \"127.0.0.1:0\"");
    std::fs::create_dir(site.path("job")).unwrap();
    let mut agent = site.start();
    let folder = std::fs::File::open(site.path("job")).unwrap();
    agent.client().track("run7", folder.as_fd()).unwrap();
    site.save("job", &[8], &State::new(1).with_rows(2048));
    agent.client().wake(Some("run7")).unwrap();
    agent.until(Some("run7"), "a transfer under way", |status| !status.transfers.is_empty());
    let good = std::fs::read_to_string(&site.config).unwrap();
    let log_has = |what: &str, times: usize| {
        let start = Instant::now();
        while agent.log().matches(what).count() < times {
            assert!(start.elapsed() < LONG, "no {what}: {}", agent.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    for (number, bad) in [
        good.replace("write_limit", "write_limt"),
        good.replace("listen = \"127.0.0.1:0\"", "listen = \"0.0.0.0:0\""),
        String::new(),
    ]
    .iter()
    .enumerate()
    {
        std::fs::write(&site.config, bad).unwrap();
        agent.signal("-HUP");
        log_has("the configuration is not taken", number + 1);
        assert_eq!(agent.status(Some("run7")).tiers[1].write_cap, Some(1_000_000));
    }
    assert_eq!(agent.log().matches("listening socket=").count(), 1, "it was away");
    // Another limit, and a certificate of which only the new one is trusted.
    std::fs::write(&site.config, good.replace("1 MB/s", "2 GB/s")).unwrap();
    site.certify();
    agent.signal("-HUP");
    log_has("listening on", 2);
    let status = agent.until(Some("run7"), "everything everywhere", |status| all_there(status, 1));
    assert_eq!(status.tiers[1].write_cap, Some(2_000_000_000));
    verify(&site.path("archive/run7"), 8);
    let log = agent.log();
    let address = log.lines().filter_map(|line| line.strip_prefix("listening on ")).next_back();
    (agent.http, agent.tls) = (Some(address.unwrap().parse().unwrap()), site.tls.clone());
    assert_eq!(agent.get("/healthz").0, 200);
}

#[test]
fn top_prints_what_the_agent_says() {
    let site = Site::new("", "");
    site.save("local", &[1, 2], &State::new(1));
    let agent = site.start();
    agent.until(None, "everything everywhere", |status| {
        all_there(status, 2) && status.transfers.is_empty()
    });
    let output =
        forebay().args(["top", "--once", "--config", text(&site.config)]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let shown = stdout(&output);
    for text in ["Tiers", "local", "archive", "● shared", "of 1.00 GB", "nothing is under way"] {
        assert!(shown.contains(text), "no {text} in {shown}");
    }
    assert!(!shown.contains('\u{1b}'), "no colours where there is no terminal");
    let json = json_of(forebay().args(["top", "--json", "--socket", text(&agent.socket)]));
    assert_eq!(json["steps"].as_array().unwrap().len(), 2);
    let piped = forebay().args(["top", "--config", text(&site.config)]).output().unwrap();
    assert_eq!(piped.status.code(), Some(2), "{}", stderr(&piped));
    drop(agent);
    let gone = forebay().args(["top", "--once", "--config", text(&site.config)]).output().unwrap();
    assert_eq!(gone.status.code(), Some(1));
    assert!(stderr(&gone).contains("no agent listens"), "{}", stderr(&gone));
}

#[test]
fn top_is_live_on_a_terminal_and_leaves_it_as_it_was() {
    let site = Site::new("", "");
    let agent = site.start();
    // script(1) makes a terminal.
    let command = format!(
        "{} top --every 0.2 --socket {}",
        env!("CARGO_BIN_EXE_forebay"),
        text(&agent.socket)
    );
    let child = std::process::Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return eprintln!("skipped: no script(1) to make a terminal: {error}"),
    };
    std::thread::sleep(Duration::from_secs(2));
    drop(agent);
    std::thread::sleep(Duration::from_secs(1));
    child.stdin.as_mut().unwrap().write_all(b"q").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let shown = stdout(&output);
    assert!(shown.matches("\u{1b}[H").count() >= 3, "several frames: {shown:?}");
    assert!(shown.contains("Forebay") && shown.contains("archive"), "{shown:?}");
    let last = shown.rsplit("\u{1b}[H").next().unwrap();
    assert!(last.contains("no agent listens") && last.contains("archive"), "{last:?}");
    assert!(shown.trim_end().ends_with("\u{1b}[?25h\u{1b}[?1049l"), "{shown:?}");
}

#[test]
fn spans_go_to_a_collector() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("otlp_endpoint = \"http://{}\"", collector.local_addr().unwrap());
    let site = Site::new("", &endpoint);
    site.save("local", &[3], &State::new(1));
    let agent = site.start();
    agent.until(None, "everything everywhere", |status| all_there(status, 1));
    agent.client().act(None, &serde_json::json!({"action": "wake"})).unwrap();
    let mut spans = Vec::new();
    while !["hop", "action"]
        .iter()
        .all(|name| spans.iter().any(|span: &serde_json::Value| span["name"] == *name))
    {
        let (mut stream, _) = collector.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        spans.extend(take_spans(&mut stream));
    }
    let hop = spans.iter().find(|span| span["name"] == "hop").unwrap();
    assert_eq!(hop["traceId"].as_str().unwrap().len(), 32);
    assert_eq!(hop["spanId"].as_str().unwrap().len(), 16);
    let number = |name: &str| hop[name].as_str().unwrap().parse::<u128>().unwrap();
    assert!(number("startTimeUnixNano") < number("endTimeUnixNano"));
    let step = hop["attributes"].as_array().unwrap().iter().find(|field| field["key"] == "step");
    assert_eq!(step.unwrap()["value"]["intValue"], "3");
}

/// Answers one request of OTLP, and gives its spans.
fn take_spans(stream: &mut std::net::TcpStream) -> Vec<serde_json::Value> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    let body = loop {
        let got = stream.read(&mut piece).unwrap();
        assert!(got > 0, "no request");
        bytes.extend_from_slice(&piece[..got]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        assert!(head.starts_with("POST /v1/traces HTTP/1.1"), "{head}");
        let length = head.lines().find_map(|line| {
            line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
        });
        if body.len() >= length.unwrap() {
            break body.to_owned();
        }
    };
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
    stream.write_all(answer.as_bytes()).unwrap();
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    value["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone()
}

#[test]
fn a_tier_that_is_gone_is_told_and_heals() {
    let site = Site::new("", "listen = \"127.0.0.1:0\"");
    // As if nothing were mounted there.
    let config = std::fs::read_to_string(&site.config).unwrap();
    let config = config.replace("place = \"archive\"", "place = \"mount/archive\"");
    std::fs::write(&site.config, config).unwrap();
    let agent = site.start();
    site.save("local", &[4], &State::new(1));
    agent.until(None, "down, and the step on the shared tier", |status| {
        let shared = status.steps.first().is_some_and(|s| s.copies[1] == CopyState::Committed);
        shared && status.tiers[2].health == forebay_tier::status::Health::Down
    });
    let (_, page) = agent.get("/");
    assert!(page.contains("A tier is down"), "{page}");
    let (_, metrics) = agent.get("/metrics");
    let down = "forebay_tier_health{run=\"default\",tier=\"archive\",health=\"down\"} 1";
    assert!(metrics.contains(down), "{metrics}");
    std::fs::create_dir(site.path("mount")).unwrap();
    agent.until(None, "everything everywhere", |status| all_there(status, 1));
}
