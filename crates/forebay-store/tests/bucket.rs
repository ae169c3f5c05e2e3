//! Buckets: every case of the suite against real servers, and trouble on the way.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[macro_use]
mod conformance;
mod servers;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use conformance::Place;
use forebay_engine::{read_exact_at, write_all_at};
use forebay_error::Code;
use forebay_store::{Expect, ObjectStore, Published, Store, StoreSettings, open_store};
use servers::proxy::{self, Action};
use servers::{Reached, fresh_url, reached, settings};

static S3S: LazyLock<Option<Reached>> = LazyLock::new(|| reached(servers::s3s()));
static MOTO: LazyLock<Option<Reached>> = LazyLock::new(|| reached(servers::moto()));
static JUICEFS: LazyLock<Option<Reached>> = LazyLock::new(|| reached(servers::juicefs()));

fn open(address: SocketAddr) -> ObjectStore {
    ObjectStore::open(&fresh_url(), &settings(address)).unwrap()
}

conformance!(in_memory, || {
    let store = ObjectStore::open("memory:", &StoreSettings::default()).unwrap();
    Some(Place::in_seconds(store))
});

conformance!(s3s_fs, || Some(Place::in_seconds(open(S3S.as_ref()?.in_turn))));

conformance!(moto, || Some(Place::in_seconds(open(MOTO.as_ref()?.in_turn))));

#[test]
fn what_servers_honour_is_found_out() {
    if let Some(s3s) = S3S.as_ref() {
        let can = open(s3s.in_turn).probe().unwrap();
        assert!(
            can.create_if_absent && can.replace_if_version && can.rejects_bad_checksums,
            "{can:?}"
        );
    }
    if let Some(moto) = MOTO.as_ref() {
        let can = open(moto.in_turn).probe().unwrap();
        assert!(can.create_if_absent && can.replace_if_version, "{can:?}");
        assert!(!can.rejects_bad_checksums, "{can:?}");
        assert!(can.publish_time > Duration::ZERO, "collectors must wait: {can:?}");
    }
}

#[test]
fn a_store_that_ignores_preconditions_is_refused_and_still_reads_and_writes() {
    let Some(juicefs) = JUICEFS.as_ref() else { return };
    let store = open(juicefs.server.address);
    let can = store.probe().unwrap();
    assert!(!can.create_if_absent && !can.replace_if_version, "{can:?}");
    let error = store.create("a", b"1").unwrap_err();
    assert_eq!(error.code(), Code::Unsupported, "{error:?}");
    assert!(!error.hints().is_empty());
    store.put("staged", b"2").unwrap();
    let error = store.publish("staged", "to", &Expect::Absent).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert_eq!(store.get("staged", 9).unwrap().unwrap().0, b"2");
    assert_eq!(store.get("to", 9).unwrap(), None);
}

/// Each of them in front of moto, for one test.
fn behind(
    decide: impl Fn(&proxy::Request<'_>) -> Action + Send + Sync + 'static,
) -> Option<(SocketAddr, StoreSettings)> {
    let server = S3S.as_ref().or(MOTO.as_ref())?;
    let address = proxy::start(server.server.address, decide);
    Some((address, StoreSettings { retries: 4, ..settings(address) }))
}

/// True for the first so many calls.
fn first(count: u32) -> impl Fn() -> bool + Send + Sync {
    let asked = AtomicU32::new(0);
    move || asked.fetch_add(1, Ordering::SeqCst) < count
}

fn is_probe(request: &proxy::Request<'_>) -> bool {
    request.path.contains(".forebay-tmp-")
}

#[test]
fn trouble_that_passes_is_not_seen() {
    let actions = [
        Action::Cut,
        Action::Answer(503, "SlowDown"),
        Action::Answer(500, "InternalError"),
        Action::Answer(429, "TooManyRequests"),
        Action::LoseReply,
        Action::Truncate,
    ];
    for action in actions {
        let (said, puts, gets) = (action.clone(), first(2), first(2));
        let behind = behind(move |request| match request.method {
            _ if is_probe(request) => Action::Pass,
            "PUT" if puts() => said.clone(),
            "GET" if gets() => said.clone(),
            _ => Action::Pass,
        });
        let Some((_, settings)) = behind else { return };
        let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
        store.put("a", &[7; 1000]).unwrap();
        assert_eq!(store.get("a", 1000).unwrap().unwrap().0, [7; 1000], "{action:?}");
    }
}

#[test]
fn what_servers_honour_is_found_out_through_trouble() {
    let Some(server) = S3S.as_ref().or(MOTO.as_ref()) else { return };
    let expected = open(server.in_turn).probe().unwrap();
    // Each request in turn meets the trouble, that with the wrong checksum too.
    for trouble in [Action::Answer(503, "SlowDown"), Action::LoseReply, Action::Cut] {
        for at in 0..17 {
            let (count, action) = (AtomicU32::new(0), trouble.clone());
            let address = proxy::start(server.in_turn, move |_| {
                match count.fetch_add(1, Ordering::SeqCst) == at {
                    true => action.clone(),
                    false => Action::Pass,
                }
            });
            assert_eq!(open(address).probe().unwrap(), expected, "{trouble:?} at {at}");
        }
    }
}

#[test]
fn trouble_is_not_taken_for_a_comparison_of_checksums() {
    let Some(server) = MOTO.as_ref() else { return };
    // Of the three keys of a probe the last is the one with the wrong checksum: it alone is replaced at will.
    let address = proxy::start(server.in_turn, |request| {
        let at_will = request.method == "PUT" && !request.head.to_lowercase().contains("\nif-");
        match is_probe(request) && at_will {
            true => Action::Cut,
            false => Action::Pass,
        }
    });
    let settings = StoreSettings { retries: 2, ..settings(address) };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    assert!(store.probe().is_err(), "it is not known");
    assert!(!open(server.in_turn).probe().unwrap().rejects_bad_checksums);
}

fn is_listing(request: &proxy::Request<'_>) -> bool {
    request.method == "GET" && request.path.contains("list-type=2")
}

#[test]
fn a_listing_of_a_silent_store_ends_as_soon_as_any_request() {
    let behind = behind(|request| match is_listing(request) {
        true => Action::Delay(Duration::from_secs(40)),
        false => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let request_timeout = Duration::from_millis(200);
    let settings = StoreSettings { request_timeout, retries: 1, ..settings };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let start = Instant::now();
    assert_eq!(store.list("", 1 << 22).unwrap_err().code(), Code::Timeout);
    assert_eq!(store.names("", 1 << 22).unwrap_err().code(), Code::Timeout);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn trouble_costs_a_page_of_a_listing_and_not_all_before_it() {
    let Some(server) = S3S.as_ref() else { return };
    let url = fresh_url();
    let folder = url.strip_prefix("s3://").unwrap();
    let folder = server.server._folder.as_ref().unwrap().path().join(folder);
    std::fs::create_dir_all(folder.join("below")).unwrap();
    for number in 0..2500 {
        std::fs::write(folder.join(format!("{number:04}")), b"1").unwrap();
    }
    std::fs::write(folder.join("below/x"), b"1").unwrap();
    let pages = Arc::new(AtomicU32::new(0));
    let (asked, own) = (first(2), pages.clone());
    let address = proxy::start(server.server.address, move |request| {
        if !is_listing(request) {
            return Action::Pass;
        }
        own.fetch_add(1, Ordering::SeqCst);
        match request.path.contains("continuation-token") && asked() {
            true => Action::Answer(503, "SlowDown"),
            false => Action::Pass,
        }
    });
    let store = ObjectStore::open(&url, &settings(address)).unwrap();
    let listed = store.list("", 2501).unwrap();
    assert_eq!((listed.len(), listed[2499].key.as_str()), (2501, "2499"));
    assert_eq!(pages.swap(0, Ordering::SeqCst), 3 + 2);
    assert_eq!(store.list("", 1000).unwrap_err().code(), Code::Unsupported);
    assert_eq!(pages.swap(0, Ordering::SeqCst), 2, "no more than tell that there are too many");
    let names = store.names("", 2501).unwrap();
    assert_eq!(names.len(), 2501);
    assert_eq!(names.last().unwrap(), &("below".to_owned(), true));
    assert_eq!(store.names("", 2500).unwrap_err().code(), Code::Unsupported);
}

#[cfg(feature = "aws-profiles")]
#[test]
fn keys_that_were_replaced_in_their_file_are_read_again() {
    let Some(server) = S3S.as_ref() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credentials");
    servers::set_credentials_file(&file);
    let write = |secret: &str| {
        let key = servers::KEY;
        let text =
            format!("[rotated]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n");
        std::fs::write(&file, text).unwrap();
    };
    write(servers::SECRET);
    let profile = Some("rotated".to_owned());
    let settings = StoreSettings { profile, ..settings(server.server.address) };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("a", b"1").unwrap();
    // The server takes the same keys for good, so the file has wrong ones first in a second store.
    write("an-older-secret");
    let other = ObjectStore::open(&fresh_url(), &settings).unwrap();
    assert_eq!(other.put("a", b"1").unwrap_err().code(), Code::PermissionDenied);
    write(servers::SECRET);
    // So long they are not doubted: a refusal may mean a permission that is lacking.
    std::thread::sleep(Duration::from_secs(11));
    other.put("a", b"1").unwrap();
    assert_eq!(store.get("a", 9).unwrap().unwrap().0, b"1");
}

#[test]
fn a_lost_reply_is_looked_up() {
    let lose = first(1);
    let behind = behind(move |request| match request.method {
        "PUT" if !is_probe(request) && request.path.contains("/lost") && lose() => {
            Action::LoseReply
        }
        _ => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    assert!(store.create("lost", b"ours").unwrap(), "its own doing");
    assert!(!store.create("lost", b"ours").unwrap(), "the same bytes are not the same call");
    store.put("staged", b"1").unwrap();
    let done = Published::Done { durable: true };
    assert_eq!(store.publish("staged", "to", &Expect::Absent).unwrap(), done);
}

#[test]
fn a_lost_reply_of_a_publication_is_looked_up() {
    let lose = first(1);
    let behind = behind(move |request| match request.method {
        "PUT" if !is_probe(request) && request.path.ends_with("/to") && lose() => Action::LoseReply,
        _ => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("staged", b"1").unwrap();
    let done = Published::Done { durable: true };
    assert_eq!(store.publish("staged", "to", &Expect::Absent).unwrap(), done);
    assert_eq!(store.get("staged", 9).unwrap(), None);
}

#[test]
fn a_byte_that_is_damaged_on_its_way_is_sent_again() {
    if S3S.is_none() {
        return;
    }
    let flip = first(1);
    let behind = behind(move |request| match request.method {
        "PUT" if !is_probe(request) && flip() => Action::FlipRequest,
        _ => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("a", &[9; 5000]).unwrap();
    assert_eq!(store.get("a", 5000).unwrap().unwrap().0, [9; 5000]);
}

#[test]
fn trouble_that_stays_is_an_error_in_time_and_no_secret_is_told() {
    let behind = behind(|_| Action::Answer(503, "SlowDown"));
    let Some((_, settings)) = behind else { return };
    let settings = StoreSettings { retry_time: Duration::from_secs(3), ..settings };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let start = Instant::now();
    let error = store.put("a", b"1").unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(70), "{:?}", start.elapsed());
    let text = format!("{} {store:?} {settings:?}", error.render());
    assert!(text.contains("503 SlowDown"), "{text}");
    assert!(!text.contains(servers::SECRET) && !text.contains(servers::KEY), "{text}");
    // Three tries or more of one request each halved it from 8.
    assert!(store.probe().is_err());
}

#[test]
fn wrong_credentials_are_a_refusal_at_once() {
    let Some(s3s) = S3S.as_ref() else { return };
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let address = proxy::start(s3s.server.address, move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Action::Answer(403, "InvalidAccessKeyId")
    });
    let store = ObjectStore::open(&fresh_url(), &settings(address)).unwrap();
    let error = store.put("a", b"1").unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error:?}");
    assert_eq!(asked.load(Ordering::SeqCst), 1, "not tried again");
    assert!(!error.hints().is_empty());
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]).collect()
}

#[test]
fn an_object_of_many_parts_goes_there_and_back_through_trouble() {
    let (parts, ranges) = (first(3), first(3));
    let behind = behind(move |request| match request.method {
        "PUT" if request.path.contains("partNumber") && parts() => Action::Answer(503, "SlowDown"),
        "GET" if request.head.to_lowercase().contains("range:") && ranges() => Action::Truncate,
        _ => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let settings = StoreSettings { range_bytes: 3 << 20, ..settings };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let bytes = pattern((26 << 20) + 12345);
    let data = store.create_data("data", bytes.len() as u64).unwrap();
    assert_eq!(store.get("data", 9).unwrap(), None, "not there before it is whole");
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let (data, bytes) = (&data, &bytes);
            scope.spawn(move || {
                for (at, piece) in
                    bytes.chunks(777_777).enumerate().filter(|(at, _)| at % 3 == worker)
                {
                    write_all_at(data.sink(), piece, at as u64 * 777_777).unwrap();
                }
            });
        }
    });
    data.seal().unwrap();
    let source = store.open_data("data").unwrap();
    let mut back = vec![0; bytes.len()];
    read_exact_at(source.as_ref(), &mut back, 0).unwrap();
    assert!(back == bytes);
    assert!(store.traffic().limits.0 < 8, "{:?}", store.traffic());
    assert!(store.traffic().upload_bytes_peak <= 256 << 20);
}

#[test]
fn holes_are_zeros_and_what_is_not_sealed_is_not_there() {
    let Some((_, settings)) = behind(|_| Action::Pass) else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let data = store.create_data("holes", 20 << 20).unwrap();
    write_all_at(data.sink(), b"end", (20 << 20) - 3).unwrap();
    data.seal().unwrap();
    let source = store.open_data("holes").unwrap();
    let mut tail = [1; 10];
    read_exact_at(source.as_ref(), &mut tail, (20 << 20) - 10).unwrap();
    assert_eq!(&tail, b"\0\0\0\0\0\0\0end");
    let dropped = store.create_data("dropped", 20 << 20).unwrap();
    write_all_at(dropped.sink(), &vec![1; 9 << 20], 0).unwrap();
    drop(dropped);
    assert_eq!(store.list("", 10).unwrap().len(), 1);
    drop(store.create_data("dropped", 1).unwrap());
}

#[test]
fn what_a_killed_writer_uploaded_is_found_and_forgotten() {
    let Some(server) = MOTO.as_ref().or(S3S.as_ref()) else { return };
    let url = fresh_url();
    let open = || ObjectStore::open(&url, &settings(server.server.address)).unwrap();
    let (killed, other) = (open(), open());
    for key in ["a/b", "a/bc"] {
        let object = killed.create_data(key, 20 << 20).unwrap();
        write_all_at(object.sink(), &vec![1; 8 << 20], 0).unwrap();
        // A process that is killed runs no destructors.
        std::mem::forget(object);
    }
    let until = Instant::now() + Duration::from_secs(20);
    while other.unfinished("", 10).unwrap().len() < 2 {
        assert!(Instant::now() < until, "the parts are not sent");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(other.list("", 10).unwrap().is_empty(), "a listing of objects does not show them");
    assert_eq!(other.unfinished("", 1).unwrap_err().code(), Code::Unsupported);
    assert!(other.unfinished("b/", 10).unwrap().is_empty());
    assert_eq!(other.forget_unfinished("a/b").unwrap(), 1);
    assert_eq!(other.forget_unfinished("a/b").unwrap(), 0);
    let left: Vec<String> =
        other.unfinished("a/", 10).unwrap().into_iter().map(|l| l.key).collect();
    assert_eq!(left, ["a/bc"], "one whose key starts alike stays");
}

/// Goes on with an upload through a proxy that counts parts, and ends it; how many parts were held, how many sent.
fn go_on(address: SocketAddr, url: &str, bytes: &[u8], piece: usize) -> (usize, u32) {
    let sent = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&sent);
    let address = proxy::start(address, move |request| {
        let is_part = request.method == "PUT" && request.path.contains("partNumber");
        count.fetch_add(u32::from(is_part), Ordering::SeqCst);
        Action::Pass
    });
    let store = ObjectStore::open(url, &settings(address)).unwrap();
    let data = store.resume_data("data", bytes.len() as u64).unwrap();
    let mut held = 0;
    for (at, range) in bytes.chunks(piece).enumerate() {
        let offset = (at * piece) as u64;
        match data.holds(range, offset).unwrap() {
            true => held += 1,
            false => write_all_at(data.sink(), range, offset).unwrap(),
        }
    }
    data.seal().unwrap();
    let source = store.open_data("data").unwrap();
    let mut back = vec![0; bytes.len()];
    read_exact_at(source.as_ref(), &mut back, 0).unwrap();
    assert!(back == bytes);
    assert!(store.unfinished("", 10).unwrap().is_empty());
    (held, sent.load(Ordering::SeqCst))
}

#[test]
fn an_upload_of_a_killed_writer_is_gone_on_with_part_by_part() {
    const MIB: usize = 1 << 20;
    let Some(server) = MOTO.as_ref() else { return };
    let (address, bytes) = (server.server.address, pattern(36 * MIB));
    // The same ranges as parts; ranges of their own, where parts are told when they are whole; other bytes.
    for (piece, changed, expected) in
        [(8 * MIB, false, (2, 3)), (5 * MIB, false, (0, 3)), (8 * MIB, true, (1, 4))]
    {
        let url = fresh_url();
        let store = ObjectStore::open(&url, &settings(address)).unwrap();
        let killed = store.resume_data("data", bytes.len() as u64).unwrap();
        // The third part is not whole, so it was not sent.
        write_all_at(killed.sink(), &bytes[..20 * MIB], 0).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        let other = ObjectStore::open(&url, &settings(address)).unwrap();
        let has = |part: usize| {
            let range = &bytes[part * 8 * MIB..(part + 1) * 8 * MIB];
            let data = other.resume_data("data", bytes.len() as u64).unwrap();
            data.holds(range, (part * 8 * MIB) as u64).unwrap()
        };
        while !has(0) || !has(1) {
            assert!(Instant::now() < until, "the parts are not sent");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!has(2), "it was not sent");
        // A process that is killed runs no destructors.
        std::mem::forget(killed);
        let mut bytes = bytes.clone();
        bytes[5] ^= u8::from(changed);
        assert_eq!(go_on(address, &url, &bytes, piece), expected, "ranges of {piece} bytes");
    }
}

#[test]
fn an_upload_that_fails_says_so_to_its_writers() {
    let behind = behind(|request| match request.path.contains("partNumber") {
        true => Action::Answer(403, "AccessDenied"),
        false => Action::Pass,
    });
    let Some((_, settings)) = behind else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    let data = store.create_data("data", 20 << 20).unwrap();
    write_all_at(data.sink(), &vec![1; 20 << 20], 0).unwrap_or_else(|error| {
        assert_eq!(error.code(), Code::PermissionDenied, "{error:?}");
    });
    assert_eq!(data.seal().unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(store.get("data", 9).unwrap(), None);
}

#[test]
fn what_changes_between_ranges_is_told() {
    let Some((_, settings)) = behind(|_| Action::Pass) else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("a", &[1; 1000]).unwrap();
    let source = store.open_data("a").unwrap();
    let mut into = [0; 100];
    read_exact_at(source.as_ref(), &mut into, 0).unwrap();
    store.put("a", &[2; 1000]).unwrap();
    let error = read_exact_at(source.as_ref(), &mut into, 500).unwrap_err();
    assert_eq!(error.code(), Code::FileChanged, "{error:?}");
}

#[test]
fn stragglers_are_asked_for_twice() {
    let slow = AtomicU32::new(0);
    let behind = behind(move |request| {
        let ranged = request.method == "GET" && request.head.to_lowercase().contains("range:");
        match ranged && slow.fetch_add(1, Ordering::SeqCst) == 60 {
            true => Action::Delay(Duration::from_secs(30)),
            false => Action::Pass,
        }
    });
    let Some((_, settings)) = behind else { return };
    let store = ObjectStore::open(&fresh_url(), &settings).unwrap();
    store.put("a", &pattern(10_000)).unwrap();
    let source = store.open_data("a").unwrap();
    let start = Instant::now();
    for _ in 0..100 {
        let mut into = [0; 5000];
        read_exact_at(source.as_ref(), &mut into, 1000).unwrap();
        assert_eq!(into[..], pattern(10_000)[1000..6000]);
    }
    assert!(store.traffic().hedged >= 1, "{:?}", store.traffic());
    assert!(start.elapsed() < Duration::from_secs(29), "{:?}", start.elapsed());
}

#[test]
fn urls_open_what_they_say() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    for place in [url.as_str(), &folder.path().display().to_string()] {
        let store = open_store(place, &StoreSettings::default()).unwrap();
        store.put("a", b"1").unwrap();
        assert!(folder.path().join("a").exists());
    }
    let error = |url: &str| open_store(url, &StoreSettings::default()).err().unwrap().code();
    assert_eq!(error("ftp://a/b"), Code::Usage);
    assert_eq!(error("/no/such/folder"), Code::NotFound);
    let no_ca = StoreSettings { ca_file: Some("/no/such.pem".into()), ..StoreSettings::default() };
    assert_eq!(open_store("s3://b", &no_ca).err().unwrap().code(), Code::NotFound);
}
