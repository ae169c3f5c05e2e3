//! The audit log of a runner, which a thread of its own writes: a log on a file system that hangs or is full must not
//! stop what is moved and removed, nor make it disappear from the log. What waits is written later, in its order.
//!
//! A removal is noted before it happens: who removes waits a moment until the note is written
//! ([`Journal::note_before`]), unless the log is known not to be writable just now.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{Adoption, Root};
use forebay_checkpoint::save::Seal;
use forebay_error::{Code, Error, Result};
use forebay_format::hex;

use super::retry::Retry;
use super::state::Shared;
use crate::audit_log::{AuditLog, Event};

/// Most events that wait. Beyond it the oldest are lost, which the log then says.
const WAITING_MAX: usize = 10_000;
/// How long a removal waits for its note: an append takes some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// A write that takes longer is told.
const HANGS: Duration = Duration::from_secs(10);

/// See the module. Without a path it writes nothing.
pub(crate) struct Journal {
    path: Option<PathBuf>,
    state: Mutex<State>,
    /// Something waits, or was written; or it ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What waits, with its number.
    waiting: VecDeque<(u64, Event)>,
    /// The number of the last that was noted, and of the last that was written.
    noted: u64,
    written: u64,
    lost: u64,
    /// Since when the writer is at it.
    writes: Option<Instant>,
    /// It could not be written, and is left alone for a while.
    fails: Retry,
    /// That it hangs was told.
    told: bool,
    closing: bool,
    /// Nobody writes any more.
    closed: bool,
}

impl Journal {
    pub(crate) fn new(path: Option<&Path>) -> Self {
        let path = path.map(Path::to_owned);
        Self { path, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Whether anything is written.
    pub(crate) fn is_kept(&self) -> bool {
        self.path.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Notes an event; it is written soon. Errors: the runner was stopped, and it cannot be written now.
    pub(crate) fn note(&self, event: Event) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut state = self.lock();
        if state.closed {
            drop(state);
            return AuditLog::open(path)?.append(event).map(drop);
        }
        state.push(event);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The same, and waits a moment until it is written: for what is about to happen. Errors: as before.
    pub(crate) fn note_before(&self, event: Event) -> Result<()> {
        self.note(event)?;
        let until = Instant::now() + PATIENCE;
        let mut state = self.lock();
        let number = state.noted;
        while state.written < number && !state.closed && state.fails.fails == 0 {
            let now = Instant::now();
            // Where it hangs already nobody waits once more.
            let hangs = state.writes.is_some_and(|since| since.elapsed() > PATIENCE);
            if now >= until || hangs {
                break;
            }
            state = self.wait(state, until - now);
        }
        Ok(())
    }

    /// That nothing more comes: the writer writes what waits, and ends.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
    }

    /// Whether the log has begun to hang; true once, for whoever tells it.
    pub(crate) fn has_begun_to_hang(&self) -> bool {
        let mut state = self.lock();
        let hangs = state.writes.is_some_and(|since| since.elapsed() > HANGS);
        let first = hangs && !state.told;
        state.told = hangs;
        first
    }

    /// Writes what is noted, until it is closed. `tell` hears the first of several failures.
    pub(crate) fn run(&self, mut tell: impl FnMut(&Error)) {
        let Some(path) = &self.path else { return };
        let mut log = None;
        while let Some((number, event)) = self.next() {
            let written = write(&mut log, path, event);
            let mut state = self.lock();
            state.writes = None;
            match written {
                Ok(()) => {
                    state.fails = Retry::default();
                    state.is_written(number);
                }
                Err(error) => {
                    log = None;
                    let is_first = state.fails.fails == 0;
                    state.fails.fail(Instant::now(), u64::from(std::process::id()));
                    drop(state);
                    if is_first {
                        tell(&unlogged(&error));
                    }
                }
            }
            self.changed.notify_all();
        }
        self.changed.notify_all();
    }

    /// What is to be written next; `None` at the end. What cannot be written is tried once more then, and given up.
    fn next(&self) -> Option<(u64, Event)> {
        let mut state = self.lock();
        loop {
            let is_due = state.fails.is_due(Instant::now());
            let next = state.front();
            match (next, state.closing) {
                (None, true) => {
                    state.closed = true;
                    return None;
                }
                (Some(_), true) if state.fails.fails > 0 && !is_due => {
                    tracing::error!(events = state.waiting.len(), "events are in no audit log");
                    state.closed = true;
                    return None;
                }
                (Some(next), _) if is_due => {
                    state.writes = Some(Instant::now());
                    return Some(next);
                }
                _ => state = self.wait(state, Duration::from_millis(250)),
            }
        }
    }
}

impl State {
    fn push(&mut self, event: Event) {
        if self.waiting.len() >= WAITING_MAX {
            self.waiting.pop_front();
            self.lost += 1;
        }
        self.noted += 1;
        self.waiting.push_back((self.noted, event));
    }

    /// What goes into the log next: that some were lost, before all.
    fn front(&self) -> Option<(u64, Event)> {
        if self.lost == 0 {
            return self.waiting.front().cloned();
        }
        let note = format!("{} events were lost: the log could not be written", self.lost);
        let (who, what) = ("forebay".to_owned(), "lost".to_owned());
        Some((0, Event { who, what, note: Some(note), ..Event::default() }))
    }

    /// 0 is for what was lost.
    fn is_written(&mut self, number: u64) {
        if number == 0 {
            self.lost = 0;
        }
        // It may have been lost while it was written.
        if self.waiting.front().is_some_and(|(first, _)| *first == number) {
            self.waiting.pop_front();
        }
        self.written = self.written.max(number);
    }
}

fn write(log: &mut Option<AuditLog>, path: &Path, event: Event) -> Result<()> {
    let log = match log {
        Some(log) => log,
        None => log.insert(AuditLog::open(path)?),
    };
    log.append(event).map(drop)
}

/// The thread that writes it; failures are told as trouble.
pub(crate) fn run(shared: &Shared) {
    shared.journal.run(|error| shared.change(|state| state.trouble(None, None, error, None)));
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

/// The error that says that the log hangs.
pub(crate) fn hangs(path: Option<&Path>) -> Error {
    let what = format!("the audit log has not taken a record for {HANGS:?}");
    let place = path.map(forebay_format::shown).unwrap_or_default();
    unlogged(&Error::new(Code::Timeout, what).at(place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit_log::verify;

    fn event(what: &str) -> Event {
        Event { what: what.to_owned(), ..Event::default() }
    }

    fn whats(path: &Path) -> Vec<String> {
        let mut seen = Vec::new();
        verify(path, None, |record| {
            seen.push(record.event.what.clone());
            Ok(())
        })
        .unwrap();
        seen
    }

    #[test]
    fn what_could_not_be_written_is_written_later_in_its_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not-there/audit.log");
        let journal = Journal::new(Some(&path));
        let mut told = 0;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| journal.run(|_| told += 1));
            journal.note(event("one")).unwrap();
            let since = Instant::now();
            journal.note_before(event("two")).unwrap();
            journal.note_before(event("three")).unwrap();
            assert!(since.elapsed() < PATIENCE, "what cannot be written is not waited for");
            std::thread::sleep(Duration::from_millis(700));
            std::fs::create_dir(folder.path().join("not-there")).unwrap();
            while journal.lock().written < 3 {
                assert!(since.elapsed() < Duration::from_secs(30));
                std::thread::sleep(Duration::from_millis(5));
            }
            journal.note_before(event("four")).unwrap();
            assert_eq!(whats(&path), ["one", "two", "three", "four"], "before it returns");
            journal.note(event("five")).unwrap();
            journal.close();
            writer.join().unwrap();
        });
        assert_eq!(told, 1);
        assert_eq!(whats(&path).last().unwrap(), "five");
        // After the end whoever notes something writes it.
        journal.note(event("six")).unwrap();
        assert_eq!(whats(&path).last().unwrap(), "six");
        assert!(Journal::new(None).note_before(event("x")).is_ok());
    }

    #[test]
    fn what_is_too_much_is_told_as_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let journal = Journal::new(Some(&path));
        for number in 0..WAITING_MAX + 3 {
            journal.note(event(&format!("n{number}"))).unwrap();
        }
        journal.lock().waiting.truncate(2);
        journal.close();
        journal.run(|error| panic!("{error}"));
        assert_eq!(whats(&path), ["lost", "n3", "n4"]);
    }

    /// A log that somebody holds locked stands for one on a file system that hangs.
    #[test]
    fn a_log_that_hangs_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let file = std::fs::File::create(&path).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let journal = Journal::new(Some(&path));
        let (first, all, told) = std::thread::scope(|scope| {
            scope.spawn(|| journal.run(|error| panic!("{error}")));
            let since = Instant::now();
            journal.note(event("one")).unwrap();
            journal.note_before(event("two")).unwrap();
            let first = since.elapsed();
            (0..20).for_each(|_| journal.note_before(event("more")).unwrap());
            let all = since.elapsed();
            let soon = journal.has_begun_to_hang();
            journal.lock().writes = Instant::now().checked_sub(HANGS * 2);
            let told = [soon, journal.has_begun_to_hang(), journal.has_begun_to_hang()];
            rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
            journal.close();
            (first, all, told)
        });
        assert!(first >= PATIENCE, "a removal waits for its note: {first:?}");
        assert!(all < PATIENCE * 10, "each of them waited: {all:?}");
        assert_eq!(told, [false, true, false]);
        assert_eq!(whats(&path).len(), 22);
    }
}
