//! fsync: of files, of folders, refused and failed.

use forebay_error::Code;
use rustix::io::Errno;

use super::{Answer, Call, names, refusing, store};
use crate::store::Store;
use crate::{Expect, Published};

#[test]
fn a_failed_fsync_is_final_and_leaves_the_old_bytes() {
    let fixture = store(refusing(&[(Call::Sync, Errno::IO)]));
    std::fs::write(fixture.folder.path().join("a"), b"old").unwrap();
    let error = fixture.store.put("a", b"new").unwrap_err();
    assert_eq!(error.code(), Code::Io);
    assert!(error.what().contains("force"), "{error}");
    assert!(fixture.store.create("b", b"new").is_err());
    assert_eq!(fixture.files.count(Call::Sync), 2, "one try for each");
    assert_eq!(names(&fixture), ["a"], "what was written is given up");
    assert_eq!(std::fs::read(fixture.folder.path().join("a")).unwrap(), b"old");
}

#[test]
fn a_seal_that_failed_is_not_tried_again() {
    let fixture = store(refusing(&[(Call::Sync, Errno::IO)]));
    let data = fixture.store.create_data("d", 10).unwrap();
    assert_eq!(data.seal().unwrap_err().code(), Code::Io);
    assert_eq!(data.seal().unwrap_err().code(), Code::Internal);
    assert_eq!(fixture.files.count(Call::Sync), 1);
}

#[test]
fn a_file_system_that_cannot_sync_folders_is_used_and_called_unproven() {
    let fixture = store(refusing(&[(Call::SyncFolder, Errno::INVAL)]));
    let store = &fixture.store;
    assert!(!store.abilities().durable_publish);
    store.put("f/staged", b"1").unwrap();
    let done = store.publish("f/staged", "f/to", &Expect::Absent).unwrap();
    assert_eq!(done, Published::Done { durable: false });
    store.create_data("f/d", 1).unwrap().seal().unwrap();
    assert!(store.remove("f/to").unwrap());
}

#[test]
fn a_folder_whose_fsync_fails_is_an_error_although_the_change_is_there() {
    let fixture = store(|call, path| match (call, path) {
        (Call::SyncFolder, "f") => Answer::Refuse(Errno::IO),
        _ => Answer::Go,
    });
    let store = &fixture.store;
    let error = store.put("f/a", b"1").unwrap_err();
    assert_eq!(error.code(), Code::NotDurable);
    assert!(error.what().contains("folder"), "{error}");
    assert_eq!(store.get("f/a", 9).unwrap().unwrap().0, b"1");
    assert_eq!(store.create("f/b", b"1").unwrap_err().code(), Code::NotDurable);
    let published = store.publish("f/b", "f/c", &Expect::Absent);
    assert_eq!(published.unwrap_err().code(), Code::NotDurable);
    assert_eq!(store.get("f/c", 9).unwrap().unwrap().0, b"1");
    assert_eq!(store.remove("f/a").unwrap_err().code(), Code::NotDurable);
    // Nobody needs what is discarded, so nobody asks for the disk.
    store.discard(&["f/b".to_owned(), "f/c".to_owned(), "f/none".to_owned()]).unwrap();
    let data = store.create_data("f/d", 1).unwrap();
    assert_eq!(data.seal().unwrap_err().code(), Code::Io);
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing() {
    for call in [Call::Create, Call::Write, Call::Sync, Call::Link, Call::Rename] {
        let fixture = store(move |made, _| match made == call {
            true => Answer::Refuse(Errno::NOSPC),
            false => Answer::Go,
        });
        std::fs::write(fixture.folder.path().join("a"), b"old").unwrap();
        let error = match call {
            Call::Link => fixture.store.create("b", b"new").unwrap_err(),
            _ => fixture.store.put("a", b"new").unwrap_err(),
        };
        assert_eq!(error.code(), Code::NoSpace, "{call:?}");
        assert!(error.what().contains("bytes and"), "{error}");
        assert_eq!(names(&fixture), ["a"], "{call:?}");
        assert_eq!(fixture.store.get("a", 9).unwrap().unwrap().0, b"old");
    }
}

#[test]
fn room_that_is_not_to_be_had_is_told_before_anything_is_written() {
    for errno in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
        let fixture = store(move |call, _| match call {
            Call::Reserve => Answer::Refuse(errno),
            _ => Answer::Go,
        });
        let error = fixture.store.create_data("d", 12_345).map(|_| ()).unwrap_err();
        assert_eq!(error.code(), Code::NoSpace);
        assert!(error.what().contains("12345 bytes are needed"), "{error}");
        // How much is free has nothing to do with how large a file may be.
        let says = if errno == Errno::FBIG { "no files that large" } else { "are free" };
        assert!(error.what().contains(says), "{error}");
        assert!(names(&fixture).is_empty());
    }
}

#[test]
fn bytes_that_changed_under_the_same_stamps_are_another_version() {
    let fixture = store(|_, _| Answer::Go);
    let path = fixture.folder.path().join("to");
    std::fs::write(&path, b"old").unwrap();
    let stamp = std::fs::metadata(&path).unwrap().modified().unwrap();
    let (_, version) = fixture.store.get("to", 9).unwrap().unwrap();
    fixture.store.put("staged", b"new").unwrap();
    std::fs::write(&path, b"odd").unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(stamp).unwrap();
    let end = fixture.store.publish("staged", "to", &Expect::Version(version)).unwrap();
    assert_eq!(end, Published::Lost);
    assert_eq!(std::fs::read(&path).unwrap(), b"odd");
}
