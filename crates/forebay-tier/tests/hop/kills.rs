//! Killed at every call of either store, then resumed.

use std::sync::Arc;

use forebay_checkpoint::commit::{latest, steps};
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::fault::{Action, Fault, FaultStore, Plan, When};
use forebay_store::{MemoryStore, PosixStore, Store};
use forebay_tier::hop::{Arrival, Share, hop};

use crate::world::{data_bytes, files, objects, options, root, side, source};

type Client = Arc<FaultStore<dyn Store>>;

fn client(store: &Arc<dyn Store>, plan: Plan) -> Client {
    Arc::new(FaultStore::new(Arc::clone(store), plan))
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

/// Bytes that a client has been asked to write to data objects. Counted by calls: a write is one part.
fn writes(client: &Client) -> usize {
    let log = client.log();
    let is_write = |step: &&forebay_store::fault::Step| {
        step.action == Action::Write && step.when == When::Before
    };
    log.iter().filter(is_write).count()
}

fn check_whole(from: &MemoryStore, to: &Arc<dyn Store>, place: &str) {
    assert_eq!(files(from, 7), files(to, 7), "{place}");
    let there = root(Arc::clone(to));
    let listed = steps(&there, std::time::Duration::ZERO).unwrap();
    assert_eq!(listed.len(), 1, "{place}");
    let commit = listed[0].commit.as_ref().unwrap();
    assert!(commit.damage.is_none() && listed[0].attempts.is_empty(), "{place}: {listed:?}");
    assert_eq!(commit.epoch, 1);
    assert_eq!(latest(&there).unwrap().unwrap().step, 7, "{place}");
    // Nothing but the record of the commit is left of the copying.
    let records: Vec<String> = objects(to, "step-7/.forebay/").into_keys().collect();
    assert_eq!(records.len(), 2, "{place}: {records:?}");
    assert!(records[0].ends_with("/decision") && records[1].ends_with("/outcome"));
}

/// One kill at each step of the destination's client, or of the source's; every `stride`th.
fn kill_everywhere(
    kill_source: bool,
    stride: usize,
    empty: &dyn Fn() -> Arc<dyn Store>,
) -> (u64, u64) {
    let from = source();
    let (whole, shared): (u64, Arc<dyn Store>) = (data_bytes(&from), Arc::new(from.clone()));
    let run = |to: &Arc<dyn Store>, plan: Plan| {
        let (source_plan, plan) =
            if kill_source { (plan, Plan::none()) } else { (Plan::none(), plan) };
        let (reader, writer) = (client(&shared, source_plan), client(to, plan));
        let from = side(Arc::clone(&reader) as Arc<dyn Store>);
        let to = side(Arc::clone(&writer) as Arc<dyn Store>);
        let done = hop(&from, &to, 7, &options(Share::all()), &Unwatched);
        (done, reader, writer)
    };
    let quiet = empty();
    let (done, reader, writer) = run(&quiet, Plan::none());
    let done = done.unwrap();
    assert_eq!(done.arrival, Arrival::Committed { by_us: true, durable: true });
    assert_eq!(done.bytes_sent, whole);
    check_whole(&from, &quiet, "without a kill");
    let steps = if kill_source { reader.steps() } else { writer.steps() };
    let parts = writes(&writer);
    let mut kills = 0;
    for step in (0..steps).step_by(stride) {
        let to = empty();
        let (killed, reader, writer) = run(&to, Plan::at(step, Fault::Kill));
        kills += u64::from(if kill_source { reader.killed() } else { writer.killed() });
        // What a dead mover may have left is never a commit that is not whole.
        if to.get("step-7/.metadata", 1 << 30).unwrap().is_some() {
            assert_eq!(files(&from, 7), files(&to, 7), "step {step}");
        }
        let sent_before = writes(&writer);
        let (resumed, _, writer) = run(&to, Plan::none());
        let resumed = resumed.unwrap();
        check_whole(&from, &to, &format!("killed at step {step}"));
        if killed.is_ok() {
            assert_eq!(resumed.bytes_sent, 0, "killed at step {step}");
        }
        // A kill costs the part under way, once, and nothing that had arrived.
        let sent = sent_before + writes(&writer);
        assert!(sent <= parts + 1, "step {step}: {sent} parts sent of {parts}");
        let all = u64::try_from(sent_before).unwrap() * crate::world::PART_BYTES;
        assert!(resumed.bytes_sent + all >= whole, "step {step}: bytes that nobody sent");
    }
    (kills, steps)
}

#[test]
fn killed_at_every_call_to_the_destination_it_goes_on_and_commits_once() {
    let (kills, steps) = kill_everywhere(false, 1, &memory);
    println!("{kills} kills of the destination's client");
    assert_eq!(kills, steps);
    assert!(kills >= 70, "{kills} kills");
}

#[test]
fn killed_at_every_call_to_the_source_it_goes_on_and_commits_once() {
    let (kills, steps) = kill_everywhere(true, 1, &memory);
    println!("{kills} kills of the source's client");
    assert_eq!(kills, steps);
    assert!(kills >= 25, "{kills} kills");
}

#[test]
fn killed_movers_into_a_folder_cost_a_part_each() {
    let folder = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    let empty = || {
        count.set(count.get() + 1);
        let path = folder.path().join(count.get().to_string());
        Arc::new(PosixStore::create(&path).unwrap()) as Arc<dyn Store>
    };
    let (kills, _) = kill_everywhere(false, 3, &empty);
    assert!(kills >= 25, "{kills} kills");
    let (kills, _) = kill_everywhere(true, 3, &empty);
    assert!(kills >= 8, "{kills} kills");
}

/// Killed again and again, a little further each time.
#[test]
fn many_kills_of_one_hop_cost_a_part_each_at_the_most() {
    let from = source();
    let (to, mut sent, mut kills) = (memory(), 0, 0);
    for after in (11..).step_by(4) {
        let writer = client(&to, Plan::at(after, Fault::Kill));
        let there = side(Arc::clone(&writer) as Arc<dyn Store>);
        let here = side(Arc::new(from.clone()));
        let done = hop(&here, &there, 7, &options(Share::all()), &Unwatched);
        sent += writes(&writer);
        match done {
            Ok(_) => break,
            Err(error) => assert_eq!(error.code(), Code::Io),
        }
        kills += 1;
    }
    assert!(kills > 3, "{kills}");
    check_whole(&from, &to, "after many kills");
    let parts = |bytes: u64| usize::try_from(bytes.div_ceil(crate::world::PART_BYTES)).unwrap();
    let all: usize = files(&from, 7)
        .iter()
        .filter(|(key, _)| !key.ends_with(".metadata"))
        .map(|(_, bytes)| parts(bytes.len() as u64))
        .sum();
    assert!(sent <= all + kills, "{sent} parts, {all} in the step, {kills} kills");
}

/// Every fault that a store may answer with leaves a step that the next hop completes.
#[test]
fn lost_replies_torn_writes_and_errors_are_gone_on_from() {
    let from = source();
    let faults = [Fault::LostReply, Fault::Torn, Fault::Short, Fault::Errno(5), Fault::NotDurable];
    let mut struck = 0;
    for fault in faults {
        for step in 0.. {
            let to = memory();
            let writer = client(&to, Plan::at(step, fault));
            let there = side(Arc::clone(&writer) as Arc<dyn Store>);
            let here = side(Arc::new(from.clone()));
            let first = hop(&here, &there, 7, &options(Share::all()), &Unwatched);
            if step >= writer.steps() {
                break;
            }
            struck += writer.fired();
            if first.is_err() {
                let there = side(Arc::clone(&to));
                hop(&here, &there, 7, &options(Share::all()), &Unwatched).unwrap();
            }
            assert_eq!(files(&from, 7), files(&to, 7), "{fault:?} at step {step}");
        }
    }
    assert!(struck > 200, "{struck}");
}
