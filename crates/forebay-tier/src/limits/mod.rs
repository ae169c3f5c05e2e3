//! How fast bytes may go, per tier and direction; who goes first; pauses.
//!
//! Whoever moves a part asks before ([`Limits::take`]) and waits there. So a cap, a pause and a priority take effect
//! within one part, and need nothing of the store. Between several who wait the more urgent goes first, and among
//! equals the one who came first; where a restore takes all there is, the archive waits: that is what it is for.

mod lane;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_checkpoint::commit::Clock;
use forebay_error::{Code, Error, Result};

pub use lane::BURST;
use lane::{Answer, Lane};

/// Longest sleep of somebody who waits: how soon a pause that ends, a new cap or one's turn is noticed.
const LOOK: Duration = Duration::from_millis(20);

/// Which way bytes go, as the tier sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Out of the tier.
    Read,
    /// Into it.
    Write,
}

/// Who goes first: in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it.
    Restore,
    /// The newest checkpoint: until it is moved, losing a node loses work.
    Newest,
    /// Everything else.
    Archive,
}

/// Bytes a second; `None`: as fast as it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// Out of the tier.
    pub read: Option<NonZeroU64>,
    /// Into it.
    pub write: Option<NonZeroU64>,
}

/// The limits of one tier, shared by all who move to and from it.
///
/// In any window of `w` seconds at most `cap * (w + 0.05)` bytes and one part go; and as many as that less one part if
/// somebody always waits. With parts of 8 MiB a cap of 100 MB/s holds within 1.5 % over 10 s.
pub struct Limits {
    /// What is common to all [shares](Self::share).
    gate: Arc<Gate>,
    closed: AtomicBool,
    read: AtomicU64,
    written: AtomicU64,
}

struct Gate {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

struct State {
    read: Lane,
    write: Lane,
    paused: bool,
}

impl Limits {
    /// With these caps, by this clock.
    pub fn new(clock: Arc<dyn Clock>, caps: Caps) -> Self {
        let (read, write) = (Lane::new(caps.read), Lane::new(caps.write));
        let state = Mutex::new(State { read, write, paused: false });
        Self::of(Arc::new(Gate { clock, state }))
    }

    fn of(gate: Arc<Gate>) -> Self {
        let (read, written) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { gate, closed: AtomicBool::new(false), read, written }
    }

    /// The same limits for another runner: caps, pauses and the line of those who wait are one, whichever share they
    /// are set through. Each counts what it let through, and is closed, by itself.
    pub fn share(&self) -> Self {
        Self::of(Arc::clone(&self.gate))
    }

    /// Other caps, from now on.
    pub fn set_caps(&self, caps: Caps) {
        let mut state = self.locked();
        state.read.set_cap(caps.read);
        state.write.set_cap(caps.write);
    }

    /// The caps.
    pub fn caps(&self) -> Caps {
        let state = self.locked();
        Caps { read: state.read.cap(), write: state.write.cap() }
    }

    /// Lets nothing through until [`resume`](Self::resume): parts that were let through before still end.
    pub fn pause(&self) {
        self.locked().paused = true;
    }

    /// Goes on.
    pub fn resume(&self) {
        self.locked().paused = false;
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.locked().paused
    }

    /// Ends all waits of this share, now and later, with `cancelled`: its runner is about to stop.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Takes a [`close`](Self::close) back: somebody else begins.
    pub fn reopen(&self) {
        self.closed.store(false, Ordering::Relaxed);
    }

    /// Bytes that were let through this share so far: read, written.
    pub fn passed(&self) -> (u64, u64) {
        (self.read.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed))
    }

    /// Waits until `bytes` may go. Errors: `cancelled` after [`close`](Self::close).
    pub fn take(&self, direction: Direction, priority: Priority, bytes: u64) -> Result<()> {
        let ticket = self.locked().lane(direction).queue(priority);
        loop {
            let wait = {
                let mut state = self.locked();
                if self.closed.load(Ordering::Relaxed) {
                    state.lane(direction).leave(ticket);
                    return Err(Error::new(
                        Code::Cancelled,
                        "movements between tiers were stopped",
                    ));
                }
                let (paused, now) = (state.paused, self.gate.clock.now());
                match state.lane(direction).ask(ticket, now, bytes, paused) {
                    Answer::Go => break,
                    Answer::Wait(time) => time,
                }
            };
            self.gate.clock.sleep(wait.min(LOOK));
        }
        let passed = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.written,
        };
        passed.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.gate.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn lane(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_checkpoint::commit::SystemClock;

    fn limits(write: u64) -> Limits {
        let caps = Caps { read: None, write: NonZeroU64::new(write) };
        Limits::new(Arc::new(SystemClock::default()), caps)
    }

    #[test]
    fn shares_go_through_one_cap_and_count_apart() {
        let one = limits(1_000_000);
        let two = one.share();
        let start = std::time::Instant::now();
        std::thread::scope(|scope| {
            for (share, parts) in [(&one, 4), (&two, 3)] {
                scope.spawn(move || {
                    for _ in 0..parts {
                        share.take(Direction::Write, Priority::Archive, 100_000).unwrap();
                    }
                });
            }
        });
        // 700 KB at 1 MB/s: the last part goes when the six before it are paid for, less the burst.
        let time = start.elapsed();
        assert!(time >= Duration::from_millis(550), "{time:?}");
        assert_eq!((one.passed(), two.passed()), ((0, 400_000), (0, 300_000)));
        one.take(Direction::Read, Priority::Archive, 7).unwrap();
        assert_eq!((one.passed().0, two.passed().0), (7, 0));
    }

    #[test]
    fn a_pause_and_new_caps_hold_for_all_and_an_end_for_one() {
        let one = limits(0);
        let two = one.share();
        one.pause();
        assert!(two.is_paused());
        let caps = Caps { read: NonZeroU64::new(5), write: None };
        two.set_caps(caps);
        assert_eq!(one.caps(), caps);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| two.take(Direction::Write, Priority::Newest, 1));
            one.close();
            let ended = one.take(Direction::Write, Priority::Restore, 1).unwrap_err();
            assert_eq!(ended.code(), Code::Cancelled);
            assert!(!waits.is_finished(), "the other share only waits");
            one.resume();
            waits.join().unwrap().unwrap();
        });
        one.reopen();
        one.take(Direction::Write, Priority::Archive, 1 << 40).unwrap();
        one.take(Direction::Write, Priority::Archive, 1).unwrap();
        assert_eq!(one.passed(), (0, (1 << 40) + 1));
    }
}
