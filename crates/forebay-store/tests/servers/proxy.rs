//! A proxy that does harm on purpose, and one thing for good.
//!
//! It reads each request whole, asks a function what to do with it, and sends it on over a connection of its own. The
//! good thing: changes pass one at a time, and reads not beside them. That gives s3s-fs and moto, which look before
//! they write, the create-if-absent that S3 has; races are raced between clients and the proxy.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// What happens to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Pass,
    /// The connection ends before the request is sent on.
    Cut,
    /// It is carried out, and the reply is lost.
    LoseReply,
    /// An answer of the proxy's own: status and code.
    Answer(u16, &'static str),
    /// Only after that time.
    Delay(Duration),
    /// Half of the reply's body, then the end.
    Truncate,
    /// One bit of the request's body is another.
    FlipRequest,
    /// The first text is the second in the head of what is sent on.
    Replace(&'static str, &'static str),
}

/// What a function decides by.
pub(crate) struct Request<'a> {
    pub(crate) method: &'a str,
    /// With the query.
    pub(crate) path: &'a str,
    pub(crate) head: &'a str,
    /// Whose it is.
    pub(crate) peer: IpAddr,
}

type Decide = dyn Fn(&Request<'_>) -> Action + Send + Sync;

/// Starts a proxy before a server. It serves until the process ends.
pub(crate) fn start(
    upstream: SocketAddr,
    decide: impl Fn(&Request<'_>) -> Action + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let decide: Arc<Decide> = Arc::new(decide);
    let turn = Arc::new(RwLock::new(()));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (decide, turn) = (Arc::clone(&decide), Arc::clone(&turn));
            std::thread::spawn(move || {
                // A peer that goes away is no failure of a test.
                let _ = serve(stream, upstream, decide.as_ref(), &turn);
            });
        }
    });
    address
}

/// One that only lets changes pass one at a time.
pub(crate) fn in_turn(upstream: SocketAddr) -> SocketAddr {
    start(upstream, |_| Action::Pass)
}

fn serve(
    stream: TcpStream,
    upstream: SocketAddr,
    decide: &Decide,
    turn: &RwLock<()>,
) -> std::io::Result<()> {
    let mut client = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    let Some((head, mut body)) = read_request(&mut client)? else { return Ok(()) };
    let mut words = head.split_whitespace();
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let peer = stream.peer_addr()?.ip();
    let action = decide(&Request { method, path, head: &head, peer });
    match &action {
        Action::Cut => return stream.shutdown(Shutdown::Both),
        Action::Delay(time) => std::thread::sleep(*time),
        Action::Answer(status, code) => {
            let text = format!("<Error><Code>{code}</Code><Message>injected</Message></Error>");
            let len = if method == "HEAD" { 0 } else { text.len() };
            let text = &text[..len];
            let reply = format!(
                "HTTP/1.1 {status} No\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{text}"
            );
            return stream.write_all(reply.as_bytes());
        }
        Action::FlipRequest => {
            let middle = body.len() / 2;
            if let Some(byte) = body.get_mut(middle) {
                *byte ^= 1;
            }
        }
        _ => {}
    }
    let reads = matches!(method, "GET" | "HEAD");
    let reply = {
        // Nor a read beside a change: a server that looks up bytes and tag one after the other may mix two states.
        let _change = (!reads).then(|| turn.write().unwrap());
        let _read = reads.then(|| turn.read().unwrap());
        let head = match &action {
            Action::Replace(from, to) => head.replace(from, to),
            _ => head.clone(),
        };
        exchange(upstream, &head, &body)?
    };
    match action {
        Action::LoseReply => {}
        Action::Truncate => {
            let start = reply.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(0);
            let half = start + (reply.len() - start) / 2;
            stream.write_all(&reply[..half])?;
        }
        _ => stream.write_all(&reply)?,
    }
    stream.shutdown(Shutdown::Both)
}

/// Head and body of a request with a length.
pub(super) fn read_request(
    client: &mut impl BufRead,
) -> std::io::Result<Option<(String, Vec<u8>)>> {
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if client.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            break;
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    client.read_exact(&mut body)?;
    Ok(Some((head, body)))
}

/// The whole reply.
pub(super) fn exchange(upstream: SocketAddr, head: &str, body: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut server = TcpStream::connect(upstream)?;
    server.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    server.write_all(body)?;
    let mut reply = Vec::new();
    server.read_to_end(&mut reply)?;
    Ok(reply)
}
