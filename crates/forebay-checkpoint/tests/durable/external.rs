//! Saves that somebody else commits (stock code, in a folder that is one checkpoint).

use std::path::Path;
use std::time::Duration;

use forebay_checkpoint::commit::{GcOptions, gc};
use forebay_checkpoint::save::{Commit, Request};
use forebay_error::Result;
use forebay_store::fault::{Fault, FaultFolder, Plan, Step};

use crate::world::*;

fn flat(root: &forebay_checkpoint::commit::Root, save: u32, commit: Commit) -> Result<bool> {
    let which = Which { step: 7, save, rank: 0, world: 1 };
    let mut request: Request = request(root, which);
    request.spec.folder = String::new();
    request.commit = commit;
    request.side_files.clear();
    save_as(request, which)
}

/// The files of a save in a folder.
fn files_of(folder: &Path, save: u32) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(&format!("00000abc-{save}_"))).collect()
}

fn at(step: &Step, fault: Fault) -> Plan {
    Plan::at(step.index, fault)
}

#[test]
fn one_that_fails_leaves_no_files() {
    let steps = {
        let folder = folder();
        let client = FaultFolder::open(folder.path(), Plan::none()).unwrap();
        flat(&root(client.store()), 2, Commit::External).unwrap();
        assert_eq!(files_of(folder.path(), 2).len(), 1);
        client.log()
    };
    let mut failed = 0;
    for step in &steps {
        let folder = folder();
        let client = FaultFolder::open(folder.path(), at(step, Fault::Errno(5))).unwrap();
        if flat(&root(client.store()), 2, Commit::External).is_err() {
            failed += 1;
            assert!(files_of(folder.path(), 2).is_empty(), "{step:?}");
        }
    }
    // The file's Open, Fallocate, Pwrite, Fsync and FsyncFolder, before and after each.
    assert!(failed >= 9, "{failed} of {steps:?}");
}

#[test]
fn what_one_left_that_was_killed_is_collected_in_the_folder_itself() {
    let folder = folder();
    flat(&plain(folder.path()), 1, Commit::Protocol).unwrap();
    let committed = files_of(folder.path(), 1);
    assert_eq!(committed.len(), 1);
    let client = FaultFolder::open(folder.path(), Plan::none()).unwrap();
    flat(&root(client.store()), 2, Commit::External).unwrap();
    assert_eq!(files_of(folder.path(), 2).len(), 1, "nobody has committed it");
    let root = plain(folder.path());
    let kept = gc(&root, &GcOptions::default()).unwrap();
    assert!(kept.removed.is_empty(), "younger than the grace time: {kept:?}");
    let at_once =
        GcOptions { grace: Duration::ZERO, settle: Duration::ZERO, ..GcOptions::default() };
    let report = gc(&root, &at_once).unwrap();
    assert!(report.failed.is_empty() && report.kept.is_empty(), "{report:?}");
    assert!(files_of(folder.path(), 2).is_empty(), "{report:?}");
    assert_eq!(files_of(folder.path(), 1), committed);
    assert_eq!(load_at(folder.path()), Some(1));
}
