//! A first tier on the drives of two nodes, with a runner on each.

use std::sync::Arc;

use forebay_checkpoint::commit::{RunId, claim};
use forebay_store::{MemoryStore, SplitStore, Store};
use forebay_tier::runner::Runner;

use crate::setup::{config, save_all, settle, start, tables, until};
use crate::world::{objects, root, save, split};

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
fn what_a_lost_node_had_a_part_of_is_given_up_once_the_job_has_gone_on() {
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
    let tidy = |store: &MemoryStore| steps(store) == ["step-3"];
    until(&one, "tidied", |_| tidy(&drives[0]) && tidy(&drives[1]) && tidy(&records));
    assert_eq!(steps(&*far), ["step-1", "step-3"]);
}
