//! How fast bytes may go, per tier and direction; who goes first; pauses.
//!
//! Whoever moves a part asks before ([`Limits::take`]) and waits there. So a cap, a pause and a priority take effect
//! within one part, and need nothing of the store. Between several who wait the more urgent goes first, and among
//! equals the one who came first; where a restore takes all there is, the archive waits: that is what it is for.

mod lane;

use std::num::NonZeroU64;
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
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

struct State {
    read: Lane,
    write: Lane,
    paused: bool,
    closed: bool,
}

impl Limits {
    /// With these caps, by this clock.
    pub fn new(clock: Arc<dyn Clock>, caps: Caps) -> Self {
        let (read, write) = (Lane::new(caps.read), Lane::new(caps.write));
        Self { clock, state: Mutex::new(State { read, write, paused: false, closed: false }) }
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

    /// Ends all waits, now and later, with `cancelled`: the process is about to stop.
    pub fn close(&self) {
        self.locked().closed = true;
    }

    /// Takes a [`close`](Self::close) back: somebody else begins.
    pub fn reopen(&self) {
        self.locked().closed = false;
    }

    /// Bytes that were let through so far: read, written.
    pub fn passed(&self) -> (u64, u64) {
        let state = self.locked();
        (state.read.passed(), state.write.passed())
    }

    /// Waits until `bytes` may go. Errors: `cancelled` after [`close`](Self::close).
    pub fn take(&self, direction: Direction, priority: Priority, bytes: u64) -> Result<()> {
        let ticket = self.locked().lane(direction).queue(priority);
        loop {
            let wait = {
                let mut state = self.locked();
                if state.closed {
                    state.lane(direction).leave(ticket);
                    return Err(Error::new(
                        Code::Cancelled,
                        "movements between tiers were stopped",
                    ));
                }
                let (paused, now) = (state.paused, self.clock.now());
                match state.lane(direction).ask(ticket, now, bytes, paused) {
                    Answer::Go => return Ok(()),
                    Answer::Wait(time) => time,
                }
            };
            self.clock.sleep(wait.min(LOOK));
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
