//! What one look at a tier finds.
//!
//! A look costs one listing of the folder of steps, one of pins, holds and epochs each, and a listing and two small
//! reads for every step that may have changed: one that is new, that is not settled (not committed, or with leftovers
//! of other attempts), that somebody said has changed, and the two newest. Of the others a few are looked at again each
//! time, the longest unseen first, so that what other programs do is seen after a while.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{Claims, Marks, Root, StepState, numbers, step_state};
use forebay_error::{Code, Error, Result};
use forebay_format::parallel;

use super::tiers::above;

/// What is younger counts as under way: the lease of writers.
pub(crate) const ALIVE: Duration = Duration::from_secs(60);
/// Settled steps that are looked at again in each look.
const AGAIN: usize = 16;
/// Fewer than this are looked at one by one; more at once: a look at a bucket is mostly waiting.
const FEW: usize = 4;

/// A step as it was last seen.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Files are left out: there may be thousands.
    pub(crate) state: Arc<StepState>,
    pub(crate) at: Instant,
}

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct Sight {
    pub(crate) steps: BTreeMap<u64, Seen>,
    /// `None` where they cannot be read: then nothing may be removed.
    pub(crate) marks: Option<Marks>,
    pub(crate) claims: Claims,
    /// Bytes that the file system has room for, where it is a folder.
    pub(crate) free: Option<u64>,
    /// Bytes of all of that file system.
    pub(crate) size: Option<u64>,
    /// Whether it shows the data of this node only.
    pub(crate) partial: bool,
    /// What went wrong while the rest was seen.
    pub(crate) troubles: Vec<(Option<u64>, Arc<Error>)>,
}

/// Looks at one tier, again and again.
#[derive(Default)]
pub(crate) struct Looker {
    known: BTreeMap<u64, Seen>,
    claims: Claims,
}

impl Seen {
    /// Since it was committed, by the store's clock as of the look, and ours since then.
    pub(crate) fn age(&self) -> Duration {
        self.state.age().saturating_add(self.at.elapsed())
    }

    fn is_settled(&self) -> bool {
        let commit = self.state.commit.as_ref();
        commit.is_some_and(|commit| commit.damage.is_none()) && self.state.attempts.is_empty()
    }
}

impl Sight {
    /// Of a folder that is not there yet.
    pub(crate) fn of_nothing(folder: Option<&Path>) -> Self {
        let (free, size) = folder.map(above).and_then(room).unzip();
        Self { marks: Some(Marks::default()), free, size, ..Self::default() }
    }
}

impl Looker {
    /// Looks. `stale`: steps that have changed. Errors: the tier does not answer; `cancelled`.
    pub(crate) fn look(
        &mut self,
        root: &Root,
        folder: Option<&Path>,
        stale: &BTreeSet<u64>,
        stop: &AtomicBool,
    ) -> Result<Sight> {
        let numbers = numbers(root)?;
        let there: BTreeSet<u64> = numbers.iter().copied().collect();
        self.known.retain(|step, _| there.contains(step));
        let mut troubles = Vec::new();
        let wanted = self.wanted(&numbers, stale);
        self.take(root, &wanted, stop, &mut troubles)?;
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Cancelled, "the look was cancelled"));
        }
        self.claims.add(root)?;
        let marks = match Marks::read(root) {
            Ok(marks) => Some(marks),
            Err(error) if error.code() == Code::InvalidMetadata => {
                troubles.push((None, Arc::new(error)));
                None
            }
            Err(error) => return Err(error),
        };
        let (free, size) = folder.and_then(room).unzip();
        Ok(Sight {
            steps: self.known.clone(),
            marks,
            claims: self.claims.clone(),
            free,
            size,
            partial: !root.store.sees_all(),
            troubles,
        })
    }

    /// The steps to look at, the newest first.
    fn wanted(&self, numbers: &[u64], stale: &BTreeSet<u64>) -> Vec<u64> {
        let newest: BTreeSet<u64> = numbers.iter().rev().take(2).copied().collect();
        let changed = |step: &u64| {
            newest.contains(step)
                || stale.contains(step)
                || self.known.get(step).is_none_or(|seen| !seen.is_settled())
        };
        let mut wanted: Vec<u64> = numbers.iter().rev().copied().filter(changed).collect();
        let mut rest: Vec<(Instant, u64)> = numbers
            .iter()
            .filter(|step| !changed(step))
            .filter_map(|step| Some((self.known.get(step)?.at, *step)))
            .collect();
        rest.sort_unstable();
        wanted.extend(rest.into_iter().take(AGAIN).map(|(_, step)| step));
        wanted
    }

    /// Looks at steps. One that cannot be seen keeps what was known of it; where none can be seen the tier is at fault.
    fn take(
        &mut self,
        root: &Root,
        wanted: &[u64],
        stop: &AtomicBool,
        troubles: &mut Vec<(Option<u64>, Arc<Error>)>,
    ) -> Result<()> {
        let work = |step: &u64| match stop.load(Ordering::Relaxed) {
            true => Err(Error::new(Code::Cancelled, "the look was cancelled")),
            false => Ok((step_state(root, *step, ALIVE)?, Instant::now())),
        };
        let found = match wanted.len() < FEW {
            true => wanted.iter().map(work).collect(),
            false => parallel::map(wanted, work),
        };
        let (mut good, mut first) = (0, None);
        for (step, found) in wanted.iter().copied().zip(found) {
            match found {
                Ok((Some(mut state), at)) => {
                    if let Some(commit) = &mut state.commit {
                        commit.files = Vec::new();
                    }
                    let state = Arc::new(state);
                    self.known.insert(step, Seen { state, at });
                    good += 1;
                }
                Ok((None, _)) => {
                    self.known.remove(&step);
                    good += 1;
                }
                Err(error) => {
                    let error = Arc::new(error);
                    first.get_or_insert_with(|| error.again());
                    troubles.push((Some(step), error));
                }
            }
        }
        match first {
            Some(error) if good == 0 => Err(error),
            _ => Ok(()),
        }
    }
}

/// Bytes that a file system has room for, for this user, and bytes of all of it.
fn room(folder: &Path) -> Option<(u64, u64)> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Some((bytes(stat.f_bavail), bytes(stat.f_blocks)))
}
