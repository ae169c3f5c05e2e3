//! Lost replies: the call happened and the answer says otherwise, as NFS clients that ask twice are told.

use std::sync::atomic::Ordering::Relaxed;

use forebay_error::Code;
use rustix::io::Errno;

use super::{Answer, Call, names, store};
use crate::store::Store;
use crate::{Expect, Published};

const DONE: Published = Published::Done { durable: true };

fn lost(call: Call, errno: Errno) -> impl Fn(Call, &str) -> Answer + Send + Sync {
    move |made, _| if made == call { Answer::DoThenSay(errno) } else { Answer::Go }
}

#[test]
fn a_first_publication_whose_reply_got_lost_is_done() {
    for errno in [Errno::EXIST, Errno::IO, Errno::TIMEDOUT, Errno::NOENT] {
        let fixture = store(lost(Call::Link, errno));
        fixture.store.put("staged", b"1").unwrap();
        let end = fixture.store.publish("staged", "to", &Expect::Absent).unwrap();
        assert_eq!(end, DONE, "{errno:?}");
        assert!(fixture.store.create("new", b"2").unwrap(), "{errno:?}");
        assert_eq!(names(&fixture), ["new", "to"], "{errno:?}");
    }
}

#[test]
fn a_replacement_whose_reply_got_lost_is_done() {
    for errno in [Errno::NOENT, Errno::IO, Errno::TIMEDOUT] {
        let fixture = store(lost(Call::Rename, errno));
        std::fs::write(fixture.folder.path().join("to"), b"old").unwrap();
        fixture.store.put("staged", b"new").unwrap();
        let (_, version) = fixture.store.get("to", 9).unwrap().unwrap();
        let end = fixture.store.publish("staged", "to", &Expect::Version(version)).unwrap();
        assert_eq!(end, DONE, "{errno:?}");
        assert_eq!(fixture.store.get("to", 9).unwrap().unwrap().0, b"new");
        assert_eq!(names(&fixture), ["to"], "{errno:?}");
    }
}

#[test]
fn a_rename_that_does_not_replace_and_loses_its_reply_is_done() {
    let fixture = store(|call, _| match call {
        Call::Link => Answer::Refuse(Errno::PERM),
        Call::RenameNew => Answer::DoThenSay(Errno::NOENT),
        _ => Answer::Go,
    });
    fixture.store.put("staged", b"1").unwrap();
    assert_eq!(fixture.store.publish("staged", "to", &Expect::Absent).unwrap(), DONE);
    assert_eq!(names(&fixture), ["to"]);
}

#[test]
fn a_failure_without_effect_is_no_success() {
    for (call, errno) in [(Call::Link, Errno::IO), (Call::Rename, Errno::IO)] {
        let fixture = store(move |made, to| match made == call && to == "to" {
            true => Answer::Refuse(errno),
            false => Answer::Go,
        });
        fixture.store.put("staged", b"new").unwrap();
        let expect = match call {
            Call::Link => Expect::Absent,
            _ => {
                std::fs::write(fixture.folder.path().join("to"), b"old").unwrap();
                Expect::Version(fixture.store.get("to", 9).unwrap().unwrap().1)
            }
        };
        let error = fixture.store.publish("staged", "to", &expect).unwrap_err();
        assert_eq!(error.code(), Code::Io);
        assert_eq!(fixture.store.get("staged", 9).unwrap().unwrap().0, b"new");
    }
}

#[test]
fn somebody_elses_object_is_not_taken_for_ours() {
    // The link fails because another writer's file is there, with the very same bytes.
    let fixture = store(|_, _| Answer::Go);
    std::fs::write(fixture.folder.path().join("to"), b"same").unwrap();
    fixture.store.put("staged", b"same").unwrap();
    let end = fixture.store.publish("staged", "to", &Expect::Absent).unwrap();
    assert_eq!(end, Published::Lost);
}

#[test]
fn a_second_name_that_stays_is_no_second_commit() {
    // The staged name stays, as if killed between link and unlink, and its writer publishes again.
    let refused = std::sync::atomic::AtomicBool::new(false);
    let fixture = store(move |call, path| match (call, path) {
        (Call::Remove, "staged") if !refused.swap(true, Relaxed) => Answer::Refuse(Errno::IO),
        _ => Answer::Go,
    });
    let store = &fixture.store;
    store.put("staged", b"1").unwrap();
    let error = store.publish("staged", "to", &Expect::Absent).unwrap_err();
    assert!(error.what().starts_with("published, but"), "{error}");
    let (_, version) = store.get("to", 9).unwrap().unwrap();
    assert_eq!(names(&fixture), ["staged", "to"]);
    assert_eq!(store.publish("staged", "to", &Expect::Absent).unwrap(), DONE);
    assert_eq!(names(&fixture), ["to"]);
    let (_, later) = store.get("to", 9).unwrap().unwrap();
    assert_eq!(later, version, "the loss of another name is no change");
    store.put("next", b"2").unwrap();
    assert_eq!(store.publish("next", "to", &Expect::Version(version)).unwrap(), DONE);
}

#[test]
fn a_put_whose_reply_got_lost_is_done() {
    let fixture = store(lost(Call::Rename, Errno::NOENT));
    fixture.store.put("a", b"1").unwrap();
    assert_eq!(names(&fixture), ["a"]);
}
