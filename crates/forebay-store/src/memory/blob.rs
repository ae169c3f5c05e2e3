//! The bytes of an object in memory, shared between its key, its writer and its readers as an inode is.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};

/// Bytes with a length of their own: room that is set aside and not written reads as zeros and takes no memory.
pub(super) struct Blob {
    len: u64,
    content: Mutex<Content>,
}

struct Content {
    bytes: Vec<u8>,
    /// Counts writes and the loss of the key.
    changes: u64,
    /// A data object is open for it.
    is_open: bool,
}

impl Blob {
    pub(super) fn of(bytes: &[u8]) -> Self {
        let content = Content { bytes: bytes.to_vec(), changes: 0, is_open: false };
        Self { len: bytes.len() as u64, content: Mutex::new(content) }
    }

    pub(super) fn reserved(len: u64) -> Self {
        let content = Content { bytes: Vec::new(), changes: 0, is_open: true };
        Self { len, content: Mutex::new(content) }
    }

    /// Makes the caller its writer, if it has none.
    pub(super) fn take_over(&self) -> bool {
        !std::mem::replace(&mut self.locked().is_open, true)
    }

    /// Its writer goes.
    pub(super) fn let_go(&self) {
        self.locked().is_open = false;
    }

    pub(super) fn holds(&self, bytes: &[u8], offset: u64) -> bool {
        let mut there = vec![0; bytes.len()];
        self.read_at(&mut there, offset) == bytes.len() && there == bytes
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// All bytes. The caller has looked at the length.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.locked().bytes.clone();
        bytes.resize(usize::try_from(self.len).unwrap_or(bytes.len()), 0);
        bytes
    }

    /// Says that the key is gone or another object's: who reads must not think that nothing happened.
    pub(super) fn retire(&self) {
        self.locked().changes += 1;
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= self.len);
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "past the object's length");
        let end = end.and_then(|end| usize::try_from(end).ok()).ok_or_else(outside)?;
        let mut content = self.locked();
        if content.bytes.len() < end {
            content.bytes.resize(end, 0);
        }
        if let Some(target) = content.bytes.get_mut(end - bytes.len()..end) {
            target.copy_from_slice(bytes);
        }
        content.changes += 1;
        Ok(bytes.len())
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> usize {
        let left = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let count = into.len().min(left);
        let content = self.locked();
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.bytes.len());
        let written = content.bytes.get(start..).unwrap_or_default();
        for (index, byte) in into.iter_mut().take(count).enumerate() {
            *byte = written.get(index).copied().unwrap_or(0);
        }
        count
    }

    fn locked(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An object that was opened for reading.
pub(super) struct Reader {
    name: String,
    blob: std::sync::Arc<Blob>,
    changes: u64,
}

impl Reader {
    pub(super) fn new(name: String, blob: std::sync::Arc<Blob>) -> Self {
        let changes = blob.locked().changes;
        Self { name, blob, changes }
    }
}

impl RangeSource for Reader {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len(&self) -> u64 {
        self.blob.len
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.blob.read_at(into, offset))
    }

    fn check_unchanged(&self) -> Result<()> {
        if self.blob.locked().changes == self.changes {
            return Ok(());
        }
        let what = "object was written, replaced or removed while it was in use";
        Err(Error::new(Code::FileChanged, what).at(&self.name))
    }
}
