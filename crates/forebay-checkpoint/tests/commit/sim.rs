//! Virtual time for threads: one actor runs at a time, until it sleeps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use forebay_checkpoint::commit::{AttemptId, Clock, Hint, Hints};
use forebay_engine::RangeSource;
use forebay_error::Result;
use forebay_store::{
    Abilities, DataObject, Expect, Listed, MemoryStore, Published, Store, Version,
};

/// The scheduler, the clock of all actors, and what moves the store's clock.
pub(crate) struct Sim {
    state: Mutex<State>,
    turn: Condvar,
    store: MemoryStore,
}

struct State {
    now: Duration,
    running: Option<usize>,
    /// (when, order of going to sleep) -> actor.
    sleepers: BTreeMap<(Duration, u64), usize>,
    order: u64,
}

/// An actor: a boxed closure, run on a thread of its own.
pub(crate) type Actor<'a, T> = Box<dyn FnOnce() -> T + Send + 'a>;

impl Sim {
    pub(crate) fn new(store: &MemoryStore) -> Arc<Self> {
        let state =
            State { now: Duration::ZERO, running: None, sleepers: BTreeMap::new(), order: 0 };
        Arc::new(Self { state: Mutex::new(state), turn: Condvar::new(), store: store.clone() })
    }

    /// Runs the actors until all have returned; returns what they returned, and how long it took.
    pub(crate) fn run<T: Send>(&self, actors: Vec<Actor<'_, T>>) -> (Vec<T>, Duration) {
        let start = self.state.lock().unwrap().now;
        {
            let mut state = self.state.lock().unwrap();
            assert!(state.running.is_none() && state.sleepers.is_empty(), "one run at a time");
            for id in 0..actors.len() {
                state.sleep(id, Duration::ZERO);
            }
            state.hand_over(&self.store);
        }
        let results = std::thread::scope(|scope| {
            let handles: Vec<_> = actors
                .into_iter()
                .enumerate()
                .map(|(id, actor)| {
                    scope.spawn(move || {
                        self.wait_for_turn(id);
                        let leave = Leave(self);
                        let result = actor();
                        drop(leave);
                        result
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        (results, self.state.lock().unwrap().now - start)
    }

    /// Moves time while nothing runs.
    pub(crate) fn advance(&self, by: Duration) {
        let mut state = self.state.lock().unwrap();
        assert!(state.running.is_none());
        state.now += by;
        self.store.advance(by);
    }

    /// [`Clock::now`], for tests that have no trait in scope.
    pub(crate) fn clock_now(&self) -> Duration {
        Clock::now(self)
    }

    /// [`Clock::sleep`].
    pub(crate) fn clock_wait(&self, time: Duration) {
        Clock::sleep(self, time);
    }

    fn wait_for_turn(&self, id: usize) {
        let mut state = self.state.lock().unwrap();
        while state.running != Some(id) {
            state = self.turn.wait(state).unwrap();
        }
    }
}

/// Hands over when an actor returns, or panics.
struct Leave<'a>(&'a Sim);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().unwrap();
        state.hand_over(&self.0.store);
        self.0.turn.notify_all();
    }
}

impl State {
    fn sleep(&mut self, id: usize, time: Duration) {
        self.order += 1;
        let key = (self.now + time, self.order);
        self.sleepers.insert(key, id);
    }

    fn hand_over(&mut self, store: &MemoryStore) {
        match self.sleepers.pop_first() {
            Some(((when, _), id)) => {
                store.advance(when.saturating_sub(self.now));
                self.now = self.now.max(when);
                self.running = Some(id);
            }
            None => self.running = None,
        }
    }
}

impl Clock for Sim {
    fn now(&self) -> Duration {
        self.state.lock().unwrap().now
    }

    fn sleep(&self, time: Duration) {
        let mut state = self.state.lock().unwrap();
        match state.running {
            None => {
                state.now += time;
                self.store.advance(time);
            }
            Some(id) => {
                state.sleep(id, time);
                state.hand_over(&self.store);
                self.turn.notify_all();
                while state.running != Some(id) {
                    state = self.turn.wait(state).unwrap();
                }
            }
        }
    }
}

/// A channel for hints among the ranks of one simulation: each has a queue, which the others fill.
pub(crate) struct Channel {
    sim: Arc<Sim>,
    queues: Arc<Vec<Mutex<VecDeque<Hint>>>>,
    rank: usize,
}

impl Channel {
    pub(crate) fn of_world(sim: &Arc<Sim>, world: u32) -> Vec<Arc<dyn Hints>> {
        let queues: Arc<Vec<_>> = Arc::new((0..world).map(|_| Mutex::default()).collect());
        let end = |rank| -> Arc<dyn Hints> {
            Arc::new(Self { sim: Arc::clone(sim), queues: Arc::clone(&queues), rank })
        };
        (0..world as usize).map(end).collect()
    }
}

impl Hints for Channel {
    fn tell(&self, _attempt: AttemptId, hint: &Hint) {
        for (rank, queue) in self.queues.iter().enumerate() {
            if rank != self.rank {
                queue.lock().unwrap().push_back(hint.clone());
            }
        }
    }

    fn wait(&self, _attempt: AttemptId, time: Duration) -> Vec<Hint> {
        let end = self.sim.now() + time;
        loop {
            let heard: Vec<Hint> = self.queues[self.rank].lock().unwrap().drain(..).collect();
            let left = end.saturating_sub(self.sim.now());
            if !heard.is_empty() || left.is_zero() {
                return heard;
            }
            self.sim.sleep(left.min(Duration::from_millis(1)));
        }
    }
}

/// What a [`Slow`] client does before and after each call.
pub(crate) enum Pace {
    /// At one point, counted over its calls: sleeps that long.
    PauseAt(u64, Duration),
    /// Often, up to 20 ms, by a seed.
    Random(u64),
    /// Whenever a part is read.
    Parts(Duration),
}

/// How a store gets what was staged to where it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    /// In one step, as `rename` does.
    AtOnce,
    /// To an empty place in two, as `link` and `unlink` do; others may come between.
    ByLink,
    /// Not at all: it copies, as object stores do, and what was staged stays.
    ByCopy,
}

/// A client of a store that takes its time, so that others get between any two of its calls.
pub(crate) struct Slow {
    inner: Arc<dyn Store>,
    sim: Arc<Sim>,
    pace: Mutex<Pace>,
    points: Mutex<u64>,
    moves: Moves,
}

impl Slow {
    pub(crate) fn new(inner: Arc<dyn Store>, sim: &Arc<Sim>, pace: Pace) -> Arc<Self> {
        Self::moving(inner, sim, pace, Moves::AtOnce)
    }

    /// One of a store with its own way of moving.
    pub(crate) fn moving(
        inner: Arc<dyn Store>,
        sim: &Arc<Sim>,
        pace: Pace,
        moves: Moves,
    ) -> Arc<Self> {
        let (sim, pace) = (Arc::clone(sim), Mutex::new(pace));
        Arc::new(Self { inner, sim, pace, points: Mutex::new(0), moves })
    }

    pub(crate) fn points(&self) -> u64 {
        *self.points.lock().unwrap()
    }

    fn point(&self) {
        let point = {
            let mut points = self.points.lock().unwrap();
            *points += 1;
            *points - 1
        };
        let time = match &mut *self.pace.lock().unwrap() {
            Pace::PauseAt(at, time) if *at == point => Some(*time),
            Pace::PauseAt(..) | Pace::Parts(_) => None,
            Pace::Random(seed) => {
                // Xorshift.
                *seed ^= *seed << 13;
                *seed ^= *seed >> 7;
                *seed ^= *seed << 17;
                (*seed % 2 == 0).then(|| Duration::from_micros((*seed >> 8) % 20_000))
            }
        };
        if let Some(time) = time {
            self.sim.sleep(time);
        }
    }

    fn around<T>(&self, call: impl FnOnce(&dyn Store) -> T) -> T {
        self.point();
        let result = call(self.inner.as_ref());
        self.point();
        result
    }
}

impl Store for Slow {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        let pause = match &*self.pace.lock().unwrap() {
            Pace::Parts(time) if key.contains("/part-") => Some(*time),
            _ => None,
        };
        if let Some(time) = pause {
            self.sim.sleep(time);
        }
        self.around(|store| store.get(key, max_bytes))
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.around(|store| store.create(key, bytes))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.around(|store| store.put(key, bytes))
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.around(|store| store.list(prefix, limit))
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.around(|store| store.names(prefix, limit))
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.around(|store| store.remove(key))
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        let staged_bytes =
            || self.inner.get(staged, 1 << 20).map(|got| got.map(|(bytes, _)| bytes));
        match self.moves {
            Moves::AtOnce => self.around(|store| store.publish(staged, to, expect)),
            Moves::ByCopy => {
                let bytes = staged_bytes()?;
                self.around(|store| {
                    let published = store.publish(staged, to, expect)?;
                    if let (Some(bytes), Published::Done { .. }) = (bytes, &published) {
                        store.put(staged, &bytes)?;
                    }
                    Ok(published)
                })
            }
            Moves::ByLink if *expect == Expect::Absent => {
                let Some(bytes) = staged_bytes()? else { return Ok(Published::Withdrawn) };
                if !self.around(|store| store.create(to, &bytes))? {
                    return Ok(Published::Lost);
                }
                self.around(|store| store.remove(staged))?;
                Ok(Published::Done { durable: true })
            }
            Moves::ByLink => self.around(|store| store.publish(staged, to, expect)),
        }
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.around(|store| store.create_data(key, bytes))
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        self.around(|store| store.open_data(key))
    }
}
