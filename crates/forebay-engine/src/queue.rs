//! The pieces that wait for a worker, and the filled slots that wait for the pump.
//!
//! Pieces become runnable in plan order, as the addresses of their targets are provided. They wait in one row: the pump
//! takes groups for DMA from its front, readers take single pieces from its back, so that both work on contiguous
//! ranges and meet in the middle; without DMA, readers take from the front, which is the order that file systems read
//! ahead in. A piece that turns out not to be resident moves to the cold row, which the direct worker serves from its
//! front; one that DMA may not do is left to the readers.
//!
//! A worker that finds nothing waits here until there is something for its role, or nothing is left to do at all: a
//! piece that another worker holds may still come back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::pump::Loaded;

/// The rows.
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// For the pump alone, which is woken at each filled slot.
    for_pump: Condvar,
}

#[derive(Default)]
struct State {
    /// Runnable pieces that are resident, or that nobody looked at yet.
    warm: VecDeque<u32>,
    /// Runnable pieces that only readers may take, in order of their coming.
    copy_only: VecDeque<u32>,
    /// Runnable pieces to be read directly, in plan order.
    cold: BTreeSet<u32>,
    /// Slots that readers have filled.
    loaded: Vec<Loaded>,
    /// Readers serve the cold row too.
    cold_by_threads: bool,
    /// DMA takes from the front.
    dma_active: bool,
    /// While it does, readers leave it the whole warm row.
    dma_alone: bool,
    /// Pieces not finished, runnable or not.
    unfinished: usize,
    stopped: bool,
}

/// What a reader was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// From the warm row: residency is to be looked at.
    Warm(u32),
    /// From the cold row: to be read directly.
    Cold(u32),
}

impl Queue {
    pub(crate) fn new(pieces: usize) -> Self {
        let state = State { unfinished: pieces, ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new(), for_pump: Condvar::new() }
    }

    /// Makes pieces runnable.
    pub(crate) fn push(&self, pieces: std::ops::Range<u32>) {
        self.lock().warm.extend(pieces);
        self.changed.notify_all();
        self.for_pump.notify_one();
    }

    /// Leaves a filled slot to the pump.
    pub(crate) fn push_loaded(&self, loaded: Loaded) {
        self.lock().loaded.push(loaded);
        self.for_pump.notify_one();
    }

    /// Takes the filled slots.
    pub(crate) fn take_loaded(&self) -> Vec<Loaded> {
        std::mem::take(&mut self.lock().loaded)
    }

    /// Sleeps until there is a filled slot, or a piece in the warm row if `dma`, at most `nap`.
    pub(crate) fn wait_for_pump(&self, nap: Duration, dma: bool) {
        let state = self.lock();
        let nothing = |state: &mut State| {
            (!dma || state.warm.is_empty()) && state.loaded.is_empty() && !state.over()
        };
        // Woken or not, the pump looks again.
        drop(self.for_pump.wait_timeout_while(state, nap, nothing));
    }

    /// Leaves pieces to the readers that DMA cannot do.
    pub(crate) fn leave_to_copy(&self, pieces: &[u32]) {
        self.lock().copy_only.extend(pieces);
        self.changed.notify_all();
    }

    /// Moves pieces to the cold row.
    pub(crate) fn push_cold(&self, pieces: &[u32]) {
        self.lock().cold.extend(pieces);
        self.changed.notify_all();
    }

    /// Gives the cold row to the readers, for want of io_uring.
    pub(crate) fn serve_cold_by_threads(&self) {
        self.lock().cold_by_threads = true;
        self.changed.notify_all();
    }

    /// Says that DMA takes from the front; `alone`: the warm row is its own.
    pub(crate) fn dma_begins(&self, alone: bool) {
        let mut state = self.lock();
        state.dma_active = true;
        state.dma_alone = alone;
    }

    /// Says that it does not any more.
    pub(crate) fn dma_ends(&self) {
        let mut state = self.lock();
        state.dma_active = false;
        state.dma_alone = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Takes pieces from the front for which `joins(last, next)` holds one after the other, without waiting.
    pub(crate) fn take_front(&self, mut joins: impl FnMut(Option<u32>, u32) -> bool) -> Vec<u32> {
        let mut state = self.lock();
        let mut taken = Vec::new();
        while !state.stopped
            && let Some(&next) = state.warm.front()
            && joins(taken.last().copied(), next)
        {
            state.warm.pop_front();
            taken.push(next);
        }
        taken
    }

    /// Takes one piece for a reader; waits for one, and calls `idle` before each sleep. `None`: nothing ever again.
    pub(crate) fn take_copy(&self, idle: &dyn Fn()) -> Option<Work> {
        let mut state = self.lock();
        let mut told = false;
        loop {
            if state.over() {
                return None;
            }
            if let Some(piece) = state.copy_only.pop_front().or_else(|| state.pop_warm()) {
                return Some(Work::Warm(piece));
            }
            if state.cold_by_threads
                && let Some(piece) = state.cold.pop_first()
            {
                return Some(Work::Cold(piece));
            }
            if !told {
                // Without the lock, and then once more around: something may have come meanwhile.
                told = true;
                drop(state);
                idle();
                state = self.lock();
                continue;
            }
            told = false;
            state = self.sleep(state);
        }
    }

    /// Takes one piece for the direct worker. `None`: nothing now (no wait) or nothing ever again.
    pub(crate) fn take_cold(&self, wait: bool) -> Option<u32> {
        let mut state = self.lock();
        loop {
            if state.over() {
                return None;
            }
            if let Some(piece) = state.cold.pop_first() {
                return Some(piece);
            }
            if !wait {
                return None;
            }
            state = self.sleep(state);
        }
    }

    /// Counts a piece as done; true for the last one.
    pub(crate) fn finished(&self) -> bool {
        let mut state = self.lock();
        state.unfinished = state.unfinished.saturating_sub(1);
        let last = state.unfinished == 0;
        drop(state);
        if last {
            self.changed.notify_all();
            self.for_pump.notify_one();
        }
        last
    }

    /// Tells every worker to go home.
    pub(crate) fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
        self.for_pump.notify_one();
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        // The timeout is a net under the notifications, not their replacement.
        match self.changed.wait_timeout(state, Duration::from_millis(500)) {
            Ok((guard, _)) => guard,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pop_warm(&mut self) -> Option<u32> {
        match (self.dma_active, self.dma_alone) {
            (false, _) => self.warm.pop_front(),
            (true, false) => self.warm.pop_back(),
            (true, true) => None,
        }
    }

    fn over(&self) -> bool {
        self.stopped || self.unfinished == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dma_takes_from_the_front_and_copies_from_the_back() {
        let queue = Queue::new(10);
        queue.push(0..10);
        queue.dma_begins(false);
        let group = queue.take_front(|_, next| next < 3);
        assert_eq!(group, [0, 1, 2]);
        assert_eq!(queue.take_copy(&|| ()), Some(Work::Warm(9)));
        queue.leave_to_copy(&group);
        queue.dma_ends();
        assert_eq!(queue.take_copy(&|| ()), Some(Work::Warm(0)));
    }

    #[test]
    fn dma_alone_leaves_only_what_it_cannot_do() {
        let queue = Queue::new(4);
        queue.push(0..4);
        queue.dma_begins(true);
        let group = queue.take_front(|last, _| last.is_none());
        queue.leave_to_copy(&group);
        assert_eq!(queue.take_copy(&|| ()), Some(Work::Warm(0)));
        queue.dma_ends();
        assert_eq!(queue.take_copy(&|| ()), Some(Work::Warm(1)));
    }

    #[test]
    fn cold_pieces_come_in_order_and_go_to_threads_only_when_told() {
        let queue = Queue::new(3);
        queue.push_cold(&[2, 0, 1]);
        assert_eq!(queue.take_cold(false), Some(0));
        queue.serve_cold_by_threads();
        assert_eq!(queue.take_copy(&|| ()), Some(Work::Cold(1)));
    }

    #[test]
    fn waiting_ends_with_the_last_piece_and_with_a_stop() {
        for stop in [false, true] {
            let queue = Queue::new(1);
            std::thread::scope(|scope| {
                let workers = [
                    scope.spawn(|| queue.take_copy(&|| ()).is_none()),
                    scope.spawn(|| queue.take_cold(true).is_none()),
                ];
                std::thread::sleep(Duration::from_millis(20));
                if stop {
                    queue.stop()
                } else {
                    assert!(queue.finished())
                }
                for worker in workers {
                    assert!(worker.join().unwrap());
                }
            });
        }
    }
}
