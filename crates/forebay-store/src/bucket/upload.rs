//! A data object on its way into a bucket.
//!
//! Its size is known, so its parts are: at least 8 MiB, at most 10,000 (an object of one part is one PUT). Ranges come
//! from many threads in any order and are copied into the buffer of their part; a part is sent as soon as it is whole,
//! with its CRC-64/NVME where the store is S3, which the store compares and gives back (see [`wire`](super::wire)).
//! What was never written reads as zeros, as on a file system.
//!
//! **Copies.** A byte is copied once in this process, from the writer into the part's buffer; from there the kernel
//! takes it (with TLS, the cipher's output is a second copy). **Memory** is bounded by [`Room`](super::room).
//!
//! Nothing is under the key before [`seal`](DataObject::seal) completes the upload. A drop without it aborts the
//! upload, so that the store keeps no parts, unless it was started to be gone on with ([`resume`](super::resume));
//! parts of a writer that was killed are a collector's, or the bucket's lifecycle rule's, to remove.

mod finish;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use forebay_engine::RangeSink;
use forebay_error::{Code, Error, Result};
use object_store::PutPayload;
use object_store::multipart::PartId;
use object_store::path::Path;
use tokio::sync::OnceCell;
use tokio::task::AbortHandle;

use super::client::Client;
use super::failure::{Failed, Kind};
use super::resume::Begun;
use super::retry::Ask;
use super::room::Taken;
use super::runtime::wait;
use crate::object::DataObject;

/// See the module.
pub(super) struct Upload {
    shared: Arc<Shared>,
    sealed: AtomicBool,
}

struct Shared {
    client: Arc<Client>,
    key: String,
    path: Path,
    bytes: u64,
    part_bytes: u64,
    parts: Vec<Mutex<Part>>,
    /// The store's name of the upload.
    id: OnceCell<String>,
    /// What another process has sent of it.
    begun: Option<Begun>,
    /// Whether a drop leaves the parts, to be gone on with.
    keeps: bool,
    /// Whether some of that was taken as it is.
    kept: AtomicBool,
    /// What was gone on with cannot be: it is aborted all the same.
    spoiled: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ids: Vec<Option<PartId>>,
    /// Of an upload that is gone on with: what its parts are to sum up to.
    sums: Vec<Option<String>>,
    flying: usize,
    failed: Option<Error>,
    tasks: Vec<AbortHandle>,
}

/// A part, until it is the store's.
enum Part {
    Untouched,
    /// The buffer is as long as the last byte that was written needs; what was not written before that is zeros.
    Filling {
        buffer: Vec<u8>,
        filled: usize,
        room: Taken,
    },
    Sent,
}

/// A part on its way. Its memory and its room go back when the last of the HTTP stack lets go of it, which may be after
/// the answer.
struct Flying {
    buffer: Vec<u8>,
    room: Option<Taken>,
}

impl AsRef<[u8]> for Flying {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            room.give_back(std::mem::take(&mut self.buffer));
        }
    }
}

impl Upload {
    /// Errors: `already_exists` where this process writes the key already; `unsupported` for more than parts can hold.
    pub(super) fn new(client: &Arc<Client>, key: &str, bytes: u64) -> Result<Self> {
        Self::start(client, key, bytes, false)
    }

    /// The same, or one that another process began: see [`resume`](super::resume).
    pub(super) fn resumed(client: &Arc<Client>, key: &str, bytes: u64) -> Result<Self> {
        Self::start(client, key, bytes, true)
    }

    fn start(client: &Arc<Client>, key: &str, bytes: u64, keeps: bool) -> Result<Self> {
        let path = client.path(key)?;
        let part_bytes = client.settings.part_bytes_of(bytes);
        let count = usize::try_from(bytes.div_ceil(part_bytes)).unwrap_or(usize::MAX);
        let mut writing = client.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if !writing.insert(key.to_owned()) {
            return Err(Error::new(Code::AlreadyExists, "the key is taken").at(client.place(key)));
        }
        drop(writing);
        let begun = match keeps && count > 1 {
            true => wait(&client.handle, client.begun(key, &|at| part_len(bytes, part_bytes, at))),
            false => None,
        };
        let id = begun.as_ref().map(|begun| begun.id.clone());
        let state = State { ids: vec![None; count], sums: vec![None; count], ..State::default() };
        let shared = Shared {
            client: Arc::clone(client),
            key: key.to_owned(),
            path,
            bytes,
            part_bytes,
            parts: (0..count).map(|_| Mutex::new(Part::Untouched)).collect(),
            id: OnceCell::new_with(id),
            begun,
            keeps,
            kept: AtomicBool::new(false),
            spoiled: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Ok(Self { shared: Arc::new(shared), sealed: AtomicBool::new(false) })
    }
}

/// Of a part of an object; `None` past its end.
fn part_len(bytes: u64, part_bytes: u64, index: usize) -> Option<u64> {
    let start = (index as u64).checked_mul(part_bytes)?;
    Some(bytes.checked_sub(start)?.min(part_bytes)).filter(|len| *len > 0)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part_len(&self, index: usize) -> usize {
        let len = part_len(self.bytes, self.part_bytes, index).unwrap_or(0);
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    /// Whether the store has these bytes as whole parts that nobody here has touched: they are done then.
    fn has(&self, bytes: &[u8], offset: u64) -> bool {
        let Some(begun) = &self.begun else { return false };
        if bytes.is_empty() || !offset.is_multiple_of(self.part_bytes) {
            return false;
        }
        let first = usize::try_from(offset / self.part_bytes).unwrap_or(usize::MAX);
        let (mut rest, mut sums) = (bytes, Vec::new());
        while let Some(slot) = self.parts.get(first + sums.len()).filter(|_| !rest.is_empty()) {
            let index = first + sums.len();
            let Some((piece, after)) = rest.split_at_checked(self.part_len(index)) else {
                return false;
            };
            let sum = begun.kind.of(piece);
            if !begun.has(index, &sum) || !matches!(*lock(slot), Part::Untouched) {
                return false;
            }
            sums.push(sum);
            rest = after;
        }
        if !rest.is_empty() {
            return false;
        }
        for (at, sum) in sums.into_iter().enumerate() {
            if let Some(slot) = self.parts.get(first + at) {
                *lock(slot) = Part::Sent;
            }
            self.note_sum(first + at, sum);
        }
        self.kept.store(true, Ordering::Release);
        true
    }

    fn note_sum(&self, index: usize, sum: String) {
        if let Some(slot) = self.state().sums.get_mut(index) {
            *slot = Some(sum);
        }
    }

    fn check(&self) -> Result<()> {
        self.state().failed.as_ref().map_or(Ok(()), |error| Err(error.again()))
    }

    /// Copies what belongs to one part; sends the part if that made it whole.
    fn fill(self: &Arc<Self>, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let index = usize::try_from(offset / self.part_bytes).unwrap_or(usize::MAX);
        let len = self.part_len(index);
        let from = usize::try_from(offset % self.part_bytes).unwrap_or(usize::MAX);
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "past the object's length");
        let slot = self.parts.get(index).ok_or_else(outside)?;
        let count = bytes.len().min(len.saturating_sub(from));
        let source = bytes.get(..count).filter(|bytes| !bytes.is_empty()).ok_or_else(outside)?;
        let mut part = lock(slot);
        if matches!(*part, Part::Untouched) {
            // Room is waited for without the part, which others fill.
            drop(part);
            let mut room = self.client.room.take(len as u64, || self.check().map_err(into_io))?;
            part = lock(slot);
            if matches!(*part, Part::Untouched) {
                *part = Part::Filling { buffer: room.buffer(), filled: 0, room };
            }
        }
        let Part::Filling { buffer, filled, .. } = &mut *part else {
            let what = "written twice: the part is the store's already";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        write_into(buffer, source, from);
        *filled += count;
        if *filled >= len {
            self.send(index, &mut part);
        }
        Ok(count)
    }

    /// Sends a part that is whole, or that nothing more will be written to.
    fn send(self: &Arc<Self>, index: usize, part: &mut Part) {
        let bytes = match std::mem::replace(part, Part::Sent) {
            Part::Filling { mut buffer, mut room, .. } => {
                room.fly();
                buffer.resize(self.part_len(index), 0);
                Bytes::from_owner(Flying { buffer, room: Some(room) })
            }
            // A hole. Zeroed memory that nobody has touched is not there yet.
            Part::Untouched => Bytes::from(vec![0; self.part_len(index)]),
            Part::Sent => return,
        };
        let shared = Arc::clone(self);
        let mut state = self.state();
        state.flying += 1;
        let task = self.client.handle.spawn(async move {
            let sent = shared.send_part(index, &bytes).await;
            drop(bytes);
            let mut state = shared.state();
            state.flying -= 1;
            match sent {
                Ok(id) => {
                    if let (Some(slot), Some(id)) = (state.ids.get_mut(index), id) {
                        *slot = Some(id);
                    }
                }
                Err(error) => drop(state.failed.get_or_insert(error)),
            }
            drop(state);
            shared.changed.notify_all();
        });
        state.tasks.retain(|task| !task.is_finished());
        state.tasks.push(task.abort_handle());
    }

    async fn send_part(&self, index: usize, bytes: &Bytes) -> Result<Option<PartId>> {
        let client = &self.client;
        let _pass = client.uploads.enter().await;
        let len = bytes.len() as u64;
        let ask = Ask {
            gate: Some(&client.uploads),
            ..client.ask("cannot upload a part of an object", &self.key, len)
        };
        if self.parts.len() <= 1 {
            self.put_whole(bytes).await?;
            client.uploads.moved(len);
            return Ok(None);
        }
        if let Some(begun) = &self.begun {
            let sum = begun.kind.of(bytes);
            let has = begun.has(index, &sum);
            self.note_sum(index, sum);
            if has {
                self.kept.store(true, Ordering::Release);
                return Ok(None);
            }
        }
        let id = self.id.get_or_try_init(|| self.begin()).await?;
        let request = || {
            let payload = PutPayload::from(bytes.clone());
            client.multipart.put_part(&self.path, id, index, payload)
        };
        let sent = client.retries.ask(&ask, request).await;
        let (part, _) = sent.inspect_err(|failed| self.note_failure(failed))?;
        client.uploads.moved(len);
        Ok(Some(part))
    }

    /// An upload of another process that this one cannot add to would be met again at each new try.
    fn note_failure(&self, failed: &Failed) {
        if self.begun.is_some() && !matches!(failed.kind, Kind::Transient { .. }) {
            self.spoiled.store(true, Ordering::Release);
        }
    }
}

impl DataObject for Upload {
    fn sink(&self) -> &dyn RangeSink {
        self
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> Result<bool> {
        Ok(self.shared.has(bytes, offset))
    }

    fn seal(&self) -> Result<()> {
        if self.sealed.swap(true, Ordering::SeqCst) {
            let what = "sealed twice";
            return Err(Error::new(Code::Usage, what).at(self.name()));
        }
        let shared = &self.shared;
        for (index, part) in shared.parts.iter().enumerate() {
            shared.send(index, &mut lock(part));
        }
        let landed = shared.landed();
        let done = landed.and_then(|parts| wait(&shared.client.handle, shared.complete(parts)));
        if done.is_err() {
            shared.abort();
        }
        done
    }
}

impl RangeSink for Upload {
    fn name(&self) -> String {
        self.shared.client.place(&self.shared.key)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.shared.check().map_err(into_io)?;
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.shared.bytes) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "past the object's length"));
        }
        if bytes.is_empty() { Ok(0) } else { self.shared.fill(bytes, offset) }
    }

    fn flush_soon(&self, _offset: u64, _len: u64) {}
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.sealed.load(Ordering::SeqCst) {
            self.shared.abort();
        }
        let writing = &self.shared.client.writing;
        writing.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.shared.key);
    }
}

/// Writes bytes where they belong. Memory is touched once, where writers come in order.
fn write_into(buffer: &mut Vec<u8>, bytes: &[u8], from: usize) {
    if buffer.len() < from {
        buffer.resize(from, 0);
    }
    let over = bytes.len().min(buffer.len() - from);
    let (inside, after) = bytes.split_at(over);
    if let Some(target) = buffer.get_mut(from..from + over) {
        target.copy_from_slice(inside);
    }
    buffer.extend_from_slice(after);
}

fn lock(part: &Mutex<Part>) -> MutexGuard<'_, Part> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// With the code that it has, for [`Error::io`] to find again.
pub(super) fn into_io(error: Error) -> io::Error {
    let kind = match error.code() {
        Code::NotFound => io::ErrorKind::NotFound,
        Code::PermissionDenied => io::ErrorKind::PermissionDenied,
        Code::NoSpace => io::ErrorKind::StorageFull,
        Code::OutOfMemory => io::ErrorKind::OutOfMemory,
        Code::Timeout => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_any_order_and_gaps_are_zeros() {
        let mut buffer = Vec::with_capacity(10);
        buffer.extend_from_slice(&[9; 10]);
        buffer.clear();
        write_into(&mut buffer, b"ef", 4);
        assert_eq!(buffer, b"\0\0\0\0ef", "not what was in that memory before");
        write_into(&mut buffer, b"b", 1);
        write_into(&mut buffer, b"", 3);
        write_into(&mut buffer, b"gh", 6);
        assert_eq!(buffer, b"\0b\0\0efgh");
        write_into(&mut buffer, b"hi", 7);
        assert_eq!((buffer.as_slice(), buffer.capacity()), (&b"\0b\0\0efghi"[..], 10));
    }
}
