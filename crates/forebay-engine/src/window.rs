//! The window: page cache registered with the GPU, from its registering to its release.
//!
//! # Why release waits
//!
//! Releasing 9 GB (unregister, unmap) takes one thread 45 to 100 ms. It holds the driver's lock and the process's
//! memory map meanwhile, so a caller who has its last byte and asks the driver for anything would wait for it. So a
//! load hands spent batches over as their copies end, and returns; who releases them is whoever comes first:
//!
//! - the **releaser**, a thread that starts when the last load of the engine has ended, waits [`GRACE`] so that the
//!   caller gets away with its tensors, releases batch by batch with a pause after each, and ends with nothing to do.
//!   While a load runs it only waits;
//! - a **load that needs room** in the window: what is spent is room, it never copies for want of it;
//! - whoever **waits for the release** ([`Window::release`]): it does the work itself instead of waiting for it;
//! - the **engine's end**, which leaves nothing registered.
//!
//! A spent batch is nobody's but the window's: it holds no load, no target and no file, only pages that the CPU never
//! touches. So its file may shrink or go in the meantime, and what the window holds is bounded by its limit, however
//! many loads there are.
//!
//! In the child of a fork the registrations are the parent's and the mappings are not there at all: nothing is released
//! or freed there, nor is the lock taken, which the releaser may have held.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::cuda::Registration;

use crate::paths::mapping::Mapping;
use crate::shared::lock;

/// How long after the end of the last load the releaser starts: the caller's way from the last byte to a framework's
/// synchronization is of a few ms.
const GRACE: Duration = Duration::from_millis(10);

/// The releaser's longest pause after a batch; as a rule it is half of what the batch took (64 MiB: 0.5 ms), so that
/// 16 GiB are gone within 0.3 s and others have the driver's lock for a third of that.
const PAUSE_MAX: Duration = Duration::from_millis(2);

/// How long the end of an engine waits for a release under way: one call of the driver.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// The engine's window of registered page cache.
pub(crate) struct Window {
    registered: AtomicU64,
    registered_peak: AtomicU64,
    spent: Mutex<Spent>,
    changed: Condvar,
    pid: u32,
}

/// What is to be released, and by whom.
#[derive(Default)]
struct Spent {
    batches: VecDeque<Batch>,
    /// Batches that somebody is releasing now.
    in_hand: usize,
    /// Loads that have not ended.
    loads: usize,
    /// When the last of them ended.
    ended: Option<Instant>,
    has_releaser: bool,
}

/// A registered batch. Fields drop in order: registration, then mapping, then its share of the window.
pub(crate) struct Batch {
    pub(crate) _registration: Registration,
    pub(crate) mapping: Mapping,
    pub(crate) _share: Share,
}

/// Bytes of the window.
pub(crate) struct Share {
    window: Arc<Window>,
    len: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.window.registered.fetch_sub(self.len, Ordering::AcqRel);
    }
}

impl Window {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            registered: AtomicU64::new(0),
            registered_peak: AtomicU64::new(0),
            spent: Mutex::default(),
            changed: Condvar::new(),
            pid: std::process::id(),
        })
    }

    /// Page cache registered now.
    pub(crate) fn registered(&self) -> u64 {
        self.registered.load(Ordering::Acquire)
    }

    /// Most of it at one time so far.
    pub(crate) fn registered_peak(&self) -> u64 {
        self.registered_peak.load(Ordering::Acquire)
    }

    /// Takes `len` bytes, if there are so many within `limit`.
    pub(crate) fn take(self: &Arc<Self>, len: u64, limit: u64) -> Option<Share> {
        let taken = self.registered.fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| {
            held.checked_add(len).filter(|&sum| sum <= limit)
        });
        let before = taken.ok()?;
        self.registered_peak.fetch_max(before + len, Ordering::AcqRel);
        Some(Share { window: self.clone(), len })
    }

    /// Makes room: releases half of what is spent, `most` batches at the most, or waits for a release under way. False
    /// if there is neither.
    pub(crate) fn make_room(&self, most: usize) -> bool {
        let mut spent = lock(&self.spent);
        let count = spent.batches.len().div_ceil(2).min(most.max(1));
        if count == 0 {
            let others = spent.in_hand > 0;
            if others {
                drop(self.wait(spent, PAUSE_MAX));
            }
            return others;
        }
        // Oldest first. In hand, so that who waits for the release waits for these too.
        let batches: Vec<Batch> = spent.batches.drain(..count).collect();
        spent.in_hand += count;
        drop(spent);
        for batch in batches {
            drop(batch);
            self.put_down();
        }
        true
    }

    /// A load begins: the releaser gives way.
    pub(crate) fn load_begins(&self) {
        lock(&self.spent).loads += 1;
    }

    /// A load has ended; what it hands over afterwards is released all the same.
    pub(crate) fn load_ends(self: &Arc<Self>) {
        let mut spent = lock(&self.spent);
        spent.loads = spent.loads.saturating_sub(1);
        spent.ended = Some(Instant::now());
        self.call_releaser(spent);
    }

    /// Takes over a batch whose copies are done.
    pub(crate) fn hand_over(self: &Arc<Self>, batch: Batch) {
        let mut spent = lock(&self.spent);
        spent.batches.push_back(batch);
        self.call_releaser(spent);
    }

    /// Sees to it that there is a releaser, if there is work for one.
    fn call_releaser(self: &Arc<Self>, mut spent: MutexGuard<'_, Spent>) {
        if spent.loads > 0 || spent.batches.is_empty() {
            return;
        }
        if spent.has_releaser {
            self.changed.notify_all();
            return;
        }
        spent.has_releaser = true;
        drop(spent);
        let own = self.clone();
        let thread = std::thread::Builder::new().name("forebay-release".to_owned());
        if let Err(error) = thread.spawn(move || own.releaser()) {
            tracing::debug!(%error, "no thread to release registrations, so at once");
            lock(&self.spent).has_releaser = false;
            self.release(LAST_WAIT);
        }
    }

    /// Releases batch by batch while no load runs; ends with nothing to do.
    fn releaser(&self) {
        let mut spent = lock(&self.spent);
        loop {
            let quiet = spent.ended.map_or(GRACE, |ended| ended.elapsed());
            if spent.batches.is_empty() {
                spent.has_releaser = false;
                return;
            } else if spent.loads > 0 {
                // Woken when a load ends; the timeout is for nothing but safety.
                spent = self.wait(spent, Duration::from_secs(1));
            } else if quiet < GRACE {
                spent = self.wait(spent, GRACE - quiet);
            } else if let Some(batch) = spent.batches.pop_front() {
                spent.in_hand += 1;
                drop(spent);
                let started = Instant::now();
                drop(batch);
                self.put_down();
                std::thread::sleep((started.elapsed() / 2).min(PAUSE_MAX));
                spent = lock(&self.spent);
            }
        }
    }

    /// Releases what is spent, on this thread, and waits for what others are releasing, at most `timeout`. True if
    /// nothing is left of it.
    pub(crate) fn release(&self, timeout: Duration) -> bool {
        if self.is_inherited() {
            return true;
        }
        let deadline = Instant::now() + timeout;
        let mut spent = lock(&self.spent);
        loop {
            if spent.batches.is_empty() && spent.in_hand == 0 {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            spent = match spent.batches.pop_front() {
                Some(batch) => {
                    spent.in_hand += 1;
                    drop(spent);
                    drop(batch);
                    self.put_down();
                    lock(&self.spent)
                }
                None => self.wait(spent, left),
            };
        }
    }

    /// The GPU is broken: nothing can be released any more.
    pub(crate) fn give_up(&self) {
        std::mem::forget(std::mem::take(&mut lock(&self.spent).batches));
    }

    /// The engine ends.
    pub(crate) fn close(&self) {
        if !self.release(LAST_WAIT) {
            tracing::warn!("an engine ends while page cache is registered");
        }
    }

    /// Whether this is the child of a fork, and the window its parent's.
    pub(crate) fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }

    fn put_down(&self) {
        let mut spent = lock(&self.spent);
        spent.in_hand = spent.in_hand.saturating_sub(1);
        drop(spent);
        self.changed.notify_all();
    }

    fn wait<'a>(&self, spent: MutexGuard<'a, Spent>, timeout: Duration) -> MutexGuard<'a, Spent> {
        self.changed.wait_timeout(spent, timeout).unwrap_or_else(PoisonError::into_inner).0
    }
}
