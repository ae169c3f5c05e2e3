//! SHA-256 of whole files, computed beside a load.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_error::{Code, Error};
use forebay_format::OpenFile;
use pyo3::prelude::*;
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::fork::Own;
use crate::model::Model;
use crate::wait::{POLL, Stop};

/// Bytes hashed between two looks at the stop flag: 1 ms or so.
const PIECE: usize = 1 << 20;

/// Threads at the most. One hashes about 2 GB/s where the processor has SHA instructions.
const THREADS_MAX: usize = 8;

/// Digests being computed.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Digests {
    inner: Own<Running>,
}

struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.stop.set();
    }
}

struct Shared {
    jobs: Vec<(usize, Arc<OpenFile>)>,
    next: AtomicUsize,
    stop: Stop,
    done: Mutex<BTreeMap<usize, forebay_error::Result<String>>>,
    changed: Condvar,
}

impl Shared {
    fn done(&self) -> MutexGuard<'_, BTreeMap<usize, forebay_error::Result<String>>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let job = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((index, file)) = self.jobs.get(job) else { return };
            let result = hash(file, &self.stop);
            self.done().insert(*index, result);
            self.changed.notify_all();
        }
    }
}

fn hash(file: &OpenFile, stop: &Stop) -> forebay_error::Result<String> {
    let mut buffer = vec![0; PIECE];
    let mut hasher = Sha256::new();
    let mut at = 0_u64;
    while at < file.size() {
        if stop.is_set() {
            return Err(Error::new(Code::Cancelled, "the check was cancelled"));
        }
        let len = usize::try_from(file.size() - at).map_or(PIECE, |left| left.min(PIECE));
        let Some(part) = buffer.get_mut(..len) else { break };
        file.read_exact_at(part, at)?;
        hasher.update(&*part);
        at += len as u64;
    }
    file.check_unchanged()?;
    Ok(forebay_format::hex(&hasher.finalize()))
}

#[pymethods]
impl Digests {
    /// Starts on these files of a model (numbers in `files()`).
    #[new]
    fn new(model: &Model, files: Vec<usize>) -> Result<Self> {
        let opened = &model.inner.files;
        let jobs: Vec<_> =
            files.iter().filter_map(|&file| Some((file, opened.get(file)?.clone()))).collect();
        let threads = forebay_topology::worker_cpus().clamp(1, THREADS_MAX).min(jobs.len());
        let shared = Arc::new(Shared {
            jobs,
            next: AtomicUsize::new(0),
            stop: Stop::default(),
            done: Mutex::default(),
            changed: Condvar::new(),
        });
        let running = Running(shared.clone());
        for _ in 0..threads {
            let shared = shared.clone();
            let spawned = std::thread::Builder::new().name("forebay-hash".to_owned());
            spawned
                .spawn(move || shared.work())
                .map_err(|error| Error::io("cannot start a thread", error))?;
        }
        Ok(Self { inner: Own::new(running, "this check") })
    }

    /// Waits for all and returns {file: digest in hex}.
    fn finish(&self, py: Python<'_>) -> Result<BTreeMap<usize, String>> {
        let shared = self.inner.get()?.0.clone();
        loop {
            let complete = py.detach(|| {
                let done = shared.done();
                let waited = shared.changed.wait_timeout_while(done, POLL, |done| {
                    done.len() < shared.jobs.len() && done.values().all(|one| one.is_ok())
                });
                waited.map_or_else(
                    |poisoned| !poisoned.into_inner().1.timed_out(),
                    |(_, out)| !out.timed_out(),
                )
            });
            if let Err(raised) = py.check_signals() {
                shared.stop.set();
                return Err(raised.into());
            }
            if complete {
                break;
            }
        }
        let done = std::mem::take(&mut *shared.done());
        let mut digests = BTreeMap::new();
        for (file, result) in done {
            digests.insert(file, result.inspect_err(|_| shared.stop.set())?);
        }
        Ok(digests)
    }

    /// Gives up.
    fn cancel(&self) {
        if let Ok(running) = self.inner.get() {
            running.0.stop.set();
        }
    }
}
