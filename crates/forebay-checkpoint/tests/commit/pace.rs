//! A committer with much to do is not taken for one that is gone; a rank forgives a store that stumbles.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use forebay_checkpoint::commit::{Attempt, Committed, Policy, Root, SystemClock};
use forebay_error::{Code, Result};
use forebay_store::fault::{Action, Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Pace, Slow};
use crate::world::*;

/// Saves with a committer that is `busy` in its closure; how many committers there were, and what they got.
fn committers(root: &Root, policy: &Policy, rank: u32, world: u32, busy: impl Fn()) -> (u32, bool) {
    let mut began =
        Attempt::begin(root, policy, None, spec(5, attempt(1, 0), rank, world)).unwrap();
    write(&mut began, attempt(1, 0), rank).unwrap();
    let mut count = 0;
    let result: Result<Committed> = began.wait_or_commit(&mut |gathered| {
        count += 1;
        busy();
        Ok(assemble(attempt(1, 0), gathered))
    });
    (count, result.is_ok())
}

#[test]
fn a_committer_that_reads_many_parts_is_left_to_it() {
    const WORLD: u32 = 16;
    let job = Job::new();
    // Three seconds a part, and four until others take over.
    let slow =
        Slow::new(Arc::new(job.store.clone()), &job.sim, Pace::Parts(Duration::from_secs(3)));
    let reading = root(slow, &job.sim);
    let actor = |rank: u32| -> Actor<'_, (u32, bool)> {
        let root = if rank == 0 { reading.clone() } else { job.root.clone() };
        Box::new(move || committers(&root, &policy(), rank, WORLD, || {}))
    };
    let (ends, took) = job.sim.run((0..WORLD).map(actor).collect());
    assert!(took > Duration::from_secs(40), "{took:?}");
    assert!(ends.iter().all(|(_, committed)| *committed));
    let counts: Vec<u32> = ends.iter().map(|(count, _)| *count).collect();
    assert_eq!((counts[0], counts.iter().sum::<u32>()), (1, 1), "{counts:?}");
    collect_all(&job.root, &job.store, &job.sim);
}

#[test]
fn a_committer_that_assembles_for_long_is_left_to_it() {
    const WORLD: u32 = 3;
    let root = Root {
        store: Arc::new(MemoryStore::new()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(TextMetadata),
    };
    let policy = Policy { takeover: Duration::from_millis(1500), ..policy() };
    let others = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let (root, policy, others) = (&root, &policy, &others);
            scope.spawn(move || {
                let busy = || std::thread::sleep(Duration::from_secs(6));
                let (count, committed) = committers(root, policy, rank, WORLD, busy);
                assert!(committed);
                others.fetch_add(if rank == 0 { 0 } else { count }, Relaxed);
            });
        }
    });
    assert_eq!(others.into_inner(), 0, "three takeover times and more have passed");
}

#[test]
fn a_look_that_fails_now_and_then_ends_no_save() {
    let job = Job::new();
    let inner: Arc<dyn Store> = Arc::new(job.store.clone());
    let counting = Arc::new(FaultStore::new(Arc::clone(&inner), Plan::none()));
    let look = |plan: Plan| {
        let client = Arc::new(FaultStore::new(Arc::clone(&inner), plan));
        let store: Arc<dyn Store> = Arc::<FaultStore<dyn Store>>::clone(&client);
        (
            Attempt::begin(
                &root(store, &job.sim),
                &policy(),
                None,
                spec(5, attempt(1, client.steps() as u32), 0, 1),
            ),
            client,
        )
    };
    drop(counting);
    let (began, client) = look(Plan::none());
    let first = client.steps();
    drop(began);
    job.sim.advance(HOUR * 24);
    forebay_checkpoint::commit::gc(&job.root, &Default::default()).unwrap();
    // One look in vain, then others that are answered.
    let (began, client) = look(Plan::at(first, Fault::Errno(5)));
    let began = began.unwrap();
    for _ in 0..9 {
        began.check().unwrap();
    }
    assert_eq!(client.fired(), 1);
    assert!(client.log().iter().skip(first as usize).all(|step| step.action == Action::Get));
    drop(began);
    job.sim.advance(HOUR * 24);
    forebay_checkpoint::commit::gc(&job.root, &Default::default()).unwrap();
    // A store that does not come back.
    let (began, _) = look(Plan::from(first, Fault::Errno(5)));
    let began = began.unwrap();
    let fine = (0..9).take_while(|_| began.check().is_ok()).count();
    assert_eq!(fine as u32 + 1, policy().poll_errors_max);
    assert_eq!(began.check().unwrap_err().code(), Code::Io);
}
