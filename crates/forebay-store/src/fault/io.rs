//! Faults on the bytes of objects.

use std::io;
use std::sync::Arc;

use forebay_engine::{RangeSink, RangeSource};
use forebay_error::Result;

use super::change;
use super::client::{Client, Go};
use super::plan::{Action, When};
use crate::object::DataObject;

/// A data object of a client with faults.
pub(super) struct FaultData {
    inner: Box<dyn DataObject>,
    client: Arc<Client>,
    key: String,
    place: String,
}

impl FaultData {
    pub(super) fn new(
        inner: Box<dyn DataObject>,
        client: Arc<Client>,
        key: String,
        place: String,
    ) -> Self {
        Self { inner, client, key, place }
    }

    fn refusal(&self, errno: i32) -> io::Error {
        self.client.refusal(errno, Action::Write, &self.key).into_io()
    }

    /// Writes all of `bytes`, as a kernel does that fails later.
    fn write_whole(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        forebay_engine::write_all_at(self.inner.sink(), bytes, offset).map_err(io::Error::other)
    }
}

impl DataObject for FaultData {
    fn sink(&self) -> &dyn RangeSink {
        self
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> Result<bool> {
        let step = self.client.step(Action::Read, When::Before, &self.key);
        step.map_err(|refusal| refusal.into_error(&self.place))?;
        self.inner.holds(bytes, offset)
    }

    fn seal(&self) -> Result<()> {
        change(&self.client, Action::Seal, &self.key, &self.place, |()| true, || self.inner.seal())
    }
}

impl RangeSink for FaultData {
    fn name(&self) -> String {
        self.inner.sink().name()
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let step = |when| {
            self.client.step(Action::Write, when, &self.key).map_err(|refusal| refusal.into_io())
        };
        let half = bytes.get(..bytes.len() / 2).unwrap_or_default();
        let written = match step(When::Before)? {
            Go::Whole | Go::NotDurable => self.inner.sink().write_at(bytes, offset)?,
            Go::Short if half.is_empty() => self.inner.sink().write_at(bytes, offset)?,
            Go::Short => self.inner.sink().write_at(half, offset)?,
            Go::Torn => {
                self.write_whole(half, offset)?;
                return Err(self.refusal(libc::EIO));
            }
            Go::LoseReply => {
                self.write_whole(bytes, offset)?;
                return Err(self.refusal(libc::ETIMEDOUT));
            }
        };
        step(When::After)?;
        Ok(written)
    }

    fn flush_soon(&self, offset: u64, len: u64) {
        if self.client.alive().is_ok() {
            self.inner.sink().flush_soon(offset, len);
        }
    }
}

/// An object that a client with faults reads. It is never a local file, so that every byte passes here.
pub(super) struct FaultSource {
    inner: Arc<dyn RangeSource>,
    client: Arc<Client>,
    key: String,
}

impl FaultSource {
    pub(super) fn new(inner: Arc<dyn RangeSource>, client: Arc<Client>, key: String) -> Self {
        Self { inner, client, key }
    }
}

impl RangeSource for FaultSource {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let step = self.client.step(Action::Read, When::Before, &self.key);
        let go = step.map_err(|refusal| refusal.into_io())?;
        let count = match go {
            Go::Short => into.len().div_ceil(2),
            _ => into.len(),
        };
        self.inner.read_at(into.get_mut(..count).unwrap_or_default(), offset)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.client.alive().map_err(|refusal| refusal.into_error(&self.inner.name()))?;
        self.inner.check_unchanged()
    }
}
