//! A job that went back to an earlier step and saved the later ones again.

use std::sync::Arc;

use forebay_checkpoint::commit::{AttemptId, Root, RunId, claim, latest, step_state};
use forebay_store::{MemoryStore, Store};
use forebay_tier::status::CopyState;

use crate::setup::{config, save_all, settle, start, tables, until};
use crate::world::{files, root, save};

const RUN: RunId = RunId(0xabc);

fn attempt(root: &Root, step: u64) -> Option<AttemptId> {
    let state = step_state(root, step, std::time::Duration::ZERO).unwrap();
    state.and_then(|state| state.commit?.attempt)
}

#[test]
fn steps_that_are_saved_again_after_a_return_replace_the_older_ones_on_every_tier() {
    let memory = || Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let stores = [memory(), memory(), memory()];
    let [near, middle, far] = &stores;
    save_all(near, &[1, 2, 3]);
    let config = config(&tables(&["near", "middle", "far"]));
    let runner = start(&config, &stores);
    settle(&runner);
    let before = files(&**far, 3);
    assert_eq!(before, files(&**near, 3));
    // The second life goes on from step 1, and gets to 2 and 3 again.
    let epoch = claim(&root(Arc::clone(near)), RUN, Some(1), "second").unwrap();
    save(near, 2, 4, epoch);
    save(near, 3, 5, epoch);
    runner.wake();
    settle(&runner);
    for (step, save) in [(1, 1), (2, 4), (3, 5)] {
        for store in [near, middle, far] {
            let found = attempt(&root(Arc::clone(store)), step);
            assert_eq!(found, Some(AttemptId { run: RUN, save }), "step {step}");
        }
    }
    assert_ne!(files(&**far, 3)["step-3/.metadata"], before["step-3/.metadata"]);
    for store in [middle, far] {
        assert_eq!(latest(&root(Arc::clone(store))).unwrap().unwrap().step, 3);
    }
    let status = until(&runner, "seen", |status| status.steps.len() == 3);
    let all = [CopyState::Committed; 3];
    assert!(status.steps.iter().all(|step| step.copies == all), "{status:#?}");
    assert!(status.errors.is_empty(), "{:#?}", status.errors);
}
