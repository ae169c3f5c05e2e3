//! Records and commits with damaged bytes, and stores that cannot be read for a while: nothing is decided by them in
//! silence, and nothing sound is lost.

use std::sync::Arc;

use forebay_checkpoint::commit::{
    Attempt, GcOptions, Layout, PruneOptions, Retention, Root, RunId, claim, gc, latest, prune,
};
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::world::*;

/// Changes bytes.
type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
/// Damages the object of a key.
type Damage<'a> = &'a dyn Fn(&MemoryStore, &str);

/// Changes an object's bytes.
fn change(store: &MemoryStore, key: &str, with: impl FnOnce(&mut Vec<u8>)) {
    let (mut bytes, _) = store.get(key, 1 << 20).unwrap().unwrap_or_else(|| panic!("no {key}"));
    with(&mut bytes);
    store.put(key, &bytes).unwrap();
}

fn flip(store: &MemoryStore, key: &str) {
    change(store, key, |bytes| bytes[40] ^= 1);
}

fn key_of(step: u64, name: &str) -> String {
    Layout::of_step(step).file(name)
}

fn keys(store: &MemoryStore) -> Vec<String> {
    store.list("", 1 << 20).unwrap().into_iter().map(|object| object.key).collect()
}

/// A job whose steps 1, 2 and 3 are of an epoch.
fn job() -> (Job, u64) {
    let job = Job::new();
    let epoch = claim(&job.root, RunId(1), None, "old").unwrap();
    for step in 1..=3 {
        save_in(&job, step, attempt(1, step as u32), epoch);
    }
    (job, epoch)
}

fn save_in(job: &Job, step: u64, id: forebay_checkpoint::commit::AttemptId, epoch: u64) {
    let mut spec = spec(step, id, 0, 1);
    spec.epoch = epoch;
    save(&job.root, None, spec).unwrap();
}

fn latest_of(root: &Root) -> Result<Option<u64>, Code> {
    latest(root).map(|state| state.map(|state| state.step)).map_err(|error| error.code())
}

#[test]
fn a_commit_that_lost_its_line_is_neither_collected_nor_stepped_over() {
    let lost = |bytes: &mut Vec<u8>| bytes.splice(..7, *b"stock \n").for_each(drop);
    let other = |bytes: &mut Vec<u8>| {
        let at = "attempt ".len();
        bytes[at] ^= 1;
    };
    let damages: [Change<'_>; 2] = [&lost, &other];
    for damage in damages {
        let (job, _) = job();
        change(&job.store, &key_of(3, ".metadata"), damage);
        job.sim.advance(HOUR * 24);
        let before = keys(&job.store);
        let report = gc(&job.root, &GcOptions::default()).unwrap();
        assert!(report.removed.is_empty(), "{report:?}");
        assert_eq!((report.failed.len(), report.failed[0].1.code()), (1, Code::InvalidMetadata));
        assert_eq!(keys(&job.store), before);
    }
}

#[test]
fn latest_is_an_error_where_a_damaged_commit_may_be_it() {
    let (job, epoch) = job();
    let sound = job.store.get(&key_of(3, ".metadata"), 1 << 20).unwrap().unwrap().0;
    change(&job.store, &key_of(3, ".metadata"), |bytes| bytes.truncate(3));
    let error = latest(&job.root).unwrap_err();
    assert_eq!(error.code(), Code::InvalidMetadata);
    assert!(error.what().contains("step 3"), "{error}");
    assert!(error.hints().iter().any(|hint| hint.contains("step 2")), "{error:?}");
    // The same where it is the only one.
    let only = Job::new();
    only.save_step(7, attempt(2, 0), 1);
    change(&only.store, &key_of(7, ".metadata"), |bytes| bytes.truncate(3));
    assert_eq!(latest_of(&only.root), Err(Code::InvalidMetadata));
    // Its own record says which life it is of, so a line that leaves it is followed.
    let next = claim(&job.root, RunId(2), Some(2), "new").unwrap();
    assert_eq!(latest_of(&job.root), Ok(Some(2)));
    // Without it nobody knows.
    let decision = Layout::of_step(3).file(".forebay/00000001-3/decision");
    let record = job.store.get(&decision, 1 << 20).unwrap().unwrap().0;
    job.store.remove(&decision).unwrap();
    assert_eq!(latest_of(&job.root), Err(Code::InvalidMetadata));
    // What is saved after it is newer; and saving it anew mends it.
    save_in(&job, 4, attempt(2, 0), next);
    assert_eq!(latest_of(&job.root), Ok(Some(4)));
    job.store.put(&decision, &record).unwrap();
    job.store.put(&key_of(3, ".metadata"), &sound).unwrap();
    assert_eq!((latest_of(&job.root), epoch < next), (Ok(Some(4)), true));
}

#[test]
fn a_damaged_record_of_a_commit_is_told_by_latest_and_claim() {
    let (job, _) = job();
    flip(&job.store, &Layout::of_step(3).file(".forebay/00000001-3/decision"));
    assert_eq!(latest_of(&job.root), Err(Code::InvalidMetadata));
    let error = claim(&job.root, RunId(2), Some(3), "new").unwrap_err();
    assert_eq!(error.code(), Code::InvalidMetadata);
    assert!(error.what().contains("step 3"), "{error}");
    assert_eq!(keys(&job.store).iter().filter(|key| key.contains("epoch/")).count(), 1);
    // As the hint says: without the record it is of no epoch, and can be gone on from.
    job.store.remove(&Layout::of_step(3).file(".forebay/00000001-3/decision")).unwrap();
    claim(&job.root, RunId(2), Some(3), "new").unwrap();
    assert_eq!(latest_of(&job.root), Ok(Some(3)));
}

#[test]
fn a_retention_counts_no_damaged_commit_as_kept() {
    let (job, _) = job();
    change(&job.store, &key_of(3, ".metadata"), |bytes| bytes.truncate(3));
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let options = PruneOptions { wait: true, ..PruneOptions::default() };
    let report = prune(&job.root, &retention, &options).unwrap();
    assert_eq!((report.unpublished, report.off_line), (vec![1], vec![3]));
    assert_eq!(load(&job.store, 2), Some(attempt(1, 2)));
}

#[test]
fn a_store_that_cannot_be_read_is_no_damage() {
    let (job, _) = job();
    // EIO, EACCES, ETIMEDOUT, ESTALE.
    for errno in [5, 13, 110, 116] {
        let mut errors = 0;
        for step in 0.. {
            let inner: Arc<dyn Store> = Arc::new(job.store.clone());
            let faulty = Arc::new(FaultStore::new(inner, Plan::at(step, Fault::Errno(errno))));
            let root = root(Arc::<FaultStore<dyn Store>>::clone(&faulty), &job.sim);
            let found = latest(&root);
            if faulty.fired() == 0 {
                break;
            }
            // Some are tried again; none makes another step the latest.
            match found {
                Ok(state) => assert_eq!(state.map(|state| state.step), Some(3), "{errno} {step}"),
                Err(error) => {
                    assert_ne!(error.code(), Code::InvalidMetadata, "{errno} {step}: {error}");
                    errors += 1;
                }
            }
        }
        assert!(errors > 6, "{errno}: {errors}");
    }
}

#[test]
fn a_damaged_begin_record_is_withdrawn_and_stops_no_later_life() {
    let damages: [Damage<'_>; 2] =
        [&flip, &|store: &MemoryStore, key: &str| store.put(key, &[]).map(drop).unwrap()];
    for damage in damages {
        let (job, epoch) = job();
        let mut spec = spec(9, attempt(1, 9), 0, 1);
        spec.epoch = epoch;
        let mut left = Attempt::begin(&job.root, &policy(), None, spec).unwrap();
        write(&mut left, attempt(1, 9), 0).unwrap();
        let begin = Layout::of_step(9).file(".forebay/00000001-9/begin-0");
        damage(&job.store, &begin);
        let next = claim(&job.root, RunId(2), Some(3), "new").unwrap();
        assert_eq!(next, epoch + 1);
        assert!(job.store.get(&begin, 1 << 20).unwrap().is_none(), "it may publish still");
        let late = left.wait_or_commit(&mut |gathered| Ok(assemble(attempt(1, 9), gathered)));
        assert_eq!(code(&late), Some(Code::Fenced));
        assert_eq!(latest_of(&job.root), Ok(Some(3)));
    }
}

#[test]
fn one_damaged_begin_record_of_a_newer_life_does_not_end_its_save() {
    let job = Job::new();
    let (old, new) = (1, 5);
    let begin = |epoch: u64, rank: u32| {
        let mut spec = spec(9, attempt(3, 0), rank, 2);
        spec.epoch = epoch;
        Attempt::begin(&job.root, &policy(), None, spec).unwrap()
    };
    let ranks = [begin(new, 0), begin(new, 1)];
    let key = |rank: u32| Layout::of_step(9).file(&format!(".forebay/00000003-0/begin-{rank}"));
    flip(&job.store, &key(0));
    assert_eq!(claim(&job.root, RunId(1), None, "old").unwrap(), old);
    assert!(job.store.get(&key(1), 1 << 20).unwrap().is_some());
    drop(ranks);
}

#[test]
fn a_damaged_claim_is_told_where_it_decides_and_else_does_no_harm() {
    for empty in [false, true] {
        let (job, epoch) = job();
        let of = |epoch: u64| format!(".forebay/epoch/{epoch:08x}");
        let damage = |key: &str| match empty {
            true => job.store.put(key, &[]).map(drop).unwrap(),
            false => flip(&job.store, key),
        };
        // Of the first life: what it committed is known.
        damage(&of(epoch));
        assert_eq!(latest_of(&job.root), Ok(Some(3)));
        // A second one from step 2, that has committed nothing.
        let second = claim(&job.root, RunId(2), Some(2), "second").unwrap();
        assert_eq!(latest_of(&job.root), Ok(Some(2)));
        damage(&of(second));
        let error = latest(&job.root).unwrap_err();
        assert_eq!(error.code(), Code::InvalidMetadata);
        assert!(error.hints().iter().any(|hint| hint.contains("1, 2, 3")), "{error:?}");
        let prunes = prune(&job.root, &Retention::default(), &PruneOptions::default()).unwrap();
        assert_eq!(prunes.unpublished, [] as [u64; 0], "{prunes:?}");
        // A third says itself where it goes on.
        let third = claim(&job.root, RunId(3), Some(2), "third").unwrap();
        assert_eq!((third, latest_of(&job.root)), (second + 1, Ok(Some(2))));
    }
}

#[test]
fn a_record_of_the_last_number_is_no_overflow() {
    let (job, _) = job();
    // Other spellings are none of ours.
    job.store.put(".forebay/epoch/FFFFFFFFFFFFFFFF", b"x").unwrap();
    job.store.put(".forebay/epoch/1", b"x").unwrap();
    let second = claim(&job.root, RunId(2), Some(3), "new").unwrap();
    assert_eq!(second, 2);
    let last = ".forebay/epoch/ffffffffffffffff";
    job.store.put(last, b"x").unwrap();
    let error = claim(&job.root, RunId(2), Some(3), "new").unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.place().is_some_and(|place| place.ends_with(last)), "{error}");
}
