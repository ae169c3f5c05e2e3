//! Ranks that hear of one another through a store, second by second.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_error::{Code, Error};

use super::ledger::{Answer, Ledger, Order};
use super::{Hint, notice};
use crate::commit::id::{AttemptId, RunId};
use crate::commit::record::Failure;

const ATTEMPT: AttemptId = AttemptId { run: RunId(1), save: 1 };

/// A key-value store, and ranks that use it.
struct Job {
    store: BTreeMap<String, Vec<u8>>,
    ranks: Vec<Ledger>,
    now: Duration,
    requests: usize,
}

impl Job {
    fn new(world: u32) -> Self {
        let who: Vec<String> = (0..world).map(|rank| format!("host:{rank}")).collect();
        let ranks = (0..world).map(|rank| Ledger::new(rank, who.clone(), Duration::ZERO));
        let mut job = Self {
            store: BTreeMap::new(),
            ranks: ranks.collect(),
            now: Duration::ZERO,
            requests: 0,
        };
        job.pass(0, |_| true);
        job
    }

    fn serve(&mut self, order: &Order) -> Answer {
        self.requests += 1;
        match order {
            Order::Add(key, by) => {
                let value = self.store.entry(key.clone()).or_insert_with(|| b"0".to_vec());
                let count = notice::count(value).unwrap() + by;
                *value = count.to_string().into_bytes();
                Answer::Number(count)
            }
            Order::Set(key, value) => {
                self.store.insert(key.clone(), value.clone());
                Answer::Done
            }
            Order::Look(key) => Answer::Value(self.store.get(key).cloned()),
            Order::Read(keys) => {
                Answer::Values(keys.iter().map(|key| self.store[key].clone()).collect())
            }
            Order::Remove(key) => {
                self.store.remove(key);
                Answer::Done
            }
        }
    }

    /// Lets time pass in steps of 10 ms; those ranks live for which it says so.
    fn pass(&mut self, ms: u64, lives: impl Fn(usize) -> bool) {
        for _ in 0..=ms / 10 {
            for rank in (0..self.ranks.len()).filter(|rank| lives(*rank)) {
                while let Ok(order) = self.ranks[rank].next(self.now) {
                    let answer = self.serve(&order);
                    self.ranks[rank].answer(answer, self.now);
                }
            }
            self.now += Duration::from_millis(10);
        }
    }

    fn attend(&mut self) {
        let now = self.now;
        for rank in &mut self.ranks {
            rank.attend(ATTEMPT, Duration::from_secs(60), now);
        }
    }
}

#[test]
fn news_reach_those_who_wait_within_a_tenth_of_a_second() {
    let mut job = Job::new(3);
    job.attend();
    job.pass(500, |_| true);
    assert!(job.ranks.iter_mut().all(|rank| rank.take().is_empty()));
    for rank in 0..3 {
        job.ranks[rank].tell(ATTEMPT, &Hint::Part);
    }
    job.pass(90, |_| true);
    assert_eq!(job.ranks[0].take(), [Hint::Part], "to the one in charge, once");
    assert_eq!(job.ranks[1].take(), []);
    let failure = Failure::of(2, &Error::new(Code::NoSpace, "full"));
    job.ranks[2].tell(ATTEMPT, &Hint::Failed(failure.clone()));
    job.pass(90, |_| true);
    assert_eq!(job.ranks[0].take(), [Hint::Failed(failure.clone())]);
    assert_eq!(job.ranks[1].take(), [Hint::Failed(failure)]);
    job.pass(500, |_| true);
    assert_eq!(job.ranks[1].take(), [], "news are told once");
    job.ranks[0].tell(ATTEMPT, &Hint::Decided);
    job.pass(90, |_| true);
    assert_eq!(job.ranks[1].take(), [Hint::Decided]);
}

#[test]
fn a_rank_that_waits_for_nothing_only_says_that_it_lives() {
    let mut job = Job::new(2);
    let before = job.requests;
    job.pass(10_000, |_| true);
    assert!((18..=22).contains(&(job.requests - before)), "{}", job.requests - before);
    assert!(!job.ranks[0].hears(job.now));
}

#[test]
fn a_rank_that_ends_is_suspect_after_five_seconds_and_not_before() {
    let mut job = Job::new(3);
    job.attend();
    job.pass(3000, |_| true);
    job.pass(4900, |rank| rank != 1);
    assert_eq!(job.ranks[0].suspects(job.now), []);
    assert!(job.ranks[0].hears(job.now) && job.ranks[2].hears(job.now));
    job.pass(2100, |rank| rank != 1);
    for rank in [0, 2] {
        let suspects = job.ranks[rank].suspects(job.now);
        assert_eq!(suspects.iter().map(|one| one.rank).collect::<Vec<_>>(), [1]);
    }
    assert!(job.ranks[1].unheard(job.now).is_some_and(|time| time > Duration::from_secs(5)));
    job.pass(2000, |_| true);
    assert_eq!(job.ranks[0].suspects(job.now), []);
    assert_eq!(job.ranks[1].unheard(job.now), None);
}

#[test]
fn a_rank_that_closes_says_so_last_and_asks_nothing_more() {
    let mut job = Job::new(2);
    job.ranks[1].tell(ATTEMPT, &Hint::Decided);
    job.ranks[1].close();
    job.pass(100, |_| true);
    assert!(job.store.contains_key(&notice::event(ATTEMPT)));
    assert_eq!(job.store[&notice::beat(1)], notice::CLOSED);
    let now = job.now;
    assert!(job.ranks[1].closed && job.ranks[1].next(now).is_err());
}

#[test]
fn answers_that_make_no_sense_are_no_answers() {
    let mut job = Job::new(1);
    let count = 1;
    for answer in [
        Answer::Done,
        Answer::Number(count),
        Answer::Number(-9),
        Answer::Value(None),
        Answer::Values(vec![vec![]; 9]),
    ] {
        job.now += Duration::from_secs(3);
        let now = job.now;
        job.attend();
        while job.ranks[0].next(now).is_ok() {
            assert!(!job.ranks[0].answer(answer.clone(), now));
        }
    }
    assert!(job.ranks[0].unheard(job.now).is_some(), "nothing of it was an acknowledgement");
}

#[test]
fn keys_of_old_attempts_go() {
    let mut job = Job::new(2);
    for save in 1..=9 {
        let attempt = AttemptId { save, ..ATTEMPT };
        for rank in 0..2 {
            job.ranks[rank].tell(attempt, &Hint::Part);
            job.ranks[rank].tell(attempt, &Hint::Decided);
        }
        job.pass(100, |_| true);
    }
    let left = job.store.keys().filter(|key| !key.starts_with("beat/")).count();
    assert_eq!(left, 4, "{:?}", job.store.keys());
}
