//! What stays and what goes.

use std::sync::Arc;

use forebay_checkpoint::commit::{Hold, Marks, SystemClock, numbers};
use forebay_error::Code;
use forebay_store::{MemoryStore, PosixStore, Store};
use forebay_tier::runner::{Action, Admitted, Duties, Runner, Tiers};
use forebay_tier::status::{CopyState, Health};

use crate::setup::{LONG, config, save_all, settle, start, tables, tier, until};
use crate::world::{data_bytes, files, root, save, source};

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn steps(store: &Arc<dyn Store>) -> Vec<u64> {
    let all = numbers(&root(Arc::clone(store))).unwrap();
    all.into_iter().filter(|step| !files(&**store, *step).is_empty()).collect()
}

#[test]
fn old_steps_leave_the_first_tier_once_they_are_elsewhere_and_pins_and_holds_stay() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2, 3, 4, 5]);
    let held = Hold { step: 2, who: "law".to_owned(), unix: 0, why: None };
    // Each mark is on one tier alone: all of them count everywhere.
    Marks::hold(&root(Arc::clone(&far)), &held).unwrap();
    let text = tables(&["near", "far"]).replacen("place", "keep_last = 1\nplace", 1);
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("audit.log");
    let text = format!("{text}[tiers]\ngrace = 0\naudit_log = \"{}\"\n", path.display());
    let runner = start(&config(&text), &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "seen", |status| status.steps.len() == 5);
    let pin = Action::Pin { step: 3, name: "best".to_owned() };
    runner.act(&pin, "me").unwrap();
    settle(&runner);
    until(&runner, "removed", |_| steps(&near) == [2, 3, 5]);
    assert_eq!(steps(&far), [1, 2, 3, 4, 5]);
    let status = runner.status();
    assert_eq!(status.steps[2].pins, ["best"]);
    assert!(status.steps[1].held && !status.steps[2].held);
    assert_eq!(status.steps[0].copies, [CopyState::Absent, CopyState::Committed]);
    runner.act(&Action::Release { step: 2 }, "me").unwrap();
    runner.act(&Action::Unpin { name: "best".to_owned() }, "me").unwrap();
    until(&runner, "released", |_| steps(&near) == [5]);
    let mut events = Vec::new();
    let read = |record: &forebay_tier::audit_log::Record| {
        events.push((record.event.what.clone(), record.event.step, record.event.who.clone()));
        Ok(())
    };
    forebay_tier::audit_log::verify(&path, None, read).unwrap();
    let has =
        |what: &str, step| events.iter().any(|event| event.0 == what && event.1 == Some(step));
    for step in [1, 2, 3, 4] {
        assert!(has("remove", step), "{events:?}");
    }
    assert!(has("pin", 3) && has("release", 2) && !has("remove", 5));
    assert!(events.iter().any(|event| event.0 == "pin" && event.2 == "me"));
}

#[test]
fn nothing_leaves_the_first_tier_before_it_is_elsewhere() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2, 3]);
    let text = tables(&["near", "far"]).replacen("place", "keep_last = 1\nplace", 1);
    let stores = [Arc::clone(&near), Arc::clone(&far)];
    let runner = start(&config(&text), &stores);
    runner.act(&Action::Pause { tier: None }, "test").unwrap();
    until(&runner, "seen", |status| {
        status.tiers[1].health == Health::Ok && status.steps.len() == 3
    });
    let dry = |runner: &Runner| {
        assert!(runner.look(LONG));
        let prune = runner.act(&Action::Prune { dry_run: true }, "test").unwrap();
        prune.removed.into_iter().map(|copy| (copy.tier, copy.step)).collect::<Vec<_>>()
    };
    assert_eq!(dry(&runner), []);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(steps(&near), [1, 2, 3]);
    runner.stop();
    // Elsewhere, they go; a runner that only looks says so, and removes nothing.
    let plain = start(&config(&tables(&["near", "far"])), &stores);
    settle(&plain);
    plain.stop();
    let clock = Arc::new(SystemClock::default());
    let looks = Tiers::with_stores(&config(&text), stores.to_vec(), clock).unwrap();
    let looks = Runner::start_with(looks, Duties::Look).unwrap();
    assert_eq!(dry(&looks), [("near".to_owned(), 1), ("near".to_owned(), 2)]);
    assert_eq!(steps(&near), [1, 2, 3]);
    let runner = start(&config(&text), &stores);
    until(&runner, "removed", |_| steps(&near) == [3]);
}

#[test]
fn a_copy_that_lacks_a_file_is_no_reason_to_remove_the_other() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2]);
    let plain = config(&tables(&["near", "far"]));
    let runner = start(&plain, &[Arc::clone(&near), Arc::clone(&far)]);
    settle(&runner);
    runner.stop();
    let lost = files(&*far, 1).into_keys().find(|key| key.ends_with(".distcp")).unwrap();
    far.remove(&lost).unwrap();
    let text = tables(&["near", "far"]).replacen("place", "keep_last = 1\nplace", 1);
    let runner = start(&config(&text), &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "seen", |status| status.steps.len() == 2);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(steps(&near), [1, 2]);
}

#[test]
fn a_full_first_tier_makes_room_waits_or_skips() {
    let bytes = data_bytes(&source());
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2]);
    let room = |backlog: &str| {
        let capacity = format!("capacity = {}\nplace", bytes * 5 / 2);
        let tables = tables(&["near", "far"]).replacen("place", &capacity, 1);
        config(&format!("{tables}[tiers]\ngrace = 0\nbacklog = \"{backlog}\"\n"))
    };
    let stores = [Arc::clone(&near), Arc::clone(&far)];
    let runner = start(&room("skip"), &stores);
    runner.act(&Action::Pause { tier: None }, "test").unwrap();
    let status = until(&runner, "full", |status| tier(status, "near").health == Health::Full);
    assert_eq!(tier(&status, "near").capacity_bytes, Some(bytes * 5 / 2));
    assert_eq!(runner.admit(bytes, LONG).unwrap(), Admitted::Skip);
    assert_eq!(runner.admit(bytes / 4, LONG).unwrap(), Admitted::Save(0));
    runner.stop();
    let runner = start(&room("wait"), &stores);
    runner.act(&Action::Pause { tier: None }, "test").unwrap();
    until(&runner, "full", |status| tier(status, "near").health == Health::Full);
    let soon = std::time::Duration::from_millis(200);
    let (admitted, lines) = crate::log::of(|| runner.admit(bytes, soon));
    assert_eq!(admitted.unwrap_err().code(), Code::Timeout);
    let waits: Vec<_> = lines.iter().filter(|line| line.contains("waits for room")).collect();
    assert_eq!(waits.len(), 1, "{lines:?}");
    let told = format!("tier=\"near\" bytes={bytes} free=");
    let capacity = format!("capacity={}", bytes * 5 / 2);
    assert!(waits[0].starts_with("INFO") && waits[0].contains(&told), "{lines:?}");
    assert!(waits[0].ends_with(&capacity), "{lines:?}");
    assert_eq!(runner.admit(bytes * 3, soon).unwrap_err().code(), Code::NoSpace);
    std::thread::scope(|scope| {
        let admitted = scope.spawn(|| runner.admit(bytes, LONG));
        std::thread::sleep(soon);
        assert!(!admitted.is_finished());
        // Once a step has been moved on, it is taken away for the save.
        runner.act(&Action::Resume { tier: None }, "test").unwrap();
        assert_eq!(admitted.join().unwrap().unwrap(), Admitted::Save(0));
    });
    assert_eq!(steps(&near), [2]);
    assert_eq!(steps(&far), [1, 2]);
    until(&runner, "well again", |status| tier(status, "near").health != Health::Full);
}

/// What is removed for a save takes room until its grace time is over.
#[test]
fn a_save_that_is_left_out_waits_for_nothing_and_makes_room_for_a_later_one() {
    let bytes = data_bytes(&source());
    // Memory has a time of its own.
    let folder = tempfile::tempdir().unwrap();
    let near = Arc::new(PosixStore::open(folder.path()).unwrap()) as Arc<dyn Store>;
    let far = memory();
    save_all(&near, &[1, 2]);
    let plain = config(&tables(&["near", "far"]));
    let runner = start(&plain, &[Arc::clone(&near), Arc::clone(&far)]);
    settle(&runner);
    runner.stop();
    let capacity = format!("capacity = {}\nplace", bytes * 5 / 2);
    let tables = tables(&["near", "far"]).replacen("place", &capacity, 1);
    let text = format!("{tables}[tiers]\ngrace = \"3 s\"\nbacklog = \"skip\"\n");
    let runner = start(&config(&text), &[Arc::clone(&near), far]);
    until(&runner, "seen", |status| tier(status, "far").committed == 2);
    let begun = std::time::Instant::now();
    assert_eq!(runner.admit(bytes, LONG).unwrap(), Admitted::Skip);
    assert!(begun.elapsed() < std::time::Duration::from_secs(2), "{:?}", begun.elapsed());
    until(&runner, "removed", |status| tier(status, "near").committed == 1);
    assert_eq!(runner.admit(bytes, LONG).unwrap(), Admitted::Skip, "it is going still");
    until(&runner, "room", |_| runner.admit(bytes, LONG).unwrap() == Admitted::Save(0));
    assert!(begun.elapsed() >= std::time::Duration::from_secs(2));
    assert_eq!(tier(&runner.status(), "near").committed, 1, "no more than that");
}

#[test]
fn saves_go_straight_to_the_next_tier_where_that_is_configured() {
    let bytes = data_bytes(&source());
    let (near, far) = (memory(), memory());
    let capacity = format!("capacity = {}\nplace", bytes / 2);
    let tables = tables(&["near", "far"]).replacen("place", &capacity, 1);
    let text = format!("{tables}[tiers]\nbacklog = \"straight\"\n");
    let runner = start(&config(&text), &[near, far]);
    assert_eq!(runner.admit(bytes, LONG).unwrap(), Admitted::Save(1));
    assert_eq!(runner.admit(bytes / 4, LONG).unwrap(), Admitted::Save(0));
}

/// The first tier keeps more than the next: what that let go would be brought there again and again.
#[test]
fn a_step_that_the_next_tier_need_not_keep_does_not_go_to_and_fro() {
    let (near, far) = (memory(), memory());
    save_all(&near, &[1, 2, 3, 4]);
    let text = tables(&["near", "far"]).replacen("place", "keep_last = 3\nplace", 1);
    let text = format!("{text}keep_last = 1\n");
    let runner = start(&config(&text), &[Arc::clone(&near), Arc::clone(&far)]);
    settle(&runner);
    until(&runner, "removed", |_| (steps(&near), steps(&far)) == (vec![2, 3, 4], vec![2, 3, 4]));
    let before = tier(&runner.status(), "far").written_bytes;
    (0..10).for_each(|_| assert!(runner.look(LONG)));
    assert_eq!(tier(&runner.status(), "far").written_bytes, before);
    // What the first no longer keeps goes from both.
    save(&near, 5, 5, 1);
    runner.wake();
    settle(&runner);
    until(&runner, "removed", |_| (steps(&near), steps(&far)) == (vec![3, 4, 5], vec![3, 4, 5]));
}
