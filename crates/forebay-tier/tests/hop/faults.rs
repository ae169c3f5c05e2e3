//! Bytes that change on the way, stores that are full or closed, a source that goes.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{GcOptions, PruneOptions, Retention, gc, prune};
use forebay_checkpoint::progress::{Progress, Unwatched};
use forebay_engine::{RangeSink, RangeSource};
use forebay_error::{Category, Code, Result};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{
    Abilities, DataObject, Expect, Listed, MemoryStore, PosixStore, Published, Store, Version,
};
use forebay_tier::hop::{Arrival, Share, hop};

use crate::world::{data_bytes, files, options, root, save, side, source};

/// A way to a store on which a bit flips: of the `at`-th part that is read, or written, and every `every`-th after it.
#[derive(Clone)]
struct Flipping {
    inner: MemoryStore,
    reads: bool,
    at: u64,
    every: u64,
    count: Arc<AtomicU64>,
}

impl Flipping {
    fn flips(&self) -> bool {
        let now = self.count.fetch_add(1, Ordering::Relaxed);
        let after = now.checked_sub(self.at);
        after
            .is_some_and(|after| after == 0 || (self.every > 0 && after.is_multiple_of(self.every)))
    }
}

struct Way<T>(T, Flipping);

impl RangeSource for Way<Arc<dyn RangeSource>> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = self.0.read_at(into, offset)?;
        if self.1.reads && count > 0 && self.1.flips() {
            into[count / 2] ^= 4;
        }
        Ok(count)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.0.check_unchanged()
    }
}

impl RangeSink for Way<Box<dyn DataObject>> {
    fn name(&self) -> String {
        self.0.sink().name()
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        if !self.1.reads && self.1.flips() {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
        }
        self.0.sink().write_at(&bytes, offset)
    }

    fn flush_soon(&self, _: u64, _: u64) {}
}

impl DataObject for Way<Box<dyn DataObject>> {
    fn sink(&self) -> &dyn RangeSink {
        self
    }

    fn seal(&self) -> Result<()> {
        self.0.seal()
    }
}

impl Store for Flipping {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.inner.get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.inner.create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.inner.put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.inner.list(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.inner.names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.inner.remove(key)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        self.inner.publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        Ok(Box::new(Way(self.inner.create_data(key, bytes)?, self.clone())))
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        Ok(Arc::new(Way(self.inner.open_data(key)?, self.clone())))
    }
}

fn flipping(inner: &MemoryStore, reads: bool, at: u64, every: u64) -> Flipping {
    Flipping { inner: inner.clone(), reads, at, every, count: Arc::default() }
}

#[test]
fn a_flip_on_any_part_of_the_way_is_caught_and_the_file_sent_again() {
    let from = source();
    let (mut repeats, mut refused) = (0, 0);
    for at in 0..60 {
        for reads in [true, false] {
            let to = MemoryStore::new();
            let way =
                |store: &MemoryStore| -> Arc<dyn Store> { Arc::new(flipping(store, reads, at, 0)) };
            // Reads change on their way out of the source, writes on their way in.
            let (here, there) = match reads {
                true => (side(way(&from)), side(Arc::new(to.clone()))),
                false => (side(Arc::new(from.clone())), side(way(&to))),
            };
            let first = hop(&here, &there, 7, &options(Share::all()), &Unwatched);
            match first {
                Ok(done) => repeats += done.repeats,
                // The manifest is read for its checksums first: that is not tried again.
                Err(error) => {
                    assert_eq!(error.code().category(), Category::Data, "{error}");
                    refused += 1;
                    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
                    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
                    hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
                }
            }
            assert_eq!(files(&from, 7), files(&to, 7), "{at}");
        }
    }
    assert!(repeats >= 15, "{repeats} files were sent again, {refused} hops refused");
}

#[test]
fn a_store_that_changes_bytes_is_named_and_gets_no_commit() {
    let (from, to) = (source(), MemoryStore::new());
    let there = side(Arc::new(flipping(&to, false, 0, 1)));
    let here = side(Arc::new(from.clone()));
    let error = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::Checksum);
    assert!(error.hints().iter().any(|hint| hint.contains("do not use it")), "{error}");
    assert!(files(&to, 7).is_empty());
}

#[test]
fn a_damaged_source_is_named_and_gets_no_commit() {
    let (from, to) = (source(), MemoryStore::new());
    let data = files(&from, 7).into_iter().find(|(key, _)| key.ends_with(".distcp")).unwrap();
    let (key, mut bytes) = data;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    from.put(&key, &bytes).unwrap();
    let (here, there) = (side(Arc::new(from)), side(Arc::new(to.clone())));
    let error = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::Checksum);
    assert!(error.place().unwrap().contains(&key), "{error}");
    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
}

#[test]
fn a_full_destination_says_so_and_goes_on_when_there_is_room() {
    let from = source();
    let whole = data_bytes(&from);
    for share in [1, 3, 9] {
        let to = MemoryStore::with_capacity(whole * share / 10);
        let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
        let error = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap_err();
        assert_eq!(error.code(), Code::NoSpace);
        assert!(!files(&to, 7).contains_key("step-7/.metadata"));
        let arrived = data_bytes(&to);
        to.set_capacity(u64::MAX);
        let done = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
        assert_eq!(done.bytes_sent + arrived, whole);
        assert_eq!(files(&from, 7), files(&to, 7));
    }
}

#[test]
fn a_destination_that_cannot_be_written_says_so() {
    let (from, to) = (source(), MemoryStore::new());
    let closed = Plan::from(0, Fault::Errno(30));
    let there = side(Arc::new(FaultStore::new(Arc::new(to.clone()), closed)));
    let here = side(Arc::new(from));
    let error = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert!(matches!(error.code(), Code::Io | Code::PermissionDenied), "{error}");
    assert!(crate::world::objects(&to, "").is_empty());
}

/// A real folder without the right to write. Root may write everywhere, so for root there is nothing to see.
#[test]
fn a_folder_that_cannot_be_written_says_so() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let to: Arc<dyn Store> = Arc::new(PosixStore::open(folder.path()).unwrap());
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    if std::fs::write(folder.path().join("x"), b"").is_ok() {
        println!("skipped: this user may write everywhere");
        return;
    }
    let here = side(Arc::new(source()));
    let error = hop(&here, &side(to), 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied);
}

/// Does something once so many bytes have gone.
struct After<F: Fn() + Sync>(AtomicU64, u64, F);

impl<F: Fn() + Sync> Progress for After<F> {
    fn total(&self, _: u64) {}

    fn add(&self, bytes: u64) -> Result<()> {
        let before = self.0.fetch_add(bytes, Ordering::Relaxed);
        if before < self.1 && before + bytes >= self.1 {
            (self.2)();
        }
        Ok(())
    }
}

#[test]
fn a_source_that_goes_while_it_is_moved_is_told_and_leaves_no_commit() {
    let (from, to) = (source(), MemoryStore::new());
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
    let gone = || {
        for key in files(&from, 7).keys() {
            from.remove(key).unwrap();
        }
    };
    let watch = After(AtomicU64::new(0), data_bytes(&from) / 3, gone);
    let error = hop(&here, &there, 7, &options(Share::all()), &watch).unwrap_err();
    assert_eq!(error.code(), Code::FileChanged);
    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
}

/// The mover's lease holds a prune off until the step has arrived.
#[test]
fn a_prune_of_the_source_waits_for_the_mover() {
    let from = source();
    let shared: Arc<dyn Store> = Arc::new(from.clone());
    save(&shared, 8, 2, 1);
    let to = MemoryStore::new();
    let (here, there) = (side(Arc::clone(&shared)), side(Arc::new(to.clone())));
    let whole = files(&from, 7);
    std::thread::scope(|scope| {
        let (began, pruner) = (std::sync::Barrier::new(2), root(Arc::clone(&shared)));
        let began = Arc::new(began);
        let other = Arc::clone(&began);
        let pruning = scope.spawn(move || {
            other.wait();
            let gc = GcOptions {
                grace: Duration::ZERO,
                settle: Duration::ZERO,
                patience: Duration::from_secs(30),
                dry_run: false,
            };
            let keep = Retention { keep_last: 1, keep_every: None, pins: BTreeSet::new() };
            prune(&pruner, &keep, &PruneOptions { gc, wait: true }).unwrap()
        });
        let slow = After(AtomicU64::new(0), 1, || {
            began.wait();
            std::thread::sleep(Duration::from_millis(300));
        });
        hop(&here, &there, 7, &options(Share::all()), &slow).unwrap();
        pruning.join().unwrap();
    });
    assert_eq!(whole, files(&to, 7));
    assert!(!files(&from, 7).contains_key("step-7/.metadata"));
}

/// A collector there takes a dead mover's files; the mover that wakes up commits nothing, and later starts anew.
#[test]
fn a_mover_that_was_collected_stops_and_starts_anew() {
    let (from, to) = (source(), MemoryStore::new());
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
    let collector = forebay_checkpoint::commit::Root {
        clock: Arc::new(crate::world::Virtual::default()),
        ..root(Arc::new(to.clone()))
    };
    let collect = || {
        to.advance(Duration::from_secs(3600));
        let report = gc(&collector, &GcOptions::default()).unwrap();
        assert!(report.failed.is_empty() && !report.removed.is_empty(), "{report:?}");
    };
    let watch = After(AtomicU64::new(0), data_bytes(&from) * 2 / 3, collect);
    let error = hop(&here, &there, 7, &options(Share::all()), &watch).unwrap_err();
    assert_eq!(error.code(), Code::Fenced, "{error}");
    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
    to.advance(Duration::from_secs(3600));
    gc(&collector, &GcOptions::default()).unwrap();
    let done = hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert!(matches!(done.arrival, Arrival::Committed { by_us: true, .. }));
    assert_eq!(files(&from, 7), files(&to, 7));
}
