//! Uploads to servers: killed in the middle and gone on with on S3, where uploads and their parts are listed; and whole
//! steps into emulators of Azure and GCS.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{RunId, claim, latest};
use forebay_checkpoint::progress::{Progress, Unwatched};
use forebay_error::Result;
use forebay_store::fault::{Action, Fault, FaultStore, Plan, When};
use forebay_store::{MemoryStore, ObjectStore, Store, StoreSettings};
use forebay_tier::hop::{Arrival, HopOptions, Share, hop};

use crate::world::{files, options, root, save_rows, side};
use server::proxy::{self, Action as Answer};

#[path = "../../../forebay-store/tests/servers/mod.rs"]
mod server;

/// A step committed there, as it was saved.
fn moves_to(url: &str, settings: &StoreSettings, rows: u64) {
    let from: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let epoch = claim(&root(Arc::clone(&from)), RunId(0xabc), None, "test").unwrap();
    save_rows(&from, (7, 1, epoch), rows);
    let to: Arc<dyn Store> = Arc::new(ObjectStore::open(url, settings).unwrap());
    let (here, there) = (side(Arc::clone(&from)), side(Arc::clone(&to)));
    let done = hop(&here, &there, 7, &in_parts(), &Unwatched).unwrap();
    assert!(matches!(done.arrival, Arrival::Committed { by_us: true, .. }));
    assert!(done.bytes_read_back >= done.bytes_sent, "no checksums are compared there");
    assert_eq!(files(&*from, 7), files(&*to, 7));
    assert_eq!(latest(&root(to)).unwrap().unwrap().step, 7);
    let again = hop(&here, &there, 7, &in_parts(), &Unwatched).unwrap();
    assert!(matches!(again.arrival, Arrival::Committed { by_us: false, .. }));
    assert_eq!(again.bytes_sent, 0);
}

#[test]
fn a_step_arrives_in_azure_in_blocks() {
    let Some(azurite) = server::emulators::azurite() else { return };
    moves_to(&server::fresh("az"), &server::emulators::azure(azurite.address), 30_000);
}

#[test]
fn a_step_arrives_in_gcs() {
    let Some((_server, adapter)) = server::emulators::gcs() else { return };
    moves_to(&server::fresh("gs"), &server::emulators::gcs_at(adapter), 301);
}

/// Of the store, and of the hop here.
const PART: usize = 8 << 20;

/// Lets each part arrive before the next is written.
struct Slow;

impl Progress for Slow {
    fn total(&self, _bytes: u64) {}

    fn add(&self, bytes: u64) -> Result<()> {
        if bytes as usize == PART {
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }
}

fn in_parts() -> HopOptions {
    HopOptions { part_bytes: PART as u64, ..options(Share::all()) }
}

/// Which step of a whole hop is the end of the largest file.
fn last_seal(from: &MemoryStore, to: Arc<dyn Store>, key: &str) -> u64 {
    let client = Arc::new(FaultStore::new(to, Plan::none()));
    let there = side(Arc::clone(&client) as Arc<dyn Store>);
    hop(&side(Arc::new(from.clone())), &there, 7, &in_parts(), &Unwatched).unwrap();
    let is_it = |step: &&forebay_store::fault::Step| {
        step.action == Action::Seal && step.when == When::Before && step.key == key
    };
    client.log().iter().find(is_it).unwrap().index
}

#[test]
fn an_upload_is_gone_on_with_after_a_kill() {
    let Some(moto) = server::moto() else { return };
    let from = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(from.clone());
    let epoch = claim(&root(Arc::clone(&shared)), RunId(0xabc), None, "test").unwrap();
    save_rows(&shared, (7, 1, epoch), 45_000);
    let (key, bytes) = files(&from, 7).into_iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
    let parts = bytes.len().div_ceil(PART);
    assert!(parts >= 3, "{} bytes", bytes.len());
    let open =
        |url: &str, address| Arc::new(ObjectStore::open(url, &server::settings(address)).unwrap());
    let (quiet, url) = (server::fresh_url(), server::fresh_url());
    let seal = last_seal(&from, open(&quiet, moto.address), &key);

    let here = side(Arc::clone(&shared));
    let victim = FaultStore::new(open(&url, moto.address), Plan::at(seal, Fault::Kill));
    assert!(hop(&here, &side(Arc::new(victim)), 7, &in_parts(), &Slow).is_err());

    let has = {
        let object = open(&url, moto.address).resume_data(&key, bytes.len() as u64).unwrap();
        let pieces = bytes.chunks(PART).enumerate();
        pieces.filter(|(at, piece)| object.holds(piece, (at * PART) as u64).unwrap()).count()
    };
    assert!(has >= 1, "nothing of {parts} parts is there");
    let sent = Arc::new(AtomicUsize::new(0));
    let (count, name) = (Arc::clone(&sent), key.clone());
    let address = proxy::start(moto.address, move |request| {
        let is_part = request.method == "PUT" && request.path.contains("partNumber");
        count.fetch_add(usize::from(is_part && request.path.contains(&name)), Ordering::SeqCst);
        Answer::Pass
    });
    let done = hop(&here, &side(open(&url, address)), 7, &in_parts(), &Unwatched).unwrap();
    assert!(matches!(done.arrival, Arrival::Committed { by_us: true, .. }));
    assert_eq!(sent.load(Ordering::SeqCst), parts - has, "{parts} parts, {has} were there");
    let there = open(&url, moto.address);
    assert_eq!(files(&from, 7), files(&*there, 7));
    assert!(there.unfinished("", 10).unwrap().is_empty());
}
