//! Memory for parts of uploads: bounded, and waited for.
//!
//! A part's buffer is taken when its first byte is written and given back when nobody sends it any more. Writers wait
//! for room while parts are on their way. When none is, waiting would be for ever: every buffer is a part that lacks
//! bytes which perhaps only the waiting writer has. Then as much again is lent, and beyond twice the bound writers are
//! told that they write too scattered. Threads that take pieces of an object in order, as saves do, never come to
//! that: they have no more parts open than there are threads, and one.
//!
//! Buffers are used again while any room is taken. The system's allocator would give back and take parts of 8 MiB for
//! every part, or keep them in heaps that fill with holes: 20 GB through 64 MiB of parts held 60 MiB more than that.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Parts for which there is room however large they are.
const PARTS_MIN: u64 = 4;
/// How often who waits looks whether its upload has failed meanwhile.
const LOOK: Duration = Duration::from_millis(200);

/// See the module.
pub(super) struct Room {
    state: Mutex<State>,
    changed: Condvar,
    bytes: u64,
}

#[derive(Default)]
struct State {
    taken: u64,
    most: u64,
    flying: usize,
    /// Buffers that nobody uses.
    spare: Vec<Vec<u8>>,
}

/// Room that was taken, and goes back when it is dropped.
pub(super) struct Taken {
    room: Arc<Room>,
    bytes: u64,
    flying: bool,
    /// Given back with the room.
    buffer: Option<Vec<u8>>,
}

impl Room {
    pub(super) fn new(bytes: u64) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), bytes }
    }

    /// Waits for room. `failed` is asked now and then whether there is any use in that.
    ///
    /// Errors: of `failed`; `OutOfMemory` where writers are too scattered.
    pub(super) fn take(
        self: &Arc<Self>,
        bytes: u64,
        failed: impl Fn() -> io::Result<()>,
    ) -> io::Result<Taken> {
        let limit = self.bytes.max(bytes.saturating_mul(PARTS_MIN));
        let mut state = self.state();
        loop {
            let after = state.taken.saturating_add(bytes);
            let stuck = state.flying == 0;
            if after <= limit || (stuck && after <= limit.saturating_mul(2)) {
                state.taken = after;
                state.most = state.most.max(after);
                let buffer = state.take_spare(bytes, limit);
                drop(state);
                return Ok(Taken { room: Arc::clone(self), bytes, flying: false, buffer });
            }
            if stuck {
                let what = format!(
                    "parts of uploads fill {} MiB and none is whole: written too scattered",
                    state.taken >> 20
                );
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, what));
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            failed()?;
            state = self.state();
        }
    }

    /// Most bytes that were taken at once.
    pub(super) fn most(&self) -> u64 {
        self.state().most
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A spare buffer of that many bytes. Those for which there is no room any more go.
    fn take_spare(&mut self, bytes: u64, limit: u64) -> Option<Vec<u8>> {
        let fits = |spare: &Vec<u8>| spare.capacity() as u64 == bytes;
        let found = self.spare.iter().position(fits).map(|at| self.spare.swap_remove(at));
        let held = |spare: &[Vec<u8>]| spare.iter().map(|one| one.capacity() as u64).sum::<u64>();
        while !self.spare.is_empty() && self.taken.saturating_add(held(&self.spare)) > limit {
            self.spare.pop();
        }
        found
    }
}

impl Taken {
    /// Memory for the part, with nothing in it.
    pub(super) fn buffer(&mut self) -> Vec<u8> {
        let len = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        let mut buffer = self.buffer.take().unwrap_or_else(|| Vec::with_capacity(len));
        buffer.clear();
        buffer
    }

    /// The part is the store's: its memory is good for another one.
    pub(super) fn give_back(mut self, buffer: Vec<u8>) {
        self.buffer = Some(buffer);
    }

    /// The part is whole and on its way.
    pub(super) fn fly(&mut self) {
        if !self.flying {
            self.flying = true;
            self.room.state().flying += 1;
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut state = self.room.state();
        state.taken = state.taken.saturating_sub(self.bytes);
        if self.flying {
            state.flying = state.flying.saturating_sub(1);
        }
        let buffer = self.buffer.take();
        // Nobody writes any more: memory is the system's again.
        let unused = if state.taken == 0 { std::mem::take(&mut state.spare) } else { Vec::new() };
        if state.taken > 0 {
            state.spare.extend(buffer);
        }
        drop(state);
        drop(unused);
        self.room.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_lent_once_more_when_nothing_moves_and_then_refused() {
        let room = Arc::new(Room::new(40));
        let taken: Vec<_> = (0..8).map(|_| room.take(10, || Ok(())).unwrap()).collect();
        let error = room.take(10, || Ok(())).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        drop(taken);
        assert!(room.take(10, || Ok(())).is_ok());
    }

    #[test]
    fn writers_wait_while_parts_are_on_their_way() {
        let room = Arc::new(Room::new(40));
        let mut parts: Vec<_> = (0..4).map(|_| room.take(10, || Ok(())).unwrap()).collect();
        parts[0].fly();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| room.take(10, || Ok(())).map(drop));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            parts.remove(0);
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(room.most(), 40);
    }

    #[test]
    fn buffers_are_used_again_emptied_and_bounded_and_go_with_the_last() {
        let room = Arc::new(Room::new(40));
        let mut first = room.take(10, || Ok(())).unwrap();
        let keeps = room.take(10, || Ok(())).unwrap();
        let mut buffer = first.buffer();
        buffer.resize(10, 7);
        let address = buffer.as_ptr();
        first.give_back(buffer);
        let mut again = room.take(10, || Ok(())).unwrap();
        let buffer = again.buffer();
        assert_eq!((buffer.as_ptr(), buffer.len()), (address, 0));
        again.give_back(buffer);
        // Those of another size take the room that the spare one would need.
        let others: Vec<_> = (0..3).map(|_| room.take(9, || Ok(())).unwrap()).collect();
        assert!(room.state().spare.is_empty(), "more than the bound would be held");
        for other in others {
            other.give_back(vec![0; 9]);
        }
        assert_eq!(room.state().spare.len(), 3);
        drop(keeps);
        assert!(room.state().spare.is_empty(), "nothing is on its way");
    }

    #[test]
    fn who_waits_for_a_failed_upload_is_told() {
        let room = Arc::new(Room::new(40));
        let mut parts: Vec<_> = (0..4).map(|_| room.take(10, || Ok(())).unwrap()).collect();
        parts[0].fly();
        let error = room.take(10, || Err(io::Error::other("failed"))).err().unwrap();
        assert_eq!(error.to_string(), "failed");
    }
}
