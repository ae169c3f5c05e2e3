//! From which tier to restore, with tiers that are damaged, empty, closed or behind.

use std::sync::Arc;

use forebay_checkpoint::commit::Root;
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::hop::{Share, hop};
use forebay_tier::nearest::{Look, Wanted, choose};

use crate::world::{copy_of, files, options, root, save, side, source};

/// Three tiers with step 7, moved from one to the next.
fn tiers() -> [MemoryStore; 3] {
    let stores = [source(), MemoryStore::new(), MemoryStore::new()];
    for pair in stores.windows(2) {
        let (here, there) = (side(Arc::new(pair[0].clone())), side(Arc::new(pair[1].clone())));
        hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
    }
    stores
}

fn roots(stores: &[MemoryStore]) -> Vec<Root> {
    stores.iter().map(|store| root(Arc::new(store.clone()))).collect()
}

/// Changes one byte of the first file whose name has `part` in it.
fn damage(store: &MemoryStore, part: &str) {
    let (key, mut bytes) = files(store, 7).into_iter().find(|(key, _)| key.contains(part)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    store.put(&key, &bytes).unwrap();
}

#[test]
fn the_nearest_sound_copy_is_taken_and_bad_ones_are_told() {
    let stores = tiers();
    let take = |look| choose(&roots(&stores), Wanted::Latest, look).unwrap();
    let chosen = take(Look::Bytes);
    assert_eq!((chosen.tier, chosen.step, chosen.passed.len()), (0, 7, 0));
    damage(&stores[0], ".distcp");
    // A listing does not see it; a restore compares what it reads.
    assert_eq!(take(Look::Listing).tier, 0);
    let chosen = take(Look::Bytes);
    assert_eq!((chosen.tier, chosen.passed.len()), (1, 1));
    assert_eq!((chosen.passed[0].tier, chosen.passed[0].error.code()), (0, Code::Checksum));
    damage(&stores[1], "forebay.manifest");
    assert_eq!(take(Look::Bytes).tier, 2);
    let (gone, _) =
        files(&stores[2], 7).into_iter().find(|(key, _)| key.contains(".distcp")).unwrap();
    stores[2].remove(&gone).unwrap();
    let error = choose(&roots(&stores), Wanted::Step(7), Look::Bytes).unwrap_err();
    assert_eq!(error.code(), Code::Checksum);
    assert!(error.hints().iter().any(|hint| hint.contains("tier 2")), "{error:?}");
}

#[test]
fn the_newest_commit_counts_and_an_older_one_is_said_to_be_older() {
    let stores = tiers();
    let shared: Arc<dyn Store> = Arc::new(stores[1].clone());
    save(&shared, 9, 2, 1);
    let take = || choose(&roots(&stores), Wanted::Latest, Look::Bytes).unwrap();
    let chosen = take();
    assert_eq!((chosen.tier, chosen.step, chosen.older_than_wanted), (1, 9, false));
    assert_eq!(choose(&roots(&stores), Wanted::Step(7), Look::Listing).unwrap().tier, 0);
    let key = |key: &&String| key.contains(".distcp");
    let key = files(&stores[1], 9).keys().find(key).unwrap().clone();
    stores[1].remove(&key).unwrap();
    let chosen = take();
    assert_eq!((chosen.tier, chosen.step, chosen.older_than_wanted), (0, 7, true));
    assert_eq!((chosen.passed[0].tier, chosen.passed[0].step), (1, Some(9)));
}

#[test]
fn a_tier_that_does_not_answer_is_passed_over_and_empty_ones_are_no_fault() {
    let stores = tiers();
    let closed = FaultStore::new(Arc::new(stores[0].clone()), Plan::from(0, Fault::Errno(5)));
    let mut roots = vec![root(Arc::new(closed)), root(Arc::new(MemoryStore::new()))];
    roots.push(root(Arc::new(copy_of(&stores[2]))));
    let chosen = choose(&roots, Wanted::Latest, Look::Bytes).unwrap();
    assert_eq!(chosen.tier, 2);
    assert!(chosen.passed.iter().all(|passed| passed.tier == 0) && !chosen.passed.is_empty());
    let nothing = [root(Arc::new(MemoryStore::new()))];
    let error = choose(&nothing, Wanted::Latest, Look::Bytes).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(
        choose(&roots[2..], Wanted::Step(8), Look::Bytes).unwrap_err().code(),
        Code::NotFound
    );
}
