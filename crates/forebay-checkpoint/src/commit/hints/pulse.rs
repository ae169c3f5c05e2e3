//! The sign of life of a rank that hints do not get through of, in the checkpoint store.
//!
//! A native thread, because the thread that carries hints may wait for a lock of the process (Python's) for longer than
//! others are patient. It runs from the first save to the last, not only in saves: a rank that has not begun a save yet
//! is waited for, too. While hints are acknowledged it does nothing.
//!
//! The object is there from the start: clients of a network file system remember for a while that a name was not there.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use forebay_error::{Error, Result};

use super::board::Board;
use super::{PULSE_EVERY, PULSE_MAX};
use crate::commit::id::RunId;
use crate::commit::record::{Beat, encode};
use crate::commit::root::Root;

/// The folder of these objects, of the checkpoint root.
pub(crate) const ALIVE: &str = ".forebay/alive/";
/// The count of a rank that does without hints: it says nothing about its life.
pub(crate) const OFF: u64 = u64::MAX;
/// How often the thread looks at its own rank.
const LOOK: Duration = Duration::from_millis(250);
/// How long the end waits for the object to be removed, before it leaves that to the thread.
const END: Duration = Duration::from_secs(1);

/// The key of a rank's sign of life.
pub(crate) fn key(run: RunId, rank: u32) -> String {
    format!("{ALIVE}{run}/beat-{rank}")
}

/// Shows that a rank lives, as long as this exists.
pub struct Pulse {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Pulse {
    /// Starts. Errors: of the store, which must take the first sign; no thread.
    pub fn start(root: Root, run: RunId, board: Arc<Board>) -> Result<Self> {
        let key = key(run, board.rank());
        let mut signs = Signs::new();
        put(&root, &key, board.rank(), signs.count)?;
        let (stop, stopped) = channel();
        let (ending, ended) = channel();
        let work = move || {
            let began = Instant::now();
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK) {
                let Some(count) = signs.due(board.unheard(), began.elapsed()) else { continue };
                if let Err(error) = put(&root, &key, board.rank(), count) {
                    tracing::debug!(%error, "no pulse");
                }
            }
            if let Err(error) = root.store.remove(&key) {
                tracing::debug!(%error, "left to the collector");
            }
            drop(ending);
        };
        std::thread::Builder::new()
            .name("forebay-pulse".to_owned())
            .spawn(work)
            .map_err(|error| Error::io("cannot start a thread", error))?;
        Ok(Self { stop: Some(stop), ended })
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        drop(self.stop.take());
        // The store may hang.
        let _ = self.ended.recv_timeout(END);
    }
}

fn put(root: &Root, key: &str, rank: u32, count: u64) -> Result<()> {
    root.store.put(key, &encode(&Beat { rank, count }, &[])?)
}

/// Which signs a rank gives, and when.
struct Signs {
    count: u64,
    given: Duration,
    off: bool,
}

impl Signs {
    fn new() -> Self {
        Self { count: 0, given: Duration::ZERO, off: false }
    }

    /// What to write now, if anything. `unheard` is for how long hints were not acknowledged, once that is too long.
    fn due(&mut self, unheard: Option<Duration>, now: Duration) -> Option<u64> {
        let off = unheard.is_some_and(|time| time >= PULSE_MAX);
        let again = now.saturating_sub(self.given) >= PULSE_EVERY;
        match (unheard, off) {
            (Some(_), true) if !self.off => {
                self.off = true;
                Some(OFF)
            }
            (Some(_), true) => None,
            (Some(_), false) if again => Some(self.next(now)),
            // Back: from now on it can be judged by hints again.
            (None, _) if self.off => Some(self.next(now)),
            _ => None,
        }
    }

    fn next(&mut self, now: Duration) -> u64 {
        self.off = false;
        self.given = now;
        self.count += 1;
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_heard_is_quiet_one_that_is_not_shows_itself_and_gives_up() {
        let at = Duration::from_secs;
        let mut signs = Signs::new();
        assert_eq!(signs.due(None, at(5)), None);
        let unheard = |seconds| Some(at(seconds));
        assert_eq!(signs.due(unheard(2), at(7)), Some(1));
        assert_eq!(signs.due(unheard(2), at(7)), None, "once a second");
        assert_eq!(signs.due(unheard(3), at(8)), Some(2));
        assert_eq!(signs.due(None, at(9)), None, "heard again");
        assert_eq!(signs.due(unheard(30), at(40)), Some(OFF));
        assert_eq!(signs.due(unheard(99), at(109)), None, "said once");
        assert_eq!(signs.due(None, at(110)), Some(3), "and taken back");
        assert_eq!(signs.due(Some(Duration::MAX), at(111)), Some(OFF), "at once where it is lost");
    }
}
