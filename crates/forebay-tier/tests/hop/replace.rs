//! A job that went back to an earlier step and saved the later ones again: its commits replace the older ones.

use std::sync::Arc;

use forebay_checkpoint::commit::{AttemptId, Hold, Marks, RunId, claim, latest};
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::hop::{Arrival, HopOptions, Share, hop};

use crate::world::{copy_of, files, options, root, save, side, source};

const RUN: RunId = RunId(0xabc);

/// Two stores that had step 7 of epoch 1; in the first the second life of the job has saved it again.
fn gone_back() -> (MemoryStore, MemoryStore) {
    static SAVED: std::sync::OnceLock<MemoryStore> = std::sync::OnceLock::new();
    let saved = SAVED.get_or_init(|| {
        let store = source();
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let epoch = claim(&root(Arc::clone(&shared)), RUN, None, "second").unwrap();
        save(&shared, 7, 2, epoch);
        store
    });
    (copy_of(saved), source())
}

fn replacing(save: u32) -> HopOptions {
    let older = AttemptId { run: RUN, save };
    HopOptions { replaces: Some(older), ..options(Share::all()) }
}

#[test]
fn an_older_commit_is_replaced_where_it_is_named_and_not_held() {
    let (from, to) = gone_back();
    let here = side(Arc::new(from.clone()));
    let there = side(Arc::new(to.clone()));
    let before = files(&to, 7);
    let code =
        |options: &HopOptions| hop(&here, &there, 7, options, &Unwatched).unwrap_err().code();
    assert_eq!(code(&options(Share::all())), Code::LostCommit, "none was named");
    assert_eq!(code(&replacing(9)), Code::LostCommit, "another was named");
    let hold = Hold { step: 7, who: "law".to_owned(), unix: 0, why: None };
    Marks::hold(&there.root, &hold).unwrap();
    assert_eq!(code(&replacing(1)), Code::AlreadyExists, "it is held");
    assert_eq!(files(&to, 7), before);
    Marks::release(&there.root, 7).unwrap();
    let done = hop(&here, &there, 7, &replacing(1), &Unwatched).unwrap();
    assert_eq!(done.arrival, Arrival::Committed { by_us: true, durable: true });
    let now = files(&to, 7);
    assert!(files(&from, 7).iter().all(|(key, bytes)| now.get(key) == Some(bytes)));
    let newest = latest(&there.root).unwrap().unwrap();
    assert_eq!(newest.commit.unwrap().attempt, Some(AttemptId { run: RUN, save: 2 }));
    // What was replaced is a collector's; the other way round nothing is replaced.
    let back = hop(&there, &here, 7, &replacing(1), &Unwatched).unwrap();
    assert_eq!(
        (back.arrival, back.bytes_sent),
        (Arrival::Committed { by_us: false, durable: true }, 0)
    );
}

/// Killed at each of its steps: there is always one whole commit, and a second call ends it.
#[test]
fn a_replacement_that_is_killed_leaves_a_whole_commit() {
    for step in 0.. {
        let (from, to) = gone_back();
        let (old, new) = (files(&to, 7), files(&from, 7));
        let here = side(Arc::new(from));
        let victim = Arc::new(FaultStore::new(Arc::new(to.clone()), Plan::at(step, Fault::Kill)));
        let dead = side(Arc::clone(&victim) as Arc<dyn Store>);
        let first = hop(&here, &dead, 7, &replacing(1), &Unwatched);
        let is_there = |whole: &std::collections::BTreeMap<String, Vec<u8>>| {
            let now = files(&to, 7);
            whole.iter().all(|(key, bytes)| now.get(key) == Some(bytes))
        };
        assert!(is_there(&old) || is_there(&new), "killed at {step}: {first:?}");
        assert!(first.is_err() || is_there(&new), "killed at {step}: {first:?}");
        let done = hop(&here, &side(Arc::new(to.clone())), 7, &replacing(1), &Unwatched).unwrap();
        assert!(matches!(done.arrival, Arrival::Committed { .. }) && is_there(&new));
        if !victim.killed() {
            assert!(step > 20, "{step} steps");
            return;
        }
    }
}
