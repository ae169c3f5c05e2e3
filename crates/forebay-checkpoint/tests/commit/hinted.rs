//! Suspicions: who died is named within seconds, who lives is waited for, and whoever lies does no harm.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, AttemptId, Clock, Committed, GcOptions, Hint, Hints, Suspect, gc,
};
use forebay_error::{Code, Result};
use forebay_store::Store;
use forebay_store::fault::{Fault, FaultStore, Plan};

use crate::sim::{Actor, Sim};
use crate::world::*;

const WORLD: u32 = 3;

/// Hints that carry nothing and suspect some ranks from some second on.
struct Suspicion {
    sim: Arc<Sim>,
    ranks: Vec<u32>,
    from: Duration,
    left: bool,
}

impl Hints for Suspicion {
    fn tell(&self, _attempt: AttemptId, _hint: &Hint) {}

    fn wait(&self, _attempt: AttemptId, time: Duration) -> Vec<Hint> {
        self.sim.sleep(time);
        Vec::new()
    }

    fn hears(&self) -> bool {
        true
    }

    fn suspects(&self) -> Vec<Suspect> {
        let of = |rank: &u32| Suspect { rank: *rank, who: format!("host:{rank}"), left: self.left };
        let ranks = if self.sim.now() < self.from { &[][..] } else { &self.ranks };
        ranks.iter().map(of).collect()
    }
}

impl Suspicion {
    fn of(job: &Job, ranks: &[u32], from: u64) -> Arc<Self> {
        let (sim, ranks) = (Arc::clone(&job.sim), ranks.to_vec());
        Arc::new(Self { sim, ranks, from: Duration::from_secs(from), left: false })
    }
}

/// Saves, all ranks but those that `die`: at the store's call of that number.
fn save_hinted(
    job: &Job,
    hints: &Arc<Suspicion>,
    id: AttemptId,
    die: &[(u32, u64)],
) -> (Vec<Result<Committed>>, Duration) {
    let store: Arc<dyn Store> = Arc::new(job.store.clone());
    let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
        let at = die.iter().find(|(dead, _)| *dead == rank).map(|(_, at)| *at);
        let plan = at.map_or_else(Plan::none, |at| Plan::at(at, Fault::Kill));
        let root = root(Arc::new(FaultStore::new(Arc::clone(&store), plan)), &job.sim);
        let hints: Arc<dyn Hints> = Arc::<Suspicion>::clone(hints);
        Box::new(move || save(&root, Some(hints), spec(5, id, rank, WORLD)))
    };
    job.sim.run((0..WORLD).map(actor).collect())
}

#[test]
fn a_rank_that_died_is_named_within_seconds_wherever_it_was() {
    for at in [0, 2, 5, 9, 12] {
        let job = Job::new();
        job.save_step(5, attempt(1, 0), WORLD);
        let hints = Suspicion::of(&job, &[1], 5);
        let (results, took) = save_hinted(&job, &hints, attempt(1, 1), &[(1, at)]);
        for rank in [0, 2] {
            let error = results[rank].as_ref().unwrap_err();
            assert_eq!(error.code(), Code::Timeout);
            assert!(error.what().starts_with("rank 1 (host:1) has died"), "{error:?}");
            assert!(error.hints().iter().any(|hint| hint.contains("restart")), "{error:?}");
        }
        assert!(took < Duration::from_secs(14), "call {at}: {took:?}");
        assert_eq!(load(&job.store, 5), Some(attempt(1, 0)), "the step that was there");
        collect_all(&job.root, &job.store, &job.sim);
    }
}

#[test]
fn a_rank_that_said_that_it_saves_no_more_is_not_waited_for() {
    let job = Job::new();
    let mut hints = Suspicion::of(&job, &[2], 3);
    Arc::get_mut(&mut hints).unwrap().left = true;
    let (results, took) = save_hinted(&job, &hints, attempt(1, 0), &[(2, 0)]);
    for result in &results[..2] {
        let error = result.as_ref().unwrap_err();
        assert!(error.what().contains("rank 2 (host:2) has closed its side"), "{error:?}");
    }
    assert!(took < Duration::from_secs(12), "{took:?}");
    // One that has begun before it said so will end.
    let job = Job::new();
    let mut hints = Suspicion::of(&job, &[2], 3);
    Arc::get_mut(&mut hints).unwrap().left = true;
    let (_, took) = save_hinted(&job, &hints, attempt(1, 0), &[(2, 12)]);
    assert!(took >= policy().lease, "{took:?}");
}

#[test]
fn a_committer_that_died_is_stood_in_for_at_once() {
    // Where rank 0 dies once its part is there, the step is committed without it.
    let mut committed = 0;
    for at in 0..40 {
        let job = Job::new();
        job.save_step(5, attempt(1, 0), WORLD);
        let hints = Suspicion::of(&job, &[0], 1);
        let (results, took) = save_hinted(&job, &hints, attempt(1, 1), &[(0, at)]);
        assert_eq!(code(&results[1]), code(&results[2]), "call {at}: {results:?}");
        assert!(took < Duration::from_secs(10), "call {at}: {took:?}");
        let now = load(&job.store, 5).unwrap();
        if results[1].is_ok() {
            assert_eq!(now, attempt(1, 1));
            committed += usize::from(results[0].is_err() && took < Duration::from_secs(4));
        } else {
            assert_eq!(now, attempt(1, 0));
        }
        collect_all(&job.root, &job.store, &job.sim);
    }
    assert!(committed > 3, "{committed}");
}

#[test]
fn whoever_suspects_the_living_loses_no_step_and_all_agree() {
    for ranks in [&[0][..], &[1], &[2], &[0, 1], &[0, 1, 2]] {
        for slow in 0..WORLD {
            let job = Job::new();
            job.save_step(5, attempt(1, 0), WORLD);
            let hints = Suspicion::of(&job, ranks, 0);
            let actor = |rank: u32| -> Actor<'static, Result<Committed>> {
                let (root, sim) = (job.root.clone(), Arc::clone(&job.sim));
                let hints: Arc<dyn Hints> = Arc::<Suspicion>::clone(&hints);
                Box::new(move || {
                    let id = attempt(1, 1);
                    let spec = spec(5, id, rank, WORLD);
                    let mut begun = Attempt::begin(&root, &policy(), Some(hints), spec)?;
                    sim.clock_wait(Duration::from_secs(if rank == slow { 8 } else { 0 }));
                    if let Err(error) = write(&mut begun, id, rank) {
                        return Err(begun.fail(error));
                    }
                    begun.wait_or_commit(&mut |gathered| Ok(assemble(id, gathered)))
                })
            };
            let (results, _) = job.sim.run((0..WORLD).map(actor).collect());
            let all: Vec<_> = results.iter().map(code).collect();
            assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{results:?}");
            let expected = if results[0].is_ok() { attempt(1, 1) } else { attempt(1, 0) };
            assert_eq!(load(&job.store, 5), Some(expected), "{ranks:?}, {slow} is slow");
            collect_all(&job.root, &job.store, &job.sim);
        }
    }
}

#[test]
fn a_rank_with_news_of_a_death_ends_its_own_work() {
    let job = Job::new();
    let hints: Arc<dyn Hints> = Suspicion::of(&job, &[1], 0);
    let actor = |rank: u32| -> Actor<'static, Result<()>> {
        let (root, sim) = (job.root.clone(), Arc::clone(&job.sim));
        let hints = Arc::clone(&hints);
        Box::new(move || {
            let spec = spec(5, attempt(1, 0), rank, WORLD);
            let begun = Attempt::begin(&root, &policy(), Some(hints), spec)?;
            // It writes for a minute.
            for _ in 0..120 {
                sim.clock_wait(Duration::from_millis(500));
                begun.beat();
                if let Err(error) = begun.check() {
                    return Err(begun.fail(error));
                }
            }
            Ok(())
        })
    };
    let (results, took) = job.sim.run([0, 2].map(actor).into_iter().collect());
    for result in results {
        let error = result.unwrap_err();
        assert!(error.what().starts_with("rank 1 (host:1) has died"), "{error:?}");
    }
    assert!(took < Duration::from_secs(8), "{took:?}");
}

#[test]
fn signs_of_life_of_runs_that_ended_are_collected() {
    let job = Job::new();
    for run in [1, 2] {
        let key = format!(".forebay/alive/{:08x}/beat-3", run);
        job.store.put(&key, b"x").unwrap();
    }
    let claimed = forebay_checkpoint::commit::claim(
        &job.root,
        forebay_checkpoint::commit::RunId(2),
        None,
        "host:0",
    );
    claimed.unwrap();
    let left = |job: &Job| -> Vec<String> {
        let listed = job.store.list(".forebay/alive/", 99).unwrap();
        listed.into_iter().map(|object| object.key).collect()
    };
    gc(&job.root, &GcOptions::default()).unwrap();
    assert_eq!(left(&job).len(), 2, "too young");
    job.sim.advance(HOUR);
    let report = gc(&job.root, &GcOptions { dry_run: true, ..GcOptions::default() }).unwrap();
    assert_eq!((report.removed.len(), left(&job).len()), (1, 2));
    gc(&job.root, &GcOptions::default()).unwrap();
    assert_eq!(left(&job), [".forebay/alive/00000002/beat-3"]);
}
