//! Every store, and every double of one, through the same suite.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[macro_use]
mod conformance;

use std::path::Path;
use std::sync::Arc;

use conformance::Place;
use forebay_store::fault::{FaultStore, Plan};
use forebay_store::power::Recording;
use forebay_store::{MemoryStore, PosixStore, SplitStore, Store, StoreSettings, open_store};

fn memory(store: MemoryStore, clock: MemoryStore) -> Place {
    let wait = Box::new(move |time| clock.advance(time));
    Place { store: Arc::new(store), wait, _keep: None }
}

fn on_shm() -> Option<tempfile::TempDir> {
    let shm = Path::new("/dev/shm");
    shm.is_dir().then(|| tempfile::tempdir_in(shm).unwrap())
}

conformance!(in_memory, || {
    let store = MemoryStore::new();
    Some(memory(store.clone(), store))
});

conformance!(on_disk, || {
    // Beside the build's own output, since /tmp is a tmpfs on some machines.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Some(Place::real(PosixStore::open(folder.path()).unwrap(), folder))
});

conformance!(on_tmpfs, || {
    let folder = on_shm()?;
    Some(Place::real(PosixStore::open(folder.path()).unwrap(), folder))
});

conformance!(in_a_folder_that_was_handed_over, || {
    let folder = on_shm()?;
    let open = std::fs::File::open(folder.path()).unwrap();
    let store = PosixStore::handed_over(open.into(), Path::new("a job's folder"));
    Some(Place::real(store.unwrap(), folder))
});

conformance!(memory_behind_a_fault_wrapper_without_faults, || {
    let store = MemoryStore::new();
    let wrapped = FaultStore::new(Arc::new(store.clone()), Plan::none());
    let wait = Box::new(move |time| store.advance(time));
    Some(Place { store: Arc::new(wrapped), wait, _keep: None })
});

conformance!(tmpfs_behind_a_fault_wrapper_without_faults, || {
    let folder = on_shm()?;
    let store = Arc::new(PosixStore::open(folder.path()).unwrap());
    Some(Place::real(FaultStore::new(store, Plan::none()), folder))
});

conformance!(tmpfs_with_a_recording, || {
    let folder = on_shm()?;
    let recording = Recording::start(folder.path()).unwrap();
    Some(Place::real(recording.store(), folder))
});

conformance!(records_in_memory_and_data_on_disk, || {
    let folder = on_shm()?;
    let (records, data) = (MemoryStore::new(), PosixStore::open(folder.path()).unwrap());
    let store = SplitStore::new(Arc::new(records.clone()), Arc::new(data));
    let wait = Box::new(move |time| records.advance(time));
    Some(Place { store: Arc::new(store), wait, _keep: Some(folder) })
});

conformance!(a_store_with_data_nearer, || {
    let folder = on_shm()?;
    let (whole, data) = (MemoryStore::new(), PosixStore::open(folder.path()).unwrap());
    let store = SplitStore::near(Arc::new(whole.clone()), Arc::new(data));
    let wait = Box::new(move |time| whole.advance(time));
    Some(Place { store: Arc::new(store), wait, _keep: Some(folder) })
});

#[test]
fn a_store_knows_the_folder_that_it_lies_in() {
    let folder = tempfile::tempdir().unwrap();
    let step = folder.path().join("step-7");
    std::fs::create_dir(&step).unwrap();
    std::fs::write(folder.path().join("beside"), b"1").unwrap();
    let link = folder.path().join("latest");
    std::os::unix::fs::symlink("step-7", &link).unwrap();
    for path in [&step, &link, &link.join(".")] {
        let (above, name) = PosixStore::open(path).unwrap().above().unwrap().unwrap();
        assert_eq!(name, "step-7");
        assert!(above.get("beside", 9).unwrap().is_some());
    }
    assert!(PosixStore::open(Path::new("/")).unwrap().above().unwrap().is_none());
    // What somebody else has opened is all that there is.
    let opened = std::fs::File::open(&step).unwrap();
    let handed = PosixStore::handed_over(opened.into(), &step).unwrap();
    assert!(handed.above().unwrap().is_none());

    let open = |url: &str| open_store(url, &StoreSettings::default()).unwrap();
    open("memory:above/runs").put("beside", b"1").unwrap();
    let (above, name) = open("memory:above/runs/step-7").above().unwrap().unwrap();
    assert_eq!((name.as_str(), above.name().as_str()), ("step-7", "memory:above/runs"));
    assert!(above.get("beside", 9).unwrap().is_some());
    assert_eq!(open("memory:above/runs").above().unwrap().unwrap().0.name(), "memory:above");
    for alone in ["memory:above", "memory:", "memory:/runs/step-7"] {
        assert!(open(alone).above().unwrap().is_none(), "{alone}");
    }
}
