//! Publications.

use forebay_error::Code;
use forebay_store::{Expect, Published, Version};

use super::Place;

fn version(place: &Place, key: &str) -> Version {
    place.store.get(key, 100).unwrap().unwrap().1
}

fn publish(place: &Place, staged: &str, to: &str, expect: &Expect) -> Published {
    place.store.publish(staged, to, expect).unwrap()
}

fn is_done(published: &Published) -> bool {
    matches!(published, Published::Done { .. })
}

pub(crate) fn a_free_key_is_taken(place: &Place) {
    place.put("s/staged", b"bytes");
    let done = publish(place, "s/staged", "s/to", &Expect::Absent);
    let durable = place.store.abilities().durable_publish;
    assert_eq!(done, Published::Done { durable });
    assert_eq!(place.bytes("s/to"), b"bytes");
    assert_eq!(place.keys(), ["s/to"]);
}

pub(crate) fn a_taken_key_is_lost(place: &Place) {
    place.put("to", b"theirs");
    let before = version(place, "to");
    place.put("staged", b"ours");
    assert_eq!(publish(place, "staged", "to", &Expect::Absent), Published::Lost);
    assert_eq!(version(place, "to"), before);
    assert_eq!(place.bytes("staged"), b"ours");
}

pub(crate) fn the_expected_version_is_replaced(place: &Place) {
    place.put("to", b"1");
    for round in 2..10_u8 {
        let expect = Expect::Version(version(place, "to"));
        place.put("staged", &[round]);
        assert!(is_done(&publish(place, "staged", "to", &expect)), "round {round}");
        assert_eq!(place.bytes("to"), [round]);
        assert_eq!(place.keys(), ["to"]);
    }
}

pub(crate) fn a_stale_version_loses(place: &Place) {
    place.put("to", b"1");
    let expect = Expect::Version(version(place, "to"));
    place.put("to", b"2");
    place.put("staged", b"3");
    assert_eq!(publish(place, "staged", "to", &expect), Published::Lost);
    assert_eq!(place.bytes("to"), b"2");
    place.store.remove("to").unwrap();
    assert_eq!(publish(place, "staged", "to", &expect), Published::Lost);
    assert_eq!(publish(place, "staged", "none", &expect), Published::Lost);
    assert_eq!(publish(place, "staged", "to", &Expect::Version(Version(vec![]))), Published::Lost);
    assert_eq!(place.bytes("staged"), b"3");
    assert_eq!(place.keys(), ["staged"]);
}

pub(crate) fn what_was_withdrawn_is_not_published(place: &Place) {
    place.put("staged", b"1");
    assert!(place.store.remove("staged").unwrap());
    assert_eq!(publish(place, "staged", "f/to", &Expect::Absent), Published::Withdrawn);
    assert_eq!(place.found("f/to"), None);
    place.put("to", b"2");
    let expect = Expect::Version(version(place, "to"));
    assert_eq!(publish(place, "staged", "to", &expect), Published::Withdrawn);
    assert_eq!(place.bytes("to"), b"2");
}

pub(crate) fn a_key_that_was_freed_and_taken_again_is_another(place: &Place) {
    for round in 0..20 {
        place.put("to", b"first");
        let expect = Expect::Version(version(place, "to"));
        // A file system gives the inode to the next file, within the same tick of its clock.
        place.store.remove("to").unwrap();
        place.put("to", b"other");
        place.put("staged", b"third");
        assert_eq!(publish(place, "staged", "to", &expect), Published::Lost, "round {round}");
        assert_eq!(place.bytes("to"), b"other");
    }
}

pub(crate) fn folders_may_differ(place: &Place) {
    place.put("from/deep/staged", b"1");
    assert!(is_done(&publish(place, "from/deep/staged", "into/new/to", &Expect::Absent)));
    assert_eq!(place.bytes("into/new/to"), b"1");
    place.put("from/staged", b"2");
    let expect = Expect::Version(version(place, "into/new/to"));
    assert!(is_done(&publish(place, "from/staged", "into/new/to", &expect)));
    assert_eq!(place.bytes("into/new/to"), b"2");
    let names = place.store.names("", 9).unwrap();
    assert_eq!(names, [("into".to_owned(), true)], "folders that are empty then are gone");
}

pub(crate) fn nothing_is_published_onto_itself(place: &Place) {
    place.put("a", b"1");
    let error = place.store.publish("a", "a", &Expect::Absent).unwrap_err();
    assert_eq!(error.code(), Code::Usage);
    assert_eq!(place.bytes("a"), b"1");
}
