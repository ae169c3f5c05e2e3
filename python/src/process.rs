//! Forks and the end of the process, which meet threads of this library at work.
//!
//! A child of a fork has none of them, but the locks that they held stay locked there. What belongs to one object is
//! out of the child's reach anyway ([`crate::fork`]); locks of the whole process (profiles of file systems, open
//! devices) are taken by calls that [`crate::wait::interruptible`] runs, so a fork waits for those: [`wait_for_calls`].
//!
//! At the exit, libraries and drivers take themselves apart under threads that may still release registrations and
//! staging memory, after a load that has returned long since. So the exit waits for them: [`wait_for_engines`]. A load
//! holds its engine until its last thread has gone; that is what is counted. Registrations are then released at once.
//!
//! The package calls all of these (`python/forebay/_process.py`).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_engine::Engine;
use pyo3::prelude::*;

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// A fork waits for the calls under way; others wait for the fork.
static FORKING: AtomicBool = AtomicBool::new(false);

/// How long a call waits for a fork, which itself waits for calls (`_FORK_WAIT_MS` of the package) and then takes
/// milliseconds.
const BEGIN_WAIT_MS: u64 = 1000;

/// Locked with the GIL only, which a fork has too.
static ENGINES: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

static HOLDERS: AtomicUsize = AtomicUsize::new(0);

/// An engine, and what dies with the last of it.
#[derive(Clone)]
struct Watched {
    engine: Weak<Engine>,
    presence: Weak<()>,
}

impl Watched {
    fn is_gone(&self) -> bool {
        self.presence.strong_count() == 0
    }

    /// Whether a thread is taking it apart now.
    fn is_going(&self) -> bool {
        self.engine.strong_count() == 0 && !self.is_gone()
    }
}

/// A call on a thread of its own.
pub(crate) struct UnderWay(());

impl UnderWay {
    pub(crate) fn begin(py: Python<'_>) -> Self {
        let none = || !FORKING.load(Ordering::Acquire);
        if !none() {
            py.detach(|| poll(BEGIN_WAIT_MS, none));
        }
        CALLS.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A Python object that holds an engine, itself or by a load.
pub(crate) struct Holder {
    pid: u32,
}

impl Holder {
    pub(crate) fn new() -> Self {
        HOLDERS.fetch_add(1, Ordering::AcqRel);
        Self { pid: std::process::id() }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // The child of a fork started again at 0.
        if self.pid == std::process::id() {
            HOLDERS.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn engines() -> MutexGuard<'static, Vec<Watched>> {
    ENGINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes an engine known here.
pub(crate) fn watch(engine: &Arc<Engine>) {
    let mut engines = engines();
    engines.retain(|engine| !engine.is_gone());
    engines.push(Watched { engine: Arc::downgrade(engine), presence: engine.presence() });
}

/// For the moment before a fork: waits until no call is under way, at most `timeout_ms`, and keeps others from starting
/// until [`resume_calls`]. True if none is under way.
#[pyfunction]
pub(crate) fn wait_for_calls(py: Python<'_>, timeout_ms: u64) -> bool {
    FORKING.store(true, Ordering::Release);
    let none = || CALLS.load(Ordering::Acquire) == 0;
    // Nearly always; then the GIL is not let go.
    none() || {
        py.detach(|| poll(timeout_ms, none));
        none()
    }
}

/// For the moment after a fork.
#[pyfunction]
pub(crate) fn resume_calls() {
    FORKING.store(false, Ordering::Release);
}

/// For the child of a fork: the calls, engines and holders of the parent are not there.
#[pyfunction]
pub(crate) fn forget_parent() {
    FORKING.store(false, Ordering::Release);
    CALLS.store(0, Ordering::Release);
    HOLDERS.store(0, Ordering::Release);
    engines().clear();
}

/// For the exit: waits until nothing uses an engine but the Python objects that hold one, and nothing is registered, at
/// most `timeout_ms`. True if so. Loads whose objects are still there are to be idle before.
#[pyfunction]
pub(crate) fn wait_for_engines(py: Python<'_>, timeout_ms: u64) -> bool {
    let engines = engines().clone();
    let idle = || {
        let uses: usize = engines.iter().map(|watched| watched.engine.strong_count()).sum();
        uses <= HOLDERS.load(Ordering::Acquire) && !engines.iter().any(Watched::is_going)
    };
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let left = || deadline.saturating_duration_since(Instant::now());
    py.detach(|| {
        let gone = poll(timeout_ms, idle);
        let mut rest = engines.iter().filter_map(|watched| watched.engine.upgrade());
        gone & rest.all(|engine| engine.release(left()))
    })
}

/// Asks every millisecond whether something is so, at most for `timeout_ms`.
fn poll(timeout_ms: u64, so: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    loop {
        if so() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
