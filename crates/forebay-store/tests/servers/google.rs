//! An adapter before fake-gcs-server, which speaks all of Google's XML interface that is needed but for one request.
//!
//! A PUT of an object becomes the upload of Google's JSON interface, with its precondition and its metadata; the answer
//! becomes that of a PUT. What is there, what it is called and which generation it is, and who loses a race, is the
//! server's to say. Uploads in parts it has in neither interface: they are passed on, and refused.

use std::io::{BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

use super::proxy::{exchange, read_request};

const BOUNDARY: &str = "--of-the-adapter--";
/// How the client names metadata.
const METADATA: &str = "x-goog-meta-";

/// Starts it. It serves until the process ends.
pub(super) fn start(upstream: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // A peer that goes away is no failure of a test.
                let _ = serve(stream, upstream);
            });
        }
    });
    address
}

fn serve(mut stream: TcpStream, upstream: SocketAddr) -> std::io::Result<()> {
    let mut client = BufReader::new(stream.try_clone()?);
    let Some((head, body)) = read_request(&mut client)? else { return Ok(()) };
    let reply = match target(&head) {
        Some((bucket, key)) => put(upstream, &head, bucket, key, &body)?,
        None => exchange(upstream, &head, &body)?,
    };
    stream.write_all(&reply)?;
    stream.shutdown(Shutdown::Both)
}

/// Bucket and key of a PUT of an object, escaped as they came.
fn target(head: &str) -> Option<(&str, &str)> {
    let path = head.strip_prefix("PUT /")?.split_whitespace().next()?;
    if path.contains('?') { None } else { path.split_once('/') }
}

fn put(
    upstream: SocketAddr,
    head: &str,
    bucket: &str,
    key: &str,
    body: &[u8],
) -> std::io::Result<Vec<u8>> {
    let headers = || head.lines().filter_map(|line| line.split_once(": "));
    let metadata: Vec<String> = headers()
        .filter_map(|(name, value)| Some((name.strip_prefix(METADATA)?, value)))
        .map(|(name, value)| format!("\"{name}\":\"{value}\""))
        .collect();
    let expected = headers().find(|(name, _)| *name == "x-goog-if-generation-match");
    let expected = expected.map_or(String::new(), |(_, n)| format!("&ifGenerationMatch={n}"));
    let metadata = format!("{{\"metadata\":{{{}}}}}", metadata.join(","));
    let mut parts = Vec::new();
    for (kind, bytes) in [("json", metadata.as_bytes()), ("octet-stream", body)] {
        let start = format!("--{BOUNDARY}\r\nContent-Type: application/{kind}\r\n\r\n");
        parts.extend([start.as_bytes(), bytes, b"\r\n"].concat());
    }
    parts.extend(format!("--{BOUNDARY}--\r\n").as_bytes());
    let request = format!(
        "POST /upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={key}{expected} \
         HTTP/1.1\r\nHost: {upstream}\r\nContent-Type: multipart/related; boundary={BOUNDARY}\r\n\
         Content-Length: {}\r\n",
        parts.len()
    );
    let reply = exchange(upstream, &request, &parts)?;
    let text = String::from_utf8_lossy(&reply);
    if !text.starts_with("HTTP/1.1 200") {
        return Ok(reply);
    }
    let said = |name: &str| {
        let (_, rest) = text.rsplit_once(&format!("\"{name}\":\""))?;
        rest.split('"').next()
    };
    let date = text.lines().find(|line| line.starts_with("Date: ")).unwrap_or_default();
    let (generation, md5) = (said("generation").unwrap(), said("md5Hash").unwrap());
    let answer = format!(
        "HTTP/1.1 200 OK\r\n{date}\r\nETag: \"{md5}\"\r\nx-goog-generation: {generation}\r\n\
         Content-Length: 0\r\nConnection: close\r\n\r\n"
    );
    Ok(answer.into_bytes())
}
