//! Steps go from tier to tier by themselves.

use std::sync::Arc;
use std::time::Duration;

use forebay_store::{MemoryStore, PosixStore, Store};
use forebay_tier::audit_log::verify;
use forebay_tier::config::Config;
use forebay_tier::runner::{Action, Runner, Tiers};
use forebay_tier::status::{CopyState, Health};

use crate::setup::{config, save_all, settle, start, tables, tier, until};
use crate::world::files;

fn folder() -> (tempfile::TempDir, Arc<dyn Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = PosixStore::open(folder.path()).unwrap();
    (folder, Arc::new(store))
}

#[test]
fn three_tiers_drain_to_the_same_files_and_the_log_says_so() {
    let above = tempfile::tempdir().unwrap();
    let place = |name: &str| above.path().join(name).display().to_string();
    let table = |name: &str| format!("[[tier]]\nname = \"{name}\"\nplace = \"{}\"\n", place(name));
    let log = above.path().join("audit.log");
    let text = format!(
        "{}{}{}takes = \"every 20\"\n[tiers]\naudit_log = \"{}\"\n",
        table("near"),
        table("shared"),
        table("far"),
        log.display()
    );
    let config: Config = config(&text);
    let tiers = Tiers::open(&config).unwrap();
    let near: Arc<dyn Store> = Arc::clone(&tiers.root(0).unwrap().store);
    save_all(&near, &[10, 20, 30]);
    let runner = Runner::start(Arc::clone(&tiers)).unwrap();
    settle(&runner);
    let store = |tier| tiers.root(tier).unwrap().store;
    for step in [10, 20, 30] {
        let saved = files(&*near, step);
        assert!(saved.len() >= 6, "{saved:?}");
        assert_eq!(files(&*store(1), step), saved, "step {step} on the shared tier");
        let archived = files(&*store(2), step);
        assert_eq!(archived.is_empty(), step != 20);
        assert!(archived.is_empty() || archived == saved);
    }
    let status = runner.status();
    assert_eq!(status.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [10, 20, 30]);
    let all = [CopyState::Committed, CopyState::Committed, CopyState::Committed];
    assert_eq!(status.steps[1].copies, all);
    assert_eq!(status.steps[2].copies[2], CopyState::Absent);
    assert!(status.tiers.iter().all(|tier| tier.health == Health::Ok), "{status:#?}");
    assert!(status.errors.is_empty() && status.waiting == 0 && status.transfers.is_empty());
    let of_files = |(key, bytes): (&String, &Vec<u8>)| match key.ends_with("/.metadata") {
        true => 0,
        false => bytes.len() as u64,
    };
    let passed: u64 = [10, 20, 30]
        .iter()
        .map(|step| files(&*near, *step).iter().map(of_files).sum::<u64>())
        .sum();
    assert!(tier(&status, "near").read_bytes >= passed);
    assert!(tier(&status, "shared").written_bytes == passed);
    assert!(tier(&status, "shared").used_bytes >= status.steps[0].bytes * 3);
    assert!(tier(&status, "far").free_bytes.is_some());
    runner.stop();
    let mut moved = Vec::new();
    let read = |record: &forebay_tier::audit_log::Record| {
        let event = &record.event;
        assert_eq!((event.what.as_str(), event.origin.as_str()), ("move", "rules"));
        assert!(event.checksum.as_ref().is_some_and(|sum| sum.len() == 64), "{event:?}");
        moved.push((event.step.unwrap(), event.to.clone().unwrap()));
        Ok(())
    };
    verify(&log, None, read).unwrap();
    moved.sort();
    let to = |step, name| (step, place(name));
    assert_eq!(moved, [to(10, "shared"), to(20, "far"), to(20, "shared"), to(30, "shared")]);
}

#[test]
fn what_is_saved_later_is_seen_and_a_new_runner_goes_on() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let (_folder, far) = folder();
    let config = config(&tables(&["near", "far"]));
    let runner = start(&config, &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "looked at", |status| status.tiers.iter().all(|tier| tier.health == Health::Ok));
    save_all(&near, &[1]);
    runner.wake();
    until(&runner, "moved", |status| {
        status.steps.first().is_some_and(|step| step.copies[1] == CopyState::Committed)
    });
    runner.stop();
    save_all(&near, &[2]);
    std::thread::sleep(Duration::from_millis(200));
    assert!(files(&*far, 2).is_empty(), "it was stopped");
    let again = start(&config, &[Arc::clone(&near), Arc::clone(&far)]);
    settle(&again);
    assert_eq!(files(&*far, 2), files(&*near, 2));
}

#[test]
fn a_pause_holds_all_parts_back_and_is_seen() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new());
    save_all(&near, &[1]);
    let config = config(&tables(&["near", "far"]));
    let tiers = Tiers::with_stores(
        &config,
        vec![near, Arc::clone(&far)],
        Arc::new(forebay_checkpoint::commit::SystemClock::default()),
    );
    let runner = Runner::start(tiers.unwrap()).unwrap();
    let pause = Action::Pause { tier: Some("far".to_owned()) };
    runner.act(&pause, "test").unwrap();
    let status = until(&runner, "begun", |status| !status.transfers.is_empty());
    assert!(tier(&status, "far").paused && !tier(&status, "near").paused);
    std::thread::sleep(Duration::from_millis(150));
    let status = runner.status();
    // Parts that were let through before; the pause came before the first.
    assert_eq!(tier(&status, "far").written_bytes, 0);
    assert_eq!(status.steps[0].copies[1], CopyState::Moving);
    assert!(status.transfers[0].total_bytes > 0 && status.transfers[0].done_bytes == 0);
    runner.act(&Action::Resume { tier: None }, "test").unwrap();
    settle(&runner);
    assert!(runner.act(&Action::Pause { tier: Some("fra".to_owned()) }, "test").is_err());
}

#[test]
fn caps_can_be_changed_and_rates_are_seen() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new());
    save_all(&near, &[1]);
    let text = tables(&["near", "far"]) + "write_limit = \"100 KB/s\"\n";
    let runner = start(&config(&text), &[near, far]);
    let status = until(&runner, "rated", |status| tier(status, "far").write_rate > 0.0);
    assert_eq!(tier(&status, "far").write_cap, Some(100_000));
    let transfer = until(&runner, "estimated", |status| {
        status.transfers.first().is_some_and(|transfer| transfer.left_seconds.is_some())
    });
    let transfer = &transfer.transfers[0];
    assert!(transfer.rate > 0.0 && transfer.rate < 400_000.0, "{transfer:?}");
    assert_eq!((transfer.step, transfer.from, transfer.to), (1, 0, 1));
    let lifted = Action::SetCaps { tier: "far".to_owned(), read: None, write: Some(0) };
    runner.act(&lifted, "test").unwrap();
    settle(&runner);
    assert_eq!(tier(&runner.status(), "far").write_cap, None);
}
