//! Steps whose data are on the drives of nodes.

use std::sync::Arc;

use forebay_checkpoint::progress::Unwatched;
use forebay_store::{MemoryStore, SplitStore};
use forebay_tier::hop::{Arrival, Share, Side, hop};
use forebay_tier::nearest::{Look, Unlanded, Wanted, choose, ranks_here, unlanded};

use crate::world::{data_bytes, files, objects, options, root, side, source, split};

fn node(records: &MemoryStore, drive: &MemoryStore) -> Side {
    side(Arc::new(SplitStore::new(Arc::new(records.clone()), Arc::new(drive.clone()))))
}

#[test]
fn every_node_brings_its_own_and_the_last_commits() {
    let whole = source();
    let (records, drives) = split(&whole);
    let to = MemoryStore::new();
    let there = side(Arc::new(to.clone()));
    let one = node(&records, &drives[0]);
    let first = hop(&one, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert!(matches!(first.arrival, Arrival::Waiting { files } if files > 0), "{first:?}");
    assert!(first.files.0 > 0 && !files(&to, 7).contains_key("step-7/.metadata"));
    // It only looks from then on.
    let seen = objects(&to, "").len();
    let again = hop(&one, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert_eq!((again.arrival, again.bytes_sent), (first.arrival, 0));
    assert_eq!(objects(&to, "").len(), seen);
    // A node without any of it, and a tier that has only a part: neither is a place to restore from.
    let none = node(&records, &MemoryStore::new());
    let idle = hop(&none, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert_eq!((idle.arrival, idle.bytes_sent), (first.arrival, 0));
    let roots = [one.root.clone(), there.root.clone()];
    let missing = unlanded(&roots, Wanted::Latest).unwrap().unwrap();
    assert_eq!(missing.step, 7);
    assert!(missing.lacking > 0 && missing.lacking < data_bytes(&whole), "{missing:?}");
    assert_eq!(missing.ranks, [1].into());
    assert_eq!(ranks_here(&one.root, 7).unwrap(), [0].into());
    assert_eq!(ranks_here(&none.root, 7).unwrap(), [].into());
    assert_eq!(ranks_here(&one.root, 8).unwrap(), [].into());
    assert!(choose(&roots, Wanted::Latest, Look::Listing).is_err());
    assert_eq!(unlanded(&roots, Wanted::Step(8)).unwrap(), None);

    let two = node(&records, &drives[1]);
    let second = hop(&two, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert_eq!(second.arrival, Arrival::Committed { by_us: true, durable: true });
    assert_eq!(first.bytes_sent + second.bytes_sent, data_bytes(&whole));
    assert_eq!(files(&to, 7), files(&whole, 7));
    let late = hop(&one, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    assert_eq!(late.arrival, Arrival::Committed { by_us: false, durable: true });
    assert_eq!(unlanded(&roots, Wanted::Latest).unwrap(), None);
    let source = choose(&roots, Wanted::Latest, Look::Bytes).unwrap();
    assert_eq!((source.tier, source.step), (1, 7));
    assert!(source.passed.is_empty(), "{:?}", source.passed);
}

#[test]
fn nodes_that_bring_theirs_at_once_make_one_commit() {
    for _ in 0..12 {
        let whole = source();
        let (records, drives) = split(&whole);
        let to = MemoryStore::new();
        let there = side(Arc::new(to.clone()));
        let start = std::sync::Barrier::new(drives.len());
        let by_us = std::thread::scope(|scope| {
            let movers: Vec<_> = drives
                .iter()
                .map(|drive| {
                    let (from, there, start) = (node(&records, drive), &there, &start);
                    scope.spawn(move || {
                        start.wait();
                        hop(&from, there, 7, &options(Share::all()), &Unwatched).unwrap()
                    })
                })
                .collect();
            let ends = movers.into_iter().map(|mover| mover.join().unwrap().arrival);
            ends.filter(|end| matches!(end, Arrival::Committed { by_us: true, .. })).count()
        });
        assert!(by_us <= 1);
        // Each may have looked a moment before the other's last file came.
        let one = node(&records, &drives[0]);
        let end = hop(&one, &there, 7, &options(Share::all()), &Unwatched).unwrap();
        assert!(matches!(end.arrival, Arrival::Committed { .. }));
        assert_eq!(files(&to, 7), files(&whole, 7));
    }
}

#[test]
fn a_whole_store_has_nothing_to_bring_together() {
    let whole = source();
    let roots = [root(Arc::new(whole)), root(Arc::new(MemoryStore::new()))];
    assert_eq!(unlanded(&roots, Wanted::Latest).unwrap(), None::<Unlanded>);
}
