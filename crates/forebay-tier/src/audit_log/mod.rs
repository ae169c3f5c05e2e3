//! Who moved, removed, pinned or promoted what: a file that is only appended to, each record bound to all before it.
//!
//! A record that is changed, removed or put in between later breaks the chain there, and [`verify`] names it. What no
//! chain can show is that the end was cut off, or all of it written anew: for that the last hash ([`Verified::head`])
//! has to be kept somewhere else, and given to [`verify`] again.
//!
//! A crash can leave a part of a record at the end. It is told, never taken for a record, and the next append cuts it
//! off and says so in a record of its own.

mod record;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use forebay_error::{Code, Error, Result};
use forebay_format::{hex, shown};
use rustix::fs::FlockOperation;

pub use record::{Event, LINE_BYTES_MAX, Record};
use record::{GENESIS, encode, parse};

/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 20;

/// A log in a file; see [`Record`] for what is in it.
pub struct AuditLog {
    path: PathBuf,
    file: File,
    /// Up to where it was checked, or written, by this.
    known: Mutex<Option<Verified>>,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Whole records.
    pub records: u64,
    /// The hash of the last one; of an empty log, zeros.
    pub head: [u8; 32],
    /// Bytes of whole records.
    pub bytes: u64,
    /// Bytes after them, of a record whose writer was stopped.
    pub torn_bytes: u64,
}

impl AuditLog {
    /// Opens a log to append to it; makes one where there is none. Errors: I/O.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::io("cannot open the audit log", error).at(shown(path));
        let file = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = file.map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, known: Mutex::default() })
    }

    /// Appends a record, durably; returns it. Processes that append at once wait for each other.
    ///
    /// The whole chain is checked before the first, and what others have appended since before each other: nothing is
    /// appended to what is seen to be broken. An end that was cut off since is told in a record of its own.
    ///
    /// Errors: those of [`verify`]; I/O; `unsupported` for an event of more than 64 KiB.
    pub fn append(&self, event: Event) -> Result<Record> {
        let lock = |operation| rustix::fs::flock(&self.file, operation);
        lock(FlockOperation::LockExclusive).map_err(|errno| self.failed(errno.into()))?;
        let appended = self.append_locked(event);
        lock(FlockOperation::Unlock).map_err(|errno| self.failed(errno.into()))?;
        appended
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::io("cannot write to the audit log", error).at(shown(&self.path))
    }

    fn append_locked(&self, event: Event) -> Result<Record> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.file.metadata().map_err(|error| self.failed(error))?.len();
        // After an error all of it is looked at again.
        let before = known.take();
        let cut = before.as_ref().filter(|known| bytes < known.bytes).cloned();
        let start = before.filter(|_| cut.is_none()).unwrap_or_default();
        let mut end = walk(&self.file, &self.path, start, &mut |_| Ok(()))?;
        if end.torn_bytes > 0 {
            self.file.set_len(end.bytes).map_err(|error| self.failed(error))?;
            let torn = Event::torn(end.torn_bytes);
            self.write(&mut end, &torn)?;
        }
        if let Some(cut) = cut {
            self.write(&mut end, &Event::cut(cut.records, &cut.head))?;
        }
        let record = self.write(&mut end, &event)?;
        *known = Some(end);
        Ok(record)
    }

    fn write(&self, end: &mut Verified, event: &Event) -> Result<Record> {
        let (line, record) = encode(end.records, &end.head, event)?;
        let mut file = &self.file;
        let written = file.write_all(&line).and_then(|()| file.sync_all());
        written.map_err(|error| self.failed(error))?;
        let (records, bytes) = (end.records + 1, end.bytes + line.len() as u64);
        *end = Verified { records, head: record.hash, bytes, torn_bytes: 0 };
        Ok(record)
    }
}

/// Checks the chain of a log, and gives its records to `each`. With `expected`, the number of records and the hash of
/// the last of them that were noted earlier, also that they are still there.
///
/// Errors: I/O; what `each` says; `checksum`, naming the first record whose hash does not follow from the records
/// before it, or that is not what was noted; `invalid_metadata` for one that is no record; `truncated` where records
/// that were noted are not there.
pub fn verify(
    path: &Path,
    expected: Option<(u64, [u8; 32])>,
    mut each: impl FnMut(&Record) -> Result<()>,
) -> Result<Verified> {
    let file = File::open(path);
    let file =
        file.map_err(|error| Error::io("cannot open the audit log", error).at(shown(path)))?;
    let mut noted = expected.is_none_or(|(records, head)| records == 0 && head == GENESIS);
    let found = walk(&file, path, Verified::default(), &mut |record| {
        if let Some((records, head)) = expected
            && record.number + 1 == records
        {
            noted = record.hash == head;
            if !noted {
                let what = format!("record {} is not the one that was noted", record.number);
                let hint = format!("its hash is {}, {} was noted", hex(&record.hash), hex(&head));
                return Err(Error::new(Code::Checksum, what).at(shown(path)).hint(hint));
            }
        }
        each(record)
    })?;
    if !noted {
        let what =
            format!("records that were noted are not there: the log ends after {}", found.records);
        return Err(Error::new(Code::Truncated, what).at(shown(path)));
    }
    Ok(found)
}

/// Reads a log record by record, from where it was read before.
fn walk(
    file: &File,
    path: &Path,
    mut found: Verified,
    each: &mut dyn FnMut(&Record) -> Result<()>,
) -> Result<Verified> {
    let failed = |error| Error::io("cannot read the audit log", error).at(shown(path));
    let mut reader = file;
    reader.seek(SeekFrom::Start(found.bytes)).map_err(failed)?;
    let mut pending: Vec<u8> = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let count = reader.read(&mut buffer).map_err(failed)?;
        pending.extend_from_slice(buffer.get(..count).unwrap_or_default());
        let mut start = 0;
        while let Some(end) =
            pending.get(start..).and_then(|rest| rest.iter().position(|b| *b == b'\n'))
        {
            let line = pending.get(start..start + end).unwrap_or_default();
            let at = || format!("{}, record {}, byte {}", shown(path), found.records, found.bytes);
            let record = parse(line, found.records, &found.head).map_err(|error| error.at(at()))?;
            each(&record)?;
            (found.records, found.head) = (found.records + 1, record.hash);
            found.bytes += end as u64 + 1;
            start += end + 1;
        }
        pending.drain(..start);
        if pending.len() > LINE_BYTES_MAX {
            let what = format!("record {} is longer than any can be", found.records);
            return Err(Error::new(Code::InvalidMetadata, what).at(shown(path)));
        }
        if count == 0 {
            found.torn_bytes = pending.len() as u64;
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests;
