//! Kinds of stores: folders, and stores that show an object when it is complete; and what readers find there.

use std::sync::Arc;

use forebay_checkpoint::commit::{RunId, claim, latest};
use forebay_checkpoint::open::verify_folder;
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, ObjectStore, PosixStore, Store, StoreSettings};
use forebay_tier::hop::{Arrival, ReadBack, Share, hop};

use crate::world::{data_bytes, files, options, root, save, side, source};

#[test]
fn from_folder_to_folder_every_byte_verifies_there() {
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let from: Arc<dyn Store> = Arc::new(PosixStore::open(near.path()).unwrap());
    let to: Arc<dyn Store> = Arc::new(PosixStore::open(far.path()).unwrap());
    save(&from, 7, 1, 0);
    let mut options = options(Share::all());
    options.files_at_once = 3;
    let done = hop(&side(Arc::clone(&from)), &side(Arc::clone(&to)), 7, &options, &Unwatched);
    let done = done.unwrap();
    assert!(matches!(done.arrival, Arrival::Committed { by_us: true, .. }));
    assert_eq!(done.bytes_read_back, data_bytes(&*from));
    let found = verify_folder(&far.path().join("step-7"), &Unwatched).unwrap();
    assert!(found.is_sound(), "{:?}", found.faults);
    assert_eq!(found.unchecked_bytes, 0);
    assert_eq!(files(&*from, 7), files(&*to, 7));
}

/// A bucket: nothing is under a key before the object is complete, and large objects cannot be renamed.
#[test]
fn a_bucket_is_written_under_the_files_own_names_and_gone_on_with_after_kills() {
    let from = source();
    let open = || Arc::new(ObjectStore::open("memory:", &StoreSettings::default()).unwrap());
    for step in (0..).step_by(5) {
        let bucket: Arc<dyn Store> = open();
        let here = side(Arc::new(from.clone()));
        let victim = Arc::new(FaultStore::new(Arc::clone(&bucket), Plan::at(step, Fault::Kill)));
        let first = {
            let there = side(Arc::clone(&victim) as Arc<dyn Store>);
            hop(&here, &there, 7, &options(Share::all()), &Unwatched)
        };
        let mut options = options(Share::all());
        options.read_back = ReadBack::Always;
        let done = hop(&here, &side(Arc::clone(&bucket)), 7, &options, &Unwatched).unwrap();
        assert!(matches!(done.arrival, Arrival::Committed { .. }), "{first:?}");
        assert_eq!(files(&from, 7), files(&*bucket, 7));
        if !victim.killed() {
            assert!(step > 60, "{step} steps");
            return;
        }
    }
}

/// What is under a file's name in a bucket and was never read back is not taken on trust.
#[test]
fn a_wrong_object_under_a_files_name_is_replaced() {
    let from = source();
    let bucket: Arc<dyn Store> =
        Arc::new(ObjectStore::open("memory:", &StoreSettings::default()).unwrap());
    let (key, bytes) =
        files(&from, 7).into_iter().find(|(key, _)| key.ends_with(".distcp")).unwrap();
    bucket.put(&key, &vec![9; bytes.len()]).unwrap();
    let mut options = options(Share::all());
    options.read_back = ReadBack::Always;
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::clone(&bucket)));
    let done = hop(&here, &there, 7, &options, &Unwatched).unwrap();
    assert_eq!(done.bytes_sent, data_bytes(&from));
    assert_eq!(files(&from, 7), files(&*bucket, 7));
}

/// The second life of a job went on from an older step: `latest` must say there what it says here.
#[test]
fn latest_follows_the_same_line_there() {
    let from: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let to: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let (here, there) = (side(Arc::clone(&from)), side(Arc::clone(&to)));
    let first = claim(&here.root, RunId(0xabc), None, "first").unwrap();
    save(&from, 10, 1, first);
    save(&from, 20, 2, first);
    let second = claim(&here.root, RunId(0xabc), Some(10), "second").unwrap();
    save(&from, 15, 3, second);
    for step in [20, 10, 15] {
        hop(&here, &there, step, &options(Share::all()), &Unwatched).unwrap();
    }
    let newest = |store: &Arc<dyn Store>| latest(&root(Arc::clone(store))).unwrap().unwrap().step;
    assert_eq!((newest(&from), newest(&to)), (15, 15));
    assert_eq!(crate::world::objects(&*from, ".forebay/epoch/"), {
        crate::world::objects(&*to, ".forebay/epoch/")
    });
}

#[test]
fn what_is_no_commit_is_not_moved() {
    let (from, to) = (source(), MemoryStore::new());
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
    let error = hop(&here, &there, 8, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::NotCommitted);
    from.put("step-9/.metadata", b"\x80\x02K\x2a.").unwrap();
    let error = hop(&here, &there, 9, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    let mut bad = options(Share::of(3, 2));
    assert_eq!(hop(&here, &there, 7, &bad, &Unwatched).unwrap_err().code(), Code::Usage);
    bad = options(Share::all());
    bad.part_bytes = 0;
    assert_eq!(hop(&here, &there, 7, &bad, &Unwatched).unwrap_err().code(), Code::Usage);
    assert!(crate::world::objects(&to, "").is_empty());
}
