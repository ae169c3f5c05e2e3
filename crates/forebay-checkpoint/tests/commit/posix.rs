//! The same on a real file system, with real threads and clocks.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{
    GcOptions, PruneOptions, Retention, Root, RunId, SystemClock, claim, gc, latest, prune,
};
use forebay_error::{Code, Result};
use forebay_store::PosixStore;

use crate::world::*;

fn open(folder: &Path) -> Root {
    Root {
        store: Arc::new(PosixStore::create(folder).unwrap()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(TextMetadata),
    }
}

/// Each rank has a store of its own, as processes have.
fn save_together(folder: &Path, step: u64, run: u32, epoch: u64, world: u32) -> Vec<Option<Code>> {
    std::thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || {
                let mut spec = spec(step, attempt(run, step as u32), rank, world);
                spec.epoch = epoch;
                code(&save(&open(folder), None, spec))
            })
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn saves_overwrites_races_prunes_and_collections_in_a_folder() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let root = open(path);
    let store = root.store.as_ref();
    let epoch = claim(&root, RunId(1), None, "first")?;
    for (step, world) in [(1, 1), (2, 4)] {
        let start = Instant::now();
        assert_eq!(save_together(path, step, 1, epoch, world), vec![None; world as usize]);
        println!("{world} ranks: committed in {:?}", start.elapsed());
    }
    // Two jobs at once: one is told that it lost, or came later and replaced the other's.
    let (one, two) = std::thread::scope(|scope| {
        let one = scope.spawn(|| save_together(path, 3, 2, epoch, 2));
        let two = scope.spawn(|| save_together(path, 3, 3, epoch, 2));
        (one.join().unwrap(), two.join().unwrap())
    });
    for codes in [&one, &two] {
        assert!([[None; 2], [Some(Code::LostCommit); 2]].iter().any(|right| codes == right));
    }
    assert!(one[0].is_none() || two[0].is_none(), "{one:?} {two:?}");
    let winner = load(store, 3).unwrap();
    assert!(winner == attempt(2, 3) && one[0].is_none() || two[0].is_none());
    // A second life takes over from step 2.
    let epoch = claim(&root, RunId(4), Some(2), "second")?;
    assert_eq!(latest(&root)?.unwrap().step, 2);
    assert_eq!(save_together(path, 2, 1, 1, 2), [Some(Code::Fenced); 2]);
    assert_eq!(save_together(path, 3, 4, epoch, 3), [None; 3]);
    assert_eq!(load(store, 3), Some(attempt(4, 3)));
    check_listing(&root, store);

    let now = GcOptions {
        grace: Duration::ZERO,
        settle: Duration::from_millis(10),
        ..GcOptions::default()
    };
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let report = prune(&root, &retention, &PruneOptions { gc: now.clone(), wait: true })?;
    assert_eq!(report.unpublished, [1, 2]);
    let report = gc(&root, &now)?;
    assert!(report.failed.is_empty() && report.kept.is_empty(), "{report:?}");
    check_clean(store);
    assert_eq!(latest(&root)?.unwrap().step, 3);
    assert!(!path.join("step-1").exists() || path.join("step-1").read_dir().unwrap().count() <= 1);
    Ok(())
}
