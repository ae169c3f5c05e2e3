//! How many requests are in flight: as many as pay, half of that when the store has too much to do.
//!
//! Throughput is looked at in windows of at least [`WINDOW`] and as many requests as are allowed at once. While
//! requests queue and a window moved clearly more than the one before, the limit grows by a quarter; where it moved
//! clearly less, it shrinks by one. `SlowDown`, 503, 429 and timeouts halve it, at most once a window, for one burst of
//! refusals is one message. So a fast store gets all that is allowed and a slow one no queue of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests in flight to begin with.
const FIRST: usize = 8;
/// Shorter ones say nothing.
const WINDOW: Duration = Duration::from_millis(250);
/// More by this counts as more.
const MORE: f64 = 1.05;
/// Less by this counts as less.
const LESS: f64 = 0.85;

/// See the module.
pub(super) struct Gate {
    permits: Arc<Semaphore>,
    state: Mutex<State>,
    max: usize,
}

struct State {
    limit: usize,
    /// Permits to take out of circulation when they come back.
    owed: usize,
    began: Instant,
    bytes: u64,
    done: usize,
    /// Whether somebody had to wait in this window.
    queued: bool,
    /// Bytes a second of the window before.
    rate: f64,
    cut: Option<Instant>,
}

/// Leave to have one request in flight.
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    permit: Option<OwnedSemaphorePermit>,
}

impl Gate {
    pub(super) fn new(max: usize) -> Self {
        let max = max.max(1);
        let limit = FIRST.min(max);
        let state = State {
            limit,
            owed: 0,
            began: Instant::now(),
            bytes: 0,
            done: 0,
            queued: false,
            rate: 0.0,
            cut: None,
        };
        Self { permits: Arc::new(Semaphore::new(limit)), state: Mutex::new(state), max }
    }

    /// Waits for a turn.
    pub(super) async fn enter(&self) -> Pass<'_> {
        if let Some(pass) = self.try_enter() {
            return pass;
        }
        self.state().queued = true;
        // Nobody closes it; if somebody did, there would be no limit any more.
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        Pass { gate: self, permit }
    }

    /// A turn, if there is one now.
    pub(super) fn try_enter(&self) -> Option<Pass<'_>> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        Some(Pass { gate: self, permit: Some(permit) })
    }

    /// The store has too much to do.
    pub(super) fn slow_down(&self) {
        let mut state = self.state();
        if state.cut.is_some_and(|cut| cut.elapsed() < WINDOW) {
            return;
        }
        let half = (state.limit / 2).max(1);
        self.set(&mut state, half);
        state.cut = Some(Instant::now());
        state.restart(0.0);
    }

    /// A request has moved that many bytes.
    pub(super) fn moved(&self, bytes: u64) {
        let mut state = self.state();
        state.bytes += bytes;
        state.done += 1;
        let time = state.began.elapsed();
        if time < WINDOW || state.done < state.limit {
            return;
        }
        let rate = state.bytes as f64 / time.as_secs_f64();
        if state.queued && rate > state.rate * MORE {
            let more = (state.limit + (state.limit / 4).max(1)).min(self.max);
            self.set(&mut state, more);
        } else if state.queued && rate < state.rate * LESS {
            let less = (state.limit - 1).max(1);
            self.set(&mut state, less);
        }
        state.restart(rate);
    }

    /// Requests that may be in flight now.
    pub(super) fn limit(&self) -> usize {
        self.state().limit
    }

    fn set(&self, state: &mut State, limit: usize) {
        if limit > state.limit {
            let more = limit - state.limit;
            let kept = more.min(state.owed);
            state.owed -= kept;
            self.permits.add_permits(more - kept);
        } else {
            let fewer = state.limit - limit;
            state.owed += fewer - self.permits.forget_permits(fewer);
        }
        if limit != state.limit {
            tracing::debug!(from = state.limit, to = limit, "requests in flight");
        }
        state.limit = limit;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn restart(&mut self, rate: f64) {
        self.began = Instant::now();
        (self.bytes, self.done, self.queued, self.rate) = (0, 0, false, rate);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        if let Some(permit) = self.permit.take().filter(|_| state.owed > 0) {
            state.owed -= 1;
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::runtime;

    #[test]
    fn it_grows_while_more_moves_and_halves_when_told() {
        let gate = Gate::new(20);
        let mut bytes = 1000;
        for _ in 0..10 {
            let mut state = gate.state();
            state.began = Instant::now().checked_sub(WINDOW).unwrap();
            (state.queued, state.done) = (true, 100);
            drop(state);
            gate.moved(bytes);
            bytes *= 2;
        }
        assert_eq!(gate.limit(), 20);
        gate.slow_down();
        gate.slow_down();
        assert_eq!(gate.limit(), 10, "one burst counts once");
    }

    #[test]
    fn no_more_than_the_limit_are_in_flight() {
        let gate = Gate::new(8);
        let handle = runtime::handle().unwrap();
        let passes: Vec<_> = (0..8).map(|_| runtime::wait(&handle, gate.enter())).collect();
        assert!(gate.try_enter().is_none());
        gate.slow_down();
        drop(passes);
        let kept: Vec<_> = std::iter::from_fn(|| gate.try_enter()).take(9).collect();
        assert_eq!(kept.len(), 4);
    }
}
