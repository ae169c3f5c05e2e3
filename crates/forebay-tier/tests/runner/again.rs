//! A job that went back to an earlier step and saved the later ones again.

use std::sync::Arc;

use forebay_checkpoint::commit::{
    AttemptId, Other, Root, RunId, claim, claim_among, latest, step_state,
};
use forebay_error::{Code, Error};
use forebay_store::fault::{Fault, FaultStore, Plan};
use forebay_store::{MemoryStore, Store};
use forebay_tier::runner::Action;
use forebay_tier::status::CopyState;

use crate::setup::{LONG, config, save_all, settle, start, tables, until};
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
    let epoch = claim(&root(Arc::clone(near)), RUN, None, "first").unwrap();
    for step in 1..=3 {
        save(near, step, 10 + step as u32, epoch);
    }
    let config = config(&tables(&["near", "middle", "far"]));
    let runner = start(&config, &stores);
    settle(&runner);
    let before = files(&**far, 3);
    assert_eq!(before, files(&**near, 3));
    // The second life goes on from step 1, and gets to 2 and 3 again; what numbers its saves have says nothing.
    runner.act(&Action::Pause { tier: Some("middle".to_owned()) }, "me").unwrap();
    let epoch = claim(&root(Arc::clone(near)), RUN, Some(1), "second").unwrap();
    save(near, 2, 4, epoch);
    save(near, 3, 5, epoch);
    assert!(runner.look(LONG));
    let status = runner.status();
    let newest = AttemptId { run: RUN, save: 5 };
    assert_eq!(status.steps[2].attempt, newest.to_string(), "{status:#?}");
    let copies = [CopyState::Committed, CopyState::Other, CopyState::Other];
    assert_eq!(status.steps[2].copies, copies);
    runner.act(&Action::Resume { tier: None }, "me").unwrap();
    settle(&runner);
    for (step, save) in [(1, 11), (2, 4), (3, 5)] {
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

/// All tiers but the first, for a claim.
fn others(stores: &[Arc<dyn Store>]) -> Vec<Other> {
    let open = |store: &Arc<dyn Store>| {
        let store = Arc::clone(store);
        Box::new(move || Ok(Some(root(store)))) as Other
    };
    stores.iter().map(open).collect()
}

/// The first tier is lost, and the far one, which knows what was claimed, cannot be asked, or be opened: the job saves
/// all the same, and what it saves comes there.
#[test]
fn a_far_tier_that_does_not_answer_neither_stops_the_first_save_nor_refuses_it_later() {
    let memory = || Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    let far = memory();
    save_all(&far, &[1]);
    save_all(&far, &[2]);
    let gone: Arc<dyn Store> =
        Arc::new(FaultStore::new(Arc::clone(&far), Plan::from(0, Fault::Errno(libc::EIO))));
    let error = || Error::new(Code::NotFound, "not mounted");
    let mut claimed = Vec::new();
    for others in [others(&[gone]), vec![Box::new(move || Err(error())) as Other]] {
        let near = memory();
        let epoch = claim_among(&root(Arc::clone(&near)), others, RUN, None, "new").unwrap();
        assert!(epoch > 2, "taken there already");
        claimed.push(epoch);
        save(&near, 3, 7 + claimed.len() as u32, epoch);
        let config = config(&tables(&["near", "far"]));
        let runner = start(&config, &[Arc::clone(&near), Arc::clone(&far)]);
        settle(&runner);
        assert_eq!(files(&*far, 3)["step-3/.metadata"], files(&*near, 3)["step-3/.metadata"]);
        assert_eq!(latest(&root(Arc::clone(&far))).unwrap().unwrap().step, 3);
        std::thread::sleep(std::time::Duration::from_millis(1100));
    }
    assert!(claimed[0] < claimed[1], "{claimed:?}");
    // Where all answer, the numbers are counted.
    let near = memory();
    let first = claim_among(&root(near), others(&[Arc::clone(&far)]), RUN, Some(3), "new").unwrap();
    assert_eq!(first, claimed[1] + 1);
}

#[test]
fn a_far_tier_that_hangs_is_not_waited_for_by_the_first_save() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let slow = Plan::from(0, Fault::Slow(std::time::Duration::from_secs(40)));
    let hangs: Arc<dyn Store> = Arc::new(FaultStore::new(Arc::new(MemoryStore::new()), slow));
    let since = std::time::Instant::now();
    claim_among(&root(near), others(&[hangs]), RUN, None, "new").unwrap();
    assert!(since.elapsed() < std::time::Duration::from_secs(30));
}

/// The step that was restored is on the tier that does not answer: on which line the job is cannot be said.
#[test]
fn a_parent_that_may_be_where_nobody_answers_is_an_error() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let gone: Arc<dyn Store> = Arc::new(FaultStore::new(
        Arc::new(MemoryStore::new()),
        Plan::from(0, Fault::Errno(libc::EIO)),
    ));
    let claim = |parent| {
        claim_among(&root(Arc::clone(&near)), others(&[Arc::clone(&gone)]), RUN, parent, "new")
    };
    assert_eq!(claim(Some(5)).unwrap_err().code(), Code::Io);
    let epoch = claim(None).unwrap();
    save(&near, 5, 1, epoch);
    claim(Some(5)).unwrap();
}
