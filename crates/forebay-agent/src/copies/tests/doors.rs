//! What strangers and other agents can do, by bytes on a connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::{ACT_TOKEN, Cluster, LONG, Node, PEER_TOKEN, READ_TOKEN};

/// Sends bytes, and reads until the end.
fn talk(node: &Node, text: &[u8]) -> String {
    let mut stream = begin(node, text);
    let mut answer = Vec::new();
    // A connection that is reset after its answer has given it.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn begin(node: &Node, text: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(text).unwrap();
    stream
}

fn head(method: &str, path: &str, token: &str, more: &str) -> Vec<u8> {
    let auth =
        if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") };
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{auth}{more}\r\n")
        .into_bytes()
}

const DRIVE: &str = "forebay-drive: 00000000000000aa\r\nforebay-to: 00000000000000d0\r\n";

fn put(file: &str, token: &str, length: usize, body: &[u8]) -> Vec<u8> {
    let path = format!("/api/v1/peers/run7/steps/7/{file}");
    let mut text = head("PUT", &path, token, &format!("{DRIVE}Content-Length: {length}\r\n"));
    text.extend_from_slice(body);
    text
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// A node with rank 0's data, and a file of rank 1's.
fn node(cluster: &Cluster) -> (Node, String, Vec<u8>) {
    cluster.name_drive(0, "00000000000000d0");
    let node = cluster.start(0, "", &cluster.settings(0, false));
    let (key, bytes) = cluster.own(1).into_iter().next().unwrap();
    node.until("seen", |status| !status.steps.is_empty());
    (node, key.rsplit('/').next().unwrap().to_owned(), bytes)
}

#[test]
fn each_token_opens_its_own_doors() {
    let cluster = Cluster::new();
    let (node, file, bytes) = node(&cluster);
    let listing = "/api/v1/peers/run7/steps/7";
    for token in ["", READ_TOKEN, ACT_TOKEN, "0123456789abcdef-pee", "0123456789abcdef-peerx"] {
        assert_eq!(status(&talk(&node, &head("GET", listing, token, ""))), 401, "{token}");
        let answer = talk(&node, &put(&file, token, bytes.len(), &bytes));
        assert!([401, 0].contains(&status(&answer)), "{token}: {answer}");
    }
    for path in ["/", "/metrics", "/api/v1/status"] {
        assert_eq!(status(&talk(&node, &head("GET", path, PEER_TOKEN, ""))), 401, "{path}");
    }
    let more = "Content-Type: application/json\r\nContent-Length: 17\r\n";
    let mut act = head("POST", "/api/v1/actions", PEER_TOKEN, more);
    act.extend_from_slice(br#"{"action":"wake"}"#);
    assert_eq!(status(&talk(&node, &act)), 401);
    assert_eq!(node.data(), cluster.own(0));
    let answer = talk(&node, &head("GET", listing, PEER_TOKEN, ""));
    assert_eq!(status(&answer), 200, "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let there: super::super::client::There = serde_json::from_str(body).unwrap();
    assert_eq!(there.files.len(), cluster.own(0).len());
    assert!(!there.busy && !there.landed);
    node.stop();
}

#[test]
fn what_is_no_file_of_a_committed_step_is_refused_and_leaves_nothing() {
    let cluster = Cluster::new();
    let (node, file, bytes) = node(&cluster);
    let send = |path: &str, length: &str, body: &[u8]| {
        let mut text = head("PUT", path, PEER_TOKEN, &format!("{DRIVE}{length}"));
        text.extend_from_slice(body);
        talk(&node, &text)
    };
    let length = format!("Content-Length: {}\r\n", bytes.len());
    let steps = "/api/v1/peers/run7/steps";
    for (path, expected) in [
        (format!("/api/v1/peers/other/steps/7/{file}"), 404),
        (format!("{steps}/8/{file}"), 404),
        (format!("{steps}/7x/{file}"), 404),
        (format!("{steps}/7/../{file}"), 404),
        (format!("{steps}/7/..%2f{file}"), 404),
        (format!("{steps}/7/%2e%2e/{file}"), 404),
        (format!("{steps}/7/{file}%00"), 404),
        (format!("{steps}/7/.metadata"), 404),
        (format!("{steps}/7/%2fetc%2fpasswd"), 404),
        (format!("{steps}/7/"), 404),
    ] {
        let answer = send(&path, &length, b"");
        assert_eq!(status(&answer), expected, "{path}: {answer}");
    }
    let path = format!("{steps}/7/{file}");
    for wrong in [0, bytes.len() - 1, bytes.len() + 1] {
        let answer = send(&path, &format!("Content-Length: {wrong}\r\n"), b"");
        assert_eq!(status(&answer), 400, "{wrong}: {answer}");
    }
    assert_eq!(status(&send(&path, "Content-Length: 18446744073709551616\r\n", b"")), 400);
    let chunked = send(&path, "Transfer-Encoding: chunked\r\n", b"");
    assert_eq!(status(&chunked), 400, "{chunked}");
    let nameless = {
        let mut text = head("PUT", &path, PEER_TOKEN, &length);
        text.extend_from_slice(&bytes);
        talk(&node, &text)
    };
    assert!([400, 0].contains(&status(&nameless)), "{nameless}");
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 4;
    let answer = send(&path, &length, &damaged);
    assert_eq!(status(&answer), 400, "{answer}");
    assert!(answer.contains("\"checksum\""), "{answer}");
    // Broken off.
    drop(begin(&node, &put(&file, PEER_TOKEN, bytes.len(), &bytes[..bytes.len() / 2])));
    for method in ["GET", "POST", "DELETE"] {
        let answer = talk(&node, &head(method, &path, PEER_TOKEN, ""));
        assert_eq!(status(&answer), 405, "{method}");
    }
    let gone = |_: &_| node.marks().is_empty();
    node.until("nothing left", gone);
    assert_eq!(node.data(), cluster.own(0));
    let answer = send(&path, &length, &bytes);
    assert_eq!(status(&answer), 200, "{answer}");
    let answer = send(&path, &length, b"");
    assert!(answer.contains("\"was_there\":true"), "{answer}");
    let mut both = cluster.own(0);
    both.insert(format!("step-7/{file}"), bytes);
    assert_eq!(node.data(), both);
    node.stop();
}

#[test]
fn four_files_come_at_a_time_and_slow_ones_are_broken_off() {
    let cluster = Cluster::new();
    let (node, file, bytes) = node(&cluster);
    let slow: Vec<TcpStream> =
        (0..4).map(|_| begin(&node, &put(&file, PEER_TOKEN, bytes.len(), &bytes[..9]))).collect();
    let listing = head("GET", "/api/v1/peers/run7/steps/7", PEER_TOKEN, "");
    node.until("busy", |_| talk(&node, &listing).contains("\"busy\":true"));
    let fifth = talk(&node, &put(&file, PEER_TOKEN, bytes.len(), b""));
    assert_eq!(status(&fifth), 503, "{fifth}");
    assert!(fifth.to_ascii_lowercase().contains("\r\nretry-after: 5\r\n"), "{fifth}");
    for mut stream in slow {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(status(&answer) == 400 && answer.contains("too slowly"), "{answer}");
    }
    // Drop by drop is too slow as well, and the place is free then.
    node.until("free", |_| talk(&node, &listing).contains("\"busy\":false"));
    let mut drops = begin(&node, &put(&file, PEER_TOKEN, bytes.len(), b""));
    let mut reading = drops.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut answer = [0; 4096];
        let count = reading.read(&mut answer).unwrap_or(0);
        String::from_utf8_lossy(answer.get(..count).unwrap_or_default()).into_owned()
    });
    let start = std::time::Instant::now();
    let mut rest = bytes.iter();
    while !reader.is_finished() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(50));
        let _ = drops.write_all(&[*rest.next().unwrap()]);
    }
    drops.shutdown(std::net::Shutdown::Both).unwrap_or_default();
    let answer = reader.join().unwrap();
    assert!(answer.contains("too slowly"), "{answer}");
    assert_eq!(status(&talk(&node, &put(&file, PEER_TOKEN, bytes.len(), &bytes))), 200);
    node.stop();
}

#[test]
fn a_paused_tier_takes_nothing() {
    let cluster = Cluster::new();
    let (node, file, bytes) = node(&cluster);
    let pause = forebay_tier::runner::Action::Pause { tier: Some("near".to_owned()) };
    node.runner.act(&pause, "test").unwrap();
    assert_eq!(status(&talk(&node, &put(&file, PEER_TOKEN, bytes.len(), b""))), 503);
    assert!(node.marks().is_empty());
    node.stop();
}

#[test]
fn what_is_for_another_drive_or_this_one_s_own_is_refused() {
    let cluster = Cluster::new();
    let (node, file, bytes) = node(&cluster);
    let path = format!("/api/v1/peers/run7/steps/7/{file}");
    let length = format!("Content-Length: {}\r\n", bytes.len());
    for (of, to, expected) in [
        ("00000000000000aa", "00000000000000d1", 404),
        ("00000000000000d0", "00000000000000d0", 400),
        ("00000000000000aa", "", 400),
    ] {
        let whose = format!("forebay-drive: {of}\r\nforebay-to: {to}\r\n{length}");
        let text = head("PUT", &path, PEER_TOKEN, &whose);
        let answer = talk(&node, &text);
        assert!(status(&answer) == expected, "{of} {to}: {answer}");
        assert_eq!(node.data(), cluster.own(0));
    }
    node.stop();
}
