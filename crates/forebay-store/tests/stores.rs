//! Every store, and every double of one, through the same suite.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

#[macro_use]
mod conformance;

use std::path::Path;
use std::sync::Arc;

use conformance::Place;
use forebay_store::fault::{FaultStore, Plan};
use forebay_store::power::Recording;
use forebay_store::{MemoryStore, PosixStore};

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
