//! Readers' leases: a restore under way holds off the removal of what it reads.
//!
//! The reader first writes its lease, then reads the commit point; the remover first takes the commit point away, then
//! looks for leases. Whatever the order of the four, the reader finds no commit or the remover finds the lease.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};

use super::lease::LeaseWatch;
use super::names::Layout;
use super::record::{Beat, encode};
use super::root::{LIST_MAX, Root};

/// How long a reader's counter may stand still.
pub const READ_LEASE: Duration = Duration::from_secs(60);
/// Looks a lease: a dead reader is noticed at most an eighth of a lease late.
const LOOKS_PER_LEASE: u32 = 8;

/// Holds a commit while it is read; dropped, it is given back.
pub struct ReadLease {
    root: Root,
    layout: Layout,
    key: String,
    beat: Mutex<(u64, Duration)>,
}

impl ReadLease {
    /// Takes a lease on a step. Errors: `not_found` and `not_committed` with a list of what is there, as
    /// [`require`](super::require).
    pub fn take(root: &Root, step: u64) -> Result<Self> {
        super::line::require(root, step)?;
        Self::on(root, &Layout::of_step(step))
    }

    /// Takes a lease on a folder that holds a step. A folder that cannot be written to is read without protection, as
    /// stock readers do, and said so in the log. A reader that does not [beat](Self::beat) in time may find files gone,
    /// never other bytes in them.
    pub fn on(root: &Root, layout: &Layout) -> Result<Self> {
        let key = format!("{}{:016x}", layout.readers(), forebay_store::random());
        let beat = Mutex::new((0, root.clock.now()));
        let lease = Self { root: root.clone(), layout: layout.clone(), key, beat };
        if let Err(error) = lease.write(0) {
            tracing::warn!(%error, "reading without a lease: a removal would not wait for it");
        }
        let started = lease.beat.lock().unwrap_or_else(PoisonError::into_inner).1;
        lease.metadata()?;
        if root.clock.now().saturating_sub(started) >= READ_LEASE {
            let what = "the lease on a step had run out before it was taken";
            let error = Error::new(Code::Timeout, what).at(root.place(layout.prefix()));
            return Err(error.hint("the store or this process stood still: try again"));
        }
        Ok(lease)
    }

    /// The commit point. Errors: `not_committed` where there is none.
    pub fn metadata(&self) -> Result<Arc<dyn RangeSource>> {
        self.root.open_metadata(&self.layout)?.ok_or_else(|| {
            let what = "the step is not committed, or was removed a moment ago";
            let place = self.root.place(&self.layout.metadata());
            Error::new(Code::NotCommitted, what).at(place)
        })
    }

    /// Says that the reader is alive; to be called at least every third of [`READ_LEASE`]. More calls cost nothing.
    pub fn beat(&self) {
        let now = self.root.clock.now();
        let mut beat = self.beat.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(beat.1) < READ_LEASE / 3 {
            return;
        }
        *beat = (beat.0 + 1, now);
        if let Err(error) = self.write(beat.0) {
            tracing::debug!(%error, "no beat of a reader");
        }
    }

    fn write(&self, count: u64) -> Result<()> {
        self.root.store.put(&self.key, &encode(&Beat { rank: 0, count }, &[])?)
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        if let Err(error) = self.root.store.remove(&self.key) {
            tracing::debug!(%error, "a lease runs out by itself");
        }
    }
}

/// Waits until no reader of a step is alive, at most `patience`; whether none is. Leases of the dead are removed.
pub(crate) fn wait_for_readers(root: &Root, layout: &Layout, patience: Duration) -> Result<bool> {
    let pause = READ_LEASE / LOOKS_PER_LEASE;
    // Counted in looks as well: an observer whose clock stands still must not wait for ever.
    let looks = (patience.as_millis() / pause.as_millis().max(1)).saturating_add(1);
    let mut watches: HashMap<String, LeaseWatch> = HashMap::new();
    for _ in 0..looks {
        let now = root.clock.now();
        let mut alive = false;
        for object in root.store.list(&layout.readers(), LIST_MAX)? {
            // One that cannot be read is watched like one that does not change.
            let count = root.read::<Beat>(&object.key).ok().flatten().map(|beat| beat.count);
            let watch = watches.entry(object.key.clone()).or_insert_with(|| LeaseWatch::new(now));
            if watch.see(count, now) >= READ_LEASE {
                root.store.remove(&object.key)?;
            } else {
                alive = true;
            }
        }
        if !alive {
            return Ok(true);
        }
        root.clock.sleep(pause);
    }
    Ok(false)
}
