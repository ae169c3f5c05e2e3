//! A checkpoint root: the store, the observer's clock, and how to tell whose commit a `.metadata` is.

use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_store::{Expect, Store, Version};

use super::clock::Clock;
use super::id::AttemptId;
use super::names::Layout;
use super::record::{Decision, Record, decode};

/// Most bytes of a record that is read: a commit record of a million files.
pub(crate) const RECORD_BYTES_MAX: u64 = 96 << 20;
/// Most bytes of `.metadata` that are read to learn its version: 20 million chunks of 190 bytes.
const METADATA_BYTES_MAX: u64 = 4 << 30;
/// Most objects of a folder that are listed.
pub(crate) const LIST_MAX: usize = 1 << 22;

/// Reads what a `.metadata` says of its writer. The format is not this module's business.
pub trait Identify: Send + Sync {
    /// The attempt that committed it; `None` where Forebay did not write it. Errors where it cannot be read: then
    /// nothing in its folder is ever removed.
    fn attempt(&self, metadata: &dyn RangeSource) -> Result<Option<AttemptId>>;

    /// The names of the files that it needs, for commits whose own record is gone (a copy without hidden folders).
    fn files(&self, metadata: &dyn RangeSource) -> Result<Vec<String>>;
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Root {
    /// Opened at the checkpoint root.
    pub store: Arc<dyn Store>,
    /// The observer's.
    pub clock: Arc<dyn Clock>,
    /// Reads `.metadata`.
    pub identify: Arc<dyn Identify>,
}

/// What is at a commit point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Current {
    pub(crate) attempt: Option<AttemptId>,
    pub(crate) version: Version,
}

impl Root {
    /// A record; `None` where there is none, or only room for it.
    pub(crate) fn read<R: Record>(&self, key: &str) -> Result<Option<R>> {
        let Some((bytes, _)) = self.store.get(key, RECORD_BYTES_MAX)? else { return Ok(None) };
        let decoded = decode::<R>(&bytes).map_err(|error| error.at(self.place(key)))?;
        Ok(decoded.map(|(record, _)| record))
    }

    /// The decision of an attempt. Room for a failure that was published before anything was written to it says as much
    /// as an abort: that is how a collector speaks on a full disk. So does an empty record, of the attempt itself.
    pub(crate) fn decision(&self, layout: &Layout, attempt: AttemptId) -> Result<Option<Decision>> {
        let key = layout.record(attempt, "decision");
        let Some((bytes, _)) = self.store.get(&key, RECORD_BYTES_MAX)? else { return Ok(None) };
        let decoded = decode::<Decision>(&bytes).map_err(|error| error.at(self.place(&key)))?;
        let blank = || super::withdraw::blank_decision(bytes.len());
        Ok(Some(decoded.map_or_else(blank, |(decision, _)| decision)))
    }

    /// Creates a record; whether it is there now and ours. A reply that got lost is looked up. One that is there and
    /// could not be made durable is an error: nobody may build on it.
    pub(crate) fn create_once(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        let failed = match self.store.create(key, bytes) {
            Ok(true) => return Ok(true),
            Ok(false) => None,
            Err(error) if error.code() == Code::NotDurable => return Err(error),
            Err(error) => Some(error),
        };
        match (self.store.get(key, RECORD_BYTES_MAX), failed) {
            (Ok(Some((there, _))), _) => Ok(there == bytes),
            (_, Some(error)) => Err(error),
            (Ok(None), None) => Ok(false),
            (Err(error), None) => Err(error),
        }
    }

    /// What is at the commit point of a step. One that cannot be read is somebody else's.
    pub(crate) fn current(&self, layout: &Layout) -> Result<Option<Current>> {
        let key = layout.metadata();
        let Some((bytes, version)) = self.store.get(&key, METADATA_BYTES_MAX)? else {
            return Ok(None);
        };
        let source = Bytes { name: self.place(&key), bytes };
        let attempt = self.identify.attempt(&source).unwrap_or_else(|error| {
            tracing::warn!(%error, "a commit that cannot be read");
            None
        });
        Ok(Some(Current { attempt, version }))
    }

    /// The attempt at a commit point, without reading all of it. Errors where it cannot be read.
    pub(crate) fn committed(&self, layout: &Layout) -> Result<Option<Option<AttemptId>>> {
        match self.open_metadata(layout)? {
            Some(source) => self.identify.attempt(source.as_ref()).map(Some),
            None => Ok(None),
        }
    }

    /// `.metadata`, if it is there.
    pub(crate) fn open_metadata(&self, layout: &Layout) -> Result<Option<Arc<dyn RangeSource>>> {
        match self.store.open_data(&layout.metadata()) {
            Ok(source) => Ok(Some(source)),
            Err(error) if error.code() == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What errors call an object.
    pub(crate) fn place(&self, key: &str) -> String {
        format!("{}/{key}", self.store.name())
    }

    /// Fails where the store cannot hold a commit.
    pub(crate) fn check_fit(&self, expect: &Expect, key: &str) -> Result<()> {
        let can = self.store.abilities();
        if !can.create_if_absent {
            let what = "the store cannot create an object only where there is none";
            let error = Error::new(Code::Unsupported, what).at(self.store.name());
            return Err(error.hint("checkpoints need a store that can: two writers would mix"));
        }
        if *expect != Expect::Absent && !can.replace_if_version {
            let what = "the step exists, and the store cannot replace an object safely";
            let error = Error::new(Code::AlreadyExists, what).at(self.place(key));
            return Err(error.hint("steps can only be created here: prune this one first"));
        }
        Ok(())
    }
}

/// Bytes in memory as a source.
pub(crate) struct Bytes {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

impl RangeSource for Bytes {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let count = into.len().min(self.bytes.len() - start);
        into[..count].copy_from_slice(&self.bytes[start..start + count]);
        Ok(count)
    }

    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}
