//! Two writers of one step.

use std::sync::Arc;

use forebay_checkpoint::commit::{Committed, RunId, claim};
use forebay_error::{Code, Result};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Pace, Sim, Slow};
use crate::world::*;

const WORLD: u32 = 2;
const SEEDS: u64 = 400;

/// Two jobs of two ranks save step 5, each call at a time of its own. Returns what each rank of each job got.
fn race(seed: u64, overwrite: bool, epochs: [u64; 2]) -> (MemoryStore, Vec<Result<Committed>>) {
    let store = MemoryStore::new();
    let sim = Sim::new(&store);
    let plain = root(Arc::new(store.clone()), &sim);
    if overwrite {
        save(&plain, None, spec(5, attempt(9, 0), 0, 1)).unwrap();
    }
    for _ in 0..epochs.into_iter().max().unwrap_or(0) {
        claim(&plain, RunId(9), None, "x").unwrap();
    }
    let actor = |at: u32| -> Actor<'static, Result<Committed>> {
        let (run, rank) = (at / WORLD, at % WORLD);
        let inner: Arc<dyn Store> = Arc::new(store.clone());
        let pace = Pace::Random(seed * 97 + u64::from(at) * 0x9E37_79B9 + 1);
        let root = root(Slow::new(inner, &sim, pace), &sim);
        let mut spec = spec(5, attempt(run + 1, 0), rank, WORLD);
        spec.epoch = epochs[run as usize];
        Box::new(move || save(&root, None, spec))
    };
    let (results, took) = sim.run((0..2 * WORLD).map(actor).collect());
    assert!(took < LONGEST_WAIT, "seed {seed}: {took:?}");
    check_listing(&plain, &store);
    let loaded = load(&store, 5);
    collect_all(&plain, &store, &sim);
    assert_eq!(load(&store, 5), loaded, "seed {seed}: a collection changed what is committed");
    (store, results)
}

fn won(results: &[Result<Committed>], seed: u64) -> bool {
    let codes: Vec<_> = results.iter().map(code).collect();
    assert!(codes.windows(2).all(|pair| pair[0] == pair[1]), "seed {seed}: {results:?}");
    assert!([None, Some(Code::LostCommit)].contains(&codes[0]), "seed {seed}: {results:?}");
    codes[0].is_none()
}

#[test]
fn of_two_writers_of_one_step_one_wins_and_the_other_knows() {
    let mut wins = [0; 3];
    for seed in 0..SEEDS {
        for overwrite in [false, true] {
            let (store, results) = race(seed, overwrite, [0, 0]);
            let (first, second) = results.split_at(WORLD as usize);
            let outcome = (won(first, seed), won(second, seed));
            let loaded = load(&store, 5).unwrap();
            match outcome {
                (true, false) => assert_eq!(loaded, attempt(1, 0), "seed {seed}"),
                (false, true) => assert_eq!(loaded, attempt(2, 0), "seed {seed}"),
                // One began after the other had committed, and replaced it.
                (true, true) => assert!([attempt(1, 0), attempt(2, 0)].contains(&loaded)),
                (false, false) => panic!("seed {seed}: both lost: {results:?}"),
            }
            wins[usize::from(outcome.0) + usize::from(outcome.1)] += 1;
        }
    }
    println!("{} races, one winner in {}, two in {}", SEEDS * 2, wins[1], wins[2]);
    assert!(wins[1] > SEEDS, "the writers met: {wins:?}");
}

#[test]
fn a_newer_epoch_wins_every_race_against_an_older_one() {
    for seed in 0..SEEDS / 2 {
        let (store, results) = race(seed, seed % 2 == 0, [1, 2]);
        assert_eq!(load(&store, 5), Some(attempt(2, 0)), "seed {seed}: {results:?}");
        assert!(results[..2].iter().all(|result| code(result) == Some(Code::Fenced)));
        assert!(results[2..].iter().all(Result::is_ok), "seed {seed}: {results:?}");
    }
}
