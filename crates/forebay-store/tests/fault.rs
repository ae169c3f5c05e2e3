//! The fault wrapper itself: every fault at every step does what it says, and nothing else.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::{read_exact_at, write_all_at};
use forebay_error::{Code, Error, Result};
use forebay_store::fault::{Action, Call, Fault, FaultFolder, FaultStore, KILLED, Plan, When};
use forebay_store::{Expect, MemoryStore, Published, Store};

const BYTES: &[u8] = &[9; 1000];

/// One of each call, in an order in which each depends on those before.
fn all_calls(store: &dyn Store) -> Result<()> {
    store.create("created", b"1")?;
    let data = store.create_data("data", BYTES.len() as u64)?;
    write_all_at(data.sink(), BYTES, 0)?;
    data.seal()?;
    store.put("staged", b"2")?;
    store.get("staged", 10)?;
    let end = store.publish("staged", "published", &Expect::Absent)?;
    if end != (Published::Done { durable: true }) {
        return Err(Error::new(Code::LostCommit, format!("{end:?}")));
    }
    store.list("", 10)?;
    store.names("", 10)?;
    let source = store.open_data("data")?;
    let mut bytes = [0; BYTES.len()];
    read_exact_at(source.as_ref(), &mut bytes, 0)?;
    assert_eq!(bytes, BYTES);
    store.remove("created")?;
    Ok(())
}

fn client(plan: Plan) -> (MemoryStore, FaultStore<MemoryStore>) {
    let store = MemoryStore::new();
    (store.clone(), FaultStore::new(Arc::new(store), plan))
}

/// Every step of [`all_calls`].
fn steps() -> Vec<(Action, When)> {
    let (_, counting) = client(Plan::none());
    all_calls(&counting).unwrap();
    assert_eq!(counting.fired(), 0);
    let log = counting.log();
    assert!(log.iter().enumerate().all(|(index, step)| step.index == index as u64));
    assert_eq!(log.len() as u64, counting.steps());
    log.into_iter().map(|step| (step.action, step.when)).collect()
}

/// How many of the changes of [`all_calls`] are in a store, in their order.
fn changes_in(store: &MemoryStore) -> usize {
    let bytes = |key| store.get(key, 2000).unwrap().map(|(bytes, _)| bytes);
    let data = bytes("data");
    let published = bytes("published").is_some();
    let created = bytes("created").is_some();
    match (created, data, bytes("staged").is_some(), published) {
        (false, None, false, false) => 0,
        (true, None, false, false) => 1,
        (true, Some(data), false, false) if data != BYTES => 2,
        // A seal changes nothing that is seen.
        (true, Some(_), false, false) => 3,
        (true, Some(_), true, false) => 4,
        (true, Some(_), false, true) => 5,
        (false, Some(_), false, true) => 6,
        state => panic!("{state:?}"),
    }
}

#[test]
fn changes_are_two_steps_and_looks_are_one() {
    use Action::{Create, CreateData, Get, List, Names, OpenData, Publish, Put, Read, Remove};
    let changing = [Create, CreateData, Action::Write, Action::Seal, Put];
    let mut expected: Vec<_> = changing.iter().flat_map(|a| both(*a)).collect();
    expected.push((Get, When::Before));
    expected.extend(both(Publish));
    expected.extend([List, Names, OpenData, Read].map(|action| (action, When::Before)));
    expected.extend(both(Remove));
    assert_eq!(steps(), expected);
}

fn both(action: Action) -> [(Action, When); 2] {
    [(action, When::Before), (action, When::After)]
}

#[test]
fn a_kill_at_each_step_stops_that_client_there_and_no_other() {
    let steps = steps();
    let mut seen = Vec::new();
    for step in 0..steps.len() as u64 {
        let (store, victim) = client(Plan::at(step, Fault::Kill));
        let error = all_calls(&victim).unwrap_err();
        assert!(error.render().contains(KILLED), "{error:?}");
        assert!(victim.killed() && victim.fired() == 1 && victim.steps() == step + 1);
        seen.push(changes_in(&store));
        assert!(victim.get("staged", 9).is_err() && victim.put("x", b"").is_err());
        assert_eq!(store.get("x", 9).unwrap(), None, "a dead client changes nothing");
        assert_eq!(victim.steps(), step + 1, "a dead client takes no steps");
        store.put("x", b"another client goes on").unwrap();
    }
    // Before and after each change, then the looks after it.
    assert_eq!(seen, [0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 5, 6]);
}

#[test]
fn an_errno_at_each_step_is_told_and_the_client_lives() {
    for (index, (action, when)) in steps().into_iter().enumerate() {
        let (_, client) = client(Plan::at(index as u64, Fault::Errno(libc::EIO)));
        let error = all_calls(&client).unwrap_err();
        assert_eq!(error.code(), Code::Io, "{action:?} {when:?}");
        client.put("x", b"").unwrap();
    }
}

#[test]
fn a_full_disk_strikes_where_room_is_needed_and_stays_full() {
    for (index, (action, when)) in steps().into_iter().enumerate() {
        let (_, client) = client(Plan::at(index as u64, Fault::Errno(libc::ENOSPC)));
        let end = all_calls(&client);
        let strikes = action.needs_room() && when == When::Before;
        assert_eq!(client.fired(), u64::from(strikes));
        assert_eq!(end.err().map(|e| e.code()), strikes.then_some(Code::NoSpace), "{action:?}");
    }
    let (_, client) = client(Plan::from(4, Fault::Errno(libc::ENOSPC)));
    assert_eq!(all_calls(&client).unwrap_err().code(), Code::NoSpace);
    assert_eq!(client.put("a", b"").unwrap_err().code(), Code::NoSpace);
    assert!(client.remove("created").unwrap(), "removing needs no room");
}

#[test]
fn a_torn_write_leaves_half() {
    let steps = steps();
    let write = steps.iter().position(|step| *step == (Action::Write, When::Before)).unwrap();
    let (store, victim) = client(Plan::at(write as u64, Fault::Torn));
    assert_eq!(all_calls(&victim).unwrap_err().code(), Code::Io);
    let (bytes, _) = store.get("data", 2000).unwrap().unwrap();
    assert_eq!((&bytes[..500], &bytes[500..]), (&BYTES[..500], &[0; 500][..]));
}

#[test]
fn short_reads_and_writes_are_gone_on_with() {
    let (store, client) = client(Plan::from(0, Fault::Short));
    all_calls(&client).unwrap();
    assert_eq!(store.get("data", 2000).unwrap().unwrap().0, BYTES);
    let of = |action| client.log().iter().filter(|step| step.action == action).count();
    assert!(of(Action::Read) > 5 && of(Action::Write) > 10, "halves of halves");
}

#[test]
fn a_lost_reply_is_a_timeout_after_the_effect() {
    for (index, (action, when)) in steps().into_iter().enumerate() {
        let (store, client) = client(Plan::at(index as u64, Fault::LostReply));
        let end = all_calls(&client);
        if !action.changes() {
            end.unwrap();
            continue;
        }
        assert_eq!(end.unwrap_err().code(), Code::Timeout, "{action:?} {when:?}");
        let begun = steps().into_iter().take(index + 1);
        let begun = begun.filter(|(action, when)| action.changes() && *when == When::Before);
        let seen = [0, 1, 2, 3, 3, 4, 5, 6][begun.count()];
        assert_eq!(changes_in(&store), seen, "{action:?} {when:?}");
    }
}

#[test]
fn a_change_that_is_not_durable_is_there_and_is_told() {
    for (index, (action, when)) in steps().into_iter().enumerate() {
        let (store, client) = client(Plan::at(index as u64, Fault::NotDurable));
        let end = all_calls(&client);
        let strikes = action.is_durable() && when == When::Before;
        assert_eq!(end.err().map(|error| error.code()), strikes.then_some(Code::NotDurable));
        if strikes {
            let begun = steps().into_iter().take(index + 1);
            let begun = begun.filter(|(action, when)| action.changes() && *when == When::Before);
            let seen = [0, 1, 2, 3, 3, 4, 5, 6][begun.count()];
            assert_eq!(changes_in(&store), seen, "{action:?}");
        }
    }
    // Nothing was changed, so nothing can fail to be durable.
    let (store, client) = client(Plan::from(0, Fault::NotDurable));
    store.put("taken", b"1").unwrap();
    assert!(!client.create("taken", b"2").unwrap() && !client.remove("none").unwrap());
    let end = client.publish("none", "to", &Expect::Absent).unwrap();
    assert_eq!(end, Published::Withdrawn);
}

#[test]
fn a_slow_step_takes_its_time() {
    let (_, client) = client(Plan::at(0, Fault::Slow(Duration::from_millis(80))));
    let start = Instant::now();
    all_calls(&client).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(80));
    assert_eq!(client.fired(), 1);
}

#[test]
fn a_seed_decides_everything_and_is_named() {
    let faults = [Fault::Errno(libc::EIO), Fault::Torn, Fault::LostReply, Fault::Kill];
    let run = |seed| {
        let (_, client) = client(Plan::seeded(seed, 10, &faults));
        let error = all_calls(&client).err().map(|error| error.render());
        (client.steps(), client.fired(), error)
    };
    let all: Vec<_> = (0..200).map(run).collect();
    assert_eq!(all, (0..200).map(run).collect::<Vec<_>>());
    let failed = all.iter().filter(|(_, fired, _)| *fired > 0).count();
    assert!((100..199).contains(&failed), "{failed} of 200");
    for (seed, (_, fired, error)) in all.iter().enumerate() {
        assert_eq!(*fired > 0, error.is_some());
        let text = error.clone().unwrap_or_default();
        assert!(*fired == 0 || text.contains(&format!("seed {seed}")), "{text}");
    }
}

/// A folder with a client that has this plan.
fn folder_client(plan: Plan) -> (tempfile::TempDir, FaultFolder) {
    let folder = tempfile::tempdir().unwrap();
    let client = FaultFolder::open(folder.path(), plan).unwrap();
    (folder, client)
}

#[test]
fn faults_strike_each_call_to_the_kernel_of_a_client_and_no_others() {
    let (_keep, counting) = folder_client(Plan::none());
    all_calls(&counting.store()).unwrap();
    let log = counting.log();
    let of = |call| log.iter().filter(|step| step.action == Action::File(call)).count();
    // The temporary files of a create and a put, and the data file.
    assert_eq!((of(Call::Open), of(Call::Pwrite), of(Call::Fsync)), (6, 6, 6), "{log:?}");
    assert!(of(Call::Link) == 4 && of(Call::Rename) == 2 && of(Call::FsyncFolder) >= 10);
    for step in 0..log.len() as u64 {
        let (folder, victim) = folder_client(Plan::at(step, Fault::Kill));
        let store = victim.store();
        let (end, killed) = (all_calls(&store), victim.killed());
        assert!(killed && victim.fired() == 1, "{step}");
        // What fails in tidying up is told to nobody.
        let tidying = matches!(log[step as usize].action, Action::File(Call::Unlink | Call::Rmdir));
        assert!(end.is_err() || tidying, "{:?}", log[step as usize]);
        assert!(store.put("x", b"").is_err(), "a dead client changes nothing");
        drop(store);
        let other = forebay_store::PosixStore::open(folder.path()).unwrap();
        assert_eq!(other.get("x", 9).unwrap(), None);
        other.put("x", b"another client goes on").unwrap();
    }
}

#[test]
fn a_folder_looks_up_lost_replies_and_goes_on_with_short_writes() {
    let (_keep, counting) = folder_client(Plan::none());
    all_calls(&counting.store()).unwrap();
    for step in counting.log() {
        let (_keep, client) = folder_client(Plan::at(step.index, Fault::LostReply));
        let end = all_calls(&client.store());
        assert_eq!(client.fired(), 1);
        if matches!(step.action, Action::File(Call::Link | Call::Rename)) {
            end.unwrap_or_else(|error| panic!("{step:?}: {error:?}"));
        }
    }
    let (folder, client) = folder_client(Plan::from(0, Fault::Short));
    all_calls(&client.store()).unwrap();
    assert_eq!(std::fs::read(folder.path().join("data")).unwrap(), BYTES);
    let writes = client.log().into_iter().filter(|s| s.action == Action::File(Call::Pwrite));
    assert!(writes.count() > 20, "halves of halves");
    let log = counting.log();
    let torn = log.iter().rfind(|step| step.action == Action::File(Call::FsyncFolder)).unwrap();
    let (_keep, client) = folder_client(Plan::at(torn.index - 1, Fault::Errno(libc::EIO)));
    assert_eq!(all_calls(&client.store()).unwrap_err().code(), Code::NotDurable);
}

#[test]
fn a_memory_store_can_be_full() {
    let store = MemoryStore::with_capacity(100);
    store.put("a", &[0; 60]).unwrap();
    let error = store.create_data("d", 50).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::NoSpace);
    assert!(error.what().contains("40 are free"), "{error}");
    let data = store.create_data("d", 40).unwrap();
    assert_eq!(store.put("b", b"1").unwrap_err().code(), Code::NoSpace);
    store.put("a", &[0; 59]).unwrap();
    store.put("b", b"1").unwrap();
    assert!(data.sink().write_at(&[0; 41], 0).is_err(), "past what was set aside");
    store.remove("d").unwrap();
    assert_eq!(store.used_bytes(), 60);
}
