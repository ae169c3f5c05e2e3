//! Objects that belong to one process.

use forebay_error::{Code, Error, Result};
use pyo3::Python;

/// A value of the process that made it. In a child of a fork it cannot be reached and is not dropped: its threads do
/// not exist there, its locks may be held by them for ever, and its driver handles are the parent's.
///
/// Dropping it may take long (a load waits up to 0.8 s for its workers, an arena is unpinned), so that happens without
/// the GIL, as long as there is an interpreter.
pub(crate) struct Own<T: Send> {
    value: Option<T>,
    pid: u32,
    what: &'static str,
}

impl<T: Send> Own<T> {
    /// `what` names the object in errors.
    pub(crate) fn new(value: T, what: &'static str) -> Self {
        Self { value: Some(value), pid: std::process::id(), what }
    }

    /// The value. Errors: `forked`.
    pub(crate) fn get(&self) -> Result<&T> {
        match &self.value {
            Some(value) if !self.is_inherited() => Ok(value),
            _ => {
                let what = self.what;
                let text = format!("{what} was made before a fork and belongs to the parent");
                Err(Error::new(Code::Forked, text)
                    .hint("open and load again in this process: it gets an engine of its own"))
            }
        }
    }

    fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }
}

impl<T: Send> Drop for Own<T> {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.value.take());
            return;
        }
        // No interpreter, no GIL to let go: then the field is dropped after this.
        Python::try_attach(|py| py.detach(|| drop(self.value.take())));
    }
}
