//! Waiting without the GIL, with an ear for signals.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{Result, internal};
use crate::process::UnderWay;

/// How often a wait looks for signals. Ctrl-C must work within a second, of which a cancelled load may take 0.8.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// How long an interrupted call waits for its thread to notice, before it leaves the thread to itself.
const GRACE: Duration = Duration::from_millis(500);

/// Told when the caller has given up.
#[derive(Clone, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for calls that look at it.
    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.0
    }

    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` on a thread of its own while this one waits for it and for signals. When Python raises meanwhile, that
/// is the result, and the thread is left to end on its own if it does not notice `Stop` soon (a hung file system).
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&Stop) -> forebay_error::Result<T> + Send + 'static,
) -> Result<T> {
    let stop = Stop::default();
    let (sender, mut receiver) = sync_channel(1);
    let own_stop = stop.clone();
    let under_way = UnderWay::begin(py);
    std::thread::Builder::new()
        .name("forebay-call".to_owned())
        .spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| work(&own_stop)));
            drop(under_way);
            // A caller who has gone does not mind.
            let _ = sender.send(result);
        })
        .map_err(|error| forebay_error::Error::io("cannot start a thread", error))?;
    loop {
        let (back, got) = receive(py, receiver, POLL);
        receiver = back;
        match got {
            Ok(Ok(result)) => return Ok(result?),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {
                return Err(internal("a call panicked"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(raised) = py.check_signals() {
            stop.set();
            let _ = receive(py, receiver, GRACE);
            return Err(raised.into());
        }
    }
}

/// Receives without the GIL. The receiver goes there and back, because two threads may not share one.
fn receive<T: Send>(
    py: Python<'_>,
    receiver: Receiver<T>,
    timeout: Duration,
) -> (Receiver<T>, std::result::Result<T, RecvTimeoutError>) {
    py.detach(move || {
        let got = receiver.recv_timeout(timeout);
        (receiver, got)
    })
}
