//! What people ask for: pins, holds, promotion.

use std::path::Path;
use std::sync::Arc;

use forebay_checkpoint::commit::{
    GcOptions, PruneOptions, Retention, RunId, claim, prune, retire, steps,
};
use forebay_checkpoint::open::verify_folder;
use forebay_error::Code;
use forebay_store::{MemoryStore, PosixStore, Store};
use forebay_tier::runner::Action;

use crate::setup::{config, save_all, settle, start, tables, until};
use crate::world::{files, root, save};

fn folder() -> (tempfile::TempDir, Arc<dyn Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(PosixStore::open(folder.path()).unwrap());
    (folder, store)
}

fn prune_now(store: &Arc<dyn Store>) -> Vec<u64> {
    let zero = std::time::Duration::ZERO;
    let gc = GcOptions { grace: zero, settle: zero, patience: zero, dry_run: false };
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let options = PruneOptions { gc, wait: true };
    prune(&root(Arc::clone(store)), &retention, &options).unwrap().unpublished
}

#[test]
fn retention_of_every_kind_respects_pins_and_holds() {
    let (_folder, near) = folder();
    save_all(&near, &[1, 2, 3, 4]);
    let runner = start(&config(&tables(&["near"])), &[Arc::clone(&near)]);
    until(&runner, "seen", |status| status.steps.len() == 4);
    let act = |action: Action| runner.act(&action, "me");
    act(Action::Pin { step: 2, name: "best".to_owned() }).unwrap();
    act(Action::Hold { step: 3, why: Some("case 7".to_owned()) }).unwrap();
    assert_eq!(prune_now(&near), [1]);
    // Not even whoever decides by rules of its own removes what is held.
    let root = root(Arc::clone(&near));
    let all = steps(&root, std::time::Duration::ZERO).unwrap();
    let held = all.iter().find(|state| state.step == 3).unwrap();
    let attempt = held.commit.as_ref().unwrap().attempt.unwrap();
    let report = retire(&root, &[(3, attempt)], &PruneOptions::default()).unwrap();
    assert_eq!(report.failed[0].1.code(), Code::AlreadyExists);
    // A pin that cannot be read keeps something: nothing goes.
    near.put(".forebay/pins/best", b"garbage").unwrap();
    let retention = Retention { keep_last: 1, ..Retention::default() };
    let refused = prune(&root, &retention, &PruneOptions::default()).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidMetadata);
    act(Action::Unpin { name: "best".to_owned() }).unwrap();
    act(Action::Release { step: 3 }).unwrap();
    assert_eq!(prune_now(&near), [2, 3]);
    let missing = act(Action::Pin { step: 9, name: "x".to_owned() }).unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    let bad = act(Action::Pin { step: 4, name: "../x".to_owned() }).unwrap_err();
    assert_eq!(bad.code(), Code::Usage);
    assert_eq!(act(Action::Unpin { name: "y".to_owned() }).unwrap_err().code(), Code::NotFound);
}

#[test]
fn a_step_that_is_held_is_not_replaced_by_another_save() {
    let (_folder, near) = folder();
    save_all(&near, &[1]);
    let runner = start(&config(&tables(&["near"])), &[Arc::clone(&near)]);
    until(&runner, "seen", |status| status.steps.len() == 1);
    runner.act(&Action::Hold { step: 1, why: None }, "me").unwrap();
    let before = files(&*near, 1);
    let epoch = claim(&root(Arc::clone(&near)), RunId(0xabc), Some(1), "second").unwrap();
    let again = |number| {
        let near = Arc::clone(&near);
        std::thread::spawn(move || save(&near, 1, number, epoch)).join()
    };
    assert!(again(2).is_err(), "the save of a step that is held must fail");
    assert_eq!(files(&*near, 1)["step-1/.metadata"], before["step-1/.metadata"]);
    // That it was held is why.
    runner.act(&Action::Release { step: 1 }, "me").unwrap();
    again(3).unwrap();
    assert_ne!(files(&*near, 1)["step-1/.metadata"], before["step-1/.metadata"]);
}

#[test]
fn a_promoted_step_is_a_checkpoint_by_itself_and_stays() {
    let (_near, near) = folder();
    let (far_folder, far) = folder();
    save_all(&near, &[1, 2]);
    let place = far_folder.path().display();
    let text = format!("{}[[tier]]\nname = \"far\"\nplace = \"{place}\"\n", tables(&["near"]));
    let runner = start(&config(&text), &[Arc::clone(&near), Arc::clone(&far)]);
    until(&runner, "seen", |status| status.steps.len() == 2);
    let promote = |step, name: &str, to: Option<&Path>, export| Action::Promote {
        step,
        name: name.to_owned(),
        to: to.map(|to| to.display().to_string()),
        export,
    };
    let outcome = runner.act(&promote(1, "golden", None, true), "me").unwrap();
    assert!(outcome.done.contains("golden") && outcome.notes.len() == 1, "{outcome:?}");
    let golden = far_folder.path().join("golden");
    let faults = verify_folder(golden.as_path(), &forebay_checkpoint::progress::Unwatched).unwrap();
    assert!(faults.faults.is_empty(), "{faults:?}");
    let names = |folder: &Path| {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect::<std::collections::BTreeSet<_>>()
    };
    for (key, bytes) in files(&*near, 1) {
        let name = key.strip_prefix("step-1/").unwrap();
        assert_eq!(std::fs::read(golden.join(name)).unwrap(), bytes, "{name}");
    }
    let exported = names(&far_folder.path().join("golden-safetensors"));
    assert!(exported.iter().any(|name| name.ends_with(".safetensors")), "{exported:?}");
    // Again is as good as once, with what is exported; another step under that name is refused.
    let again = runner.act(&promote(1, "golden", None, true), "me").unwrap();
    assert_eq!((&again.done, again.notes.len()), (&outcome.done, 1));
    let taken = runner.act(&promote(2, "golden", None, false), "me").unwrap_err();
    assert_eq!((taken.code(), taken.hints().len()), (Code::LostCommit, 1), "{taken:?}");
    // An export of something else is not taken for one of this.
    std::fs::create_dir(far_folder.path().join("gold-safetensors")).unwrap();
    for export in [true, false, true] {
        let stale = runner.act(&promote(1, "gold", None, export), "me").unwrap_err();
        assert_eq!(stale.code(), Code::AlreadyExists);
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let to = elsewhere.path().join("models");
    runner.act(&promote(2, "best", Some(&to), false), "me").unwrap();
    assert!(to.join("best/.metadata").is_file() && !to.join(".forebay").exists());
    for bad in ["step-3", ".x", "a/b", ""] {
        let refused = runner.act(&promote(1, bad, None, false), "me").unwrap_err();
        assert_eq!(refused.code(), Code::Usage, "{bad}");
    }
    let missing = runner.act(&promote(7, "none", None, false), "me").unwrap_err();
    assert!(matches!(missing.code(), Code::NotFound | Code::NotCommitted), "{missing:?}");
    settle(&runner);
    // Retention does not know it.
    prune_now(&far);
    assert!(golden.join(".metadata").is_file());
}

#[test]
fn a_bucket_takes_promotions_but_no_exports() {
    let near: Arc<dyn Store> = Arc::new(MemoryStore::new());
    save_all(&near, &[1]);
    let runner = start(&config(&tables(&["near"])), &[Arc::clone(&near)]);
    until(&runner, "seen", |status| status.steps.len() == 1);
    let promote = |export| Action::Promote { step: 1, name: "gold".to_owned(), to: None, export };
    assert_eq!(runner.act(&promote(true), "me").unwrap_err().code(), Code::Unsupported);
    runner.act(&promote(false), "me").unwrap();
    assert!(near.get("gold/.metadata", 1 << 20).unwrap().is_some());
}
