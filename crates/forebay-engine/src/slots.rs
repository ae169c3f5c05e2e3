//! The staging slots of one load.
//!
//! Readers take a slot, fill it and hand it on with the piece; it comes back here when the bytes are in their targets.
//! A load takes slots from the arena one by one, as it first needs them and up to its limit, so a small model pins
//! 4 MiB and two loads side by side can share a small arena. They go back to the arena when the load's last worker
//! ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use forebay_device::{Arena, Slot};
use forebay_error::{Code, Error, Result};

use crate::shared::lock;

/// Slots that wait for a reader.
pub(crate) struct Slots {
    state: Mutex<State>,
    returned: Condvar,
    limit: AtomicUsize,
}

#[derive(Default)]
struct State {
    free: Vec<Slot>,
    /// Taken from the arena so far, free or not.
    held: usize,
}

impl Slots {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            state: Mutex::default(),
            returned: Condvar::new(),
            limit: AtomicUsize::new(limit.max(1)),
        }
    }

    /// Takes a slot; waits for one that comes back when the limit is reached.
    ///
    /// Errors: `cancelled` once `give_up` says so; what the arena says.
    pub(crate) fn take(&self, arena: &Arc<Arena>, give_up: &dyn Fn() -> bool) -> Result<Slot> {
        loop {
            if let Some(slot) = self.take_free_or_fresh(arena, give_up)? {
                return Ok(slot);
            }
            let state = lock(&self.state);
            if state.free.is_empty() {
                let wait = self.returned.wait_timeout(state, Duration::from_millis(50));
                drop(wait);
            }
            if give_up() {
                return Err(Error::new(Code::Cancelled, "cancelled while waiting for a slot"));
            }
        }
    }

    /// Takes a slot if one is free, or may be taken from the arena at once.
    pub(crate) fn try_take(&self, arena: &Arc<Arena>) -> Result<Option<Slot>> {
        self.take_free_or_fresh(arena, &|| true)
    }

    /// Raises the limit: a direct worker has begun, with so many reads in flight.
    pub(crate) fn allow(&self, more: usize) {
        self.limit.fetch_add(more, Ordering::Relaxed);
    }

    /// Gives a slot back: to this load, or to another one that waits for the arena.
    pub(crate) fn put(&self, slot: Slot) {
        let mut state = lock(&self.state);
        if slot.is_wanted() {
            state.held -= 1;
            drop(state);
            drop(slot);
        } else {
            state.free.push(slot);
            drop(state);
        }
        self.returned.notify_one();
    }

    /// Gives the free slots back to the arena.
    pub(crate) fn give_back(&self) {
        let mut state = lock(&self.state);
        let free = std::mem::take(&mut state.free);
        state.held -= free.len();
        drop(state);
        drop(free);
    }

    fn take_free_or_fresh(
        &self,
        arena: &Arc<Arena>,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Option<Slot>> {
        let first = {
            let mut state = lock(&self.state);
            if let Some(slot) = state.free.pop() {
                return Ok(Some(slot));
            }
            if state.held >= self.limit.load(Ordering::Relaxed) {
                return Ok(None);
            }
            state.held += 1;
            state.held == 1
        };
        // Outside the lock: pinning fresh memory takes a millisecond, and readers do it side by side. Only the first
        // slot is worth waiting for when the arena is all out; with one, the load goes on. Meanwhile another worker may
        // have got one, and left it here for good.
        let taken = arena.acquire(1, &|| !first || give_up() || !lock(&self.state).free.is_empty());
        match taken.map(|mut slots| slots.pop()) {
            Ok(Some(slot)) => Ok(Some(slot)),
            Ok(None) => {
                lock(&self.state).held -= 1;
                Ok(None)
            }
            Err(error) => self.without(error, first && give_up()),
        }
    }
}

impl Slots {
    /// No slot from the arena: an error, unless the load can go on with those that it has, or ask again.
    fn without(&self, error: Error, given_up: bool) -> Result<Option<Slot>> {
        let mut state = lock(&self.state);
        state.held -= 1;
        match error.code() {
            Code::Cancelled if !given_up => Ok(None),
            Code::OutOfMemory if state.held > 0 => {
                self.limit.store(state.held, Ordering::Relaxed);
                let slots = state.held;
                drop(state);
                tracing::warn!(%error, slots, "no more staging memory; going on with less");
                Ok(None)
            }
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_device::{ArenaConfig, Device};

    use super::*;

    fn arena() -> Arc<Arena> {
        let config = ArenaConfig { size_bytes: 4 << 20, slot_bytes: 1 << 20 };
        Arena::new(&Device::Host, &config).unwrap()
    }

    #[test]
    fn a_load_takes_no_more_than_its_limit() {
        let (arena, slots) = (arena(), Slots::new(2));
        let first = slots.take(&arena, &|| false).unwrap();
        let second = slots.take(&arena, &|| false).unwrap();
        assert!(slots.try_take(&arena).unwrap().is_none());
        slots.put(first);
        assert!(slots.try_take(&arena).unwrap().is_some());
        drop(second);
    }

    #[test]
    fn two_loads_share_an_arena_that_is_too_small_for_both() {
        let (arena, one, other) = (arena(), Slots::new(8), Slots::new(8));
        let taken: Vec<_> = (0..3).map(|_| one.take(&arena, &|| false).unwrap()).collect();
        assert_eq!(other.try_take(&arena).err().unwrap().code(), Code::Cancelled);
        drop(taken);
        assert!(other.try_take(&arena).unwrap().is_some());
    }

    #[test]
    fn who_waits_for_the_arena_takes_a_slot_that_came_back_here() {
        let (arena, other, slots) = (arena(), Slots::new(8), Slots::new(8));
        let mut taken: Vec<_> = (0..3).map(|_| other.take(&arena, &|| false).unwrap()).collect();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| slots.take(&arena, &|| false).map(drop));
            std::thread::sleep(Duration::from_millis(20));
            // A second worker of the same load was luckier.
            slots.put(taken.pop().unwrap());
            first.join().unwrap().unwrap();
        });
    }
}
