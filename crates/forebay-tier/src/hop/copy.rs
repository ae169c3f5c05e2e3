//! One file from store to store, in parts, every byte summed up.

use std::sync::{Arc, Mutex, PoisonError};

use forebay_checkpoint::commit::{Adoption, FileRef};
use forebay_checkpoint::progress::Progress;
use forebay_engine::{RangeSource, read_exact_at, write_all_at};
use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_store::DataObject;

use super::expected::Expected;
use super::landing::{Landing, taken};
use super::pulse::Pulse;
use super::{HopOptions, Side};
use crate::copies;
use crate::limits::Direction;

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) sent: u64,
    pub(super) read_back: u64,
    pub(super) repeats: u32,
    /// Whether bytes here could not be read.
    pub(super) unread: bool,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.read_back += other.read_back;
        self.repeats += other.repeats;
    }
}

/// What copies files.
pub(super) struct Copier<'a> {
    pub(super) from: &'a Side,
    pub(super) to: &'a Side,
    pub(super) adoption: &'a Adoption,
    pub(super) options: &'a HopOptions,
    pub(super) landing: &'a Landing<'a>,
    pub(super) expected: &'a Expected,
    pub(super) pulse: &'a Pulse<'a>,
    /// What was wrong first with a file of this node's, where others may have a copy.
    pub(super) bad: Mutex<Option<Error>>,
}

/// How one try ended.
enum Try {
    Landed,
    /// The sum of what was read here is not that of the manifest.
    BadSource,
    /// The sum of what was read there is not that of what was sent.
    BadArrival,
    /// What was being copied is gone.
    Taken(String),
}

impl Copier<'_> {
    /// Sees to it that a file is there, whole. One that is damaged on the drive of a node is noted there, and ends no
    /// other: who has a copy brings that. Errors: `checksum` where it does not come out right in several tries.
    pub(super) fn bring(&self, file: &FileRef, watch: &impl Progress) -> Result<Tally> {
        let mut tally = Tally::default();
        if !self.landing.proves() && self.is_there(file, &mut tally)? {
            watch.add(file.bytes)?;
            return Ok(tally);
        }
        let mut last = Try::Landed;
        for repeat in 0..self.options.tries {
            tally.repeats += u32::from(repeat > 0);
            // Bytes of repeats are not progress.
            let told = |bytes| if repeat == 0 { watch.add(bytes) } else { watch.add(0) };
            last = match self.attempt(file, &mut tally, &told) {
                Err(error) if tally.unread && self.is_on_node() => {
                    return Ok(self.leave(file, error, tally));
                }
                tried => tried?,
            };
            if matches!(last, Try::Landed) {
                return Ok(tally);
            }
        }
        let key = self.adoption.layout().file(&file.name);
        let damaged = |side: &Side, what: &str| {
            let place = format!("{}/{key}", side.root.store.name());
            Error::new(Code::Checksum, what).at(place)
        };
        match last {
            Try::Landed => Ok(tally),
            Try::BadSource => {
                let error = damaged(self.from, "its bytes are not those that were saved").hint(
                    "this copy is damaged, or its way here is: move the step from another tier",
                );
                match self.is_on_node() {
                    true => Ok(self.leave(file, error, tally)),
                    false => Err(error),
                }
            }
            Try::BadArrival => Err(damaged(self.to, "what is read there is not what was sent")
                .hint("the store, or the way to it, changes bytes: do not use it")),
            Try::Taken(key) => Err(taken(&self.to.root, &key)),
        }
    }

    fn is_on_node(&self) -> bool {
        !self.from.root.store.sees_all()
    }

    /// Leaves a file to who has a copy.
    fn leave(&self, file: &FileRef, error: Error, tally: Tally) -> Tally {
        let step = self.adoption.step();
        tracing::warn!(%error, step, name = file.name, "a file is damaged on this drive");
        copies::note_damaged(&self.from.root, step, &file.name);
        self.bad.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        tally
    }

    /// Whether a file that nothing proves is there and what it must be; if not, it is removed.
    fn is_there(&self, file: &FileRef, tally: &mut Tally) -> Result<bool> {
        let key = self.adoption.layout().file(&file.name);
        let source = match self.to.root.store.open_data(&key) {
            Ok(source) => source,
            Err(error) if error.code() == Code::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if source.len() == file.bytes {
            let expected = self.sum(file)?;
            tally.read_back += file.bytes;
            if self.sum_of(&*source, self.to)? == expected {
                return Ok(true);
            }
        }
        self.to.root.store.remove(&key)?;
        Ok(false)
    }

    fn attempt(
        &self,
        file: &FileRef,
        tally: &mut Tally,
        told: &dyn Fn(u64) -> Result<()>,
    ) -> Result<Try> {
        let expected = self.sum(file)?;
        let source = self.open(file)?;
        // Open until the end: as long as it is, nobody else goes on with it.
        let ground = self.landing.create(&file.name, file.bytes)?;
        let key = ground.key;
        let sent = self.send(&*source, &*ground.data, tally, told);
        let sent = sent.and_then(|crc| source.check_unchanged().map(|()| crc));
        let crc = sent.inspect_err(|error| {
            // Where there is no room, what is half done must not take it from others.
            if !ground.again || error.code() == Code::NoSpace {
                self.abandon(&key);
            }
        })?;
        if crc != expected {
            self.abandon(&key);
            return Ok(Try::BadSource);
        }
        ground.data.seal().inspect_err(|_| self.abandon(&key))?;
        if self.options.read_back.applies(&self.to.root) {
            let arrived = match self.to.root.store.open_data(&key) {
                Ok(arrived) => arrived,
                Err(error) if error.code() == Code::NotFound => return Ok(Try::Taken(key)),
                Err(error) => return Err(error),
            };
            tally.read_back += file.bytes;
            if arrived.len() != file.bytes || self.sum_of(&*arrived, self.to)? != expected {
                self.landing.give_up(&key);
                return Ok(Try::BadArrival);
            }
        }
        match self.landing.land(&key, &file.name)? {
            true => Ok(Try::Landed),
            false => Ok(Try::Taken(key)),
        }
    }

    /// What was not sealed is nobody's; under a file's own name it may be another's that was.
    fn abandon(&self, key: &str) {
        if self.landing.proves() {
            self.landing.give_up(key);
        }
    }

    fn open(&self, file: &FileRef) -> Result<Arc<dyn RangeSource>> {
        let source = self.from.root.store.open_data(&self.adoption.layout().file(&file.name))?;
        if source.len() != file.bytes {
            let what = format!("file has {} bytes, {} were committed", source.len(), file.bytes);
            return Err(Error::new(Code::Truncated, what).at(source.name()));
        }
        Ok(source)
    }

    /// What its bytes must sum up to.
    fn sum(&self, file: &FileRef) -> Result<u32> {
        match self.expected.of(file) {
            Some(crc) => Ok(crc),
            None => self.sum_of(&*self.open(file)?, self.from),
        }
    }

    fn sum_of(&self, source: &dyn RangeSource, side: &Side) -> Result<u32> {
        self.parts(source, side, &mut |_, _| Ok(()))
    }

    fn send(
        &self,
        source: &dyn RangeSource,
        data: &dyn DataObject,
        tally: &mut Tally,
        told: &dyn Fn(u64) -> Result<()>,
    ) -> Result<u32> {
        let sink = data.sink();
        let mut writes = false;
        let sent = self.parts(source, self.from, &mut |bytes, offset| {
            writes = true;
            let len = bytes.len() as u64;
            if data.holds(bytes, offset)? {
                told(len)?;
                writes = false;
                return Ok(());
            }
            self.to.limits.take(Direction::Write, self.options.priority, len)?;
            // Counted before: what of it was sent when this fails is not known.
            tally.sent += len;
            write_all_at(sink, bytes, offset)?;
            sink.flush_soon(offset, len);
            told(len)?;
            writes = false;
            Ok(())
        });
        tally.unread = !writes && sent.as_ref().is_err_and(|error| error.code() == Code::Io);
        sent
    }

    /// Reads a source part by part, for `each`; returns the CRC-32 of all of it.
    fn parts(
        &self,
        source: &dyn RangeSource,
        side: &Side,
        each: &mut dyn FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<u32> {
        let (len, mut at, mut crc) = (source.len(), 0, 0);
        let mut buffer = Vec::new();
        while at < len {
            let count = (len - at).min(self.options.part_bytes);
            side.limits.take(Direction::Read, self.options.priority, count)?;
            self.pulse.beat();
            buffer.resize(count as usize, 0);
            read_exact_at(source, &mut buffer, at)?;
            crc = crc32_join(crc, crc32(&buffer), count);
            each(&buffer, at)?;
            at += count;
        }
        Ok(crc)
    }
}
