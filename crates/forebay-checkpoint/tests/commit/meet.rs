//! Removers and writers that meet: each stands still at every point while the other goes on.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{GcOptions, PruneOptions, Retention, Root, gc, prune};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Moves, Pace, Sim, Slow};
use crate::world::*;

const NEVER: u64 = u64::MAX;

struct Pair {
    store: MemoryStore,
    sim: Arc<Sim>,
    plain: Root,
}

fn pair(steps: u64) -> Pair {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let plain = root(Arc::new(store.clone()), &sim);
    for step in 1..=steps {
        save(&plain, None, spec(step, attempt(9, step as u32), 0, 1)).unwrap();
    }
    Pair { store, sim, plain }
}

impl Pair {
    fn slow(&self, point: u64, pause: Duration) -> (Root, Arc<Slow>) {
        let inner: Arc<dyn Store> = Arc::new(self.store.clone());
        let slow = Slow::new(inner, &self.sim, Pace::PauseAt(point, pause));
        (root(Arc::<Slow>::clone(&slow), &self.sim), slow)
    }
}

/// The writer sleeps two hours at its point; the collector starts after one, and sleeps two at its own, so that the
/// writer goes on in the middle of the collection.
fn collect_under(writer_at: u64, collector_at: u64, overwrite: bool) -> (u64, u64) {
    let pair = pair(u64::from(overwrite));
    let (writer, writes) = pair.slow(writer_at, HOUR * 2);
    let (collector, collects) = pair.slow(collector_at, HOUR * 2);
    let saving = || save(&writer, None, spec(1, attempt(1, 0), 0, 1)).is_ok();
    let collecting = || {
        pair.sim.clock_wait(HOUR);
        gc(&collector, &GcOptions::default()).is_ok()
    };
    let actors: Vec<Actor<'_, bool>> = vec![Box::new(saving), Box::new(collecting)];
    let (results, _) = pair.sim.run(actors);
    let old = overwrite.then(|| attempt(9, 1));
    let right = if results[0] { Some(attempt(1, 0)) } else { old };
    assert_eq!(load(&pair.store, 1), right, "writer {writer_at}, collector {collector_at}");
    check_listing(&pair.plain, &pair.store);
    collect_all(&pair.plain, &pair.store, &pair.sim);
    (writes.points(), collects.points())
}

#[test]
fn a_collection_that_meets_its_attempt_alive_leaves_a_whole_step_or_withdraws_it() {
    let mut pairs = 0;
    for overwrite in [false, true] {
        let (writes, _) = collect_under(NEVER, NEVER, overwrite);
        for writer_at in 0..writes {
            let (_, collects) = collect_under(writer_at, NEVER, overwrite);
            for collector_at in 0..collects {
                collect_under(writer_at, collector_at, overwrite);
                pairs += 1;
            }
        }
    }
    println!("{pairs} pairs of points");
    assert!(pairs > 1500, "{pairs}");
}

/// The pruner of step 1 sleeps at its point while the step is saved anew, and is killed at a later step of its own.
/// Returns whether the old commit was meant, and how many points and steps the pruner has.
fn overwrite_under_prune(pruner_at: u64, killed_at: u64) -> (bool, u64, u64) {
    let pair = pair(2);
    let plan = if killed_at == NEVER { Plan::none() } else { Plan::at(killed_at, Fault::Kill) };
    let client = Arc::new(FaultStore::new(Arc::new(pair.store.clone()), plan));
    let inner: Arc<dyn Store> = Arc::<FaultStore<MemoryStore>>::clone(&client);
    let pace = Pace::PauseAt(pruner_at, Duration::from_secs(600));
    let slow = Slow::new(inner, &pair.sim, pace);
    let pruner = root(Arc::<Slow>::clone(&slow), &pair.sim);
    let pruning = || {
        let retention = Retention { keep_last: 1, ..Retention::default() };
        let gc = GcOptions { grace: Duration::from_secs(30), ..GcOptions::default() };
        drop(prune(&pruner, &retention, &PruneOptions { gc, wait: true }));
        true
    };
    let saving = || {
        pair.sim.clock_wait(Duration::from_secs(300));
        save(&pair.plain, None, spec(1, attempt(1, 0), 0, 1)).is_ok()
    };
    // A moment after the pruner has gone on: a commit that was moved by mistake must be back by then.
    let looking = || {
        pair.sim.clock_wait(Duration::from_secs(615));
        load(&pair.store, 1) == Some(attempt(1, 0))
    };
    let actors: Vec<Actor<'_, bool>> = vec![Box::new(pruning), Box::new(saving), Box::new(looking)];
    let (results, _) = pair.sim.run(actors);
    let new = Some(attempt(1, 0));
    let meant = client.log().iter().any(|step| step.key.ends_with("/00000001-0/removing"));
    if killed_at == NEVER && !meant {
        assert!(results[2], "pruner at {pruner_at}: it is put back at once");
    }
    // A pruner that was killed while it held a commit aside: a collection puts that back.
    collect_all(&pair.plain, &pair.store, &pair.sim);
    let context = format!("pruner at {pruner_at}, killed at {killed_at}");
    assert!(results[1], "{context}: the save failed");
    // A pruner that was late enough has listed the new commit, and means that.
    if !meant {
        assert_eq!(load(&pair.store, 1), new, "{context}");
    }
    assert_eq!(load(&pair.store, 2), Some(attempt(9, 2)));
    (!meant, slow.points(), client.steps())
}

#[test]
fn a_step_that_is_saved_anew_while_it_is_pruned_is_never_lost() {
    let (_, points, steps) = overwrite_under_prune(NEVER, NEVER);
    let mut kept = 0;
    for point in 0..points {
        for killed in (0..steps).chain([NEVER]) {
            kept += u64::from(overwrite_under_prune(point, killed).0);
        }
    }
    println!("{points} points x {steps} steps, kept in {kept}");
    assert!(points > 40 && kept > points * steps / 2, "{kept} of {points} x {steps}");
}

/// The pruner of step 1 stops for less than a writer waits for it, also between the two halves of a move.
fn overwrite_under_short_pause(pruner_at: u64) -> u64 {
    let pair = pair(2);
    let inner: Arc<dyn Store> = Arc::new(pair.store.clone());
    let pace = Pace::PauseAt(pruner_at, Duration::from_secs(20));
    let slow = Slow::moving(Arc::clone(&inner), &pair.sim, pace, Moves::ByLink);
    let pruner = root(Arc::<Slow>::clone(&slow), &pair.sim);
    let other = Slow::moving(inner, &pair.sim, Pace::PauseAt(NEVER, HOUR), Moves::ByLink);
    let writer = root(other, &pair.sim);
    let pruning = || {
        let retention = Retention { keep_last: 1, ..Retention::default() };
        let gc = GcOptions { grace: Duration::from_secs(60), ..GcOptions::default() };
        let report = prune(&pruner, &retention, &PruneOptions { gc, wait: true }).unwrap();
        assert!(report.failed.is_empty() && report.gc.failed.is_empty(), "{report:?}");
        true
    };
    let saving = || {
        pair.sim.clock_wait(Duration::from_secs(10));
        save(&writer, None, spec(1, attempt(1, 0), 0, 1)).is_ok()
    };
    let actors: Vec<Actor<'_, bool>> = vec![Box::new(pruning), Box::new(saving)];
    let (results, _) = pair.sim.run(actors);
    let points = slow.points();
    assert!(results[1], "pruner at {pruner_at}");
    // Stopped before it had listed the steps, it means the new commit.
    if load(&pair.store, 1).is_none() {
        assert!(pruner_at < LISTED_BY, "pruner at {pruner_at}: a commit is lost");
    } else {
        assert_eq!(load(&pair.store, 1), Some(attempt(1, 0)), "pruner at {pruner_at}");
    }
    collect_all(&pair.plain, &pair.store, &pair.sim);
    points
}

/// By this point a prune has read what step 1 is.
const LISTED_BY: u64 = 9;

#[test]
fn a_writer_lets_a_remover_pass_that_moves_in_two_steps() {
    let points = overwrite_under_short_pause(NEVER);
    println!("{points} points");
    assert!(points > 50, "{points}");
    for point in 0..points {
        overwrite_under_short_pause(point);
    }
}
