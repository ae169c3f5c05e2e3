//! The files of a save: writers wait until they are there, and they are let go when nobody writes any more.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use forebay_store::DataObject;

use super::{internal, lock};

/// The files of a save, open for writing.
pub(in crate::save) type OpenFiles = Vec<Box<dyn DataObject>>;

/// Whether the files are there yet.
enum Ready {
    No,
    Yes,
    Never,
}

pub(super) struct Gate {
    state: Mutex<(Ready, Arc<OpenFiles>)>,
    changed: Condvar,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new((Ready::No, Arc::default())), changed: Condvar::new() }
    }

    /// The files are there.
    pub(super) fn open(&self, files: OpenFiles) {
        *lock(&self.state) = (Ready::Yes, Arc::new(files));
        self.changed.notify_all();
    }

    /// There will be no files: whoever waits for them goes home.
    pub(super) fn give_up(&self) {
        let mut state = lock(&self.state);
        if matches!(state.0, Ready::No) {
            state.0 = Ready::Never;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Lets go of the files, once nobody writes any more: a file that was removed takes room until it is closed.
    pub(super) fn close(&self) {
        *lock(&self.state) = (Ready::Never, Arc::default());
    }

    /// The files, once they are there.
    pub(super) fn wait(&self) -> Result<Arc<OpenFiles>> {
        let mut state = lock(&self.state);
        loop {
            match state.0 {
                Ready::Yes => return Ok(state.1.clone()),
                Ready::Never => return Err(Error::new(Code::Cancelled, "the save was given up")),
                Ready::No => {
                    let waited = self.changed.wait_timeout(state, Duration::from_secs(1));
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Makes everything durable, file by file, several at a time.
    pub(super) fn seal(&self) -> Result<()> {
        let files = lock(&self.state).1.clone();
        std::thread::scope(|scope| {
            let seals: Vec<_> = files.iter().map(|file| scope.spawn(|| file.seal())).collect();
            seals.into_iter().try_for_each(|seal| {
                let panicked = || Err(internal("a thread of a save panicked"));
                seal.join().unwrap_or_else(|_| panicked())
            })
        })
    }
}
