//! Which of several runners of a job moves what is beyond the drives of its nodes: one does, and if it is gone another.
//!
//! Who leads says so in a record where all nodes see it, and counts up in it. The others look from time to time, by
//! their own clocks; where the count stands still for [`Lead::gone`], whoever sees it first takes over. No two clocks
//! are compared. Two may believe for a moment that they lead: they move the same steps to the same places, which costs
//! work and does no harm, and the next look tells one of them that it does not.

use std::time::{Duration, Instant};

use forebay_checkpoint::commit::Root;
use forebay_error::{Code, Error, Result};
use serde::{Deserialize, Serialize};

use crate::copies::DriveId;

/// The record.
const KEY: &str = ".forebay/leads";
/// Most bytes of it.
const BYTES_MAX: u64 = 4096;
/// Looks without a change after which somebody is gone.
const LOOKS: u32 = 4;
/// The longest time between two looks.
const EVERY_MAX: Duration = Duration::from_secs(15);
/// And the shortest.
const EVERY_MIN: Duration = Duration::from_millis(250);

/// Who leads, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The drive of the one that does: 16 hex digits.
    drive: String,
    /// Rises with every look of it.
    count: u64,
    /// Host and process, for people.
    who: String,
}

/// One runner's view.
pub struct Lead {
    own: String,
    who: String,
    every: Duration,
    /// What was seen last, and since when it is so.
    seen: Option<(Record, Instant)>,
}

impl Lead {
    /// Of the runner of a drive. `look_every`: how often tiers are looked at, which says how quick things are to be.
    pub fn new(drive: DriveId, who: &str, look_every: Duration) -> Self {
        let every = (look_every * 8).clamp(EVERY_MIN, EVERY_MAX);
        Self { own: drive.to_string(), who: who.to_owned(), every, seen: None }
    }

    /// How long to wait between two looks.
    pub fn every(&self) -> Duration {
        self.every
    }

    /// How long a count stands still until another takes over.
    pub fn gone(&self) -> Duration {
        self.every * LOOKS
    }

    /// Looks who leads, and takes over where nobody does; whether it is this one. `root`: the job's records. `now`:
    /// the time on this runner's clock.
    ///
    /// Errors: I/O. Who cannot look does not lead.
    pub fn look(&mut self, root: &Root, now: Instant) -> Result<bool> {
        let Some(found) = read(root)? else {
            self.seen = None;
            return root.store.create(KEY, &self.record(0)?);
        };
        if found.drive == self.own {
            root.store.put(KEY, &self.record(found.count.wrapping_add(1))?)?;
            return Ok(true);
        }
        match &self.seen {
            Some((seen, since)) if *seen == found => {
                if now.saturating_duration_since(*since) < self.gone() {
                    return Ok(false);
                }
                tracing::info!(before = found.who, "who moved what is beyond the drives is gone");
                root.store.put(KEY, &self.record(0)?)?;
                // Several may see it at once: the last to write leads, and knows by its next look.
                self.seen = None;
                Ok(false)
            }
            _ => {
                self.seen = Some((found, now));
                Ok(false)
            }
        }
    }

    /// Another may lead from now on. Errors: I/O.
    pub fn leave(&self, root: &Root) -> Result<()> {
        match read(root)? {
            Some(found) if found.drive == self.own => root.store.remove(KEY).map(drop),
            _ => Ok(()),
        }
    }

    fn record(&self, count: u64) -> Result<Vec<u8>> {
        let (drive, who) = (self.own.clone(), self.who.clone());
        serde_json::to_vec(&Record { drive, count, who }).map_err(|error| {
            Error::new(Code::Internal, "cannot write who leads").with_source(error)
        })
    }
}

/// What cannot be read counts as none that changes.
fn read(root: &Root) -> Result<Option<Record>> {
    let found = match root.store.get(KEY, BYTES_MAX) {
        Err(error) if error.code() == Code::Unsupported => Some(Vec::new()),
        found => found?.map(|(bytes, _)| bytes),
    };
    let Some(bytes) = found else { return Ok(None) };
    let unread = || Record { drive: String::new(), count: 0, who: String::new() };
    Ok(Some(serde_json::from_slice(&bytes).unwrap_or_else(|_| unread())))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_checkpoint::commit::SystemClock;
    use forebay_checkpoint::save::OurMetadata;
    use forebay_store::{MemoryStore, Store};

    use super::*;

    fn root() -> Root {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        Root { store, clock: Arc::new(SystemClock::default()), identify: Arc::new(OurMetadata) }
    }

    fn lead(drive: &str) -> Lead {
        Lead::new(drive.repeat(16).parse().unwrap(), drive, Duration::from_secs(2))
    }

    #[test]
    fn one_leads_and_another_takes_over_when_it_is_gone() {
        let (root, start) = (root(), Instant::now());
        let (mut a, mut b, mut c) = (lead("a"), lead("b"), lead("c"));
        let mut at = start;
        assert!(a.look(&root, at).unwrap() && !b.look(&root, at).unwrap());
        for _ in 0..20 {
            at += a.every();
            assert!(a.look(&root, at).unwrap());
            assert!(!b.look(&root, at).unwrap() && !c.look(&root, at).unwrap());
        }
        // It is killed. Who sees it first leads.
        let mut leads = [false; 2];
        for look in 0..=LOOKS + 1 {
            at += a.every();
            leads = [b.look(&root, at).unwrap(), c.look(&root, at).unwrap()];
            assert!(look >= LOOKS - 1 || leads == [false; 2], "too early");
        }
        assert_eq!(leads, [true, false]);
        // It comes back, and is told.
        assert!(!a.look(&root, at).unwrap());
        b.leave(&root).unwrap();
        assert!(a.look(&root, at).unwrap(), "nobody led");
        c.leave(&root).unwrap();
        assert!(a.look(&root, at).unwrap(), "only who leads can leave");
    }

    #[test]
    fn garbage_is_of_somebody_who_is_gone() {
        let (root, start) = (root(), Instant::now());
        for garbage in [b"\xff{".to_vec(), vec![b' '; BYTES_MAX as usize + 1]] {
            root.store.put(KEY, &garbage).unwrap();
            let mut a = lead("a");
            assert!(!a.look(&root, start).unwrap());
            let late = start + a.gone();
            assert!(!a.look(&root, late).unwrap() && a.look(&root, late).unwrap());
        }
    }
}
