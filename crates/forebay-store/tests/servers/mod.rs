//! Real servers that tests talk to, started by them: s3s-fs, moto, the JuiceFS gateway, [`emulators`].
//!
//! Where they are is told by variables that `cargo xtask test` sets. Without one a test says that it is skipped;
//! with `FOREBAY_NO_SKIP` set it fails, unless `FOREBAY_MAY_SKIP` names the variable. A server is started once in a
//! test program and dies with it.
//! **unsafe**: the credentials are set as variables of the process, which is where the product looks for them.

#![allow(dead_code, reason = "each test program uses some of it")]

pub(crate) mod emulators;
mod google;
pub(crate) mod proxy;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, mpsc};
use std::time::{Duration, Instant};

use forebay_store::StoreSettings;

pub(crate) const BUCKET: &str = "forebay-tests";
/// What all test servers take.
pub(crate) const KEY: &str = "testtesttest";
pub(crate) const SECRET: &str = "test-secret-of-tests";

/// A server that answers.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    /// Where it keeps what it has.
    pub(crate) _folder: Option<tempfile::TempDir>,
}

/// Where a program is; `None`, with the reason printed, where it is not there.
pub(crate) fn program(variable: &str) -> Option<PathBuf> {
    let found = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.exists());
    if found.is_none() {
        println!("skipped: {variable} names no program; `cargo xtask test` installs it");
        let may = std::env::var("FOREBAY_MAY_SKIP").is_ok_and(|named| named == variable);
        assert!(may || std::env::var_os("FOREBAY_NO_SKIP").is_none(), "{variable} is missing");
    }
    found
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts a program that dies with this process, and waits until it listens.
fn start(mut command: Command, port: u16) -> SocketAddr {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (told, tell) = mpsc::channel();
    // The signal is sent when the thread that started it ends: this one does not before the process does.
    std::thread::spawn(move || {
        let mut child = command.spawn().unwrap();
        told.send(()).unwrap();
        let _ = child.wait();
    });
    tell.recv().unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < until, "the server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    address
}

/// `setpriv` has it killed when its parent dies.
fn dying(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// s3s-fs: compares checksums and preconditions, but looks before it writes, so creates that race may all win.
pub(crate) fn s3s() -> Option<Server> {
    let program = program("FOREBAY_TEST_S3S")?;
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
    let port = free_port();
    let mut command = dying(&program);
    command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    command.args(["--access-key", KEY, "--secret-key", SECRET]).arg(folder.path());
    Some(Server { address: start(command, port), _folder: Some(folder) })
}

/// moto: a server in Python for tests of AWS clients; it does not compare checksums.
pub(crate) fn moto() -> Option<Server> {
    let program = program("FOREBAY_TEST_MOTO")?;
    let port = free_port();
    let mut command = dying(&program);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    let address = start(command, port);
    let status = put_bucket(address);
    assert!(status.contains("200"), "{status}");
    Some(Server { address, _folder: None })
}

/// Makes a JuiceFS file system in a folder; where its metadata are.
pub(crate) fn format_juicefs(program: &Path, folder: &Path) -> String {
    let meta = format!("sqlite3://{}", folder.join("meta.db").display());
    let data = format!("{}/", folder.join("data").display());
    let formatted = Command::new(program)
        .args(["format", "--storage", "file", "--bucket", &data, &meta, BUCKET])
        .stderr(Stdio::null())
        .status();
    assert!(formatted.unwrap().success());
    meta
}

/// The S3 gateway of JuiceFS: ignores preconditions and checksums.
pub(crate) fn juicefs() -> Option<Server> {
    let program = program("FOREBAY_TEST_JUICEFS")?;
    let folder = tempfile::tempdir().unwrap();
    let meta = format_juicefs(&program, folder.path());
    let port = free_port();
    let mut command = dying(&program);
    command.args(["gateway", &meta, &format!("127.0.0.1:{port}")]);
    command.env("MINIO_ROOT_USER", KEY).env("MINIO_ROOT_PASSWORD", SECRET);
    Some(Server { address: start(command, port), _folder: Some(folder) })
}

/// Makes a bucket on a server that asks for no signature.
fn put_bucket(address: SocketAddr) -> String {
    let authorization =
        format!("Authorization: AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/x");
    ask_with(address, &format!("PUT /{BUCKET}"), &authorization, "")
}

/// The first line of the answer to a request.
fn ask(address: SocketAddr, request: &str, body: &str) -> String {
    ask_with(address, request, "Content-Type: application/json", body)
}

fn ask_with(address: SocketAddr, request: &str, header: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let len = body.len();
    let head = format!(
        "{request} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len}\r\nConnection: close\r\n\
         {header}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

/// A URL below which nobody else has anything.
pub(crate) fn fresh_url() -> String {
    fresh("s3")
}

pub(crate) fn fresh(scheme: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{scheme}://{BUCKET}/tests/{}-{count}", std::process::id())
}

/// A server, and the proxy before it through which changes pass one at a time.
pub(crate) struct Reached {
    pub(crate) server: Server,
    pub(crate) in_turn: SocketAddr,
}

pub(crate) fn reached(server: Option<Server>) -> Option<Reached> {
    let server = server?;
    let in_turn = proxy::in_turn(server.address);
    Some(Reached { server, in_turn })
}

/// Has clients read credentials of profiles from that file.
pub(crate) fn set_credentials_file(path: &Path) {
    // SAFETY: what runs beside it reads variables through std, which has a lock; no name is resolved meanwhile.
    unsafe { std::env::set_var("AWS_SHARED_CREDENTIALS_FILE", path) };
}

/// How a server is reached; its credentials are in the variables then.
pub(crate) fn settings(address: SocketAddr) -> StoreSettings {
    static ONCE: Once = Once::new();
    // SAFETY: what runs beside it reads variables through std, which has a lock; no name is resolved meanwhile.
    ONCE.call_once(|| unsafe {
        std::env::set_var("AWS_ACCESS_KEY_ID", KEY);
        std::env::set_var("AWS_SECRET_ACCESS_KEY", SECRET);
    });
    StoreSettings {
        endpoint: Some(format!("http://{address}")),
        region: Some("us-east-1".to_owned()),
        request_timeout: Duration::from_secs(60),
        ..StoreSettings::default()
    }
}
