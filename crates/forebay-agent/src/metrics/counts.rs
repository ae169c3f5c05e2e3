//! What the agent counts of itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Since the start.
#[derive(Default)]
pub struct Counts {
    /// By route and status.
    answers: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// By kind of request.
    requests: Mutex<BTreeMap<&'static str, u64>>,
    /// By action and whether it was done.
    actions: Mutex<BTreeMap<(&'static str, bool), u64>>,
    /// Wrong tokens, users that may not, connections too many.
    pub(crate) denied: AtomicU64,
    pub(crate) http_connections: AtomicI64,
    pub(crate) socket_clients: AtomicI64,
    /// Staged saves, and their bytes.
    pub(crate) staged_saves: AtomicI64,
    pub(crate) staged_bytes: AtomicU64,
    /// Of processes that died, by what became of them.
    finished: Mutex<BTreeMap<&'static str, u64>>,
    /// Spans that were not sent.
    pub(crate) spans_lost: AtomicU64,
}

/// Names that a label may have; what else comes is `other`, so that clients cannot make up labels.
const ACTIONS: [&str; 10] =
    ["pause", "resume", "set_caps", "pin", "unpin", "hold", "release", "promote", "prune", "wake"];

impl Counts {
    pub(crate) fn answered(&self, route: &'static str, status: u16) {
        *lock(&self.answers).entry((route, status)).or_default() += 1;
    }

    pub(crate) fn asked(&self, request: &'static str) {
        *lock(&self.requests).entry(request).or_default() += 1;
    }

    pub(crate) fn acted(&self, action: &str, done: bool) {
        let known = ACTIONS.iter().find(|known| **known == action);
        *lock(&self.actions).entry((known.copied().unwrap_or("other"), done)).or_default() += 1;
    }

    pub(crate) fn denied(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    /// So many staged saves are kept or being finished now.
    pub(crate) fn staged(&self, saves: usize, bytes: u64) {
        self.staged_saves.store(i64::try_from(saves).unwrap_or(i64::MAX), Ordering::Relaxed);
        self.staged_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn finished(&self, result: &'static str) {
        *lock(&self.finished).entry(result).or_default() += 1;
    }

    pub(super) fn all_finished(&self) -> Vec<(&'static str, u64)> {
        lock(&self.finished).iter().map(|(&result, &n)| (result, n)).collect()
    }

    pub(super) fn answers(&self) -> Vec<(&'static str, u16, u64)> {
        lock(&self.answers).iter().map(|(&(route, status), &n)| (route, status, n)).collect()
    }

    pub(super) fn requests(&self) -> Vec<(&'static str, u64)> {
        lock(&self.requests).iter().map(|(&request, &n)| (request, n)).collect()
    }

    pub(super) fn actions(&self) -> Vec<(&'static str, bool, u64)> {
        lock(&self.actions).iter().map(|(&(action, done), &n)| (action, done, n)).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
