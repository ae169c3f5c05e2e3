//! Parts that killed writers uploaded.

use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{AttemptId, GcOptions, RunId, gc};
use forebay_engine::write_all_at;

use super::*;

/// Begins an upload under a key, and has a part of it arrive.
fn begin_and_die(root: &Root, key: &str) {
    let before = root.store.unfinished("", 100).unwrap().len();
    let object = root.store.create_data(key, 20 << 20).unwrap();
    write_all_at(object.sink(), &vec![1; 8 << 20], 0).unwrap();
    // A process that is killed runs no destructors.
    std::mem::forget(object);
    let until = Instant::now() + Duration::from_secs(30);
    while root.store.unfinished("", 100).unwrap().len() == before {
        assert!(Instant::now() < until, "the part is not sent");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn uploads_of_dead_attempts_are_collected_and_those_of_the_living_are_not() {
    // Of the servers here moto lists uploads; it says of all that they were begun in 2010.
    let Some(server) = reached(servers::moto()) else { return };
    let root = root(&fresh_url(), server.in_turn);
    for saved in save_all(root.store.name().as_str(), server.in_turn, 1, 1, 5) {
        saved.unwrap();
    }
    let dead = AttemptId { run: RunId(9), save: 3 };
    // Of a step that is there, of one of which nothing else is, and what is nobody's.
    begin_and_die(&root, &format!("step-7/{dead}_0_0.distcp"));
    begin_and_die(&root, &format!("step-8/{dead}_0_0.distcp"));
    begin_and_die(&root, "notes/large.bin");
    let living = AttemptId { run: RunId(u32::from(b'r')), save: 4 };
    begin_and_die(&root, &format!("step-3/{living}_0_1.distcp"));
    let collect = |grace, dry_run| {
        let settle = Duration::ZERO;
        let options = GcOptions { grace, settle, dry_run, ..GcOptions::default() };
        let report = gc(&root, &options).unwrap();
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        let removed = report.removed.into_iter().map(|(key, _)| key);
        removed.filter(|key| key.contains(".distcp")).collect::<Vec<_>>()
    };
    // Its uploads count as older than the grace time, and it gives a sign of life.
    let grace = Duration::from_secs(600);
    let (id, _attempt) = attempt_of(&root, 4);
    assert_eq!(id, living);
    let expected = [format!("step-7/{dead}_0_0.distcp"), format!("step-8/{dead}_0_0.distcp")];
    assert_eq!(collect(grace, true)[..], expected[..]);
    assert_eq!(collect(grace, false)[..], expected[..]);
    let left = root.store.unfinished("", 100).unwrap().into_iter().map(|upload| upload.key);
    let expected = ["notes/large.bin".to_owned(), format!("step-3/{living}_0_1.distcp")];
    assert_eq!(left.collect::<Vec<_>>(), expected);
}
