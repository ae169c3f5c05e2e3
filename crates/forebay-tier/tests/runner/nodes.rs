//! A first tier on the drives of two nodes, with a runner on each.

use std::sync::Arc;

use forebay_checkpoint::commit::{RunId, SystemClock, claim};
use forebay_store::{MemoryStore, SplitStore, Store};
use forebay_tier::runner::{Duties, Reach, Runner, Tiers};

use crate::setup::{config, save_all, settle, start, tables, until};
use crate::world::{files, objects, root, save, split};

fn runner(records: &MemoryStore, drive: &MemoryStore, far: &Arc<dyn Store>) -> Runner {
    let near = SplitStore::new(Arc::new(records.clone()), Arc::new(drive.clone()));
    let text = tables(&["near"]) + "keep_last = 1\n" + &tables(&["far"]);
    start(&config(&text), &[Arc::new(near), Arc::clone(far)])
}

/// Steps that anything is left of, data or record.
fn steps(store: &dyn Store) -> Vec<String> {
    let mut found: Vec<String> = objects(store, "")
        .into_keys()
        .filter_map(|key| Some(key.split_once('/')?.0.to_owned()))
        .filter(|name| name.starts_with("step-"))
        .collect();
    found.dedup();
    found
}

#[test]
fn steps_come_together_and_every_drive_is_tidied() {
    let whole = MemoryStore::new();
    save_all(&(Arc::new(whole.clone()) as Arc<dyn Store>), &[1, 2, 3]);
    let (records, drives) = split(&whole);
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let one = runner(&records, &drives[0], &far);
    let brought = || {
        let keys = objects(&*far, "").into_keys();
        keys.filter(|key| key.ends_with(".distcp") && !key.contains("/.forebay/")).count()
    };
    until(&one, "all of its own brought", |_| brought() == objects(&drives[0], "").len());
    assert!(!objects(&*far, "").keys().any(|key| key.ends_with("/.metadata")));
    assert_eq!(
        steps(&drives[0]),
        ["step-1", "step-2", "step-3"],
        "nothing goes that is half there"
    );
    let two = runner(&records, &drives[1], &far);
    settle(&two);
    settle(&one);
    assert_eq!(steps(&*far), ["step-1", "step-2", "step-3"]);
    let tidy = |store: &MemoryStore| steps(store) == ["step-3"];
    until(&one, "tidied", |_| tidy(&drives[0]) && tidy(&drives[1]) && tidy(&records));
    assert!(one.status().errors.is_empty(), "{:#?}", one.status().errors);
    assert!(two.status().errors.is_empty(), "{:#?}", two.status().errors);
}

#[test]
fn what_a_lost_node_had_a_part_of_holds_nobody_up_and_stays() {
    let whole: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let kept = MemoryStore::new();
    save_all(&whole, &[1, 2]);
    let epoch = claim(&root(Arc::clone(&whole)), RunId(0xabc), Some(1), "second").unwrap();
    save(&whole, 3, 1, epoch);
    for (key, bytes) in objects(&*whole, "") {
        kept.put(&key, &bytes).unwrap();
    }
    let (records, drives) = split(&kept);
    let lost: Vec<String> = objects(&drives[1], "step-2/")
        .into_keys()
        .chain(objects(&drives[1], "step-1/").into_keys())
        .collect();
    drives[1].discard(&lost).unwrap();
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new());
    // Step 1 came there in time.
    for (key, bytes) in objects(&*whole, "step-1/") {
        far.put(&key, &bytes).unwrap();
    }
    let (one, two) = (runner(&records, &drives[0], &far), runner(&records, &drives[1], &far));
    settle(&one);
    settle(&two);
    let keys = objects(&*far, "");
    let is_there = |step| keys.contains_key(&format!("step-{step}/.metadata"));
    assert_eq!([1, 2, 3].map(is_there), [true, false, true]);
    // What is left of step 2 stays, for a person to decide.
    until(&one, "tidied", |_| steps(&drives[0]) == ["step-2", "step-3"]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(steps(&drives[0]), ["step-2", "step-3"]);
}

#[test]
fn each_node_brings_its_own_and_one_runner_goes_on_from_there() {
    let whole = MemoryStore::new();
    save_all(&(Arc::new(whole.clone()) as Arc<dyn Store>), &[1, 2]);
    let (records, drives) = split(&whole);
    let (middle, far) = (MemoryStore::new(), MemoryStore::new());
    let text = tables(&["near", "middle", "far"]);
    let start = |drive: &MemoryStore, reach: Reach| {
        let near = SplitStore::new(Arc::new(records.clone()), Arc::new(drive.clone()));
        let stores: Vec<Arc<dyn Store>> =
            vec![Arc::new(near), Arc::new(middle.clone()), Arc::new(far.clone())];
        let clock = Arc::new(SystemClock::default());
        let tiers = Tiers::with_stores(&config(&text), stores, clock).unwrap();
        Runner::start_for(tiers, Duties::All, reach).unwrap()
    };
    let runners = [
        start(&drives[0], Reach::OwnDrive),
        start(&drives[0], Reach::Beyond),
        start(&drives[1], Reach::OwnDrive),
    ];
    settle(&runners[1]);
    assert_eq!(steps(&far), ["step-1", "step-2"]);
    let written = |runner: &Runner, tier: usize| runner.status().tiers[tier].written_bytes;
    let bytes: u64 = [1, 2].map(|step| data_bytes(&whole, step)).iter().sum();
    // Each byte went each way once.
    assert_eq!((written(&runners[0], 2), written(&runners[2], 2)), (0, 0));
    assert_eq!((written(&runners[1], 1), written(&runners[1], 2)), (0, bytes));
    let brought = [0, 2].map(|at| written(&runners[at], 1));
    assert!(brought.iter().all(|bytes| *bytes > 0));
    assert_eq!(brought.iter().sum::<u64>(), bytes);
}

fn data_bytes(store: &MemoryStore, step: u64) -> u64 {
    let files = files(store, step).into_iter();
    files.filter(|(key, _)| !key.ends_with("/.metadata")).map(|(_, bytes)| bytes.len() as u64).sum()
}
