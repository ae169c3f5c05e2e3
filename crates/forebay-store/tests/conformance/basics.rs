//! Small objects and listings.

use std::time::Duration;

use forebay_error::Code;
use forebay_store::Expect;

use super::Place;

pub(crate) fn what_is_put_is_got(place: &Place) {
    assert_eq!(place.found("a"), None);
    assert_eq!(place.found("f/a"), None);
    for (key, bytes) in [("a", &b"1"[..]), ("f/g/a", b"22"), ("f/empty", b""), ("a b/ü", b"3")] {
        place.put(key, bytes);
        assert_eq!(place.bytes(key), bytes);
    }
    let big = vec![7; 300_000];
    place.put("a", &big);
    assert_eq!(place.bytes("a"), big);
    assert_eq!(place.bytes("f/g/a"), b"22");
}

pub(crate) fn versions_tell_states_apart(place: &Place) {
    let version = || place.store.get("a", 100).unwrap().unwrap().1;
    place.put("a", b"1");
    let first = version();
    assert_eq!(version(), first);
    for round in 0..20 {
        let before = version();
        place.put("a", if round % 2 == 0 { b"2" } else { b"1" });
        assert_ne!(version(), before, "round {round}");
    }
}

pub(crate) fn create_takes_a_free_key_once(place: &Place) {
    assert!(place.store.create("f/a", b"first").unwrap());
    assert!(!place.store.create("f/a", b"second").unwrap());
    assert_eq!(place.bytes("f/a"), b"first");
    assert!(place.store.remove("f/a").unwrap());
    assert!(place.store.create("f/a", b"third").unwrap());
    assert_eq!(place.bytes("f/a"), b"third");
    assert_eq!(place.keys(), ["f/a"]);
}

pub(crate) fn large_objects_are_not_read(place: &Place) {
    place.put("a", &[0; 10]);
    assert_eq!(place.store.get("a", 9).unwrap_err().code(), Code::Unsupported);
    assert_eq!(place.store.get("a", 10).unwrap().unwrap().0.len(), 10);
}

pub(crate) fn listings_are_sorted_and_bounded(place: &Place) {
    let keys = ["a", "b-c", "b/.hidden", "b/c/d", "b/c/e", "b0", "c"];
    for key in keys.iter().rev() {
        place.put(key, key.as_bytes());
    }
    assert_eq!(place.keys(), keys);
    let below = place.store.list("b/", 3).unwrap();
    assert_eq!(below.iter().map(|line| &line.key[..]).collect::<Vec<_>>(), &keys[2..5]);
    assert!(below.iter().all(|line| line.bytes == line.key.len() as u64));
    assert_eq!(place.store.list("b/", 2).unwrap_err().code(), Code::Unsupported);
    assert!(place.store.list("none/", 0).unwrap().is_empty());
    assert!(place.store.list("a/", 0).unwrap().is_empty(), "a is no folder");
    assert_eq!(place.store.list("b", 9).unwrap_err().code(), Code::UnsafePath);
}

pub(crate) fn names_show_folders_and_are_bounded(place: &Place) {
    for key in ["z", "b/x/1", "b/x/2", "b/y", ".forebay/part"] {
        place.put(key, b"");
    }
    let names = |prefix, limit| place.store.names(prefix, limit);
    let named = |name: &str, folder| (name.to_owned(), folder);
    let top = [named(".forebay", true), named("b", true), named("z", false)];
    assert_eq!(names("", 3).unwrap(), top);
    assert_eq!(names("b/", 2).unwrap(), [named("x", true), named("y", false)]);
    assert_eq!(names("b/", 1).unwrap_err().code(), Code::Unsupported);
    assert!(names("none/", 0).unwrap().is_empty());
}

pub(crate) fn removal_is_told_and_leaves_no_folder(place: &Place) {
    assert!(!place.store.remove("f/g/a").unwrap());
    place.put("f/g/a", b"1");
    place.put("f/b", b"1");
    // A replacement leaves a lock behind, which must not keep the folder.
    place.put("f/staged", b"2");
    let (_, version) = place.store.get("f/b", 9).unwrap().unwrap();
    place.store.publish("f/staged", "f/b", &Expect::Version(version)).unwrap();
    assert!(place.store.remove("f/g/a").unwrap());
    assert!(!place.store.remove("f/g/a").unwrap());
    assert_eq!(place.keys(), ["f/b"]);
    assert!(place.store.remove("f/b").unwrap());
    assert!(place.keys().is_empty());
    assert!(place.store.names("", 10).unwrap().is_empty());
}

pub(crate) fn what_is_discarded_is_gone_with_its_folders(place: &Place) {
    for key in ["f/g/a", "f/g/b", "f/c", "d"] {
        place.put(key, b"1");
    }
    let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
    place.store.discard(&keys(&["f/g/a", "f/none", "none/x", "f/g/b", "f/c"])).unwrap();
    assert_eq!(place.keys(), ["d"]);
    assert_eq!(place.store.names("", 10).unwrap(), [("d".to_owned(), false)]);
    place.store.discard(&[]).unwrap();
    assert_eq!(place.store.discard(&keys(&["../x"])).unwrap_err().code(), Code::UnsafePath);
}

pub(crate) fn keys_that_leave_the_store_are_refused_by_every_call(place: &Place) {
    let store = &place.store;
    place.put("ok", b"");
    for key in ["", "/etc/x", "../x", "a/../../x", "a//x", "a/", ".", "a\0"] {
        let expect = Expect::Absent;
        let codes = [
            store.get(key, 9).map(|_| ()),
            store.create(key, b"").map(|_| ()),
            store.put(key, b""),
            store.remove(key).map(|_| ()),
            store.publish(key, "to", &expect).map(|_| ()),
            store.publish("ok", key, &expect).map(|_| ()),
            store.create_data(key, 1).map(|_| ()),
            store.open_data(key).map(|_| ()),
        ];
        for (call, result) in codes.into_iter().enumerate() {
            assert_eq!(result.unwrap_err().code(), Code::UnsafePath, "call {call} of {key:?}");
        }
    }
    assert!(store.list("../", 9).is_err() && store.names("a/../", 9).is_err());
    assert_eq!(place.keys(), ["ok"]);
}

pub(crate) fn ages_are_the_stores_own(place: &Place) {
    let pause = Duration::from_millis(60);
    place.put("a", b"1");
    (place.wait)(pause);
    place.put("b", b"1");
    let ages: Vec<_> = place.store.list("", 9).unwrap().iter().map(|line| line.age.0).collect();
    assert!(ages[0] >= pause / 2, "{ages:?}");
    assert!(ages[0] > ages[1], "{ages:?}");
    assert!(ages[0] < Duration::from_secs(60), "{ages:?}");
}
