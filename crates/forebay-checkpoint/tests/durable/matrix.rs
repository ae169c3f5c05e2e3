//! Every call to the kernel that changes something, of a save, of an overwrite, of a prune, fails in every way.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_checkpoint::commit::Root;
use forebay_store::fault::{Fault, FaultFolder, Plan, Step, When};
use forebay_store::is_temp;

use crate::world::*;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const FAULTS: [Fault; 5] =
    [Fault::Kill, Fault::Errno(EIO), Fault::Errno(ENOSPC), Fault::Torn, Fault::LostReply];
/// Points that are tried at a time: most wait for a rank that was killed.
const AT_A_TIME: usize = 16;

/// A fault at a step.
#[derive(Clone, Debug)]
struct Point {
    step: Step,
    fault: Fault,
}

/// Runs `check` for each fault at each of the steps; returns how many struck.
fn for_each(steps: &[Step], check: impl Fn(&Point) -> bool + Sync) -> usize {
    let all = steps.iter().flat_map(|step| FAULTS.map(|fault| Point { step: step.clone(), fault }));
    let todo = Mutex::new(all);
    let struck = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let Some(point) = todo.lock().unwrap().next() else { return };
                    let context = Context(&point);
                    struck.fetch_add(usize::from(check(&point)), Ordering::Relaxed);
                    std::mem::forget(context);
                }
            });
        }
    });
    struck.into_inner()
}

/// Says which point it was when an assertion fails.
struct Context<'a>(&'a Point);

impl Drop for Context<'_> {
    fn drop(&mut self) {
        println!("the matrix failed at {:?}", self.0);
    }
}

/// Saves step 7 as save 2 with `victim` under the plan, the others whole; over save 1 if there is to be one.
fn run(
    folder: &Path,
    (victim, world): (u32, u32),
    over: bool,
    plan: Option<Plan>,
) -> (FaultFolder, Vec<forebay_error::Result<bool>>) {
    if over {
        let roots: Vec<Root> = (0..world).map(|_| plain(folder)).collect();
        save_all(&roots, 7, 1).into_iter().for_each(|end| assert!(end.unwrap()));
    }
    let in_a_hurry = plan.is_some();
    let client = FaultFolder::open(folder, plan.unwrap_or_default()).unwrap();
    let roots: Vec<Root> = (0..world)
        .map(|rank| if rank == victim { root(client.store()) } else { plain(folder) })
        .collect();
    // Without a fault nobody is in a hurry, so that the steps are the same on a machine that is busy.
    let ends = match in_a_hurry {
        true => save_with(&hurried(), &roots, 7, 2),
        false => save_all(&roots, 7, 2),
    };
    (client, ends)
}

fn check(point: &Point, who: (u32, u32), over: bool) -> bool {
    let folder = folder();
    let (client, ends) =
        run(folder.path(), who, over, Some(Plan::at(point.step.index, point.fault)));
    if client.fired() == 0 {
        // Another order of calls: threads and times decide how many there are.
        return false;
    }
    let loaded = load(folder.path(), 7);
    assert!(loaded == Some(2) || loaded == over.then_some(1), "{loaded:?} {ends:?}");
    for (rank, end) in (0..).zip(&ends) {
        match end {
            Ok(_) => assert_eq!(loaded, Some(2), "rank {rank} was told of a commit: {ends:?}"),
            // Only who cannot reach the store any more may fail to hear of a commit.
            Err(_) if loaded == Some(2) => {
                assert!(client.killed() && rank == who.0, "rank {rank}: {ends:?}");
            }
            Err(_) => {}
        }
    }
    go_on(folder.path(), 7, 3);
    true
}

/// The steps of a save without faults.
fn steps_of(who: (u32, u32), over: bool) -> Vec<Step> {
    let folder = folder();
    let (client, ends) = run(folder.path(), who, over, None);
    assert!(ends.iter().all(|end| *end.as_ref().unwrap()), "{ends:?}");
    assert_eq!(load(folder.path(), 7), Some(2));
    client.log()
}

/// Calls to the kernel of a first save of one rank: four records (begin, manifest, staged source, decision) of six each
/// (Open, Pwrite, Fsync, Link or Rename, FsyncFolder, Unlink of the temporary name), two files of five each (Open,
/// Fallocate, Pwrite, Fsync, FsyncFolder), seven for the root and three folders (Mkdir, FsyncFolder), the publication's
/// seven (Link, FsyncFolder, the lock's Mkdir and Flock, Unlink, FsyncFolder, Rmdir), three of the cleaning up (two
/// Unlinks, Rmdir). A replacement is a Rename under the lock, without Link and Unlink.
const CALLS: usize = 4 * 6 + 2 * 5 + 7 + 7 + 3;

/// A thread writes data while another makes the side file, so the order of a few calls is not the same each time, and a
/// full disk does not strike them all.
const ORDER: usize = 6;

fn calls(steps: &[Step]) -> usize {
    steps.iter().filter(|step| step.when == When::Before).count()
}

/// How many faults strike if each comes at its step: all, but that a full disk only stops what needs room.
fn strikes(steps: &[Step]) -> usize {
    let full = |step: &&Step| step.when == When::Before && step.action.needs_room();
    steps.len() * (FAULTS.len() - 1) + steps.iter().filter(full).count()
}

#[test]
fn a_fault_at_any_call_of_a_save_leaves_a_whole_step_or_none() {
    for over in [false, true] {
        let steps = steps_of((0, 1), over);
        assert_eq!(calls(&steps), CALLS - usize::from(over), "{steps:#?}");
        let struck = for_each(&steps, |point| check(point, (0, 1), over));
        println!("{struck} faults at {} steps of a save, over another: {over}", steps.len());
        assert!(struck + ORDER >= strikes(&steps), "{struck} of {}", strikes(&steps));
    }
}

#[test]
fn a_fault_at_any_call_of_one_of_two_ranks_is_told_to_both() {
    for victim in [0, 1] {
        let steps = steps_of((victim, 2), victim == 0);
        let struck = for_each(&steps, |point| check(point, (victim, 2), victim == 0));
        println!("{struck} faults at {} steps of rank {victim} of two", steps.len());
        // As alone, with part and rooms (each Open, Fallocate, Pwrite, Fsync and two names) and the outcome; and
        // where it does not commit, without manifest, staged source, decision, publication.
        let least = if victim == 0 { 64 } else { 36 };
        assert!(calls(&steps) >= least, "{}: {steps:#?}", calls(&steps));
        assert!(struck * 10 >= strikes(&steps) * 9, "{struck} of {}", strikes(&steps));
    }
}

#[test]
fn a_fault_at_any_call_of_a_prune_leaves_whole_commits_and_the_next_one_finishes_it() {
    let two_steps = |folder: &Path| {
        let root = plain(folder);
        for (step, save_number) in [(7, 1), (8, 2)] {
            save(&root, Which { step, save: save_number, rank: 0, world: 1 }).unwrap();
        }
    };
    let first = folder();
    two_steps(first.path());
    let client = FaultFolder::open(first.path(), Plan::none()).unwrap();
    assert!(prune_to_one(&root(client.store())));
    assert_eq!((load(first.path(), 7), load(first.path(), 8)), (None, Some(2)));
    let steps = client.log();
    let struck = for_each(&steps, |point| {
        let folder = folder();
        two_steps(folder.path());
        let plan = Plan::at(point.step.index, point.fault);
        let client = FaultFolder::open(folder.path(), plan).unwrap();
        prune_to_one(&root(client.store()));
        if client.fired() == 0 {
            return false;
        }
        assert_eq!(load(folder.path(), 8), Some(2), "the newest stays");
        assert!([None, Some(1)].contains(&load(folder.path(), 7)));
        assert!(prune_to_one(&plain(folder.path())));
        assert_eq!((load(folder.path(), 7), load(folder.path(), 8)), (None, Some(2)));
        go_on(folder.path(), 8, 3);
        // Temporary files may be a writer's for an hour.
        let left = plain(folder.path()).store.list("step-7/", 100).unwrap();
        assert!(left.iter().all(|object| is_temp(&object.key)), "{left:?}");
        true
    });
    println!("{struck} faults at {} steps of a prune", steps.len());
    // The announcement, six calls as any record; the move of `.metadata` with two names and two folders; and of what is
    // removed (decision, data, side file, manifest, the announcement, what was moved) name and folder each.
    assert!(calls(&steps) >= 6 + 5 + 6 * 2, "{steps:#?}");
    assert!(struck + ORDER >= strikes(&steps), "{struck} of {}", strikes(&steps));
}
