//! Tiers that fail, are seen to fail, and heal by themselves.

use std::sync::Arc;
use std::time::Duration;

use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::config::Config;
use forebay_tier::runner::Runner;
use forebay_tier::status::{CopyState, Health, Status};

use crate::setup::{LONG, Switch, config, save_all, settle, start, tables, tier, until};
use crate::world::files;

/// Three tiers in memory; the middle one can be switched.
struct World {
    near: Arc<dyn Store>,
    middle: Arc<dyn Store>,
    switch: Arc<Switch>,
    far: Arc<dyn Store>,
    runner: Runner,
}

fn three() -> Config {
    config(&tables(&["near", "middle", "far"]))
}

fn world(config: &Config, before: impl FnOnce(&Switch, Arc<dyn Store>)) -> World {
    let memory = || Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let (near, middle, far) = (memory(), memory(), memory());
    let switch = Switch::new(Arc::clone(&middle));
    before(&switch, Arc::clone(&middle));
    let stores = [Arc::clone(&near), Arc::clone(&switch) as _, Arc::clone(&far)];
    let runner = start(config, &stores);
    World { near, middle, switch, far, runner }
}

fn broken(store: &Arc<dyn Store>, fault: Fault) -> Arc<dyn Store> {
    Arc::new(FaultStore::new(Arc::clone(store), Plan::from(0, fault)))
}

impl World {
    /// Everything comes to every tier in the end, as it was saved.
    fn is_whole(&self, steps: &[u64]) {
        settle(&self.runner);
        for step in steps {
            let saved = files(&*self.near, *step);
            assert!(!saved.is_empty());
            assert_eq!(files(&*self.far, *step), saved, "step {step} on the far tier");
        }
    }
}

#[test]
fn a_tier_that_does_not_answer_is_passed_over_and_is_back_when_it_does() {
    let world = world(&three(), |switch, middle| {
        let gone = broken(&middle, Fault::Errno(libc::EIO));
        switch.set_reads(Arc::clone(&gone));
        switch.set_writes(gone);
    });
    save_all(&world.near, &[1]);
    let status = until(&world.runner, "passed over", |status| {
        let down = tier(status, "middle").health == Health::Down;
        down && status.steps.first().is_some_and(|step| step.copies[2] == CopyState::Committed)
    });
    assert_eq!(files(&*world.far, 1), files(&*world.near, 1));
    let error = status.errors.iter().find(|error| error.tier == Some(1)).unwrap();
    assert_eq!(error.code, "io");
    assert!(error.again_seconds.is_some_and(|again| again > 0.0 && again <= 60.0));
    assert!(tier(&status, "middle").notes.iter().any(|note| note.contains("Input/output")));
    world.switch.set_reads(Arc::clone(&world.middle));
    world.switch.set_writes(Arc::clone(&world.middle));
    until(&world.runner, "back", |status| tier(status, "middle").health != Health::Down);
    save_all(&world.near, &[2]);
    world.runner.wake();
    world.is_whole(&[1, 2]);
    assert_eq!(files(&*world.middle, 2), files(&*world.near, 2));
    assert!(files(&*world.middle, 1).is_empty(), "a farther tier has it: it does not come back");
}

fn refuses_and_heals(errno: i32, health: Health, code: &str) {
    let world = world(&three(), |switch, middle| {
        switch.set_writes(broken(&middle, Fault::Errno(errno)));
    });
    save_all(&world.near, &[1]);
    let status = until(&world.runner, "seen", |status| tier(status, "middle").health == health);
    let error = status.errors.iter().find(|error| error.tier == Some(1)).unwrap();
    assert_eq!((error.code.as_str(), error.step), (code, Some(1)));
    assert!(tier(&status, "near").health == Health::Ok, "{status:#?}");
    world.switch.set_writes(Arc::clone(&world.middle));
    world.is_whole(&[1]);
    until(&world.runner, "healed", |status| {
        !matches!(tier(status, "middle").health, Health::ReadOnly | Health::Full | Health::Down)
    });
}

#[test]
fn a_read_only_tier_is_seen_and_heals() {
    refuses_and_heals(libc::EROFS, Health::ReadOnly, "io");
}

#[test]
fn a_tier_without_permission_is_seen_and_heals() {
    refuses_and_heals(libc::EACCES, Health::ReadOnly, "permission_denied");
}

#[test]
fn a_tier_without_room_is_seen_and_heals() {
    refuses_and_heals(libc::ENOSPC, Health::Full, "no_space");
}

#[test]
fn a_tier_that_refuses_for_long_is_passed_over() {
    let world = world(&three(), |switch, middle| {
        switch.set_writes(broken(&middle, Fault::Errno(libc::EROFS)));
    });
    save_all(&world.near, &[1]);
    until(&world.runner, "passed over", |status| {
        status.steps.first().is_some_and(|step| step.copies[2] == CopyState::Committed)
    });
    assert_eq!(files(&*world.far, 1), files(&*world.near, 1));
}

#[test]
fn what_is_refused_for_long_is_owed_and_tried_again() {
    let memory = || Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let (near, far) = (memory(), memory());
    let switch = Switch::new(Arc::clone(&far));
    switch.set_writes(broken(&far, Fault::Errno(libc::EDQUOT)));
    let stores = [Arc::clone(&near), Arc::clone(&switch) as _];
    let runner = start(&config(&tables(&["near", "far"])), &stores);
    save_all(&near, &[1, 2]);
    let told = |status: &Status| status.errors.iter().filter(|error| error.tier == Some(1)).count();
    for count in [4, 5] {
        let status = until(&runner, "refused", |status| told(status) >= count);
        assert_eq!(tier(&status, "far").health, Health::Full);
        assert!(runner.look(LONG));
        let (pending, status) = (runner.pending(), runner.status());
        assert!(!pending.is_over() && pending.moving + pending.waiting > 0, "{pending:?}");
        assert!(status.waiting > 0, "{status:#?}");
        for step in &status.steps {
            assert!(matches!(step.copies[1], CopyState::Waiting | CopyState::Moving), "{step:?}");
        }
    }
    switch.set_writes(Arc::clone(&far));
    settle(&runner);
    for step in [1, 2] {
        assert_eq!(files(&*far, step), files(&*near, step));
    }
    assert_eq!(tier(&runner.status(), "far").committed, 2);
}

#[test]
fn what_is_for_a_store_that_takes_no_commits_is_told_and_not_waited_for() {
    let memory = || Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let (near, far) = (memory(), memory());
    let stores = [Arc::clone(&near), Switch::careless(&far) as _];
    save_all(&near, &[1, 2]);
    let runner = start(&config(&tables(&["near", "far"])), &stores);
    until(&runner, "seen", |status| tier(status, "far").health == Health::ReadOnly);
    assert!(runner.look(LONG));
    let pending = runner.pending();
    assert!(pending.is_over() && !pending.is_none() && pending.refused == 2, "{pending:?}");
    assert_eq!(tier(&runner.status(), "far").committed, 0);
}

#[test]
fn a_slow_tier_holds_nobody_else_up() {
    let world = world(&three(), |switch, middle| {
        let slow = broken(&middle, Fault::Slow(Duration::from_millis(12_000)));
        switch.set_reads(slow);
    });
    save_all(&world.near, &[1]);
    // The others go on meanwhile, and past it.
    let status = until(&world.runner, "slow", |status| {
        tier(status, "near").health == Health::Ok
            && tier(status, "middle").notes.iter().any(|note| note.contains("has not answered"))
            && status.steps.first().is_some_and(|step| step.copies[2] == CopyState::Committed)
    });
    assert_ne!(tier(&status, "middle").health, Health::Ok);
    world.switch.set_reads(Arc::clone(&world.middle));
    world.is_whole(&[1]);
    until(&world.runner, "well", |status| tier(status, "middle").health != Health::Unknown);
}

#[test]
fn faults_now_and_then_lose_nothing() {
    let seed = 7;
    let errors = [Fault::Errno(libc::EIO), Fault::LostReply, Fault::Errno(libc::ENOSPC)];
    let world = world(&three(), |switch, middle| {
        let plan = Plan::seeded(seed, 60, &errors);
        let flaky: Arc<dyn Store> = Arc::new(FaultStore::new(middle, plan));
        switch.set_writes(Arc::clone(&flaky));
        switch.set_reads(flaky);
    });
    save_all(&world.near, &[1, 2]);
    until(&world.runner, "there", |status| {
        status.steps.len() == 2
            && status.steps.iter().all(|step| step.copies[2] == CopyState::Committed)
    });
    world.switch.set_reads(Arc::clone(&world.middle));
    world.switch.set_writes(Arc::clone(&world.middle));
    world.is_whole(&[1, 2]);
}
