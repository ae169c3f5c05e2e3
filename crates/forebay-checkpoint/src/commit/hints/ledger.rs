//! What one rank knows of the others by hints, and what it asks next. No I/O, no clock of its own, no locks: given
//! what came when, it always says the same.

use std::collections::VecDeque;
use std::time::Duration;

use super::peers::Peers;
use super::{Hint, PULSE_AFTER, Suspect, notice};
use crate::commit::id::AttemptId;

/// Between two signs of life.
const PERIOD: Duration = Duration::from_secs(1);
/// Between two looks for news, in small jobs.
const LOOK: Duration = Duration::from_millis(50);
/// What a rank adds to that for each rank of the job: 10 000 looks a second in all.
const LOOK_PER_RANK: Duration = Duration::from_micros(100);
/// How long a rank listens after it was last asked to.
const ATTENTION: Duration = Duration::from_secs(3);
/// Most things to tell that wait for the store.
const OUTBOX_MAX: usize = 64;

/// A request to the key-value store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Adds to a counter; [`Answer::Number`] is what it is then.
    Add(String, i64),
    /// Sets a value; [`Answer::Done`].
    Set(String, Vec<u8>),
    /// Reads a value that may not be there; [`Answer::Value`].
    Look(String),
    /// Reads values that are there; [`Answer::Values`], in their order.
    Read(Vec<String>),
    /// Removes a value that may not be there; [`Answer::Done`].
    Remove(String),
}

/// What the store answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Order::Add`].
    Number(i64),
    /// To [`Order::Look`].
    Value(Option<Vec<u8>>),
    /// To [`Order::Read`].
    Values(Vec<Vec<u8>>),
    /// To the others; as an answer to one of these: nothing that can be understood.
    Done,
}

/// What a rank listens to.
#[derive(Clone, Copy, Debug)]
struct Listening {
    attempt: AttemptId,
    until: Duration,
    /// Until when news are waited for, too.
    news_until: Duration,
    look_due: Duration,
    parts_due: Duration,
    parts_told: bool,
}

/// See the module. Times are those of the caller's monotonic clock.
pub(crate) struct Ledger {
    rank: u32,
    peers: Peers,
    /// Own counter, as acknowledged last.
    count: i64,
    acknowledged: Duration,
    beat_due: Duration,
    round_due: Duration,
    listening: Option<Listening>,
    last_event: Vec<u8>,
    outbox: VecDeque<Order>,
    inbox: Vec<Hint>,
    /// Attempts with keys in the store.
    attempts: VecDeque<AttemptId>,
    asked: Option<Order>,
    /// The store is out of reach, for good.
    pub(crate) lost: bool,
    closing: bool,
    pub(crate) closed: bool,
}

impl Ledger {
    /// `who` names each rank, for people.
    pub(crate) fn new(rank: u32, who: Vec<String>, now: Duration) -> Self {
        Self {
            rank,
            peers: Peers::new(rank, who),
            count: 0,
            acknowledged: now,
            beat_due: now,
            round_due: now,
            listening: None,
            last_event: Vec::new(),
            outbox: VecDeque::new(),
            inbox: Vec::new(),
            attempts: VecDeque::new(),
            asked: None,
            lost: false,
            closing: false,
            closed: false,
        }
    }

    /// What to ask the store now, or how long there is nothing to ask.
    pub(crate) fn next(&mut self, now: Duration) -> Result<Order, Duration> {
        if self.lost || self.closed {
            return Err(PERIOD);
        }
        let order = self.due(now)?;
        self.asked = Some(order.clone());
        Ok(order)
    }

    fn due(&mut self, now: Duration) -> Result<Order, Duration> {
        if let Some(order) = self.outbox.pop_front() {
            return Ok(order);
        }
        if self.closing {
            self.closed = true;
            return Ok(Order::Set(notice::beat(self.rank), notice::CLOSED.to_vec()));
        }
        if now >= self.beat_due {
            self.beat_due = now + PERIOD;
            return Ok(Order::Add(notice::beat(self.rank), 1));
        }
        let mut wake = self.beat_due;
        let in_charge = self.peers.is_in_charge(now);
        if let Some(listening) = self.listening.as_mut().filter(|one| now < one.until) {
            let pause = LOOK.max(LOOK_PER_RANK * self.peers.world());
            let news = now < listening.news_until;
            if news && now >= listening.look_due {
                listening.look_due = now + pause;
                return Ok(Order::Look(notice::event(listening.attempt)));
            }
            if news && in_charge && !listening.parts_told && now >= listening.parts_due {
                listening.parts_due = now + pause;
                return Ok(Order::Look(notice::parts(listening.attempt)));
            }
            if now >= self.round_due {
                self.round_due = now + self.peers.period();
                return Ok(Order::Read(self.peers.watched(now).map(notice::beat).collect()));
            }
            wake = wake.min(self.round_due);
            if news {
                wake = wake.min(listening.look_due);
            }
        }
        Err(wake.saturating_sub(now))
    }

    /// Takes the store's answer to what was asked; whether there is news.
    pub(crate) fn answer(&mut self, answer: Answer, now: Duration) -> bool {
        match (self.asked.take(), answer) {
            (Some(Order::Add(key, _)), Answer::Number(count)) => {
                if key == notice::beat(self.rank) && count > self.count {
                    (self.count, self.acknowledged) = (count, now);
                }
                false
            }
            (Some(Order::Look(key)), Answer::Value(Some(value))) => self.hear(&key, value),
            (Some(Order::Read(keys)), Answer::Values(values)) => {
                self.peers.round(&keys, values, self.count, now)
            }
            _ => false,
        }
    }

    fn hear(&mut self, key: &str, value: Vec<u8>) -> bool {
        let Some(listening) = &mut self.listening else { return false };
        let attempt = listening.attempt;
        if key == notice::parts(attempt) {
            let all =
                notice::count(&value).is_some_and(|count| count >= i64::from(self.peers.world()));
            if all {
                listening.parts_told = true;
                self.inbox.push(Hint::Part);
            }
            return all;
        }
        if key != notice::event(attempt) || value == self.last_event {
            return false;
        }
        let heard = notice::read(attempt, &value);
        self.last_event = value;
        let news = heard.is_some();
        self.inbox.extend(heard);
        news
    }

    /// Ranks to look after.
    pub(crate) fn suspects(&self, now: Duration) -> Vec<Suspect> {
        if self.lost { Vec::new() } else { self.peers.suspects(now) }
    }

    /// Whether news of others come through.
    pub(crate) fn hears(&self, now: Duration) -> bool {
        !self.lost && !self.closing && self.peers.is_fresh(now)
    }

    /// For how long the store has not acknowledged this rank's counter, once that is too long.
    pub(crate) fn unheard(&self, now: Duration) -> Option<Duration> {
        let time = now.saturating_sub(self.acknowledged);
        (time >= PULSE_AFTER).then_some(time)
    }

    pub(crate) fn tell(&mut self, attempt: AttemptId, hint: &Hint) {
        self.note(attempt);
        let order = match notice::value(attempt, hint) {
            Some(value) => Order::Set(notice::event(attempt), value),
            None => Order::Add(notice::parts(attempt), 1),
        };
        if !self.lost && !self.closing && self.outbox.len() < OUTBOX_MAX {
            self.outbox.push_back(order);
        }
    }

    /// Listens to how the others are from now on, and for `news` of the attempt.
    pub(crate) fn attend(&mut self, attempt: AttemptId, news: Duration, now: Duration) {
        self.note(attempt);
        let due = now;
        let mut listening = Listening {
            attempt,
            until: due,
            news_until: due,
            look_due: due,
            parts_due: due,
            parts_told: false,
        };
        match self.listening.filter(|one| one.attempt == attempt) {
            Some(before) => listening = before,
            None => {
                self.last_event.clear();
                self.inbox.clear();
            }
        }
        listening.until = now + news + ATTENTION;
        listening.news_until = listening.news_until.max(now + news);
        self.listening = Some(listening);
    }

    /// What was heard of an attempt.
    pub(crate) fn take(&mut self) -> Vec<Hint> {
        std::mem::take(&mut self.inbox)
    }

    /// Nobody asks for an attempt any more once the one after it has begun on this rank: every rank waits for the end
    /// of a save before it begins the next. One is kept for ranks that are slow to read.
    fn note(&mut self, attempt: AttemptId) {
        if self.attempts.contains(&attempt) {
            return;
        }
        self.attempts.push_back(attempt);
        if self.attempts.len() > 2
            && let Some(old) = self.attempts.pop_front()
            && self.rank == 0
            && !self.lost
        {
            self.outbox.push_back(Order::Remove(notice::event(old)));
            self.outbox.push_back(Order::Remove(notice::parts(old)));
        }
    }

    /// The store is out of reach.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
        self.outbox.clear();
    }

    /// This rank saves no more: it says so, and then asks nothing.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }
}
