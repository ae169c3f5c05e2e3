//! A rank on a slow disk is alive.

use std::time::Duration;

use forebay_error::Code;
use forebay_store::fault::{Action, Call, Fault, FaultFolder, Plan};

use crate::world::*;

/// Longer than the lease of these tests, by far.
const SLOW: Duration = Duration::from_secs(7);

#[test]
fn a_rank_that_writes_a_side_file_for_longer_than_its_lease_is_not_taken_for_dead() {
    let first = folder();
    let client = FaultFolder::open(first.path(), Plan::none()).unwrap();
    let ends = save_all(&[plain(first.path()), root(client.store())], 7, 1);
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    let log = client.log();
    // Its data file is created, and its side file after that: their room is set aside.
    let rooms: Vec<u64> = log
        .iter()
        .filter(|step| step.action == Action::File(Call::Fallocate))
        .map(|step| step.index)
        .collect();
    let slow_at = *rooms.last().unwrap();
    let folder = folder();
    let client = FaultFolder::open(folder.path(), Plan::at(slow_at, Fault::Slow(SLOW))).unwrap();
    let started = std::time::Instant::now();
    let ends = save_with(&hurried(), &[plain(folder.path()), root(client.store())], 7, 1);
    assert_eq!(client.fired(), 1);
    assert!(started.elapsed() >= SLOW);
    let codes: Vec<Option<Code>> =
        ends.iter().map(|end| end.as_ref().err().map(forebay_error::Error::code)).collect();
    assert_eq!(codes, [None, None], "{ends:?}");
    assert_eq!(load(folder.path(), 7), Some(1));
}
