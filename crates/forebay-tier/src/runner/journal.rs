//! The audit log of a runner. What cannot be written now is kept and written later, in its order: a full disk must not
//! make movements disappear from the log.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use forebay_checkpoint::commit::{Adoption, Root};
use forebay_checkpoint::save::Seal;
use forebay_error::{Error, Result};
use forebay_format::hex;

use crate::audit_log::{AuditLog, Event};

/// Most events that wait. Beyond it the oldest are lost, which the log then says.
const WAITING_MAX: usize = 10_000;

/// See the module. Without a path it writes nothing.
pub(crate) struct Journal {
    path: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    log: Option<AuditLog>,
    waiting: VecDeque<Event>,
    lost: u64,
}

impl Journal {
    pub(crate) fn new(path: Option<&Path>) -> Self {
        Self { path: path.map(Path::to_owned), state: Mutex::default() }
    }

    /// Whether anything is written.
    pub(crate) fn is_kept(&self) -> bool {
        self.path.is_some()
    }

    /// Notes an event. Errors: it is not written yet; it will be tried again with the next.
    pub(crate) fn note(&self, event: Event) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.waiting.len() >= WAITING_MAX {
            state.waiting.pop_front();
            state.lost += 1;
        }
        state.waiting.push_back(event);
        state.write(path)
    }

    /// Writes what waits. Errors: as before.
    pub(crate) fn flush(&self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.waiting.is_empty() { Ok(()) } else { state.write(path) }
    }
}

impl State {
    fn write(&mut self, path: &Path) -> Result<()> {
        let log = match &self.log {
            Some(log) => log,
            None => self.log.insert(AuditLog::open(path)?),
        };
        if self.lost > 0 {
            let note = format!("{} events were lost: the log could not be written", self.lost);
            let (who, what) = ("forebay".to_owned(), "lost".to_owned());
            log.append(Event { who, what, note: Some(note), ..Event::default() })?;
            self.lost = 0;
        }
        while let Some(event) = self.waiting.front() {
            log.append(event.clone())?;
            self.waiting.pop_front();
        }
        Ok(())
    }
}

/// What a step's bytes are known by: the hash of its manifest, which holds those of all files.
pub(crate) fn checksum_of(root: &Root, step: u64) -> Option<String> {
    let commit = Adoption::read(root, step).ok()?;
    let seal = Seal::find(&commit.metadata_source()).ok()??;
    Some(hex(&seal.hash))
}

/// The error that says that the log could not be written.
pub(crate) fn unlogged(error: &Error) -> Error {
    error.again().hint("what happened is kept in memory and written when the log can be")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit_log::verify;

    #[test]
    fn what_could_not_be_written_is_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not-there/audit.log");
        let journal = Journal::new(Some(&path));
        let event = |what: &str| Event { what: what.to_owned(), ..Event::default() };
        assert!(journal.note(event("one")).is_err());
        assert!(journal.note(event("two")).is_err());
        std::fs::create_dir(folder.path().join("not-there")).unwrap();
        journal.note(event("three")).unwrap();
        let mut seen = Vec::new();
        let read = |record: &crate::audit_log::Record| {
            seen.push(record.event.what.clone());
            Ok(())
        };
        verify(&path, None, read).unwrap();
        assert_eq!(seen, ["one", "two", "three"]);
        assert!(Journal::new(None).note(event("x")).is_ok());
    }
}
