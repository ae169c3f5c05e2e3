//! Pins and holds that are made while somebody removes the step: it stays, or who made the mark is told.

use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Attempt, Committed, GcOptions, Hold, Marks, Pin, Policy, PruneOptions, Retention, Root, Spec,
    prune, retire,
};
use forebay_error::{Code, Result};
use forebay_store::{PosixStore, Store};

use crate::sim::{Actor, Pace, Slow};
use crate::world::*;

/// Longer than a remover waits between its announcement and the removal.
const PAUSE: Duration = Duration::from_secs(3);

fn two_steps() -> Job {
    let job = Job::new();
    for step in 1..=2 {
        save(&job.root, None, spec(step, attempt(1, step as u32), 0, 1)).unwrap();
    }
    job
}

fn slow(job: &Job, point: u64) -> (Arc<Slow>, Root) {
    let slow = Slow::new(Arc::new(job.store.clone()), &job.sim, Pace::PauseAt(point, PAUSE));
    let root = root(Arc::<Slow>::clone(&slow), &job.sim);
    (slow, root)
}

fn options() -> PruneOptions {
    let gc = GcOptions { grace: Duration::from_secs(30), ..GcOptions::default() };
    PruneOptions { gc, wait: true }
}

fn mark(root: &Root, by_pin: bool) -> Result<()> {
    let (step, who, unix) = (1, "me".to_owned(), 0);
    match by_pin {
        true => Marks::pin(root, &Pin { name: "best".to_owned(), step, who, unix }),
        false => Marks::hold(root, &Hold { step, who, unix, why: None }),
    }
}

/// A remover of step 1 and a mark of it, each slow at a point and later than the start by a lag.
struct Meeting {
    by_pin: bool,
    points: (u64, u64),
    lags_ms: (u64, u64),
}

/// What came of it.
struct Met {
    /// Whether the step stayed; `None` where it was gone before the mark was begun.
    stayed: Option<bool>,
    pruner_points: u64,
    maker_points: u64,
}

impl Meeting {
    fn hold(&self) -> Met {
        let job = two_steps();
        let (of_pruner, pruner) = slow(&job, self.points.0);
        let (of_maker, maker) = slow(&job, self.points.1);
        let removing = || {
            job.sim.clock_wait(Duration::from_millis(self.lags_ms.0));
            let retention = Retention { keep_last: 1, ..Retention::default() };
            let report = prune(&pruner, &retention, &options()).unwrap();
            assert!(report.failed.is_empty(), "{report:?}");
            None
        };
        let marking = || {
            job.sim.clock_wait(Duration::from_millis(self.lags_ms.1));
            let was_there = job.store.get("step-1/.metadata", 1 << 20).unwrap().is_some();
            let marked = mark(&maker, self.by_pin);
            was_there.then_some(marked)
        };
        let actors: Vec<Actor<'_, Option<Result<()>>>> =
            vec![Box::new(removing), Box::new(marking)];
        let (mut ends, _) = job.sim.run(actors);
        let marked = ends.remove(1);
        if let Some(marked) = &marked {
            self.check(&job, marked);
        }
        Met {
            stayed: marked.map(|marked| marked.is_ok()),
            pruner_points: of_pruner.points(),
            maker_points: of_maker.points(),
        }
    }

    fn check(&self, job: &Job, marked: &Result<()>) {
        let here = format!("{} {:?} {:?}: {marked:?}", self.by_pin, self.points, self.lags_ms);
        let kept = Marks::read(&job.root).unwrap().kept();
        let loaded = load(&job.store, 1);
        match marked {
            Ok(()) => {
                assert_eq!(loaded, Some(attempt(1, 1)), "{here}");
                assert!(kept.contains(&1), "{here}");
                let left = job.store.get("step-1/.forebay/00000001-1/removing", 9).unwrap();
                assert_eq!(left, None, "{here}");
            }
            Err(error) => {
                assert_eq!((error.code(), loaded), (Code::NotFound, None), "{here}");
                assert!(kept.is_empty(), "{here}");
            }
        }
    }
}

#[test]
fn a_mark_made_at_any_point_of_a_prune_keeps_the_step_or_fails() {
    let mut ends = [0, 0];
    for by_pin in [true, false] {
        // During the pause or the wait that comes first, and during a pause after the wait of two seconds.
        for lag in [1, 3000] {
            let lags_ms = (0, lag);
            let all = Meeting { by_pin, points: (u64::MAX, u64::MAX), lags_ms: (0, 3000) }.hold();
            assert_eq!(all.stayed, None, "the removal takes longer than the test thinks");
            for point in 0..all.pruner_points {
                let met = Meeting { by_pin, points: (point, u64::MAX), lags_ms }.hold();
                met.stayed.into_iter().for_each(|stayed| ends[usize::from(stayed)] += 1);
            }
        }
    }
    assert!(ends[0] > 0 && ends[1] > 20, "{ends:?}");
}

#[test]
fn a_mark_that_takes_its_time_keeps_the_step_or_fails() {
    let mut ends = [0, 0];
    for by_pin in [true, false] {
        for lag in [0, 500, 1000, 2500] {
            let lags_ms = (lag, 0);
            let all = Meeting { by_pin, points: (u64::MAX, u64::MAX), lags_ms }.hold();
            // A pause before the first call is one before the mark is begun.
            for point in 1..all.maker_points {
                let met = Meeting { by_pin, points: (u64::MAX, point), lags_ms }.hold();
                ends[usize::from(met.stayed.unwrap())] += 1;
            }
        }
    }
    assert!(ends[0] > 0 && ends[1] > 0, "{ends:?}");
}

#[test]
fn who_removes_by_rules_of_its_own_goes_by_marks_that_come_meanwhile() {
    for by_pin in [true, false] {
        let job = two_steps();
        let removing = || {
            let report = retire(&job.root, &[(1, attempt(1, 1))], &options()).unwrap();
            report.failed.iter().map(|(step, error)| (*step, error.code())).collect()
        };
        let marking = || {
            job.sim.clock_wait(Duration::from_secs(1));
            mark(&job.root, by_pin).unwrap();
            Vec::new()
        };
        let actors: Vec<Actor<'_, Vec<(u64, Code)>>> = vec![Box::new(removing), Box::new(marking)];
        let (ends, _) = job.sim.run(actors);
        assert_eq!(ends[0], [(1, Code::AlreadyExists)]);
        assert_eq!(load(&job.store, 1), Some(attempt(1, 1)));
        // A pin that was there before is the caller's matter; a hold never is.
        let report = retire(&job.root, &[(1, attempt(1, 1))], &options()).unwrap();
        assert_eq!(report.unpublished.len(), usize::from(by_pin), "{report:?}");
    }
}

/// A name that another step had stays with that one when the new one goes.
#[test]
fn a_pin_that_fails_is_where_it_was_before() {
    let job = two_steps();
    let old = Pin { name: "best".to_owned(), step: 2, who: "me".to_owned(), unix: 0 };
    Marks::pin(&job.root, &old).unwrap();
    let (_, maker) = slow(&job, 4);
    let removing = || {
        let retention = Retention { keep_last: 1, ..Retention::default() };
        prune(&job.root, &retention, &options()).unwrap();
        Ok(())
    };
    let marking = || mark(&maker, true);
    let actors: Vec<Actor<'_, Result<()>>> = vec![Box::new(marking), Box::new(removing)];
    let (ends, _) = job.sim.run(actors);
    assert_eq!(ends[0].as_ref().unwrap_err().code(), Code::NotFound);
    assert_eq!(Marks::read(&job.root).unwrap().pins, [old]);
}

/// Saves a step anew; `meanwhile` runs when the ranks have written their data.
fn save_anew(root: &Root, spec: Spec, meanwhile: impl Fn()) -> Result<Committed> {
    let (id, rank) = (spec.attempt, spec.rank);
    let policy = Policy { overwrite: true, ..policy() };
    let mut began = Attempt::begin(root, &policy, None, spec)?;
    write(&mut began, id, rank)?;
    began.wait_or_commit(&mut |gathered| {
        meanwhile();
        Ok(assemble(id, gathered))
    })
}

#[test]
fn a_step_that_is_held_while_it_is_saved_anew_is_not_replaced() {
    for held in [true, false] {
        let job = two_steps();
        let rank = |rank| -> Actor<'_, Result<Committed>> {
            let job = &job;
            let hold = move || {
                if held {
                    mark(&job.root, false).unwrap()
                }
            };
            Box::new(move || save_anew(&job.root, spec(1, attempt(2, 0), rank, 2), hold))
        };
        let (ends, _) = job.sim.run(vec![rank(0), rank(1)]);
        let right = held.then_some(Code::AlreadyExists);
        assert!(ends.iter().all(|end| code(end) == right), "{ends:?}");
        let there = if held { attempt(1, 1) } else { attempt(2, 0) };
        assert_eq!(load(&job.store, 1), Some(there));
        Marks::release(&job.root, 1).unwrap();
        collect_all(&job.root, &job.store, &job.sim);
        assert_eq!(load(&job.store, 1), Some(there));
    }
}

/// Writers of one checkpoint have the step's folder as their root, and holds are in the folder above.
#[test]
fn a_hold_counts_for_a_writer_whose_root_is_the_step_itself() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::new();
    let open = |path: &std::path::Path| root(Arc::new(PosixStore::create(path).unwrap()), &job.sim);
    let (above, own) = (open(folder.path()), open(&folder.path().join("step-1")));
    let spec = |save| Spec { folder: String::new(), ..spec(0, attempt(1, save), 0, 1) };
    save_anew(&own, spec(1), || {}).unwrap();
    save_anew(&own, spec(2), || {}).unwrap();
    let held = save_anew(&own, spec(3), || mark(&above, false).unwrap());
    assert_eq!(code(&held), Some(Code::AlreadyExists));
    assert_eq!(code(&save_anew(&own, spec(4), || {})), Some(Code::AlreadyExists));
    assert_eq!(load(above.store.as_ref(), 1), Some(attempt(1, 2)));
    Marks::release(&above, 1).unwrap();
    save_anew(&own, spec(5), || {}).unwrap();
    assert_eq!(load(above.store.as_ref(), 1), Some(attempt(1, 5)));
}
