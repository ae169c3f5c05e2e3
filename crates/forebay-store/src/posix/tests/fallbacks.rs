//! File systems without links, without renameat2, without locks, without fallocate.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_error::Code;
use rustix::io::Errno;

use super::{Answer, Call, Fixture, Hooked, RealFiles, names, refusing, store};
use crate::posix::{PosixStore, Root, lock};
use crate::store::Store;
use crate::{Expect, Published};

const DONE: Published = Published::Done { durable: true };

/// First publications, replacements and creations, right and wrong ones, as on any store.
fn check_all(fixture: &Fixture) {
    let store = &fixture.store;
    store.put("1", b"one").unwrap();
    store.put("2", b"two").unwrap();
    assert_eq!(store.publish("1", "to", &Expect::Absent).unwrap(), DONE);
    assert_eq!(store.publish("2", "to", &Expect::Absent).unwrap(), Published::Lost);
    assert_eq!(store.publish("1", "to", &Expect::Absent).unwrap(), Published::Withdrawn);
    let (_, version) = store.get("to", 9).unwrap().unwrap();
    let expect = Expect::Version(version);
    assert_eq!(store.publish("2", "to", &expect).unwrap(), DONE);
    store.put("3", b"six").unwrap();
    assert_eq!(store.publish("3", "to", &expect).unwrap(), Published::Lost);
    assert!(store.create("new", b"1").unwrap());
    assert!(!store.create("new", b"2").unwrap());
    assert_eq!(store.get("to", 9).unwrap().unwrap().0, b"two");
    assert_eq!(names(fixture), ["3", "new", "to"]);
}

#[test]
fn with_everything() {
    let fixture = store(|_, _| Answer::Go);
    check_all(&fixture);
    assert_eq!(fixture.files.count(Call::RenameNew), 0);
}

#[test]
fn without_links_renames_that_do_not_replace_do_it() {
    let fixture = store(refusing(&[(Call::Link, Errno::PERM)]));
    check_all(&fixture);
    assert!(fixture.files.count(Call::RenameNew) >= 2);
}

#[test]
fn without_either_a_look_and_a_rename_under_the_lock_do_it() {
    let fixture =
        store(refusing(&[(Call::Link, Errno::OPNOTSUPP), (Call::RenameNew, Errno::INVAL)]));
    check_all(&fixture);
    assert!(fixture.files.count(Call::TryLock) >= 3);
}

#[test]
fn without_locks_a_claim_does_it() {
    let fixture = store(refusing(&[
        (Call::Link, Errno::NOSYS),
        (Call::RenameNew, Errno::NOSYS),
        (Call::TryLock, Errno::NOLCK),
    ]));
    check_all(&fixture);
    let records = fixture.folder.path().join(".forebay");
    assert_eq!(std::fs::read_dir(records).unwrap().count(), 0, "the claim goes after each use");
}

#[test]
fn a_claim_keeps_others_out() {
    let fixture = store(refusing(&[
        (Call::Link, Errno::NOSYS),
        (Call::RenameNew, Errno::NOSYS),
        (Call::TryLock, Errno::NOLCK),
    ]));
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for me in 0..6 {
            let (store, done) = (&fixture.store, &done);
            scope.spawn(move || {
                let staged = format!("staged-{me}");
                store.put(&staged, &[me; 100]).unwrap();
                if store.publish(&staged, "to", &Expect::Absent).unwrap() == DONE {
                    done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 1);
}

#[test]
fn the_claim_of_a_dead_writer_is_taken_away() {
    let mut fixture = store(refusing(&[(Call::TryLock, Errno::NOLCK)]));
    // Its age counts from the later of its times, and the change time is nobody's to set: so this waits for real.
    fixture.store.claim_stale = Duration::from_millis(1500);
    let store = &fixture.store;
    store.put("to", b"1").unwrap();
    store.put("staged", b"2").unwrap();
    let claim = fixture.folder.path().join(".forebay/lock-claim");
    std::fs::create_dir_all(&claim).unwrap();
    let (_, version) = store.get("to", 9).unwrap().unwrap();
    let start = std::time::Instant::now();
    let end = store.publish("staged", "to", &Expect::Version(version)).unwrap();
    assert_eq!(end, DONE);
    let waited = start.elapsed();
    assert!(waited > Duration::from_secs(1) && waited < Duration::from_secs(30), "{waited:?}");
    assert!(!claim.exists());
}

/// Another client of a fixture's folder, which finds claims stale after a tenth of a second.
fn another(
    fixture: &Fixture,
    hook: impl Fn(Call, &str) -> Answer + Send + Sync + 'static,
) -> PosixStore {
    let root = Root::open(fixture.folder.path()).unwrap();
    let real = RealFiles::new(Arc::clone(&root));
    let files = Hooked { real, hook: Box::new(hook), calls: Mutex::default() };
    let mut store = PosixStore::with_files(root, Arc::new(files));
    store.claim_stale = Duration::from_millis(100);
    store
}

fn without_locks(call: Call) -> Answer {
    match call {
        Call::TryLock => Answer::Refuse(Errno::NOLCK),
        _ => Answer::Go,
    }
}

#[test]
fn of_two_who_find_a_claim_stale_one_holds_it() {
    let fixture = store(|_, _| Answer::Go);
    let dead = another(&fixture, |call, _| without_locks(call));
    std::mem::forget(lock::take(&dead, "").unwrap());
    std::thread::sleep(Duration::from_millis(200));
    let quick = Arc::new(another(&fixture, |call, _| without_locks(call)));
    // The slow one has judged the claim, and is about to take it away, when the quick one does all of it.
    let (holds, held) = std::sync::mpsc::channel();
    let (ends, end) = std::sync::mpsc::channel::<()>();
    let end = Mutex::new(Some(end));
    let (holds, own) = (Mutex::new(holds), Arc::clone(&quick));
    let slow = another(&fixture, move |call, path| {
        let about_to = matches!(call, Call::Rename | Call::RemoveFolder);
        if about_to
            && path.contains("lock-claim")
            && let Some(end) = end.lock().unwrap().take()
        {
            let (own, holds) = (Arc::clone(&own), holds.lock().unwrap().clone());
            std::thread::spawn(move || {
                let held = lock::take(&own, "").unwrap();
                holds.send(()).unwrap();
                end.recv().unwrap();
                drop(held);
            });
            std::thread::sleep(Duration::from_millis(60));
        }
        without_locks(call)
    });
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| drop(lock::take(&slow, "").unwrap()));
        held.recv().unwrap();
        // The slow one goes on, and looks for stale claims once a second.
        std::thread::sleep(Duration::from_millis(200));
        assert!(!slow.is_finished(), "two hold it");
        ends.send(()).unwrap();
        slow.join().unwrap();
    });
}

#[test]
fn a_holder_that_was_taken_for_dead_leaves_its_heirs_claim_alone() {
    let fixture = store(|_, _| Answer::Go);
    let client = || another(&fixture, |call, _| without_locks(call));
    let (sleeper, mut heir) = (client(), client());
    let slept = lock::take(&sleeper, "").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let held = lock::take(&heir, "").unwrap();
    drop(slept);
    let claim = fixture.folder.path().join(".forebay/lock-claim");
    assert!(claim.exists(), "the heir's claim was taken away");
    drop(held);
    assert!(!claim.exists());
    heir.claim_stale = Duration::from_secs(20);
    // One that died between the two halves of its claim.
    std::fs::create_dir(&claim).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    drop(lock::take(&sleeper, "").unwrap());
}

#[test]
fn without_fallocate_the_length_is_set_and_the_room_compared() {
    let fixture = store(refusing(&[(Call::Reserve, Errno::OPNOTSUPP)]));
    let store = &fixture.store;
    let data = store.create_data("d", 1 << 20).unwrap();
    data.seal().unwrap();
    assert_eq!(store.open_data("d").unwrap().len(), 1 << 20);
    assert_eq!(fixture.files.count(Call::SetLen), 1);
    let error = store.create_data("e", 1 << 60).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::NoSpace);
    assert_eq!(names(&fixture), ["d"]);
    // Little room is made by writing, so that it is really there.
    store.create_data("small", 4096).unwrap();
    let blocks = std::fs::metadata(fixture.folder.path().join("small")).unwrap();
    assert_eq!((blocks.len(), fixture.files.count(Call::SetLen)), (4096, 1));
}
