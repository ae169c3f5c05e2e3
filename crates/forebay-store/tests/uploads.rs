//! Lists of unfinished uploads, from servers that give odd answers.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod servers;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forebay_error::Code;
use forebay_store::{ObjectStore, Store, shared_store};

/// What a server answers to the path of a request, the how-manieth it is: status and body; `None`: a body without end.
type Answer = dyn Fn(&str, u32) -> (u16, Option<String>) + Send + Sync;

fn serve(stream: TcpStream, answer: &Answer, count: &AtomicU32) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let path = head.split(' ').nth(1).unwrap_or_default();
        match answer(path, count.fetch_add(1, Ordering::SeqCst)) {
            (status, Some(body)) => {
                let len = body.len();
                let text = format!("HTTP/1.1 {status} X\r\nContent-Length: {len}\r\n\r\n{body}");
                stream.write_all(text.as_bytes())?;
            }
            (status, None) => {
                write!(stream, "HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n")?;
                let chunk = vec![b' '; 1 << 20];
                loop {
                    write!(stream, "100000\r\n")?;
                    stream.write_all(&chunk)?;
                    stream.write_all(b"\r\n")?;
                }
            }
        }
    }
}

/// A server that answers like that, and how often it was asked.
fn server(
    answer: impl Fn(&str, u32) -> (u16, Option<String>) + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicU32>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (answer, count): (Arc<Answer>, Arc<AtomicU32>) = (Arc::new(answer), Arc::default());
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (answer, count) = (Arc::clone(&answer), Arc::clone(&counted));
            std::thread::spawn(move || serve(stream, answer.as_ref(), &count));
        }
    });
    (address, count)
}

/// Its store.
fn store(
    answer: impl Fn(&str, u32) -> (u16, Option<String>) + Send + Sync + 'static,
) -> (ObjectStore, Arc<AtomicU32>) {
    let (address, count) = server(answer);
    (ObjectStore::open("s3://bucket/prefix", &servers::settings(address)).unwrap(), count)
}

fn refusal(code: &str) -> Option<String> {
    Some(format!("<Error><Code>{code}</Code><Message>no</Message></Error>"))
}

/// A page with one upload; `more` says from where the next goes on.
fn page(key: &str, more: &str) -> Option<String> {
    let truncated = !more.is_empty();
    Some(format!(
        "<ListMultipartUploadsResult>{more}<IsTruncated>{truncated}</IsTruncated><Upload>\
         <Key>prefix/{key}</Key><UploadId>1</UploadId></Upload></ListMultipartUploadsResult>"
    ))
}

#[test]
fn an_answer_without_end_is_not_read_to_its_end() {
    let since = Instant::now();
    let (store, asked) = store(|_, _| (200, None));
    let error = store.unfinished("", 9).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported, "{error}");
    assert!(error.what().contains("16777216 bytes"), "{error}");
    assert_eq!(asked.load(Ordering::SeqCst), 1, "it would be as long again");
    assert!(since.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_permission_that_is_lacking_is_not_a_credential_that_is_wrong() {
    for (status, code) in [(403, "AccessDenied"), (400, "InvalidArgument"), (501, "NotImplemented")]
    {
        let (store, _) = store(move |_, _| (status, refusal(code)));
        assert!(store.unfinished("", 9).unwrap().is_empty(), "{code}");
    }
    for (status, code) in
        [(403, "SignatureDoesNotMatch"), (403, "RequestTimeTooSkewed"), (400, "ExpiredToken")]
    {
        let (store, _) = store(move |_, _| (status, refusal(code)));
        let error = store.unfinished("", 9).unwrap_err();
        assert!(error.what().contains(code), "{error}");
    }
}

#[test]
fn pages_go_on_from_any_mark_and_never_for_ever() {
    let next = "<NextKeyMarker>prefix/a</NextKeyMarker>";
    // Some servers give the key alone.
    let (whole, _) = store(move |path, _| match path.contains("key-marker=prefix%2Fa") {
        false => (200, page("a", next)),
        true => (200, page("b", "")),
    });
    let keys = |store: &ObjectStore| -> Vec<String> {
        store.unfinished("", 9).unwrap().into_iter().map(|upload| upload.key).collect()
    };
    assert_eq!(keys(&whole), ["a", "b"]);
    // The same mark again, none, or two in turn, with nothing of ours in between.
    let other = |at: u32| format!("<NextKeyMarker>other/{at}</NextKeyMarker>");
    let foreign = move |at: u32| page("", &other(at)).map(|page| page.replace("prefix/", "other/"));
    let answers: [Box<Answer>; 3] = [
        Box::new(move |_, _| (200, page("a", next))),
        Box::new(|_, _| (200, page("a", "<NextUploadIdMarker>1</NextUploadIdMarker>"))),
        Box::new(move |_, at| (200, foreign(at % 2))),
    ];
    for answer in answers {
        let (store, asked) = store(answer);
        let error = store.unfinished("", 1 << 20).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported, "{error}");
        assert!(asked.load(Ordering::SeqCst) <= 1000);
    }
}

/// A store whose credentials are refused is opened anew by the next who asks for it; one that may only not list uploads
/// is as good as before.
#[test]
fn who_may_not_list_uploads_keeps_the_store_and_its_credentials() {
    let open = |code: &'static str| {
        let settings = servers::settings(server(move |_, _| (403, refusal(code))).0);
        move || shared_store("s3://bucket/prefix", &settings).unwrap()
    };
    let (lacking, wrong) = (open("AccessDenied"), open("InvalidAccessKeyId"));
    let before = (lacking(), wrong());
    // Younger credentials are not doubted.
    std::thread::sleep(Duration::from_millis(10_500));
    assert!(before.0.unfinished("", 9).unwrap().is_empty());
    assert!(before.1.unfinished("", 9).is_err());
    assert!(Arc::ptr_eq(&before.0, &lacking()), "it was opened anew for nothing");
    assert!(!Arc::ptr_eq(&before.1, &wrong()));
}
