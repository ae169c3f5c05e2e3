//! Takes a copy of a file from somebody who is not trusted.
//!
//! What comes is compared with what this node knows by itself: the step must be a commit in the records, the file one
//! of its data files, its length the one that was committed, and the checksum of all bytes the manifest's. Until then
//! they lie under a name of chance, away from all steps, and nobody takes them for anything. So whoever may send can
//! put nothing on a drive but true files of committed steps.
//!
//! A copy is on the disk before it has its name, and marked as one before that too.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_checkpoint::commit::{Adoption, AttemptId, FileRef, Root};
use forebay_checkpoint::save::Seal;
use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_store::{DataObject, Expect, NODE_OWN, Published, is_data, random};

use super::peers::DriveId;
use super::tidy::{Tidied, tidy};
use super::{damaged, marks};
use crate::hop::{Expected, Side};
use crate::limits::{Direction, Priority};

/// Steps whose checksums are remembered.
const KNOWN_MAX: usize = 4;
/// Most of what came and was broken off that is looked at.
const INCOMING_MAX: usize = 1 << 16;

/// Takes copies for one drive.
pub struct Receiver {
    side: Side,
    part_bytes: usize,
    /// The ones that were asked for last, the newest at the end.
    known: Mutex<Vec<(u64, Arc<Known>)>>,
    /// Names of what is coming.
    coming: Coming,
    marking: Marking,
}

/// Held while a file gets its mark and its name, or loses them: seen in between it would be a node's own.
type Marking = Arc<Mutex<()>>;

type Coming = Arc<Mutex<BTreeSet<String>>>;

/// A commit, and what its files sum up to.
struct Known {
    adoption: Adoption,
    expected: Expected,
}

/// What came of a beginning.
pub enum Begun {
    /// The file is there.
    There,
    /// Its bytes may come.
    Incoming(Box<Incoming>),
}

impl Receiver {
    /// For the drive of a root, within its limits. `part_bytes`: memory of each copy that comes, and what passes a
    /// limit at once.
    pub fn new(side: Side, part_bytes: u64) -> Self {
        let part_bytes = usize::try_from(part_bytes.clamp(1 << 16, 256 << 20)).unwrap_or(8 << 20);
        let (known, coming, marking) = Default::default();
        Self { side, part_bytes, known, coming, marking }
    }

    /// Looks through the copies of the drive. `landed`: steps that are committed in one place, with their attempts.
    ///
    /// Errors: I/O, where nothing could be looked through.
    pub fn tidy(&self, landed: &BTreeSet<(u64, String)>) -> Result<Tidied> {
        tidy(&self.side.root, landed, &self.marking)
    }

    /// Removes what came of copies that were broken off by an end of the process, so long ago by the store's clock.
    ///
    /// Errors: I/O.
    pub fn collect(&self, grace: Duration) -> Result<()> {
        let store = &self.side.root.store;
        for line in store.list(&incoming(), INCOMING_MAX)? {
            if line.age.0 >= grace && !locked(&self.coming).contains(&line.key) {
                store.remove(&line.key)?;
            }
        }
        Ok(())
    }

    /// The data files of a committed step that are on the drive, with their bytes; not those of its own that are known
    /// to be damaged.
    ///
    /// Errors: `not_committed`; those of a damaged commit; I/O.
    pub fn files(&self, step: u64) -> Result<Vec<FileRef>> {
        let known = self.known(step)?;
        let (missing, copies) = marks::here(&self.side.root, &known.adoption)?;
        let damaged = damaged::of_step(&self.side.root, step)?;
        let is_whole =
            |file: &FileRef| copies.contains_key(&file.name) || !damaged.contains(&file.name);
        let data = known.adoption.files().iter().filter(|file| is_data(&file.name));
        Ok(data.filter(|file| !missing.contains(file) && is_whole(file)).cloned().collect())
    }

    /// Begins to take a file of a step, which is that drive's.
    ///
    /// Errors: `not_committed`; `not_found` where no data file of the step has that name; `usage` where it has another
    /// length; `no_space`; those of a damaged commit; I/O.
    pub fn begin(&self, step: u64, name: &str, bytes: u64, of: DriveId) -> Result<Begun> {
        let known = self.known(step)?;
        let root = &self.side.root;
        let files = known.adoption.files();
        let Some(file) = files.iter().find(|file| file.name == name && is_data(name)) else {
            let what = format!("no data file of step {step} has that name");
            return Err(Error::new(Code::NotFound, what));
        };
        if file.bytes != bytes {
            let what = format!("the file has {} bytes, and not {bytes}", file.bytes);
            return Err(Error::new(Code::Usage, what));
        }
        let Some(crc) = known.expected.of(file) else {
            return Err(Error::new(Code::Unsupported, "the manifest has no checksum of the file"));
        };
        let to = known.adoption.layout().file(&file.name);
        match root.store.open_data(&to) {
            Ok(there) if there.len() == bytes => return Ok(Begun::There),
            Ok(_) => {
                let what = "the file is there, and has another length";
                return Err(Error::new(Code::AlreadyExists, what).at(to));
            }
            Err(error) if error.code() == Code::NotFound => {}
            Err(error) => return Err(error),
        }
        let file = file.clone();
        let key = format!("{}{:016x}", incoming(), random());
        locked(&self.coming).insert(key.clone());
        let data = root.store.create_data(&key, bytes).inspect_err(|_| {
            locked(&self.coming).remove(&key);
        })?;
        Ok(Begun::Incoming(Box::new(Incoming {
            side: self.side.clone(),
            known,
            file,
            step,
            of,
            coming: Arc::clone(&self.coming),
            marking: Arc::clone(&self.marking),
            key,
            to,
            data,
            part: Vec::new(),
            part_bytes: self.part_bytes,
            at: 0,
            crc: (0, crc),
            is_done: false,
        })))
    }

    /// A commit as it is now.
    fn known(&self, step: u64) -> Result<Arc<Known>> {
        let root = &self.side.root;
        let found = locked(&self.known)
            .iter()
            .find(|(known, _)| *known == step)
            .map(|(_, k)| Arc::clone(k));
        if let Some(known) = found
            && known.adoption.is_at(root)?
        {
            return Ok(known);
        }
        let known = Arc::new(Known::read(root, step)?);
        let mut all = locked(&self.known);
        all.retain(|(other, _)| *other != step);
        if all.len() >= KNOWN_MAX {
            all.remove(0);
        }
        all.push((step, Arc::clone(&known)));
        Ok(known)
    }
}

impl Known {
    fn read(root: &Root, step: u64) -> Result<Self> {
        let adoption = Adoption::read(root, step)?;
        let expected = expected(root, &adoption)?;
        Ok(Self { adoption, expected })
    }
}

/// What the files of a commit sum up to, by its manifest. Errors: those of a damaged one; I/O.
pub(super) fn expected(root: &Root, adoption: &Adoption) -> Result<Expected> {
    let none = || Error::new(Code::InvalidMetadata, "`.metadata` names no manifest");
    let seal = Seal::find(&adoption.metadata_source())?.ok_or_else(none)?;
    Expected::read(root, adoption, &seal)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where copies are until they are whole.
fn incoming() -> String {
    format!("{NODE_OWN}incoming/")
}

/// A copy that comes. Dropped before [`finish`](Self::finish) nothing is left of it.
pub struct Incoming {
    side: Side,
    known: Arc<Known>,
    file: FileRef,
    step: u64,
    of: DriveId,
    coming: Coming,
    marking: Marking,
    /// Where it is written, and what it becomes.
    key: String,
    to: String,
    data: Box<dyn DataObject>,
    part: Vec<u8>,
    part_bytes: usize,
    at: u64,
    /// Of what was written, and what it must be in the end.
    crc: (u32, u32),
    is_done: bool,
}

impl Incoming {
    /// The next bytes. Waits where the tier's limits say so.
    ///
    /// Errors: `usage` for more than the file has; I/O; `cancelled`.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.left() < bytes.len() as u64 {
            return Err(Error::new(Code::Usage, "more bytes came than the file has"));
        }
        while !bytes.is_empty() {
            let room = self.part_bytes - self.part.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.part.extend_from_slice(now);
            bytes = later;
            if self.part.len() == self.part_bytes {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Whose commit the file is of.
    pub fn attempt(&self) -> AttemptId {
        self.known.adoption.attempt()
    }

    /// Bytes that are still to come.
    pub fn left(&self) -> u64 {
        self.file.bytes - self.at - self.part.len() as u64
    }

    fn flush(&mut self) -> Result<()> {
        let len = self.part.len() as u64;
        if len == 0 {
            return Ok(());
        }
        self.side.limits.take(Direction::Write, Priority::Newest, len)?;
        let sink = self.data.sink();
        write_all_at(sink, &self.part, self.at)?;
        sink.flush_soon(self.at, len);
        self.crc.0 = crc32_join(self.crc.0, crc32(&self.part), len);
        self.at += len;
        self.part.clear();
        Ok(())
    }

    /// All bytes have come: checks them, and gives the file its name.
    ///
    /// Errors: `truncated`; `checksum`; `not_committed` where the step was removed or replaced meanwhile; `fenced`
    /// where what came was taken away; I/O.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        if self.left() > 0 {
            let what = format!("{} bytes did not come", self.left());
            return Err(Error::new(Code::Truncated, what));
        }
        if self.crc.0 != self.crc.1 {
            return Err(Error::new(Code::Checksum, "what came is not what was saved"));
        }
        self.data.seal()?;
        let root = &self.side.root;
        if !self.known.adoption.is_at(root)? {
            let what = format!("step {} was removed or replaced meanwhile", self.step);
            return Err(Error::new(Code::NotCommitted, what));
        }
        let _marking = locked(&self.marking);
        marks::make(root, self.step, &self.file.name, self.of, false)?;
        match root.store.publish(&self.key, &self.to, &Expect::Absent)? {
            Published::Done { .. } => {
                self.is_done = true;
                Ok(())
            }
            // Another copy of it came at the same time.
            Published::Lost => Ok(()),
            Published::Withdrawn => Err(Error::new(Code::Fenced, "what came was taken away")),
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        locked(&self.coming).remove(&self.key);
        if !self.is_done
            && let Err(error) = self.side.root.store.remove(&self.key)
        {
            tracing::debug!(%error, "what came of a copy stays until it is collected");
        }
    }
}
