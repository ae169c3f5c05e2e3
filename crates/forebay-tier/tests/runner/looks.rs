//! What was seen, and when.

use std::sync::Arc;
use std::time::Duration;

use forebay_error::Code;
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::runner::{Action, Admitted, Duties, Runner, Tiers};
use forebay_tier::status::{CopyState, Health};

use crate::setup::{LONG, Switch, config, save_all, start, tables, tier, until};
use crate::world::{data_bytes, files, source};

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn slow(store: &Arc<dyn Store>, millis: u64) -> Arc<dyn Store> {
    let slow = Fault::Slow(Duration::from_millis(millis));
    Arc::new(FaultStore::new(Arc::clone(store), Plan::from(0, slow)))
}

/// A look that has begun may have listed the steps before: it is none of after the call.
#[test]
fn a_look_is_one_that_began_after_it_was_asked_for() {
    let near = memory();
    save_all(&near, &[1]);
    let switch = Switch::new(Arc::clone(&near));
    let mut long = config(&tables(&["near"]));
    long.moving.look_every = Duration::from_secs(3600);
    let runner = start(&long, &[Arc::clone(&switch) as _]);
    assert!(runner.look(LONG));
    switch.set_reads(slow(&near, 300));
    runner.wake();
    std::thread::sleep(Duration::from_millis(450));
    // The listing of the look that is under way is over.
    save_all(&near, &[2]);
    assert!(runner.look(LONG));
    assert_eq!(runner.status().steps.len(), 2);
}

#[test]
fn a_far_tier_that_hangs_from_the_start_does_not_stop_the_near_ones() {
    let (near, middle, far) = (memory(), memory(), memory());
    save_all(&near, &[1]);
    // Each of its calls takes longer than it is waited for.
    let hangs = slow(&far, 25_000);
    let config = config(&tables(&["near", "middle", "far"]));
    let runner = start(&config, &[Arc::clone(&near), Arc::clone(&middle), hangs]);
    let status = until(&runner, "moved", |status| {
        status.steps.first().is_some_and(|step| step.copies[1] == CopyState::Committed)
    });
    assert!(matches!(tier(&status, "far").health, Health::Unknown), "{status:#?}");
    assert_eq!(files(&*middle, 1), files(&*near, 1));
}

/// What a save is likely to need is not known before something was seen: it waits for that.
#[test]
fn a_save_that_comes_before_the_first_look_is_not_taken_for_an_empty_one() {
    let bytes = data_bytes(&source());
    let near = memory();
    save_all(&near, &[1, 2]);
    let text = tables(&["near", "far"]);
    let text = text.replacen("place", &format!("capacity = {}\nplace", bytes * 5 / 2), 1);
    let text = format!("{text}[tiers]\nbacklog = \"skip\"\n");
    let far = slow(&memory(), 2_000);
    let runner = start(&config(&text), &[slow(&near, 50), far]);
    assert_eq!(runner.admit_next(LONG).unwrap(), Admitted::Skip);
    // Where nothing was saved yet there is room for anything.
    let new = start(&config(&text), &[memory(), memory()]);
    assert_eq!(new.admit_next(LONG).unwrap(), Admitted::Save(0));
}

/// Two tiers in folders that are not there yet.
fn two_folders(above: &std::path::Path) -> Arc<Tiers> {
    let table = |name: &str| {
        format!("[[tier]]\nname = \"{name}\"\nplace = \"{}\"\n", above.join(name).display())
    };
    Tiers::open(&config(&(table("near") + &table("far")))).unwrap()
}

#[test]
fn who_only_looks_makes_no_folder() {
    let above = tempfile::tempdir().unwrap();
    let (near, far) = (above.path().join("near"), above.path().join("far"));
    let tiers = two_folders(above.path());
    let runner = Runner::start_with(Arc::clone(&tiers), Duties::Look).unwrap();
    assert!(runner.look(LONG));
    let status = runner.status();
    assert!(status.tiers.iter().all(|tier| tier.health == Health::Ok && tier.free_bytes.is_some()));
    assert!(runner.act(&Action::Prune { dry_run: true }, "me").unwrap().removed.is_empty());
    assert!(runner.act(&Action::Unpin { name: "none".to_owned() }, "me").is_err());
    runner.stop();
    assert!(!near.exists() && !far.exists());
    // What is moved there makes it.
    save_all(&tiers.root(0).unwrap().store, &[1]);
    assert!(near.exists() && !far.exists());
    let runner = Runner::start(tiers).unwrap();
    crate::setup::settle(&runner);
    assert!(far.join("step-1/.metadata").is_file());
}

#[test]
fn a_folder_that_is_replaced_while_it_is_used_is_noticed() {
    let above = tempfile::tempdir().unwrap();
    let far = above.path().join("far");
    let tiers = two_folders(above.path());
    save_all(&tiers.root(0).unwrap().store, &[1]);
    let runner = Runner::start(tiers).unwrap();
    crate::setup::settle(&runner);
    std::fs::rename(&far, above.path().join("lost")).unwrap();
    std::fs::create_dir(&far).unwrap();
    let status = until(&runner, "noticed", |_| far.join("step-1/.metadata").is_file());
    let told = |error: &&forebay_tier::status::Trouble| error.code == "file_changed";
    assert_eq!(status.errors.iter().filter(told).count(), 1, "{:#?}", status.errors);
}

/// As an agent's first tier where each job hands its own folder over.
#[test]
fn a_drive_that_is_to_be_made_is_no_trouble() {
    let above = tempfile::tempdir().unwrap();
    let at = |name: &str| above.path().join(name);
    let (drive, records) = (at("drive"), at("shared"));
    let tiers = |records: &std::path::Path| {
        let text = format!(
            "[[tier]]\nname = \"drive\"\nplace = \"{}\"\nrecords = \"{}\"\n\
             [[tier]]\nname = \"far\"\nplace = \"{}\"\n",
            drive.display(),
            records.display(),
            at("far").display()
        );
        Tiers::open(&config(&text)).unwrap()
    };
    std::fs::create_dir(&drive).unwrap();
    assert!(tiers(&records).found(0).unwrap().is_none(), "the folder of all is not there yet");
    std::fs::create_dir(&records).unwrap();
    let open = tiers(&records);
    assert!(open.found(0).unwrap().is_none() && open.found(0).unwrap().is_none());
    assert_eq!(std::fs::read_dir(&records).unwrap().count(), 0, "looking makes nothing");
    let runner = Runner::start(Arc::clone(&open)).unwrap();
    let status = until(&runner, "seen", |status| tier(status, "drive").health != Health::Unknown);
    assert_eq!(tier(&status, "drive").health, Health::Ok, "{status:?}");
    runner.stop();
    assert!(tiers(&at("no/mount")).found(0).is_err(), "where the records could not be made");
    assert!(open.root(0).is_ok() && open.found(0).unwrap().is_some());
    // It is a drive now, and its records are gone.
    std::fs::remove_dir_all(&records).unwrap();
    assert_eq!(tiers(&records).found(0).err().unwrap().code(), Code::NotShared);
    // Others' steps are in it: nobody would see them.
    std::fs::remove_dir_all(drive.join(".forebay")).unwrap();
    std::fs::create_dir(drive.join("step-1")).unwrap();
    std::fs::write(drive.join("step-1/.metadata"), b"x").unwrap();
    assert_eq!(tiers(&records).found(0).err().unwrap().code(), Code::AlreadyExists);
}
