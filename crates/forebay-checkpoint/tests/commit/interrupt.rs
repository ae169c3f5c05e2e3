//! Prunes, collections and claims that are interrupted at every step.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    GcOptions, PruneOptions, Retention, Root, RunId, claim, gc, latest, prune,
};
use forebay_error::Result;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::Sim;
use crate::world::*;

const FAULTS: [Fault; 6] = [
    Fault::Kill,
    Fault::Errno(5),
    Fault::Errno(28),
    Fault::Torn,
    Fault::LostReply,
    Fault::NotDurable,
];

/// Three commits, one of them replaced once, an attempt that died, and one that may be alive.
fn job() -> Job {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let root = root(Arc::new(store.clone()), &sim);
    let two = |step, save| {
        let roots = vec![root.clone(); 2];
        let (results, _) = save_all(&sim, &roots, |rank| spec(step, attempt(1, save), rank, 2));
        assert!(results.iter().all(Result::is_ok));
    };
    two(1, 1);
    two(2, 2);
    two(2, 3);
    two(3, 4);
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let kill = |step, save, at| {
        let client = FaultStore::new(Arc::clone(&inner), Plan::at(at, Fault::Kill));
        let dying = crate::world::root(Arc::new(client), &sim);
        save_all(&sim, &[dying.clone(), dying], |rank| spec(step, attempt(1, save), rank, 2));
    };
    kill(2, 5, 40);
    sim.advance(HOUR * 24);
    kill(4, 6, 30);
    Job { store, sim, root }
}

/// Runs `task` with every fault at every step, and `check` after each; returns the number of faults.
fn matrix(task: impl Fn(&Root) -> bool, check: impl Fn(&Job)) -> u64 {
    let client = |job: &Job, plan| {
        let client = Arc::new(FaultStore::new(Arc::new(job.store.clone()), plan));
        let store: Arc<dyn Store> = Arc::<FaultStore<MemoryStore>>::clone(&client);
        (root(store, &job.sim), client)
    };
    let job = job();
    let (root, counting) = client(&job, Plan::none());
    assert!(task(&root), "without a fault it works");
    check(&job);
    let mut points = 0;
    for step in counting.log() {
        for fault in FAULTS {
            let job = self::job();
            let (root, client) = client(&job, Plan::at(step.index, fault));
            let worked = task(&root);
            if client.fired() > 0 {
                points += 1;
                assert!(!worked || fault != Fault::Kill, "killed at {step:?}, and went on");
                check(&job);
            }
        }
    }
    points
}

fn prune_to_one(root: &Root, wait: bool) -> bool {
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let gc = GcOptions { grace: Duration::from_secs(60), ..GcOptions::default() };
    match prune(root, &retention, &PruneOptions { gc, wait }) {
        Ok(report) => report.failed.is_empty() && report.gc.failed.is_empty(),
        Err(_) => false,
    }
}

#[test]
fn a_fault_at_any_step_of_a_prune_leaves_whole_commits_and_the_next_one_finishes_it() {
    let check = |job: &Job| {
        check_listing(&job.root, &job.store);
        assert_eq!(load(&job.store, 3), Some(attempt(1, 4)), "the newest stays");
        save(&job.root, None, spec(5, attempt(2, 0), 0, 1)).unwrap();
        assert!(prune_to_one(&job.root, true));
        assert_eq!(latest(&job.root).unwrap().unwrap().step, 5);
        assert_eq!((load(&job.store, 1), load(&job.store, 2)), (None, None));
        collect_all(&job.root, &job.store, &job.sim);
    };
    for wait in [true, false] {
        let points = matrix(|root| prune_to_one(root, wait), check);
        println!("{points} faults in a prune, waiting: {wait}");
        assert!(points > 200, "{points}");
    }
}

#[test]
fn a_fault_at_any_step_of_a_collection_leaves_all_commits_and_the_next_one_finishes_it() {
    let collect =
        |root: &Root| gc(root, &GcOptions::default()).is_ok_and(|report| report.failed.is_empty());
    let points = matrix(collect, |job| {
        check_listing(&job.root, &job.store);
        let loaded = [1, 2, 3, 4].map(|step| load(&job.store, step));
        assert_eq!(loaded, [Some(attempt(1, 1)), Some(attempt(1, 3)), Some(attempt(1, 4)), None]);
        save(&job.root, None, spec(4, attempt(2, 0), 0, 1)).unwrap();
        collect_all(&job.root, &job.store, &job.sim);
    });
    println!("{points} faults in a collection");
    assert!(points > 150, "{points}");
}

#[test]
fn a_fault_at_any_step_of_a_claim_leaves_the_root_to_the_next_claimant() {
    let points = matrix(
        |root| claim(root, RunId(7), Some(3), "x").is_ok(),
        |job| {
            let epoch = claim(&job.root, RunId(8), Some(3), "y").unwrap();
            assert!((1..=3).contains(&epoch));
            let mut next = spec(4, attempt(8, 0), 0, 1);
            next.epoch = epoch;
            save(&job.root, None, next).unwrap();
            assert_eq!(latest(&job.root).unwrap().unwrap().step, 4);
            check_listing(&job.root, &job.store);
            collect_all(&job.root, &job.store, &job.sim);
        },
    );
    println!("{points} faults in a claim");
    assert!(points > 40, "{points}");
}
