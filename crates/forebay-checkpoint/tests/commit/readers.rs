//! Restores under way, and what is listed.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, AttemptStatus, Clock, GcOptions, PruneOptions, READ_LEASE, ReadLease, Retention, Root,
    RunId, State, claim, gc, latest, prune, require, steps,
};
use forebay_error::{Code, Result};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Pace, Sim, Slow};
use crate::world::*;

fn with_steps(last: u64) -> (MemoryStore, Arc<Sim>, Root) {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let root = root(Arc::new(store.clone()), &sim);
    for step in 1..=last {
        save(&root, None, spec(step, attempt(1, step as u32), 0, 1)).unwrap();
    }
    (store, sim, root)
}

fn keep_last(count: usize) -> Retention {
    Retention { keep_last: count, ..Retention::default() }
}

fn waiting() -> PruneOptions {
    let gc = GcOptions { grace: Duration::from_secs(30), ..GcOptions::default() };
    PruneOptions { gc, wait: true }
}

#[test]
fn a_prune_waits_for_a_restore_that_is_alive() {
    let (store, sim, root) = with_steps(2);
    let reading = || -> Result<Duration> {
        let lease = ReadLease::take(&root, 1)?;
        // Reads for longer than the grace time; its files must be there to the end.
        for _ in 0..40 {
            sim.clock_wait(Duration::from_secs(2));
            lease.beat();
            assert!(store.get("step-1/00000001-1_0_0.distcp", 1 << 20)?.is_some());
        }
        Ok(sim.clock_now())
    };
    let pruning = || -> Result<Duration> {
        sim.clock_wait(Duration::from_secs(1));
        let report = prune(&root, &keep_last(1), &waiting())?;
        assert_eq!(report.unpublished, [1]);
        assert!(report.gc.failed.is_empty() && report.gc.kept.is_empty(), "{report:?}");
        Ok(sim.clock_now())
    };
    let actors: Vec<Actor<'_, Result<Duration>>> = vec![Box::new(reading), Box::new(pruning)];
    let (ends, _) = sim.run(actors);
    let ends: Vec<_> = ends.into_iter().map(Result::unwrap).collect();
    assert!(ends[1] >= ends[0], "{ends:?}");
    assert_eq!(load(&store, 1), None);
    check_clean(&store);
}

#[test]
fn a_restore_that_outlasts_a_prunes_patience_keeps_its_files_for_the_next_one() {
    let (store, sim, root) = with_steps(2);
    let lease = ReadLease::take(&root, 1).unwrap();
    let beating = || {
        for _ in 0..100 {
            sim.clock_wait(Duration::from_secs(10));
            lease.beat();
        }
    };
    let pruning = || {
        let report = prune(&root, &keep_last(1), &waiting()).unwrap();
        assert!(report.gc.kept.iter().any(|(_, _, why)| why.contains("restore")), "{report:?}");
    };
    let actors: Vec<Actor<'_, ()>> = vec![Box::new(beating), Box::new(pruning)];
    sim.run(actors);
    assert!(store.get("step-1/00000001-1_0_0.distcp", 1 << 20).unwrap().is_some());
    drop(lease);
    collect_all(&root, &store, &sim);
}

#[test]
fn a_restore_that_died_holds_a_prune_off_for_one_lease() {
    let (store, sim, root) = with_steps(2);
    // A reader that is killed leaves its lease.
    std::mem::forget(ReadLease::take(&root, 1).unwrap());
    let start = sim.now();
    prune(&root, &keep_last(1), &waiting()).unwrap();
    let took = sim.now() - start;
    assert!(took >= READ_LEASE && took < READ_LEASE * 2, "{took:?}");
    check_clean(&store);
}

/// A clock that stands still, whatever one waits.
struct Frozen;

impl Clock for Frozen {
    fn now(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn sleep(&self, _time: Duration) {}
}

#[test]
fn an_observer_whose_clock_stands_still_lets_no_lease_run_out_and_waits_for_none() {
    let (store, sim, root) = with_steps(2);
    std::mem::forget(ReadLease::take(&root, 1).unwrap());
    let frozen = Root { clock: Arc::new(Frozen), ..root.clone() };
    let report = prune(&frozen, &keep_last(1), &waiting()).unwrap();
    assert!(report.gc.kept.iter().any(|(_, _, why)| why.contains("restore")), "{report:?}");
    assert!(store.get("step-1/00000001-1_0_0.distcp", 1 << 20).unwrap().is_some());
    collect_all(&root, &store, &sim);
}

#[test]
fn a_restore_that_begins_while_a_prune_is_under_way_has_the_whole_step_or_none_of_it() {
    let mut refused = 0;
    let count = restore_during_prune(u64::MAX).1;
    for point in 0..count {
        refused += u64::from(!restore_during_prune(point).0);
    }
    println!("{count} points, refused at {refused}");
    assert!(count > 20 && refused > 3 && refused < count, "{refused} of {count}");
}

/// The pruner stops at a point for a minute, in which a restore begins; whether the restore went through.
fn restore_during_prune(point: u64) -> (bool, u64) {
    let (store, sim, root) = with_steps(2);
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let slow = Slow::new(inner, &sim, Pace::PauseAt(point, Duration::from_secs(60)));
    let pruner = crate::world::root(Arc::<Slow>::clone(&slow), &sim);
    let pruning = move || {
        prune(&pruner, &keep_last(1), &waiting()).unwrap();
        true
    };
    let reading = || {
        sim.clock_wait(Duration::from_secs(30));
        let Ok(lease) = ReadLease::take(&root, 1) else { return false };
        for _ in 0..30 {
            sim.clock_wait(Duration::from_secs(5));
            lease.beat();
            let file = store.get("step-1/00000001-1_0_0.distcp", 1 << 20).unwrap();
            assert!(file.is_some(), "point {point}: removed under a reader");
        }
        true
    };
    let actors: Vec<Actor<'_, bool>> = vec![Box::new(pruning), Box::new(reading)];
    let (results, _) = sim.run(actors);
    collect_all(&root, &store, &sim);
    (results[1], slow.points())
}

#[test]
fn a_restore_that_stops_anywhere_before_it_has_its_lease_is_told_when_the_step_went() {
    let run = |point: u64| {
        let (store, sim, root) = with_steps(2);
        let inner: Arc<dyn Store> = Arc::new(store.clone());
        let slow = Slow::new(inner, &sim, Pace::PauseAt(point, Duration::from_secs(300)));
        let reader = crate::world::root(Arc::<Slow>::clone(&slow), &sim);
        let reading = || match ReadLease::take(&reader, 1) {
            Ok(lease) => {
                let there = store.get("step-1/00000001-1_0_0.distcp", 1 << 20).unwrap();
                assert!(there.is_some(), "point {point}: a lease on nothing");
                drop(lease);
                true
            }
            Err(error) => {
                let right = [Code::NotCommitted, Code::NotFound, Code::Timeout];
                assert!(right.contains(&error.code()), "{error:?}");
                false
            }
        };
        let pruning = || {
            sim.clock_wait(Duration::from_secs(100));
            prune(&root, &keep_last(1), &waiting()).unwrap();
            true
        };
        let actors: Vec<Actor<'_, bool>> = vec![Box::new(reading), Box::new(pruning)];
        let (results, _) = sim.run(actors);
        (results[0], slow.points())
    };
    let (taken, points) = run(u64::MAX);
    assert!(taken && points > 10, "{points}");
    let refused = (0..points).filter(|point| !run(*point).0).count() as u64;
    assert!(refused > 5 && refused < points, "{refused} of {points}");
}

#[test]
fn a_step_that_is_asked_for_and_missing_is_an_error_that_lists_what_is_there() {
    let (store, sim, root) = with_steps(3);
    let error = require(&root, 9).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(error.hints(), ["committed steps: 1, 2, 3"]);
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let dying = FaultStore::new(inner, Plan::at(12, Fault::Kill));
    let dying = crate::world::root(Arc::new(dying), &sim);
    save(&dying, None, spec(4, attempt(1, 9), 0, 1)).unwrap_err();
    let error = ReadLease::take(&root, 4).err().unwrap();
    assert_eq!(error.code(), Code::NotCommitted);
    assert_eq!(latest(&root).unwrap().unwrap().step, 3, "an unfinished step is never the latest");
    let empty = MemoryStore::new();
    let error = require(&crate::world::root(Arc::new(empty), &sim), 9).unwrap_err();
    assert!(error.hints()[0].contains("right folder"), "{error:?}");
}

#[test]
fn the_listing_tells_committed_pending_dead_and_failed_apart() {
    let (store, sim, root) = with_steps(1);
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let dying = |step: u64, at: u64| {
        let client = FaultStore::new(Arc::clone(&inner), Plan::at(at, Fault::Kill));
        let dying = crate::world::root(Arc::new(client), &sim);
        save(&dying, None, spec(step, attempt(2, step as u32), 0, 1)).unwrap_err();
    };
    dying(2, 12);
    sim.advance(HOUR);
    dying(3, 12);
    let full = FaultStore::new(Arc::clone(&inner), Plan::at(8, Fault::Errno(28)));
    let full = crate::world::root(Arc::new(full), &sim);
    save(&full, None, spec(4, attempt(2, 4), 0, 1)).unwrap_err();
    store.put("step-5/__0_0.distcp", b"of a stock writer").unwrap();
    store.put("step-6/.metadata", b"stock").unwrap();
    store.put("step-7/.metadata", b"what is this").unwrap();
    let states = steps(&root, Duration::from_secs(60)).unwrap();
    let short: Vec<_> = states.iter().map(|state| (state.step, state.state())).collect();
    use State::{Committed, Dead, Pending};
    let right =
        [(1, Committed), (2, Dead), (3, Pending), (4, Dead), (6, Committed), (7, Committed)];
    assert_eq!(short, right);
    let age = states[0].age();
    assert!(states[0].ranks() == 1 && age >= HOUR && age < HOUR + HOUR / 60, "{age:?}");
    assert!(states[0].bytes() > 3000 && states[1].bytes() >= 3000, "{states:?}");
    let AttemptStatus::Failed(why) = &states[3].attempts[0].status else { panic!("{states:?}") };
    assert!(why.contains("rank 0"), "{why}");
    assert_eq!(states[4].commit.as_ref().unwrap().attempt, None);
    assert!(states[5].commit.as_ref().unwrap().damage.is_some());
    // Nothing is removed where the commit cannot be read, nor what is not ours.
    sim.advance(HOUR * 24);
    let report = gc(&root, &GcOptions::default()).unwrap();
    assert_eq!(report.failed.len(), 1, "{report:?}");
    for key in ["step-5/__0_0.distcp", "step-6/.metadata", "step-7/.metadata"] {
        assert!(store.get(key, 1 << 20).unwrap().is_some(), "{key}");
    }
    assert_eq!(steps(&root, HOUR).unwrap().len(), 3);
}

#[test]
fn a_commit_that_was_just_replaced_is_not_under_way() {
    let (_, _, root) = with_steps(1);
    let mut next = Attempt::begin(&root, &policy(), None, spec(1, attempt(1, 9), 0, 1)).unwrap();
    next.writes_for(8);
    write(&mut next, attempt(1, 9), 0).unwrap();
    let seen = || steps(&root, HOUR).unwrap().remove(0);
    assert_eq!(seen().attempts[0].status, AttemptStatus::Pending);
    next.wait_or_commit(&mut |gathered| Ok(assemble(attempt(1, 9), gathered))).unwrap();
    let now = seen();
    assert_eq!((now.commit.as_ref().unwrap().world, now.ranks()), (8, 8));
    assert_eq!(now.attempts[0].attempt, attempt(1, 1));
    assert_eq!(now.attempts[0].status, AttemptStatus::Replaced);
}

#[test]
fn a_prune_that_waits_takes_what_was_removed_before_as_well() {
    let (store, sim, root) = with_steps(4);
    let now = PruneOptions { wait: false, ..waiting() };
    let report = prune(&root, &keep_last(3), &now).unwrap();
    assert_eq!(report.unpublished, [1]);
    assert!(report.unpublished_bytes[0] > 0 && report.gc.removed.is_empty(), "{report:?}");
    sim.advance(HOUR);
    let dry = PruneOptions { gc: GcOptions { dry_run: true, ..waiting().gc }, ..waiting() };
    let report = prune(&root, &keep_last(2), &dry).unwrap();
    assert_eq!((report.unpublished, report.unpublished_bytes.len()), (vec![2], 1));
    let report = prune(&root, &keep_last(2), &waiting()).unwrap();
    assert_eq!(report.unpublished, [2]);
    for step in ["step-1/", "step-2/"] {
        let data = |key: &str| key.starts_with(step) && key.ends_with(".distcp");
        assert!(report.gc.removed.iter().any(|(key, _)| data(key)), "{step}: {report:?}");
        assert_eq!(store.list(step, 100).unwrap().iter().filter(|one| data(&one.key)).count(), 0);
    }
}

#[test]
fn retention_counts_commits_only_and_follows_the_line() {
    let (store, sim, root) = with_steps(5);
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let dying = FaultStore::new(inner, Plan::at(12, Fault::Kill));
    let dying = crate::world::root(Arc::new(dying), &sim);
    save(&dying, None, spec(6, attempt(2, 0), 0, 1)).unwrap_err();
    let dry = PruneOptions { gc: GcOptions { dry_run: true, ..waiting().gc }, ..waiting() };
    assert_eq!(prune(&root, &keep_last(1), &dry).unwrap().unpublished, [1, 2, 3, 4]);
    assert_eq!(load(&store, 1), Some(attempt(1, 1)), "a dry run changes nothing");
    let retention = Retention { keep_last: 2, keep_every: Some(3), pins: [1].into() };
    let report = prune(&root, &retention, &waiting()).unwrap();
    assert_eq!(report.unpublished, [2], "{report:?}");
    // A life that starts afresh in the same folder prunes nothing of the one before it.
    let epoch = claim(&root, RunId(3), None, "fresh").unwrap();
    for step in [10, 20] {
        let mut spec = spec(step, attempt(3, step as u32), 0, 1);
        spec.epoch = epoch;
        save(&root, None, spec).unwrap();
    }
    let report = prune(&root, &keep_last(1), &waiting()).unwrap();
    assert_eq!((report.unpublished, report.off_line), (vec![10], vec![1, 3, 4, 5]));
    assert_eq!(latest(&root).unwrap().unwrap().step, 20);
    collect_all(&root, &store, &sim);
}

#[test]
fn steps_saved_under_lower_numbers_are_the_newest_and_stay() {
    for (restored, steps, gone) in
        [(Some(10), vec![1, 2, 3], vec![8, 9, 10, 1]), (Some(9), vec![10, 9], vec![8])]
    {
        let store = MemoryStore::new();
        let sim = Sim::new(&store);
        let root = root(Arc::new(store.clone()), &sim);
        let run = |run: u32, parent: Option<u64>, steps: &[u64]| {
            let epoch = claim(&root, RunId(run), parent, "a job").unwrap();
            for (number, step) in steps.iter().enumerate() {
                let mut spec = spec(*step, attempt(run, number as u32), 0, 1);
                spec.epoch = epoch;
                save(&root, None, spec).unwrap();
                assert_eq!(latest(&root).unwrap().unwrap().step, *step, "what was just saved");
            }
        };
        run(1, None, &[8, 9, 10]);
        run(2, restored, &steps);
        let report = prune(&root, &keep_last(2), &waiting()).unwrap();
        assert_eq!((report.unpublished, report.off_line), (gone, vec![]));
        assert_eq!(latest(&root).unwrap().unwrap().step, *steps.last().unwrap());
        collect_all(&root, &store, &sim);
    }
}

#[test]
fn what_was_replaced_stays_for_the_grace_time_of_readers_without_a_lease() {
    let (store, sim, root) = with_steps(1);
    sim.advance(HOUR * 24);
    save(&root, None, spec(1, attempt(2, 0), 0, 1)).unwrap();
    let old = "step-1/00000001-1_0_0.distcp";
    sim.advance(Duration::from_secs(800));
    gc(&root, &GcOptions::default()).unwrap();
    assert!(store.get(old, 1 << 20).unwrap().is_some());
    sim.advance(Duration::from_secs(200));
    gc(&root, &GcOptions::default()).unwrap();
    assert!(store.get(old, 1 << 20).unwrap().is_none());
    check_clean(&store);
}

#[test]
fn a_prune_that_does_not_wait_leaves_the_data_for_the_grace_time() {
    let (store, sim, root) = with_steps(2);
    sim.advance(HOUR * 24);
    let options = PruneOptions { gc: GcOptions::default(), wait: false };
    let prune_now = || {
        let report = prune(&root, &keep_last(1), &options).unwrap();
        assert!(report.failed.is_empty() && report.gc.failed.is_empty(), "{report:?}");
        store.get("step-1/00000001-1_0_0.distcp", 1 << 20).unwrap().is_some()
    };
    assert!(prune_now(), "readers without a lease may be at it");
    assert_eq!(load(&store, 1), None);
    sim.advance(Duration::from_secs(800));
    assert!(prune_now());
    sim.advance(Duration::from_secs(200));
    assert!(!prune_now());
    check_clean(&store);
}

#[test]
fn leases_of_killed_readers_go_after_an_hour_and_no_others() {
    let (store, _sim, root) = with_steps(1);
    let leases = || store.list("step-1/.forebay/readers/", 99).unwrap().len();
    // A reader that is killed never drops its own.
    std::mem::forget(ReadLease::take(&root, 1).unwrap());
    store.advance(Duration::from_secs(3599));
    let alive = ReadLease::take(&root, 1).unwrap();
    let collect = |dry_run| gc(&root, &GcOptions { dry_run, ..GcOptions::default() }).unwrap();
    assert!(collect(false).removed.is_empty());
    assert_eq!(leases(), 2);
    store.advance(Duration::from_secs(2));
    assert_eq!(collect(true).removed.len(), 1);
    assert_eq!(leases(), 2);
    assert_eq!(collect(false).removed.len(), 1);
    assert_eq!(leases(), 1);
    drop(alive);
    assert_eq!((leases(), load(&store, 1).is_some()), (0, true));
}
