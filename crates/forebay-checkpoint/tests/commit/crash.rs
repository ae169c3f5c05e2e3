//! Faults at every step of every client of a save, of an overwrite: afterwards the last commit loads, all that survive
//! agree, and life goes on.

use std::sync::Arc;

use forebay_checkpoint::commit::{Committed, Root};
use forebay_error::{Code, Result};
use forebay_store::fault::{Action, Fault, FaultStore, Plan, Step};
use forebay_store::{MemoryStore, Store};

use crate::sim::Sim;
use crate::world::*;

const FAULTS: [Fault; 6] = [
    Fault::Kill,
    Fault::Errno(EIO),
    Fault::Errno(ENOSPC),
    Fault::Torn,
    Fault::LostReply,
    Fault::NotDurable,
];
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const STEP: u64 = 7;

/// Whom a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Rank(u32),
    /// All ranks at once: the machine room goes dark.
    All,
}

/// A run of a save with a plan for the victim.
struct Run {
    store: MemoryStore,
    sim: Arc<Sim>,
    victim: Arc<FaultStore<MemoryStore>>,
    old: bool,
    results: Vec<Result<Committed>>,
}

fn run(world: u32, victim: Victim, overwrite: bool, plan: Plan) -> Run {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let plain = root(Arc::new(store.clone()), &sim);
    if overwrite {
        let roots = vec![plain.clone(); world as usize];
        let (results, _) = save_all(&sim, &roots, |rank| spec(STEP, attempt(1, 0), rank, world));
        assert!(results.iter().all(Result::is_ok));
    }
    let client = Arc::new(FaultStore::new(Arc::new(store.clone()), plan));
    let faulty: Arc<dyn Store> = Arc::<FaultStore<MemoryStore>>::clone(&client);
    let roots: Vec<Root> = (0..world)
        .map(|rank| match victim {
            Victim::Rank(other) if rank != other => plain.clone(),
            _ => root(Arc::clone(&faulty), &sim),
        })
        .collect();
    let (results, took) = save_all(&sim, &roots, |rank| spec(STEP, attempt(1, 1), rank, world));
    assert!(took < LONGEST_WAIT, "{victim:?} of {world}: {took:?}");
    Run { store, sim, victim: client, old: overwrite, results }
}

/// The invariants, for whatever happened.
fn check(run: &Run, world: u32, victim: Victim, fault: Fault) {
    let plain = root(Arc::new(run.store.clone()), &run.sim);
    let loaded = load(&run.store, STEP);
    let (old, new) = (run.old.then(|| attempt(1, 0)), Some(attempt(1, 1)));
    assert!(loaded == new || loaded == old, "{loaded:?}");
    for (rank, result) in run.results.iter().enumerate() {
        let struck = victim == Victim::All || victim == Victim::Rank(rank as u32);
        match result {
            Ok(committed) => {
                assert_eq!(loaded, new, "rank {rank} was told of a commit");
                assert_eq!(committed.attempt, attempt(1, 1));
            }
            // Only a rank that cannot reach the store any more may fail to hear of a commit.
            Err(error) if loaded == new => {
                assert!(struck && fault == Fault::Kill, "rank {rank}: {error:?}");
            }
            Err(_) => {}
        }
    }
    check_listing(&plain, &run.store);
    let roots = vec![plain.clone(); world as usize];
    let (again, _) = save_all(&run.sim, &roots, |rank| spec(STEP, attempt(2, 0), rank, world));
    assert!(again.iter().all(Result::is_ok), "{again:?}");
    assert_eq!(load(&run.store, STEP), Some(attempt(2, 0)));
    collect_all(&plain, &run.store, &run.sim);
}

fn matrix(world: u32, overwrite: bool) -> u64 {
    let mut points = 0;
    let ranks = (0..world).map(Victim::Rank);
    for victim in ranks.chain((world > 1).then_some(Victim::All)) {
        let counting = run(world, victim, overwrite, Plan::none());
        assert!(counting.results.iter().all(Result::is_ok));
        check(&counting, world, victim, Fault::Kill);
        let steps = counting.victim.log();
        for step in &steps {
            for fault in FAULTS {
                let context = format!("{fault:?} at {step:?} for {victim:?} of {world}");
                let hook = Context(context);
                let run = run(world, victim, overwrite, Plan::at(step.index, fault));
                if run.victim.fired() == 0 {
                    continue;
                }
                check(&run, world, victim, fault);
                let looked_up = matches!(step.action, Action::Create | Action::Publish);
                if fault == Fault::LostReply && looked_up {
                    assert!(run.results.iter().all(Result::is_ok), "{:?}", run.results);
                }
                if fault == Fault::NotDurable {
                    check_not_durable(&run, step);
                }
                points += 1;
                hook.done();
            }
        }
    }
    println!("{points} faults, {world} ranks, overwrite: {overwrite}");
    points
}

/// What could not be made durable is no part of a success: the attempt fails on all ranks, or where the commit itself
/// is meant they are told that it may not last.
fn check_not_durable(run: &Run, step: &Step) {
    let name = step.key.rsplit('/').next().unwrap();
    let of = |what: &str| name.starts_with(what);
    let durable = |result: &Result<Committed>| match result {
        Ok(committed) => Some(committed.durable),
        Err(error) => {
            assert_eq!(error.code(), Code::NotDurable, "{error:?}");
            None
        }
    };
    let ends: Vec<_> = run.results.iter().map(durable).collect();
    let allowed: &[Option<bool>] = match step.action {
        // Signs of life, and what is left when all is over.
        _ if of("beat-") || of("committer") || of("outcome") => &[Some(true)],
        Action::Remove => &[Some(true)],
        Action::Publish if of(".metadata") => &[Some(false)],
        // All others may have seen it, and have decided, before its rank knew.
        Action::Publish if of("part-") => &[Some(true), None],
        _ => &[None],
    };
    let agree = ends.iter().all(|end| *end == ends[0]);
    assert!(agree && allowed.contains(&ends[0]), "{:?}", run.results);
}

/// Says which point of the matrix it was when an assertion fails.
struct Context(String);

impl Context {
    fn done(mut self) {
        self.0.clear();
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the matrix failed at: {}", self.0);
        }
    }
}

#[test]
fn a_fault_at_any_step_of_a_save_leaves_a_whole_step_or_none() {
    let points: u64 = (1..=3).map(|world| matrix(world, false)).sum();
    assert!(points > 2000, "{points}");
}

#[test]
fn a_fault_at_any_step_of_an_overwrite_leaves_the_old_step_or_the_new() {
    let points: u64 = (1..=3).map(|world| matrix(world, true)).sum();
    assert!(points > 2000, "{points}");
}
