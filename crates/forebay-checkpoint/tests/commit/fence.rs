//! A writer thought dead that wakes up at every point of its save.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, Committed, GcOptions, PruneOptions, Retention, Root, RunId, claim, gc, latest, prune,
};
use forebay_error::{Code, Result};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Moves, Pace, Sim, Slow};
use crate::world::*;

/// Longer than any wait of the others, and than every grace time.
const PAUSE: Duration = Duration::from_secs(2 * 3600);
const WORLD: u32 = 2;

/// A save of step 5 by an old writer, of which rank `sleeper` stops at a point, while `meanwhile` runs an hour later.
fn sleep_at(
    sleeper: u32,
    point: u64,
    overwrite: bool,
    copies: bool,
    meanwhile: impl FnOnce(&Root) + Send,
) -> (Job, Vec<Option<Result<Committed>>>, u64) {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let plain = root(Arc::new(store.clone()), &sim);
    if overwrite {
        let roots = vec![plain.clone(); WORLD as usize];
        let (results, _) = save_all(&sim, &roots, |rank| spec(5, attempt(9, 0), rank, WORLD));
        assert!(results.iter().all(Result::is_ok));
    }
    let epoch = claim(&plain, RunId(1), None, "old").unwrap();
    let inner: Arc<dyn Store> = Arc::new(store.clone());
    let pace = Pace::PauseAt(point, PAUSE);
    let never = Pace::PauseAt(u64::MAX, PAUSE);
    let moves = if copies { Moves::ByCopy } else { Moves::AtOnce };
    let slow = Slow::moving(Arc::clone(&inner), &sim, pace, moves);
    let other = Slow::moving(inner, &sim, never, moves);
    let mut actors: Vec<Actor<'_, Option<Result<Committed>>>> = Vec::new();
    for rank in 0..WORLD {
        let root = match rank == sleeper {
            true => root(Arc::<Slow>::clone(&slow), &sim),
            false => root(Arc::<Slow>::clone(&other), &sim),
        };
        let mut spec = spec(5, attempt(1, 0), rank, WORLD);
        spec.epoch = epoch;
        actors.push(Box::new(move || Some(save(&root, None, spec))));
    }
    let (clock, observer) = (Arc::clone(&sim), plain.clone());
    actors.push(Box::new(move || {
        clock.clock_wait(HOUR);
        meanwhile(&observer);
        None
    }));
    let (results, _) = sim.run(actors);
    (Job { store, sim, root: plain }, results, slow.points())
}

/// Every point at which each rank can fall asleep.
fn at_every_point(overwrite: bool, copies: bool, mut check: impl FnMut(u32, u64)) -> u64 {
    let mut points = 0;
    for sleeper in 0..WORLD {
        let (_, results, count) = sleep_at(sleeper, u64::MAX, overwrite, copies, |_| {});
        assert!(results.iter().flatten().all(Result::is_ok), "{results:?}");
        (0..count).for_each(|point| check(sleeper, point));
        points += count;
    }
    points
}

fn options() -> GcOptions {
    GcOptions { grace: Duration::from_secs(900), ..GcOptions::default() }
}

#[test]
fn a_writer_that_was_collected_and_wakes_up_commits_nothing() {
    for overwrite in [false, true] {
        let points = at_every_point(overwrite, false, |sleeper, point| {
            let (job, results, _) = sleep_at(sleeper, point, overwrite, false, |root| {
                gc(root, &options()).unwrap();
            });
            let loaded = load(&job.store, 5);
            let woken = results[sleeper as usize].as_ref().unwrap();
            if loaded == Some(attempt(1, 0)) {
                // Its peer had committed before, or it fell asleep after it had.
            } else {
                assert_eq!(loaded, overwrite.then(|| attempt(9, 0)), "{sleeper} at {point}");
                assert!(woken.is_err(), "{sleeper} at {point}: {woken:?}");
            }
            check_listing(&job.root, &job.store);
            collect_all(&job.root, &job.store, &job.sim);
        });
        assert!(points > 90, "{points}");
    }
}

#[test]
fn a_writer_of_an_older_epoch_never_replaces_what_a_newer_one_committed() {
    for overwrite in [false, true] {
        let points = at_every_point(overwrite, false, |sleeper, point| {
            let newer = |root: &Root| {
                let epoch = claim(root, RunId(2), None, "new").unwrap();
                let mut spec = spec(5, attempt(2, 0), 0, 1);
                spec.epoch = epoch;
                save(root, None, spec).unwrap();
            };
            let (job, results, _) = sleep_at(sleeper, point, overwrite, false, newer);
            assert_eq!(load(&job.store, 5), Some(attempt(2, 0)), "{sleeper} at {point}");
            let woken = results[sleeper as usize].as_ref().unwrap();
            let right = [None, Some(Code::Fenced), Some(Code::Timeout), Some(Code::NotShared)];
            assert!(right.contains(&code(woken)), "{sleeper} at {point}: {woken:?}");
            let newest = latest(&job.root).unwrap().unwrap();
            assert_eq!(newest.commit.unwrap().epoch, 2);
            collect_all(&job.root, &job.store, &job.sim);
        });
        assert!(points > 90, "{points}");
    }
}

/// On a store that moves when it publishes, and on one that copies, where sources are left.
#[test]
fn a_step_that_was_pruned_does_not_come_back_with_a_writer_that_wakes_up() {
    for copies in [false, true] {
        let points = at_every_point(false, copies, |sleeper, point| {
            let mut before = None;
            let later = |root: &Root| {
                before = latest(root).unwrap();
                let mut spec = spec(6, attempt(1, 1), 0, 1);
                spec.epoch = 1;
                save(root, None, spec).unwrap();
                let retention = Retention { keep_last: 1, ..Retention::default() };
                let options = PruneOptions { gc: options(), wait: true };
                let report = prune(root, &retention, &options).unwrap();
                assert!(report.failed.is_empty() && report.gc.failed.is_empty(), "{report:?}");
            };
            let (job, _, _) = sleep_at(sleeper, point, false, copies, later);
            // What was committed an hour in has been pruned. A sleeper may commit after that what had never been there.
            if before.is_some() {
                assert_eq!(load(&job.store, 5), None, "{sleeper} at {point}");
            }
            assert_eq!(load(&job.store, 6), Some(attempt(1, 1)));
            check_listing(&job.root, &job.store);
            collect_all(&job.root, &job.store, &job.sim);
        });
        assert!(points > 90, "{points}");
    }
}

/// Another job commits the step while this one assembles, so this one loses; what won is pruned while a rank sleeps.
#[test]
fn an_attempt_that_lost_does_not_come_in_when_the_winner_has_been_pruned() {
    let run = |sleeper: u32, point: u64| {
        let job = Job::new();
        let rival_came = AtomicBool::new(false);
        let inner: Arc<dyn Store> = Arc::new(job.store.clone());
        let slow = Slow::new(inner, &job.sim, Pace::PauseAt(point, PAUSE));
        let mut actors: Vec<Actor<'_, bool>> = Vec::new();
        for rank in 0..WORLD {
            let root = match rank == sleeper {
                true => root(Arc::<Slow>::clone(&slow), &job.sim),
                false => job.root.clone(),
            };
            let (job, rival_came) = (&job, &rival_came);
            actors.push(Box::new(move || {
                let spec = spec(5, attempt(1, 0), rank, WORLD);
                let Ok(mut begun) = Attempt::begin(&root, &policy(), None, spec) else {
                    return false;
                };
                if let Err(error) = write(&mut begun, attempt(1, 0), rank) {
                    begun.fail(error);
                    return false;
                }
                let result = begun.wait_or_commit(&mut |gathered| {
                    if !rival_came.swap(true, Ordering::SeqCst) {
                        save(&job.root, None, crate::world::spec(5, attempt(2, 0), 0, 1))?;
                    }
                    Ok(assemble(attempt(1, 0), gathered))
                });
                result.is_ok()
            }));
        }
        let pruning = || {
            job.sim.clock_wait(HOUR);
            let won = load(&job.store, 5).is_some();
            save(&job.root, None, spec(6, attempt(3, 0), 0, 1)).unwrap();
            let retention = Retention { keep_last: 1, ..Retention::default() };
            let gc = GcOptions { grace: HOUR * 9, ..options() };
            prune(&job.root, &retention, &PruneOptions { gc, wait: false }).unwrap();
            won
        };
        actors.push(Box::new(pruning));
        let (results, _) = job.sim.run(actors);
        if results[WORLD as usize] {
            assert_eq!(load(&job.store, 5), None, "{sleeper} at {point}: {results:?}");
        }
        collect_all(&job.root, &job.store, &job.sim);
        (slow.points(), results[WORLD as usize])
    };
    let mut won = 0;
    for sleeper in 0..WORLD {
        let (points, _) = run(sleeper, u64::MAX);
        won += (0..points).filter(|point| run(sleeper, *point).1).count();
    }
    assert!(won > 20, "{won}");
}

#[test]
fn a_writer_that_was_taken_over_from_commits_nothing_from_then_on() {
    // A single rank: nobody gives its attempt up while it sleeps.
    let run = |point: u64| {
        let store = MemoryStore::new();
        let sim = Sim::new(&store);
        let plain = root(Arc::new(store.clone()), &sim);
        let mut spec = spec(5, attempt(1, 0), 0, 1);
        spec.epoch = claim(&plain, RunId(1), None, "old").unwrap();
        let slow = Slow::new(Arc::new(store.clone()), &sim, Pace::PauseAt(point, PAUSE));
        let sleeper = root(Arc::<Slow>::clone(&slow), &sim);
        let before = || {
            sim.clock_wait(HOUR);
            let before = load(&store, 5);
            claim(&plain, RunId(2), None, "new").unwrap();
            assert_eq!(load(&store, 5), before, "a claim changes no step");
            before.is_some()
        };
        let actors: Vec<Actor<'_, bool>> =
            vec![Box::new(|| save(&sleeper, None, spec).is_ok()), Box::new(before)];
        let (results, _) = sim.run(actors);
        assert_eq!(load(&store, 5).is_some(), results[1], "point {point}: {results:?}");
        assert!(results[0] || !results[1] || point < slow.points(), "{results:?}");
        collect_all(&plain, &store, &sim);
        slow.points()
    };
    // Asleep from the start, it is refused at once and has few points.
    let points = run(u64::MAX);
    assert!(points > 20, "{points}");
    for point in 0..points {
        run(point);
    }
}

#[test]
fn a_claim_that_died_half_way_still_fences_off_what_has_not_come_to_its_last_look() {
    let run = |point: u64| {
        let job = Job::new();
        let mut spec = spec(5, attempt(1, 0), 0, 1);
        spec.epoch = claim(&job.root, RunId(1), None, "old").unwrap();
        let inner: Arc<dyn Store> = Arc::new(job.store.clone());
        let slow = Slow::new(Arc::clone(&inner), &job.sim, Pace::PauseAt(point, PAUSE));
        let sleeper = root(Arc::<Slow>::clone(&slow), &job.sim);
        let claiming = || {
            job.sim.clock_wait(HOUR);
            let before = load(&job.store, 5).is_some();
            // Listing, creating, and dead before it has withdrawn anything.
            let client = FaultStore::new(inner, Plan::at(2, Fault::Kill));
            claim(&root(Arc::new(client), &job.sim), RunId(2), None, "new").unwrap_err();
            before
        };
        let actors: Vec<Actor<'_, bool>> =
            vec![Box::new(|| save(&sleeper, None, spec).is_ok()), Box::new(claiming)];
        let (results, _) = job.sim.run(actors);
        assert_eq!(load(&job.store, 5).is_some(), results[0] || results[1]);
        (slow.points(), results[0] && !results[1])
    };
    let (points, _) = run(u64::MAX);
    let late = (0..points).filter(|point| run(*point).1).count();
    // Between the last look and the publication nothing but the look at the begin record.
    println!("{late} of {points} points");
    assert!(points > 20 && late <= 4, "{late} of {points}");
}

#[test]
fn a_job_that_was_taken_over_from_is_refused_from_the_start() {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let root = root(Arc::new(store.clone()), &sim);
    let old = claim(&root, RunId(1), None, "host-a:17").unwrap();
    let new = claim(&root, RunId(2), None, "host-b:18").unwrap();
    assert_eq!((old, new), (1, 2));
    let mut spec = spec(5, attempt(1, 0), 0, 1);
    spec.epoch = old;
    let error = save(&root, None, spec).unwrap_err();
    assert_eq!(error.code(), Code::Fenced);
    assert!(error.hints()[0].contains("host-b:18"), "{error:?}");
}

#[test]
fn claims_that_race_get_different_epochs() {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let actor = |run: u32| -> Actor<'static, u64> {
        let inner: Arc<dyn Store> = Arc::new(store.clone());
        let slow = Slow::new(inner, &sim, Pace::Random(u64::from(run) + 1));
        let root = root(slow, &sim);
        Box::new(move || claim(&root, RunId(run), None, "x").unwrap())
    };
    let (mut epochs, _) = sim.run((0..8).map(actor).collect());
    epochs.sort_unstable();
    assert_eq!(epochs, [1, 2, 3, 4, 5, 6, 7, 8]);
}
