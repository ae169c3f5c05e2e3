//! Data objects.

use forebay_engine::{RangeSource, read_exact_at, write_all_at};
use forebay_error::Code;

use super::Place;

fn pattern(index: usize) -> u8 {
    (index * 31 % 251) as u8
}

fn all_of(source: &dyn RangeSource) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(source.len()).unwrap()];
    read_exact_at(source, &mut bytes, 0).unwrap();
    bytes
}

pub(crate) fn ranges_come_in_any_order_from_many_threads(place: &Place) {
    const PIECE: usize = 10_007;
    const PIECES: usize = 40;
    let bytes: Vec<u8> = (0..PIECE * PIECES).map(pattern).collect();
    let data = place.store.create_data("step/data", bytes.len() as u64).unwrap();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (data, bytes) = (&data, &bytes);
            scope.spawn(move || {
                for piece in (0..PIECES).rev().filter(|piece| piece % 4 == worker) {
                    let (from, to) = (piece * PIECE, (piece + 1) * PIECE);
                    write_all_at(data.sink(), &bytes[from..to], from as u64).unwrap();
                    data.sink().flush_soon(from as u64, PIECE as u64);
                }
            });
        }
    });
    data.seal().unwrap();
    let source = place.store.open_data("step/data").unwrap();
    assert_eq!(source.len(), bytes.len() as u64);
    assert!(all_of(source.as_ref()) == bytes);
    let mut middle = [0; 100];
    read_exact_at(source.as_ref(), &mut middle, 5000).unwrap();
    assert_eq!(middle, bytes[5000..5100]);
    assert_eq!(source.read_at(&mut middle, bytes.len() as u64).unwrap(), 0);
    source.check_unchanged().unwrap();
    assert_eq!(place.store.list("", 9).unwrap()[0].bytes, bytes.len() as u64);
}

pub(crate) fn a_key_is_written_by_one(place: &Place) {
    let data = place.store.create_data("d", 3).unwrap();
    let error = place.store.create_data("d", 3).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    write_all_at(data.sink(), b"abc", 0).unwrap();
    data.seal().unwrap();
    assert_eq!(place.bytes("d"), b"abc");
    let error = place.store.open_data("none").map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

/// Whether anything is kept is the store's to say; that what it keeps is right is the suite's.
pub(crate) fn what_was_begun_is_gone_on_with(place: &Place) {
    let bytes: Vec<u8> = (0..30_000).map(pattern).collect();
    let begun = place.store.resume_data("d", 30_000).unwrap();
    assert!(!begun.holds(&bytes[..10_000], 0).unwrap(), "nothing is there yet");
    write_all_at(begun.sink(), &bytes[..10_000], 0).unwrap();
    // Wrong bytes, as a torn write leaves them.
    write_all_at(begun.sink(), &[0xee; 5000], 10_000).unwrap();
    let error = place.store.resume_data("d", 30_000).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "its writer lives: {error:?}");
    drop(begun);
    let again = place.store.resume_data("d", 30_000).unwrap();
    for (at, piece) in bytes.chunks(5000).enumerate() {
        let held = again.holds(piece, at as u64 * 5000).unwrap();
        assert!(!held || at < 2, "range {at} was never written");
        if !held {
            write_all_at(again.sink(), piece, at as u64 * 5000).unwrap();
        }
    }
    again.seal().unwrap();
    drop(again);
    assert!(all_of(place.store.open_data("d").unwrap().as_ref()) == bytes);
}

pub(crate) fn what_changes_under_a_reader_is_told(place: &Place) {
    place.put("a", b"old");
    let source = place.store.open_data("a").unwrap();
    source.check_unchanged().unwrap();
    place.put("a", b"new");
    assert_eq!(source.check_unchanged().unwrap_err().code(), Code::FileChanged);
    assert_old_or_changed(source.as_ref(), b"old");
    let source = place.store.open_data("a").unwrap();
    place.store.remove("a").unwrap();
    assert_eq!(source.check_unchanged().unwrap_err().code(), Code::FileChanged);
    assert_old_or_changed(source.as_ref(), b"new");
}

/// An open object keeps its bytes, or says that it cannot: it never gives others.
fn assert_old_or_changed(source: &dyn RangeSource, old: &[u8]) {
    let mut bytes = vec![0; old.len()];
    match read_exact_at(source, &mut bytes, 0) {
        Ok(()) => assert_eq!(bytes, old),
        Err(error) => assert_eq!(error.code(), Code::FileChanged, "{error:?}"),
    }
}

pub(crate) fn an_object_may_be_empty(place: &Place) {
    place.store.create_data("d", 0).unwrap().seal().unwrap();
    let source = place.store.open_data("d").unwrap();
    assert!(source.is_empty());
    assert_eq!(source.read_at(&mut [0; 8], 0).unwrap(), 0);
}
