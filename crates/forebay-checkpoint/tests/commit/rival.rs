//! A commit of an older epoch that came first: replaced where steps may be replaced, and not under a remover's hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, Committed, GcOptions, Policy, PruneOptions, Retention, prune,
};
use forebay_error::{Code, Result};

use crate::sim::{Actor, Moves, Pace, Slow};
use crate::world::*;

/// Saves step 5 in epoch 2, while a writer of epoch 1 commits it at the last moment; `then` runs right after that.
fn beaten_to_it(job: &Job, policy: &Policy, then: impl FnMut()) -> Result<Committed> {
    let mut then = then;
    let mut spec = spec(5, attempt(2, 0), 0, 1);
    spec.epoch = 2;
    let mut began = Attempt::begin(&job.root, policy, None, spec)?;
    write(&mut began, attempt(2, 0), 0)?;
    began.wait_or_commit(&mut |gathered| {
        let mut old = crate::world::spec(5, attempt(1, 0), 0, 1);
        old.epoch = 1;
        save(&job.root, None, old)?;
        then();
        Ok(assemble(attempt(2, 0), gathered))
    })
}

#[test]
fn it_is_replaced_if_steps_may_be_replaced_and_stays_if_not() {
    for overwrite in [true, false] {
        let job = Job::new();
        let policy = Policy { overwrite, ..policy() };
        let result = beaten_to_it(&job, &policy, || {});
        match overwrite {
            true => assert_eq!(result.unwrap().attempt, attempt(2, 0)),
            false => assert_eq!(result.unwrap_err().code(), Code::LostCommit),
        }
        let stays = if overwrite { attempt(2, 0) } else { attempt(1, 0) };
        assert_eq!(load(&job.store, 5), Some(stays));
        check_listing(&job.root, &job.store);
    }
}

/// On a store that moves in two steps a replacement in between would be unlinked with what it replaced.
#[test]
fn it_is_not_replaced_while_somebody_takes_it_away() {
    let run = |point: u64| {
        let job = Job::new();
        let mut later = spec(6, attempt(1, 6), 0, 1);
        (later.epoch, later.parent) = (1, Some(5));
        save(&job.root, None, later).unwrap();
        let pace = Pace::PauseAt(point, Duration::from_secs(3));
        let slow = Slow::moving(Arc::new(job.store.clone()), &job.sim, pace, Moves::ByLink);
        let remover = root(Arc::<Slow>::clone(&slow), &job.sim);
        let committed = AtomicBool::new(false);
        let pruned = AtomicUsize::new(0);
        let saving = || {
            let then = || {
                committed.store(true, Ordering::Relaxed);
                // The remover announces itself meanwhile, waits its two seconds, and is at it or about to be.
                job.sim.clock_wait(Duration::from_secs(3));
            };
            Some(beaten_to_it(&job, &policy(), then))
        };
        let removing = || {
            while !committed.load(Ordering::Relaxed) {
                job.sim.clock_wait(Duration::from_millis(10));
            }
            let retention = Retention { keep_last: 1, ..Retention::default() };
            let options = PruneOptions { gc: GcOptions::default(), wait: false };
            let report = prune(&remover, &retention, &options).unwrap();
            pruned.fetch_add(report.unpublished.len(), Ordering::Relaxed);
            None
        };
        type End = Option<Result<Committed>>;
        let actors: Vec<Actor<'_, End>> = vec![Box::new(saving), Box::new(removing)];
        let (mut ends, _) = job.sim.run(actors);
        ends.remove(0).unwrap().unwrap();
        assert_eq!(load(&job.store, 5), Some(attempt(2, 0)), "lost with the remover at {point}");
        (slow.points(), pruned.into_inner())
    };
    let (points, pruned) = run(u64::MAX);
    assert!(points > 20 && pruned == 1, "{pruned} pruned, {points} points");
    let pruned = (0..points).filter(|point| run(*point).1 == 1).count();
    assert!(pruned > 10, "the remover was at it {pruned} times");
}
