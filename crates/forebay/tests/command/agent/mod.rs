//! The agent, started as it is started, on real folders with real checkpoints.
//!
//! | module | what is tested |
//! | --- | --- |
//! | `http` | tokens, TLS, actions, sessions, bounds, hostile names |
//! | `socket` | local processes: protocol, users, folders that are handed over, links that lead out of them |
//! | `staged` | saves whose processes die, and are finished |
//! | `deploy` | the service unit and the manifests |
//! | `life` | start, end, `--check`, two of them, kill -9 in the middle, systemd, log, traces, `top` |
//! | `page` | the page in a browser, on a phone and on a desk |
//! | `copies` | two nodes with drives of their own: copies, kill -9 of both, a node that is lost |
//! | `browser` | headless Chromium by its protocol |

mod browser;
mod copies;
mod deploy;
mod http;
mod life;
mod page;
mod socket;
mod staged;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_agent::Client;
use forebay_tier::status::{CopyState, Status};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::ckpt_make::{State, save};
use crate::util::{forebay, text};

/// How long anything may take.
const LONG: Duration = Duration::from_secs(60);

const READ_TOKEN: &str = "0123456789abcdef-read";
const ACT_TOKEN: &str = "0123456789abcdef-act";

/// Folders of tiers, and the configuration of an agent over them.
struct Site {
    folder: tempfile::TempDir,
    config: PathBuf,
    /// What trusts its certificate, where it has one.
    tls: Option<Arc<ClientConfig>>,
}

impl Site {
    /// `tier`: lines for the second tier; `agent`: for `[agent]`. Both token files are there.
    fn new(tier: &str, agent: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for name in ["local", "shared", "archive"] {
            std::fs::create_dir(at.join(name)).unwrap();
        }
        private(&at.join("read.token"), READ_TOKEN);
        private(&at.join("act.token"), ACT_TOKEN);
        let text = format!(
            "[[tier]]\nname = \"local\"\nplace = \"local\"\ncapacity = \"1 GB\"\n\
             [[tier]]\nname = \"shared\"\nplace = \"shared\"\n{tier}\n\
             [[tier]]\nname = \"archive\"\nplace = \"archive\"\n\
             [tiers]\nlook_every = \"100 ms\"\npart_bytes = \"64 KiB\"\n\
             [agent]\nsocket = \"run/agent.sock\"\n{agent}\n"
        );
        let config = at.join("forebay.toml");
        std::fs::write(&config, text).unwrap();
        Self { folder, config, tls: None }
    }

    /// The same, reached by TLS.
    fn with_tls(tier: &str, agent: &str) -> Self {
        let keys = "tls_certificate = \"cert.pem\"\ntls_key = \"key.pem\"";
        let mut site = Self::new(tier, &format!("{agent}\n{keys}"));
        site.certify();
        site
    }

    /// Makes a certificate, in place of the one that is there.
    fn certify(&mut self) {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let pair = rcgen::generate_simple_self_signed(names).unwrap();
        for (name, text) in
            [("cert.pem", pair.cert.pem()), ("key.pem", pair.signing_key.serialize_pem())]
        {
            let new = self.path("new.pem");
            private(&new, &text);
            std::fs::rename(new, self.path(name)).unwrap();
        }
        let mut roots = RootCertStore::empty();
        roots.add(pair.cert.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        self.tls = Some(Arc::new(config));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Saves steps below one of the folders.
    fn save(&self, name: &str, steps: &[u64], state: &State) {
        for (number, step) in steps.iter().enumerate() {
            save(&self.path(name), *step, 1, number as u32 + 1, state);
        }
    }

    fn start(&self) -> Agent {
        self.start_with(&[], &[])
    }

    fn start_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Agent {
        let mut command = forebay();
        command.args(["agent", "--config", text(&self.config)]).args(args);
        command.envs(variables.iter().copied());
        self.run(command)
    }

    /// Runs a command that becomes an agent.
    fn run(&self, command: std::process::Command) -> Agent {
        self.run_as(command, "run/agent.sock", "agent.log")
    }

    /// The same with a socket and a log of its own.
    fn run_as(&self, mut command: std::process::Command, socket: &str, log: &str) -> Agent {
        let log = self.path(log);
        let file = std::fs::File::create(&log).unwrap();
        command.stderr(file).stdout(Stdio::null()).stdin(Stdio::null());
        let mut agent = Agent {
            child: command.spawn().unwrap(),
            socket: self.path(socket),
            log,
            http: None,
            tls: self.tls.clone(),
        };
        agent.wait_ready();
        agent
    }
}

fn private(path: &Path, content: &str) {
    let file = std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(path);
    file.unwrap().write_all(content.as_bytes()).unwrap();
}

/// TCP, or TLS over it.
trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// A running one; killed when dropped.
struct Agent {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    http: Option<SocketAddr>,
    tls: Option<Arc<ClientConfig>>,
}

impl Agent {
    fn wait_ready(&mut self) {
        let start = Instant::now();
        while Client::connect(&self.socket).is_err() || !self.log().contains("started") {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && start.elapsed() < LONG, "{ended:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = self.log();
        let address = log.lines().find_map(|line| line.strip_prefix("listening on "));
        self.http = address.map(|address| address.parse().unwrap());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    fn status(&self, job: Option<&str>) -> Status {
        self.client().status(job).unwrap()
    }

    /// Waits until something holds of a job.
    fn until(&self, job: Option<&str>, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
        let start = Instant::now();
        loop {
            let status = self.status(job);
            if holds(&status) {
                return status;
            }
            assert!(start.elapsed() < LONG, "never {what}: {status:#?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Sends a signal, by name.
    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = std::process::Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(sent.success());
    }

    /// A connection to the HTTP port, by TLS if it has that.
    fn connect(&self) -> Box<dyn Stream> {
        let stream = TcpStream::connect(("127.0.0.1", self.http.unwrap().port())).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        match &self.tls {
            None => Box::new(stream),
            Some(config) => {
                let name = ServerName::try_from("localhost").unwrap();
                let connection = ClientConnection::new(Arc::clone(config), name).unwrap();
                Box::new(StreamOwned::new(connection, stream))
            }
        }
    }

    /// Sends bytes to the HTTP port, and gives all that comes back.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        // It may answer, and close, before it has taken all.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// A request with these header lines and body; status and all of the answer.
    fn http(&self, line: &str, head: &str, body: &str) -> (u16, String) {
        self.try_http(line, head, body).expect("an answer")
    }

    /// The same; `None` where nothing came back.
    fn try_http(&self, line: &str, head: &str, body: &str) -> Option<(u16, String)> {
        let host = format!("127.0.0.1:{}", self.http.unwrap().port());
        let length = if body.is_empty() { String::new() } else { length_of(body) };
        let request = format!(
            "{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{length}{head}\r\n{body}"
        );
        let answer = self.raw(request.as_bytes());
        (!answer.is_empty()).then(|| status_of(answer))
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.http(&format!("GET {path}"), "", "")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn length_of(body: &str) -> String {
    format!("Content-Length: {}\r\n", body.len())
}

fn status_of(answer: String) -> (u16, String) {
    let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    (code.unwrap_or_else(|| panic!("no HTTP: {answer:?}")), answer)
}

/// Whether every step is committed on every tier.
fn all_there(status: &Status, steps: usize) -> bool {
    let there = |copies: &[CopyState]| {
        copies.len() == 3 && copies.iter().all(|copy| *copy == CopyState::Committed)
    };
    status.steps.len() == steps && status.steps.iter().all(|step| there(&step.copies))
}

/// Checks a step with the command that users have.
fn verify(root: &Path, step: u64) {
    let path = root.join(forebay_checkpoint::commit::step_folder(step));
    let output = forebay().args(["ckpt", "verify", text(&path)]).output().unwrap();
    assert!(output.status.success(), "{}", crate::util::stderr(&output));
}
