//! Many clients at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use forebay_store::{Expect, Published, Store};

use super::Place;

const THREADS: usize = 8;
const ROUNDS: usize = 25;

/// Runs all at the same moment, and gives their results in order.
fn at_once<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let start = Barrier::new(count);
    std::thread::scope(|scope| {
        let run = |index| {
            let (start, work) = (&start, &work);
            scope.spawn(move || {
                start.wait();
                work(index)
            })
        };
        let threads: Vec<_> = (0..count).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Bytes that tell who wrote them in which round: the version of an object in a bucket may follow from its bytes.
fn signed_in(round: usize, writer: usize) -> Vec<u8> {
    let mut bytes = signed(writer);
    bytes.extend((round as u64).to_le_bytes());
    bytes
}

/// Bytes that tell who wrote them and whether they are whole.
fn signed(writer: usize) -> Vec<u8> {
    vec![writer as u8; 5000]
}

fn is_done(published: &Published) -> bool {
    matches!(published, Published::Done { .. })
}

pub(crate) fn one_of_many_creates_wins(place: &Place) {
    for round in 0..ROUNDS {
        let key = format!("f{round}/key");
        let won = at_once(THREADS, |me| place.store.create(&key, &signed(me)).unwrap());
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "round {round}: {won:?}");
        let winner = won.iter().position(|won| *won).unwrap();
        assert_eq!(place.bytes(&key), signed(winner));
    }
    assert_eq!(place.keys().len(), ROUNDS, "no temporary object stays");
}

fn publish_race(place: &Place, round: usize, to: &str, expect: &Expect) {
    for me in 0..THREADS {
        place.put(&format!("staged-{me}"), &signed_in(round, me));
    }
    let ends =
        at_once(THREADS, |me| place.store.publish(&format!("staged-{me}"), to, expect).unwrap());
    let winners: Vec<_> = (0..THREADS).filter(|me| is_done(&ends[*me])).collect();
    assert_eq!(winners.len(), 1, "{ends:?}");
    assert_eq!(ends.iter().filter(|end| **end == Published::Lost).count(), THREADS - 1);
    assert_eq!(place.bytes(to), signed_in(round, winners[0]));
    for me in 0..THREADS {
        let left = place.found(&format!("staged-{me}"));
        assert_eq!(left.is_none(), me == winners[0], "who loses changes nothing");
    }
}

pub(crate) fn one_of_many_first_publications_wins(place: &Place) {
    for round in 0..ROUNDS {
        publish_race(place, round, &format!("f{round}/to"), &Expect::Absent);
    }
}

pub(crate) fn one_of_many_replacements_wins(place: &Place) {
    place.put("f/to", b"first");
    for round in 0..ROUNDS {
        let (_, version) = place.store.get("f/to", 10_000).unwrap().unwrap();
        publish_race(place, round, "f/to", &Expect::Version(version));
    }
}

/// Adds one to a number in the store, as often as it takes.
fn add_one(store: &dyn Store, staged: &str) {
    loop {
        let (bytes, version) = store.get("number", 100).unwrap().unwrap();
        let number: u32 = String::from_utf8(bytes).unwrap().parse().unwrap();
        store.put(staged, (number + 1).to_string().as_bytes()).unwrap();
        if is_done(&store.publish(staged, "number", &Expect::Version(version)).unwrap()) {
            return;
        }
    }
}

pub(crate) fn replacements_in_a_row_lose_no_update(place: &Place) {
    const EACH: usize = 6;
    place.put("number", b"0");
    at_once(THREADS, |me| {
        for _ in 0..EACH {
            add_one(place.store.as_ref(), &format!("staged-{me}"));
        }
    });
    assert_eq!(place.bytes("number"), (THREADS * EACH).to_string().into_bytes());
}

pub(crate) fn a_withdrawal_and_a_publication_agree(place: &Place) {
    for round in 0..ROUNDS {
        for first in [true, false] {
            let to = format!("to-{round}-{first}");
            let expect = if first {
                Expect::Absent
            } else {
                place.put(&to, b"old");
                Expect::Version(place.store.get(&to, 9).unwrap().unwrap().1)
            };
            place.put("staged", &signed(1));
            let ends = at_once(2, |me| match me {
                0 => Some(place.store.publish("staged", &to, &expect).unwrap()),
                _ => place.store.remove("staged").map(|_| None).unwrap(),
            });
            let old = if first { None } else { Some(b"old".to_vec()) };
            match &ends[0] {
                Some(Published::Done { .. }) => assert_eq!(place.bytes(&to), signed(1)),
                Some(Published::Withdrawn) => assert_eq!(place.found(&to), old),
                other => panic!("{other:?}"),
            }
            assert_eq!(place.found("staged"), None);
        }
    }
}

pub(crate) fn readers_see_old_or_new(place: &Place) {
    let stop = AtomicBool::new(false);
    let reads = AtomicUsize::new(0);
    place.put("a", &signed(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let bytes = place.bytes("a");
                    assert_eq!(bytes.len(), 5000);
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn");
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut writes = 0;
        while writes < 100 || reads.load(Ordering::Relaxed) < 20 {
            place.put("a", &signed(writes % 200));
            writes += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

pub(crate) fn folders_come_and_go_under_writers(place: &Place) {
    at_once(4, |me| {
        for round in 0..ROUNDS {
            let key = format!("step/deep/{me}");
            match me % 2 {
                0 => place.put(&key, b"1"),
                _ => {
                    place.put(&format!("step/staged-{me}"), b"1");
                    let from = format!("step/staged-{me}");
                    let end = place.store.publish(&from, &key, &Expect::Absent).unwrap();
                    assert!(is_done(&end), "round {round}: {end:?}");
                }
            }
            assert!(place.store.remove(&key).unwrap(), "round {round}");
        }
    });
    assert!(place.store.names("", 9).unwrap().is_empty());
}

pub(crate) fn the_same_object_published_twice_is_there(place: &Place) {
    for round in 0..ROUNDS {
        let to = format!("to-{round}");
        place.put("staged", &signed(round));
        let ends = at_once(2, |_| place.store.publish("staged", &to, &Expect::Absent).unwrap());
        assert!(ends.iter().any(is_done), "{ends:?}");
        assert_eq!(place.bytes(&to), signed(round));
    }
}

pub(crate) fn a_move_takes_no_replacement_away(place: &Place) {
    for round in 0..ROUNDS * 4 {
        let (to, aside) = (format!("f{round}/to"), format!("f{round}/.forebay/aside"));
        place.put(&to, &signed(1));
        let expect = Expect::Version(place.store.get(&to, 10_000).unwrap().unwrap().1);
        place.put("staged", &signed(2));
        let ends = at_once(2, |me| match me {
            0 => place.store.publish("staged", &to, &expect).unwrap(),
            _ => place.store.publish(&to, &aside, &Expect::Absent).unwrap(),
        });
        assert!(is_done(&ends[1]), "{ends:?}");
        let (there, moved) = (place.found(&to), place.bytes(&aside));
        match &ends[0] {
            Published::Done { .. } => {
                let found = there.as_ref() == Some(&signed(2)) || moved == signed(2);
                assert!(found, "round {round}: the replacement is nowhere");
            }
            Published::Lost => assert_eq!((there, moved), (None, signed(1))),
            Published::Withdrawn => panic!("{ends:?}"),
        }
        place.store.remove("staged").unwrap();
    }
}
