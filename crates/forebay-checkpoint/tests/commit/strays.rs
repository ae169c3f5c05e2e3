//! What lies about in a checkpoint root beside its steps.

use std::time::Duration;

use forebay_checkpoint::commit::{GcOptions, RunId, claim, gc};
use forebay_store::{Store, TEMP_PREFIX};

use crate::world::*;

#[test]
fn temporary_objects_of_the_root_and_of_epochs_go_when_they_are_old() {
    let job = Job::new();
    job.save_step(5, attempt(1, 0), 1);
    claim(&job.root, RunId(1), Some(5), "x").unwrap();
    let temps = ["", ".forebay/", ".forebay/epoch/", "step-5/"];
    let temps = temps.map(|folder| format!("{folder}{TEMP_PREFIX}s0123"));
    temps.iter().for_each(|key| job.store.put(key, b"half a rec").unwrap());
    let left = || temps.iter().filter(|key| job.store.get(key, 99).unwrap().is_some()).count();
    job.sim.advance(Duration::from_secs(3000));
    gc(&job.root, &GcOptions::default()).unwrap();
    assert_eq!(left(), temps.len(), "they may be somebody's who is slow");
    job.sim.advance(HOUR);
    let dry = GcOptions { dry_run: true, ..GcOptions::default() };
    assert_eq!(gc(&job.root, &dry).unwrap().removed.len(), temps.len());
    assert_eq!(left(), temps.len());
    let report = gc(&job.root, &GcOptions::default()).unwrap();
    assert!(report.failed.is_empty(), "{report:?}");
    assert_eq!(left(), 0);
    assert_eq!(load(&job.store, 5), Some(attempt(1, 0)));
    check_clean(&job.store);
}
