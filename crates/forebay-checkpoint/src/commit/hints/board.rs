//! One rank's end of the key-value store, between the thread of a save, which tells and waits, and the thread that has
//! the connection.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ledger::{Answer, Ledger, Order};
use super::{Hint, Hints, Suspect};
use crate::commit::id::AttemptId;

/// See the module, whose folder's opening says what travels.
pub struct Board {
    start: Instant,
    rank: u32,
    ledger: Mutex<Ledger>,
    /// There is something to ask, or news.
    moved: Condvar,
}

impl Board {
    /// For a rank of a job; `who` names each of its ranks, for people.
    pub fn new(rank: u32, who: Vec<String>) -> Self {
        let ledger = Mutex::new(Ledger::new(rank, who, Duration::ZERO));
        Self { start: Instant::now(), rank, ledger, moved: Condvar::new() }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// What to ask the store; waits for that at most `time`. One order at a time: the next one only after
    /// [`answer`](Self::answer).
    pub fn next(&self, time: Duration) -> Option<Order> {
        let until = self.now() + time;
        let mut ledger = self.lock();
        loop {
            let now = self.now();
            let pause = match ledger.next(now) {
                Ok(order) => return Some(order),
                Err(pause) => pause.min(until.saturating_sub(now)),
            };
            if pause.is_zero() || ledger.closed || ledger.lost {
                return None;
            }
            ledger = self.wait_for_change(ledger, pause);
        }
    }

    /// Takes the store's answer.
    pub fn answer(&self, answer: Answer) {
        if self.lock().answer(answer, self.now()) {
            self.moved.notify_all();
        }
    }

    /// The store is out of reach: there are no hints from here on.
    pub fn lose(&self) {
        self.lock().lose();
        self.moved.notify_all();
    }

    /// This rank saves no more. What is left to tell, and that, are the last orders.
    pub fn close(&self) {
        self.lock().close();
        self.moved.notify_all();
    }

    /// Whether there is nothing to ask any more.
    pub fn is_over(&self) -> bool {
        let ledger = self.lock();
        ledger.closed || ledger.lost
    }

    /// For how long others may not have heard of this rank, once that is too long; `Duration::MAX`: they never will.
    pub(super) fn unheard(&self) -> Option<Duration> {
        let ledger = self.lock();
        if ledger.lost { Some(Duration::MAX) } else { ledger.unheard(self.now()) }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_change<'a>(
        &'a self,
        ledger: MutexGuard<'a, Ledger>,
        time: Duration,
    ) -> MutexGuard<'a, Ledger> {
        self.moved.wait_timeout(ledger, time).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Hints for Board {
    fn tell(&self, attempt: AttemptId, hint: &Hint) {
        self.lock().tell(attempt, hint);
        self.moved.notify_all();
    }

    fn wait(&self, attempt: AttemptId, time: Duration) -> Vec<Hint> {
        let until = self.now() + time;
        let mut ledger = self.lock();
        ledger.attend(attempt, time, self.now());
        self.moved.notify_all();
        let before = ledger.suspects(self.now()).len();
        loop {
            let heard = ledger.take();
            let now = self.now();
            let left = until.saturating_sub(now);
            if !heard.is_empty() || left.is_zero() || ledger.suspects(now).len() != before {
                return heard;
            }
            ledger = self.wait_for_change(ledger, left);
        }
    }

    fn attend(&self, attempt: AttemptId) {
        self.lock().attend(attempt, Duration::ZERO, self.now());
        self.moved.notify_all();
    }

    fn hears(&self) -> bool {
        self.lock().hears(self.now())
    }

    fn suspects(&self) -> Vec<Suspect> {
        self.lock().suspects(self.now())
    }
}
