//! All ranks get one answer, the right one, in time.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{Attempt, Committed, Failure, Hint, latest};
use forebay_error::{Code, Error, Result};
use forebay_store::Store;

use crate::sim::{Actor, Channel, Pace, Slow};
use crate::world::*;

const WORLD: u32 = 3;

#[test]
fn every_rank_hears_of_the_same_commit_and_the_records_are_tidied() {
    let job = Job::new();
    let roots = vec![job.root.clone(); WORLD as usize];
    let (results, took) = save_all(&job.sim, &roots, |rank| spec(1, attempt(1, 0), rank, WORLD));
    let committed: Vec<&Committed> =
        results.iter().map(|result| result.as_ref().unwrap()).collect();
    assert!(committed.windows(2).all(|pair| pair[0] == pair[1]), "{committed:?}");
    assert!(committed[0].durable && committed[0].bytes > 9000, "{committed:?}");
    assert!(took < Duration::from_secs(1), "without hints: {took:?}");
    check_clean(&job.store);
}

#[test]
fn hints_carry_a_commit_in_milliseconds() {
    let job = Job::new();
    let hints = Channel::of_world(&job.sim, WORLD);
    let actor = |(rank, hints)| -> Actor<'static, (Result<Committed>, Duration)> {
        let (root, spec) = (job.root.clone(), spec(1, attempt(1, 0), rank, WORLD));
        let sim = Arc::clone(&job.sim);
        Box::new(move || {
            // Rank 2 takes its time, so the others have gone over to long pauses.
            sim.clock_wait(if rank == 2 { Duration::from_secs(10) } else { Duration::ZERO });
            let result = save(&root, Some(hints), spec);
            (result, sim.clock_now())
        })
    };
    let (results, _) = job.sim.run((0..WORLD).zip(hints).map(actor).collect());
    for (result, at) in results {
        result.unwrap();
        assert!(at < Duration::from_millis(10_020), "{at:?}");
    }
}

#[test]
fn a_rank_that_is_slow_but_beats_is_waited_for() {
    let job = Job::new();
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let (root, sim) = (job.root.clone(), Arc::clone(&job.sim));
        Box::new(move || {
            let spec = spec(5, attempt(1, 0), rank, 2);
            let mut begun = Attempt::begin(&root, &policy(), None, spec)?;
            for _ in 0..if rank == 1 { 60 } else { 0 } {
                sim.clock_wait(Duration::from_secs(1));
                begun.beat();
            }
            write(&mut begun, attempt(1, 0), rank)?;
            begun.wait_or_commit(&mut |gathered| Ok(assemble(attempt(1, 0), gathered)))
        })
    };
    let (results, took) = job.sim.run((0..2).map(actor).collect());
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    assert!(took > policy().lease * 4 && took < Duration::from_secs(63), "{took:?}");
    assert_eq!(load(&job.store, 5), Some(attempt(1, 0)));
}

#[test]
fn a_committer_that_is_slow_is_overtaken_and_all_agree() {
    let job = Job::new();
    // Rank 0 stands still for a minute after it has all parts: in each of its calls from there on.
    let mut overtaken = 0;
    let points = paused(&job, u64::MAX).1;
    for point in 0..points {
        let job = Job::new();
        let (results, _) = paused(&job, point);
        let committed: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
        assert!(committed.is_empty() || committed.len() == 2, "point {point}: {results:?}");
        assert!(committed.windows(2).all(|pair| pair[0] == pair[1]), "{results:?}");
        assert_eq!(load(&job.store, 5).is_some(), !committed.is_empty());
        overtaken += usize::from(committed.iter().any(|committed| committed.by == 1));
        collect_all(&job.root, &job.store, &job.sim);
    }
    assert!(overtaken > 5, "{overtaken} of {points}");
}

fn paused(job: &Job, point: u64) -> (Vec<Result<Committed>>, u64) {
    let store: Arc<dyn Store> = Arc::new(job.store.clone());
    let slow = Slow::new(store, &job.sim, Pace::PauseAt(point, Duration::from_secs(60)));
    let roots = [root(Arc::<Slow>::clone(&slow), &job.sim), job.root.clone()];
    let (results, took) = save_all(&job.sim, &roots, |rank| spec(5, attempt(1, 0), rank, 2));
    assert!(took < LONGEST_WAIT);
    (results, slow.points())
}

#[test]
fn failures_that_are_heard_of_late_change_nothing() {
    let job = Job::new();
    let hints = Channel::of_world(&job.sim, 2);
    let actor = |(rank, hints)| -> Actor<'static, Result<Committed>> {
        let root = job.root.clone();
        Box::new(move || save(&root, Some(hints), spec(5, attempt(1, 0), rank, 2)))
    };
    let actors = (0..2).zip(hints.clone()).map(actor).collect();
    let (results, _) = job.sim.run(actors);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let failure = Failure::of(1, &Error::new(Code::Io, "of another life"));
    hints[1].tell(attempt(1, 0), &Hint::Failed(failure));
    assert_eq!(load(&job.store, 5), Some(attempt(1, 0)));
    assert_eq!(latest(&job.root).unwrap().unwrap().step, 5);
}
