//! Removals: what they wait for, what happens where they fail, and what is collected beside them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{
    AttemptId, Clock, GcOptions, RunId, SystemClock, claim, numbers, step_state,
};
use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::runner::{Action, Runner, Tiers};
use forebay_tier::status::Health;

use crate::setup::{LONG, Switch, config, save_all, settle, start, tables, tier, until};
use crate::world::{data_bytes, files, root, save, source};

const RUN: RunId = RunId(0xabc);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn broken(store: &Arc<dyn Store>, errno: i32) -> Arc<dyn Store> {
    Arc::new(FaultStore::new(Arc::clone(store), Plan::from(0, Fault::Errno(errno))))
}

fn steps(store: &Arc<dyn Store>) -> Vec<u64> {
    let all = numbers(&root(Arc::clone(store))).unwrap();
    let has = |step: &u64| {
        let state = step_state(&root(Arc::clone(store)), *step, Duration::ZERO).unwrap();
        state.is_some_and(|state| state.commit.is_some())
    };
    all.into_iter().filter(has).collect()
}

/// Everything is on both tiers.
fn drained(near: &Arc<dyn Store>, far: &Arc<dyn Store>) {
    let plain = config(&tables(&["near", "far"]));
    let runner = start(&plain, &[Arc::clone(near), Arc::clone(far)]);
    settle(&runner);
}

/// The first tier keeps one step, or both do.
fn keeping_one(both: bool) -> String {
    let tables = tables(&["near", "far"]);
    let count = if both { usize::MAX } else { 1 };
    tables.replacen("place", "keep_last = 1\nplace", count)
}

/// Steps 1 to 3 of a life that was left behind after step 1, and step 2 of the next: 3 is on no line any more.
fn left_behind() -> [Arc<dyn Store>; 2] {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2, 3]);
    let epoch = claim(&root(Arc::clone(&near)), RUN, Some(1), "second").unwrap();
    save(&near, 2, 4, epoch);
    drained(&near, &far);
    assert_eq!((steps(&near), steps(&far)), (vec![1, 2, 3], vec![1, 2, 3]));
    [near, far]
}

#[test]
fn two_tiers_do_not_remove_the_last_two_copies_at_once() {
    let stores = left_behind();
    let runner = start(&config(&keeping_one(true)), &stores);
    settle(&runner);
    assert_eq!(steps(&stores[0]), [2]);
    assert_eq!(steps(&stores[1]), [2, 3], "no line leads to 3: its last copy stays");
}

#[test]
fn two_runners_do_not_remove_the_last_two_copies_either() {
    for _ in 0..4 {
        let stores = left_behind();
        let config = config(&keeping_one(true));
        let runners: Vec<Runner> = (0..2).map(|_| start(&config, &stores)).collect();
        runners.iter().for_each(settle);
        let left: BTreeSet<u64> = stores.iter().flat_map(steps).collect();
        assert!(left.contains(&3), "both copies of a step are gone");
        assert!(left.contains(&2));
    }
}

#[test]
fn a_copy_whose_removal_is_announced_is_no_reason_to_remove_the_other() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2]);
    drained(&near, &far);
    // As another process does that removes it there.
    let attempt = AttemptId { run: RUN, save: 1 };
    let announcement = format!("step-1/.forebay/{attempt}/removing");
    far.put(&announcement, &[]).unwrap();
    let runner = start(&config(&keeping_one(false)), &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "seen", |status| status.steps.len() == 2);
    std::thread::sleep(Duration::from_millis(3500));
    assert_eq!(steps(&near), [1, 2], "both would be gone");
    assert!(far.remove(&announcement).unwrap(), "nobody else takes it back");
    until(&runner, "removed", |_| steps(&near) == [2]);
}

#[test]
fn an_announcement_of_a_remover_that_was_killed_holds_nothing_for_ever() {
    let (near, memory) = (memory(), MemoryStore::new());
    let far: Arc<dyn Store> = Arc::new(memory.clone());
    save_all(&near, &[1, 2]);
    drained(&near, &far);
    let announcement = format!("step-1/.forebay/{}/removing", AttemptId { run: RUN, save: 1 });
    far.put(&announcement, &[]).unwrap();
    memory.advance(Duration::from_secs(660));
    let runner = start(&config(&keeping_one(false)), &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "removed", |_| steps(&near) == [2]);
    assert!(far.get(&announcement, 64).unwrap().is_none(), "who only slept must not find it");
    assert_eq!(steps(&far), [1, 2]);
}

#[test]
fn a_removal_that_fails_is_tried_again_later_and_later_and_told() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2]);
    drained(&near, &far);
    let switch = Switch::new(Arc::clone(&near));
    switch.set_writes(broken(&near, libc::EROFS));
    let runner = start(&config(&keeping_one(false)), &[Arc::clone(&switch) as _, far]);
    let since = Instant::now();
    // It does not count as something that ends soon.
    while runner.pending().stuck == 0 {
        assert!(since.elapsed() < LONG, "{:?}", runner.pending());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(since.elapsed() > Duration::from_millis(1500), "four tries without a wait");
    let pending = runner.pending();
    assert_eq!((pending.stuck, pending.waiting, pending.moving), (1, 0, 0));
    let dry = runner.act(&Action::Prune { dry_run: true }, "test").unwrap();
    assert!(dry.removed.iter().all(|removed| (removed.step, &*removed.tier) == (1, "near")));
    let status = runner.status();
    let errors: Vec<_> = status.errors.iter().filter(|error| error.step == Some(1)).collect();
    assert!((4..=6).contains(&errors.len()), "{:#?}", status.errors);
    assert!(errors.iter().all(|error| error.again_seconds.is_some()));
    assert_eq!(steps(&near), [1, 2]);
    switch.set_writes(Arc::clone(&near));
    until(&runner, "removed", |_| steps(&near) == [2]);
}

#[test]
fn a_save_for_which_room_cannot_be_made_hears_it_in_its_time() {
    let bytes = data_bytes(&source());
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2]);
    drained(&near, &far);
    let switch = Switch::new(Arc::clone(&near));
    switch.set_writes(broken(&near, libc::EIO));
    let room = format!("capacity = {}\nplace", bytes * 5 / 2);
    let text = tables(&["near", "far"]).replacen("place", &room, 1);
    let runner = Arc::new(start(&config(&text), &[Arc::clone(&switch) as _, far]));
    until(&runner, "seen", |status| tier(status, "near").health != Health::Unknown);
    // In a thread of its own: it would never end.
    let (told, hear) = std::sync::mpsc::channel();
    let of = Arc::clone(&runner);
    std::thread::spawn(move || told.send(of.admit(bytes, Duration::from_millis(400))));
    let admitted = hear.recv_timeout(Duration::from_secs(20)).expect("it ignores its deadline");
    assert_eq!(admitted.unwrap_err().code(), Code::Timeout);
    let (told, hear) = std::sync::mpsc::channel();
    let of = Arc::clone(&runner);
    std::thread::spawn(move || told.send(of.admit(bytes, LONG)));
    std::thread::sleep(Duration::from_millis(300));
    runner.stop();
    let admitted = hear.recv_timeout(Duration::from_secs(20)).expect("it ignores the stop");
    assert_eq!(admitted.unwrap_err().code(), Code::Cancelled);
    assert_eq!(steps(&near), [1, 2]);
}

#[test]
fn what_lies_beside_the_steps_is_collected() {
    let memory = MemoryStore::new();
    let near: Arc<dyn Store> = Arc::new(memory.clone());
    save_all(&near, &[1]);
    // Signs of life: of runs that were killed, of the one that has the root, and one that is young.
    let pulse = |run: u32| format!(".forebay/alive/{}/beat-0", RunId(run));
    near.put(&pulse(0x1), b"x").unwrap();
    near.put(&pulse(RUN.0), b"x").unwrap();
    memory.advance(Duration::from_secs(7200));
    near.put(&pulse(0x2), b"x").unwrap();
    let runner = start(&config(&tables(&["near"])), &[Arc::clone(&near)]);
    let is_there = |run: u32| near.get(&pulse(run), 64).unwrap().is_some();
    until(&runner, "collected", |_| !is_there(0x1));
    settle(&runner);
    assert!(is_there(0x2) && is_there(RUN.0), "one may live, the other has the root");
}

#[test]
fn a_pin_that_is_damaged_is_told_once() {
    let near = memory();
    save_all(&near, &[1]);
    near.put(".forebay/pins/best", b"garbage").unwrap();
    let runner = start(&config(&tables(&["near"])), &[Arc::clone(&near)]);
    let of_pins = |status: &forebay_tier::status::Status| {
        status.errors.iter().filter(|error| error.code == "invalid_metadata").count()
    };
    until(&runner, "told", |status| of_pins(status) > 0);
    for _ in 0..5 {
        assert!(runner.look(LONG));
    }
    let status = runner.status();
    assert_eq!(of_pins(&status), 1, "{:#?}", status.errors);
    assert_eq!(tier(&status, "near").health, Health::Troubled);
    assert!(tier(&status, "near").notes.iter().any(|note| note.contains("pin")));
    // Whole again, and damaged again: that is new.
    near.remove(".forebay/pins/best").unwrap();
    assert!(runner.look(LONG));
    near.put(".forebay/pins/best", b"garbage").unwrap();
    assert!(runner.look(LONG));
    assert_eq!(of_pins(&runner.status()), 2);
    assert!(!files(&*near, 1).is_empty());
}

#[test]
fn what_has_come_of_a_step_that_waits_is_gone_on_with() {
    let (near, far) = (memory(), MemoryStore::new());
    save_all(&near, &[1, 2]);
    // A mover was killed when it had brought a file of step 1; others go first, for a long time.
    let brought = files(&*near, 1).into_iter().find(|(key, _)| key.ends_with(".distcp")).unwrap();
    far.put(&brought.0, &brought.1).unwrap();
    far.advance(Duration::from_secs(3600));
    let shared: Arc<dyn Store> = Arc::new(far.clone());
    let runner = start(&config(&tables(&["near", "far"])), &[Arc::clone(&near), shared.clone()]);
    runner.act(&Action::Pause { tier: None }, "test").unwrap();
    until(&runner, "seen", |status| {
        status.steps.len() == 2 && status.tiers[1].health == Health::Ok
    });
    for _ in 0..5 {
        assert!(runner.look(LONG));
    }
    assert!(far.get(&brought.0, u64::MAX).unwrap().is_some(), "it was collected");
    runner.act(&Action::Resume { tier: None }, "test").unwrap();
    settle(&runner);
    assert_eq!(steps(&shared), [1, 2]);
    let sent: u64 = [1, 2].iter().map(|step| files(&*near, *step)).map(bytes_of).sum();
    assert_eq!(runner.status().tiers[1].written_bytes, sent - brought.1.len() as u64);
}

/// Without `.metadata`, which is no file that is copied.
fn bytes_of(files: std::collections::BTreeMap<String, Vec<u8>>) -> u64 {
    let data = files.iter().filter(|(key, _)| !key.ends_with("/.metadata"));
    data.map(|(_, bytes)| bytes.len() as u64).sum()
}

/// Counts waits of a collection: no limit of a mover makes it wait as long.
#[derive(Default)]
struct Counting {
    clock: SystemClock,
    settled: AtomicUsize,
}

impl Clock for Counting {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn sleep(&self, time: Duration) {
        if time == GcOptions::default().settle {
            self.settled.fetch_add(1, Ordering::Relaxed);
        } else {
            self.clock.sleep(time);
        }
    }
}

#[test]
fn what_is_left_of_many_steps_waits_once() {
    let (near, far) = (memory(), memory());
    let all: Vec<u64> = (1..=12).collect();
    save_all(&near, &all);
    drained(&near, &far);
    let clock = Arc::new(Counting::default());
    let tiers = [Arc::clone(&near), far].to_vec();
    let tiers = Tiers::with_stores(&config(&keeping_one(false)), tiers, clock.clone()).unwrap();
    let runner = Runner::start(tiers).unwrap();
    until(&runner, "collected", |_| numbers(&root(Arc::clone(&near))).unwrap() == [12]);
    let settled = clock.settled.load(Ordering::Relaxed);
    assert!((1..=4).contains(&settled), "11 steps waited {settled} times");
}
