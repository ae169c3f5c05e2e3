//! That the model can tell a sound protocol from one that is not, and that the store's is sound.

use std::collections::BTreeSet;

use super::*;
use crate::posix::Files;
use crate::{Expect, Published, Store};

const OLD: &[u8] = &[1; 1500];
const NEW: &[u8] = &[2; 1500];
const SEEDS: u64 = 40;

/// Every image of a recording from `first` on.
fn images(recording: &Recording, first: usize) -> Vec<(usize, Survival, Image)> {
    let mut ways = vec![Survival::Everything, Survival::Synced];
    ways.extend((0..SEEDS).map(Survival::Seeded));
    let points = first..=recording.changes();
    points
        .flat_map(|at| ways.iter().map(move |way| (at, *way)))
        .map(|(at, way)| (at, way, recording.image(at, way)))
        .collect()
}

/// Writes `NEW` over `OLD` by renaming, with or without each fsync, and says what the file may hold after a loss of
/// power once all is done: the old bytes, the new ones, or something else.
fn outcomes(sync_file: bool, sync_folder: bool) -> BTreeSet<&'static str> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), OLD).unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    let files = &recording.recorder;
    let handle = files.create("t").unwrap();
    files.write_at(&handle, NEW, 0).unwrap();
    if sync_file {
        files.sync(&handle).unwrap();
    }
    files.rename("t", "a").unwrap();
    if sync_folder {
        files.sync_folder("").unwrap();
    }
    let found =
        images(&recording, recording.changes()).into_iter().map(|(_, _, image)| {
            match image.contents().get("a").map(Vec::as_slice) {
                Some(OLD) => "old",
                Some(NEW) => "new",
                Some(_) => "torn",
                None => "gone",
            }
        });
    found.collect()
}

#[test]
fn a_rename_without_fsync_is_seen_to_lose_bytes() {
    assert_eq!(outcomes(false, false), BTreeSet::from(["new", "old", "torn"]));
    assert_eq!(outcomes(false, true), BTreeSet::from(["new", "torn"]));
}

#[test]
fn a_rename_without_fsync_of_the_folder_is_seen_to_be_undone() {
    assert_eq!(outcomes(true, false), BTreeSet::from(["new", "old"]));
    assert_eq!(outcomes(true, true), BTreeSet::from(["new"]));
}

#[test]
fn a_folder_whose_parent_was_not_synced_is_seen_to_vanish() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    let files = &recording.recorder;
    files.make_folder("f").unwrap();
    let handle = files.create("f/a").unwrap();
    files.sync(&handle).unwrap();
    files.sync_folder("f").unwrap();
    let held = |way| recording.image(recording.changes(), way).contents().contains_key("f/a");
    assert!(held(Survival::Everything) && !held(Survival::Synced));
    files.sync_folder("").unwrap();
    assert!(held(Survival::Synced));
}

#[test]
fn a_store_does_not_trust_a_folder_that_another_left_unsynced() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    // Another client was killed right after its mkdir.
    recording.recorder.make_folder("step").unwrap();
    recording.recorder.make_folder("step/deep").unwrap();
    let store = recording.store();
    store.create_data("step/deep/d", 1).unwrap().seal().unwrap();
    let image = recording.image(recording.changes(), Survival::Synced);
    assert!(image.contents().contains_key("step/deep/d"));
    // Pruned and made again by others, maybe at the same inode.
    assert!(recording.store().remove("step/deep/d").unwrap());
    std::thread::sleep(std::time::Duration::from_millis(20));
    recording.recorder.make_folder("step").unwrap();
    store.put("step/a", b"1").unwrap();
    let image = recording.image(recording.changes(), Survival::Synced);
    assert!(image.contents().contains_key("step/a"));
}

#[test]
fn the_same_seed_gives_the_same_image() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    let data = recording.store().create_data("f/a", 5000).unwrap();
    data.sink().write_at(&[7; 5000], 0).unwrap();
    let at = recording.changes();
    let of = |seed| recording.image(at, Survival::Seeded(seed)).contents();
    let all: BTreeSet<_> = (0..SEEDS).map(of).collect();
    assert!((0..SEEDS).all(|seed| of(seed) == of(seed)));
    assert!(all.len() > 5, "{} different images", all.len());
}

/// What a checkpoint does to a store: at each step, how many changes there were when the call returned.
struct Acknowledged {
    sealed: usize,
    put: usize,
    first: usize,
    second: usize,
    removed: usize,
}

fn staged_twice(recording: &Recording) -> Acknowledged {
    let (one, two) = (recording.store(), recording.store());
    let data = one.create_data("step/data", NEW.len() as u64).unwrap();
    assert_eq!(data.sink().write_at(NEW, 0).unwrap(), NEW.len());
    data.seal().unwrap();
    let sealed = recording.changes();
    two.put("step/.forebay/part", NEW).unwrap();
    let put = recording.changes();
    one.put("step/.metadata.1", OLD).unwrap();
    let done = one.publish("step/.metadata.1", "step/.metadata", &Expect::Absent).unwrap();
    assert_eq!(done, Published::Done { durable: true });
    let first = recording.changes();
    let (_, version) = two.get("step/.metadata", 1 << 20).unwrap().unwrap();
    two.put("step/.metadata.2", NEW).unwrap();
    let expect = Expect::Version(version);
    let done = two.publish("step/.metadata.2", "step/.metadata", &expect).unwrap();
    assert_eq!(done, Published::Done { durable: true });
    let second = recording.changes();
    assert!(one.remove("step/.metadata").unwrap());
    Acknowledged { sealed, put, first, second, removed: recording.changes() }
}

#[test]
fn what_a_store_said_is_durable_survives_every_loss_of_power() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    let ack = staged_twice(&recording);
    assert_eq!(recording.changes(), ack.removed);
    let all = images(&recording, 0);
    assert_eq!(all.len(), (ack.removed + 1) * (2 + SEEDS as usize));
    for (at, way, image) in all {
        let contents = image.contents();
        let get = |key: &str| contents.get(key).map(Vec::as_slice);
        let context = format!("after change {at} ({}), {way:?}", recording.describe(at));
        if at >= ack.sealed {
            assert_eq!(get("step/data"), Some(NEW), "{context}");
        }
        if at >= ack.put {
            assert_eq!(get("step/.forebay/part"), Some(NEW), "{context}");
        }
        let allowed: &[Option<&[u8]>] = match at {
            at if at >= ack.removed => &[None],
            at if at >= ack.second => &[Some(NEW), None],
            at if at >= ack.first => &[Some(OLD), Some(NEW)],
            _ => &[None, Some(OLD)],
        };
        assert!(allowed.contains(&get("step/.metadata")), "{context}");
        for key in ["step/.metadata.1", "step/.metadata.2", "step/.forebay/part"] {
            assert!([None, Some(OLD), Some(NEW)].contains(&get(key)), "torn {key} {context}");
        }
    }
}

#[test]
fn a_store_opens_what_a_loss_of_power_left() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    staged_twice(&recording);
    for (at, way, image) in images(&recording, 0).into_iter().step_by(7) {
        let after = tempfile::tempdir().unwrap();
        image.write_to(after.path()).unwrap();
        let second = Recording::start(after.path()).unwrap();
        let start = second.image(0, Survival::Synced).contents();
        assert_eq!(start, image.contents(), "{at} {way:?}");
        let store = second.store();
        let expect = match store.get("step/.metadata", 1 << 20).unwrap() {
            Some((_, version)) => Expect::Version(version),
            None => Expect::Absent,
        };
        store.put("step/.metadata.3", b"3").unwrap();
        let done = store.publish("step/.metadata.3", "step/.metadata", &expect).unwrap();
        assert_eq!(done, Published::Done { durable: true }, "{at} {way:?}");
        let last = second.image(second.changes(), Survival::Synced).contents();
        assert_eq!(last.get("step/.metadata").unwrap(), b"3");
    }
}

#[test]
fn an_object_that_is_moved_is_never_without_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let recording = Recording::start(folder.path()).unwrap();
    let store = recording.store();
    store.put("step/.metadata", NEW).unwrap();
    let start = recording.changes();
    let mut moved = vec![("step/.metadata", start)];
    for (from, to) in [
        ("step/.metadata", "step/.forebay/1/aside"),
        ("step/.forebay/1/aside", "step/.metadata"),
        ("step/.metadata", "step/other"),
    ] {
        let done = store.publish(from, to, &Expect::Absent).unwrap();
        assert_eq!(done, Published::Done { durable: true });
        moved.push((to, recording.changes()));
    }
    for (at, way, image) in images(&recording, start) {
        let contents = image.contents();
        let context = format!("after change {at} ({}), {way:?}", recording.describe(at));
        assert!(contents.values().any(|bytes| bytes == NEW), "{context}");
        // And once it is said to be moved it is at its new place only.
        if let Some((key, _)) = moved.iter().find(|(_, said)| *said == at) {
            assert_eq!(contents.keys().collect::<Vec<_>>(), [key], "{context}");
        }
    }
}
