//! Several movers of one step: sharing it, racing for it.

use std::sync::Arc;

use forebay_checkpoint::commit::{RunId, claim};
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, PosixStore, Store};
use forebay_tier::hop::{Arrival, Share, hop};

use crate::world::{data_bytes, files, options, root, save, side, source};

#[test]
fn each_mover_brings_its_ranks_files_and_the_last_commits() {
    let (from, to) = (source(), MemoryStore::new());
    let (here, there) = (side(Arc::new(from.clone())), side(Arc::new(to.clone())));
    let first = hop(&here, &there, 7, &options(Share::of(0, 2)), &Unwatched).unwrap();
    let Arrival::Waiting { files: left } = first.arrival else { panic!("{first:?}") };
    assert!(left > 0 && first.files.0 > 0);
    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
    // Again, before the other has come: nothing to do.
    let again = hop(&here, &there, 7, &options(Share::of(0, 2)), &Unwatched).unwrap();
    assert_eq!((again.bytes_sent, again.arrival), (0, first.arrival));
    let second = hop(&here, &there, 7, &options(Share::of_ranks(1, 2, [1])), &Unwatched).unwrap();
    assert_eq!(second.arrival, Arrival::Committed { by_us: true, durable: true });
    assert_eq!(first.bytes_sent + second.bytes_sent, data_bytes(&from));
    assert_eq!(files(&from, 7), files(&to, 7));
    let late = hop(&here, &there, 7, &options(Share::of(0, 2)), &Unwatched).unwrap();
    assert_eq!(late.arrival, Arrival::Committed { by_us: false, durable: true });
    assert_eq!(late.bytes_sent, 0);
}

fn race(here: &Arc<dyn Store>, there: &Arc<dyn Store>, shares: &[Share]) -> usize {
    let from = side(Arc::clone(here));
    let to = side(Arc::clone(there));
    let start = std::sync::Barrier::new(shares.len());
    let reports: Vec<_> = std::thread::scope(|scope| {
        let movers: Vec<_> = shares
            .iter()
            .map(|share| {
                let (from, to, start) = (&from, &to, &start);
                scope.spawn(move || {
                    start.wait();
                    hop(from, to, 7, &options(share.clone()), &Unwatched)
                })
            })
            .collect();
        movers.into_iter().map(|mover| mover.join().unwrap()).collect()
    });
    let committed = |by_us: bool| Arrival::Committed { by_us, durable: true };
    for report in &reports {
        match report {
            Ok(report) => assert!(
                report.arrival == committed(true)
                    || report.arrival == committed(false)
                    || matches!(report.arrival, Arrival::Waiting { .. }),
            ),
            // Two of one number take each other's work away; one of them gets it done.
            Err(error) => assert_eq!(error.code(), Code::Fenced, "{error}"),
        }
    }
    let is_ours = |report: &&forebay_error::Result<forebay_tier::hop::HopReport>| {
        report.as_ref().is_ok_and(|report| report.arrival == committed(true))
    };
    reports.iter().filter(is_ours).count()
}

#[test]
fn movers_that_race_make_one_commit() {
    for round in 0..12 {
        let (from, to) = (source(), MemoryStore::new());
        let (here, there): (Arc<dyn Store>, Arc<dyn Store>) =
            (Arc::new(from.clone()), Arc::new(to.clone()));
        let shares = match round % 3 {
            0 => vec![Share::of(0, 2), Share::of(1, 2)],
            // The same files, by two numbers, and by one.
            1 => vec![Share::of_ranks(0, 2, [0, 1]), Share::of_ranks(1, 2, [0, 1])],
            _ => vec![Share::all(), Share::all()],
        };
        let commits = race(&here, &there, &shares);
        assert!(commits <= 1, "{commits} commits in round {round}");
        let last = hop(&side(here), &side(there), 7, &options(Share::all()), &Unwatched);
        assert!(matches!(last.unwrap().arrival, Arrival::Committed { .. }));
        assert_eq!(files(&from, 7), files(&to, 7));
    }
}

#[test]
fn movers_race_in_folders_too() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let from = source();
        let path = folder.path().join(round.to_string());
        std::fs::create_dir(&path).unwrap();
        let to: Arc<dyn Store> = Arc::new(PosixStore::open(&path).unwrap());
        let here: Arc<dyn Store> = Arc::new(from.clone());
        let shares = [Share::of_ranks(0, 2, [0, 1]), Share::of_ranks(1, 2, [0, 1])];
        assert_eq!(race(&here, &to, &shares), 1, "round {round}");
        assert_eq!(files(&from, 7), files(&*to, 7));
    }
}

/// One mover dies at each of its steps while the other has done its share; a third run ends it.
#[test]
fn a_mover_that_dies_does_not_cost_the_other_its_work() {
    let from = source();
    for step in (0..200).step_by(7) {
        let to = MemoryStore::new();
        let here = side(Arc::new(from.clone()));
        let victim = Arc::new(FaultStore::new(Arc::new(to.clone()), Plan::at(step, Fault::Kill)));
        let dead = side(Arc::clone(&victim) as Arc<dyn Store>);
        let _ = hop(&here, &dead, 7, &options(Share::of(0, 2)), &Unwatched);
        let there = side(Arc::new(to.clone()));
        let other = hop(&here, &there, 7, &options(Share::of(1, 2)), &Unwatched).unwrap();
        let last = hop(&here, &there, 7, &options(Share::of(0, 2)), &Unwatched).unwrap();
        assert!(matches!(last.arrival, Arrival::Committed { .. }), "{other:?} {last:?}");
        assert_eq!(files(&from, 7), files(&to, 7));
        if !victim.killed() {
            return;
        }
    }
    panic!("a hop has more steps than this test thought");
}

#[test]
fn another_commit_of_the_step_is_neither_touched_nor_taken_for_the_same() {
    let (from, to) = (source(), MemoryStore::new());
    let there: Arc<dyn Store> = Arc::new(to.clone());
    save(&there, 7, 9, 0);
    let before = files(&to, 7);
    let here = side(Arc::new(from));
    let error = hop(&here, &side(there), 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::LostCommit);
    assert_eq!(before, files(&to, 7));
}

#[test]
fn a_folder_that_another_job_has_claimed_is_refused() {
    let (from, to) = (source(), MemoryStore::new());
    let there: Arc<dyn Store> = Arc::new(to.clone());
    claim(&root(Arc::clone(&there)), RunId(0xdef), None, "another job").unwrap();
    let here = side(Arc::new(from));
    let error = hop(&here, &side(there), 7, &options(Share::all()), &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    assert!(!files(&to, 7).contains_key("step-7/.metadata"));
}
