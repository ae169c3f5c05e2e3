//! Azure and GCS: the suite against their emulators.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[macro_use]
mod conformance;
mod servers;

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use conformance::Place;
use forebay_engine::{read_exact_at, write_all_at};
use forebay_error::Code;
use forebay_store::{Expect, ObjectStore, Published, Store, StoreSettings};
use servers::emulators::{self, azure, gcs_at};
use servers::proxy::{self, Action, Request};
use servers::{Server, fresh};

static AZURITE: LazyLock<Option<Server>> = LazyLock::new(emulators::azurite);
/// With the adapter that has the requests that the server lacks.
static GCS: LazyLock<Option<(Server, SocketAddr)>> = LazyLock::new(emulators::gcs);

fn in_azurite() -> Option<ObjectStore> {
    let settings = azure(AZURITE.as_ref()?.address);
    Some(ObjectStore::open(&fresh("az"), &settings).unwrap())
}

/// Behind a proxy, for one test.
fn behind(decide: impl Fn(&Request<'_>) -> Action + Send + Sync + 'static) -> Option<ObjectStore> {
    let address = proxy::start(AZURITE.as_ref()?.address, decide);
    let settings = StoreSettings { retries: 3, ..azure(address) };
    Some(ObjectStore::open(&fresh("az"), &settings).unwrap())
}

// Races are the server's own to decide: no proxy puts changes in a row.
conformance!(azurite, || Some(Place::in_seconds(in_azurite()?)));

fn in_gcs() -> Option<ObjectStore> {
    let (_, adapter) = GCS.as_ref()?;
    Some(ObjectStore::open(&fresh("gs"), &gcs_at(*adapter)).unwrap())
}

conformance!(gcs, || Some(Place::in_seconds(in_gcs()?)));

#[test]
fn what_azurite_honours_is_found_out() {
    let Some(store) = in_azurite() else { return };
    let can = store.probe().unwrap();
    assert!(can.create_if_absent && can.replace_if_version, "{can:?}");
    assert!(!can.rejects_bad_checksums && !can.returns_checksums, "none are sent: {can:?}");
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]).collect()
}

#[test]
fn an_object_of_many_blocks_goes_there_and_back() {
    let Some(store) = in_azurite() else { return };
    // A writer that was killed left a block, which is nobody's.
    let killed = store.create_data("data", 20 << 20).unwrap();
    write_all_at(killed.sink(), &vec![7; 8 << 20], 0).unwrap();
    std::mem::forget(killed);
    let again = ObjectStore::open(&store.name(), &azure(AZURITE.as_ref().unwrap().address));
    let store = again.unwrap();
    let bytes = pattern((18 << 20) + 12345);
    let data = store.create_data("data", bytes.len() as u64 + 5).unwrap();
    for (at, piece) in bytes.chunks(5_777_777).enumerate().rev() {
        write_all_at(data.sink(), piece, at as u64 * 5_777_777).unwrap();
    }
    assert_eq!(store.get("data", 9).unwrap(), None, "not there before it is whole");
    data.seal().unwrap();
    let source = store.open_data("data").unwrap();
    let mut back = vec![1; bytes.len() + 5];
    read_exact_at(source.as_ref(), &mut back, 0).unwrap();
    assert!(back[..bytes.len()] == bytes);
    assert_eq!(back[bytes.len()..], [0; 5], "a hole");
    let dropped = store.create_data("dropped", 20 << 20).unwrap();
    write_all_at(dropped.sink(), &vec![1; 9 << 20], 0).unwrap();
    drop(dropped);
    assert_eq!(store.list("", 10).unwrap().len(), 1, "blocks are no object");
}

#[test]
fn replies_of_azure_that_get_lost_are_looked_up() {
    let lost = AtomicU32::new(0);
    let store = behind(move |request| {
        let named = ["/lost", "/to", "comp=blocklist"]
            .iter()
            .position(|name| request.method == "PUT" && request.path.contains(name));
        match named.is_some_and(|bit| lost.fetch_or(1 << bit, Ordering::SeqCst) & (1 << bit) == 0) {
            true => Action::LoseReply,
            false => Action::Pass,
        }
    });
    let Some(store) = store else { return };
    assert!(store.create("lost", b"ours").unwrap(), "its own doing");
    assert!(!store.create("lost", b"ours").unwrap(), "the same bytes are not the same call");
    store.put("staged", b"1").unwrap();
    let done = Published::Done { durable: true };
    assert_eq!(store.publish("staged", "to", &Expect::Absent).unwrap(), done);
    let data = store.create_data("data", 9 << 20).unwrap();
    write_all_at(data.sink(), &vec![3; 9 << 20], 0).unwrap();
    data.seal().unwrap();
    assert_eq!(store.open_data("data").unwrap().len(), 9 << 20);
}

#[test]
fn refusals_of_azure_are_told_without_secrets() {
    let Some(server) = AZURITE.as_ref() else { return };
    let error = |url: &str, settings: &StoreSettings| {
        let store = ObjectStore::open(url, settings).unwrap();
        store.put("a", b"1").unwrap_err()
    };
    let settings = azure(server.address);
    // What is signed is not what arrives.
    let another = Action::Replace("x-ms-meta-forebaywrite: ", "x-ms-meta-forebaywrite: not-");
    let address = proxy::start(server.address, move |_| another.clone());
    let refused = error(&fresh("az"), &azure(address));
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
    assert!(!refused.render().contains(emulators::ACCOUNT_KEY));
    let start = Instant::now();
    let no_container = error("az://no-such-container/x", &settings);
    assert_eq!(no_container.code(), Code::NotFound, "{no_container:?}");
    assert!(start.elapsed() < Duration::from_secs(5), "not tried again: {:?}", start.elapsed());
}

#[test]
fn what_an_emulator_of_gcs_honours_is_found_out() {
    let Some(store) = in_gcs() else { return };
    let can = store.probe().unwrap();
    assert!(can.create_if_absent && can.replace_if_version, "{can:?}");
}

#[test]
fn gcs_without_preconditions_is_refused() {
    let Some((_, adapter)) = GCS.as_ref() else { return };
    let ignored = Action::Replace("x-goog-if-generation-match", "x-ignored");
    let address = proxy::start(*adapter, move |_| ignored.clone());
    let store = ObjectStore::open(&fresh("gs"), &gcs_at(address)).unwrap();
    let can = store.probe().unwrap();
    assert!(!can.create_if_absent && !can.replace_if_version, "{can:?}");
    let error = store.create("b", b"1").unwrap_err();
    assert_eq!(error.code(), Code::Unsupported, "{error:?}");
    assert!(!error.hints().is_empty());
}

#[test]
fn an_upload_that_gcs_refuses_leaves_nothing() {
    let Some(store) = in_gcs() else { return };
    // The emulator has no uploads in parts.
    let data = store.create_data("data", 9 << 20).unwrap();
    let wrote = write_all_at(data.sink(), &vec![1; 9 << 20], 0);
    let error = wrote.and_then(|()| data.seal()).unwrap_err();
    assert_eq!(error.code(), Code::Io, "{error:?}");
    drop(data);
    assert!(store.list("", 9).unwrap().is_empty());
}
