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
//! upload, so that the store keeps no parts; parts of a writer that was killed are the bucket's lifecycle rule's to
//! remove.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use forebay_engine::RangeSink;
use forebay_error::{Code, Error, Result};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{PutMode, PutPayload};
use tokio::sync::OnceCell;
use tokio::task::AbortHandle;

use super::client::{Client, PutAsk};
use super::failure::Kind;
use super::retry::Ask;
use super::room::Taken;
use super::runtime::wait;
use crate::object::DataObject;

/// Most time that a drop spends on telling the store.
const ABORT_TIME: Duration = Duration::from_secs(10);

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
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ids: Vec<Option<PartId>>,
    flying: usize,
    failed: Option<Error>,
    tasks: Vec<AbortHandle>,
}

/// A part, until it is the store's.
enum Part {
    Untouched,
    Filling { buffer: Vec<u8>, filled: usize, room: Taken },
    Sent,
}

impl Upload {
    /// Errors: `already_exists` where this process writes the key already; `unsupported` for more than parts can hold.
    pub(super) fn new(client: &Arc<Client>, key: &str, bytes: u64) -> Result<Self> {
        let path = client.path(key)?;
        let part_bytes = client.settings.part_bytes_of(bytes);
        let count = usize::try_from(bytes.div_ceil(part_bytes)).unwrap_or(usize::MAX);
        let mut writing = client.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if !writing.insert(key.to_owned()) {
            return Err(Error::new(Code::AlreadyExists, "the key is taken").at(client.place(key)));
        }
        drop(writing);
        let state = State { ids: vec![None; count], ..State::default() };
        let shared = Shared {
            client: Arc::clone(client),
            key: key.to_owned(),
            path,
            bytes,
            part_bytes,
            parts: (0..count).map(|_| Mutex::new(Part::Untouched)).collect(),
            id: OnceCell::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Ok(Self { shared: Arc::new(shared), sealed: AtomicBool::new(false) })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part_len(&self, index: usize) -> usize {
        let start = index as u64 * self.part_bytes;
        let len = self.bytes.saturating_sub(start).min(self.part_bytes);
        usize::try_from(len).unwrap_or(usize::MAX)
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
            let room = self.client.room.take(len as u64, || self.check().map_err(into_io))?;
            part = lock(slot);
            if matches!(*part, Part::Untouched) {
                *part = Part::Filling { buffer: vec![0; len], filled: 0, room };
            }
        }
        let Part::Filling { buffer, filled, .. } = &mut *part else {
            let what = "written twice: the part is the store's already";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        let target = buffer.get_mut(from..from + count).ok_or_else(outside)?;
        target.copy_from_slice(source);
        *filled += count;
        if *filled >= len {
            self.send(index, &mut part);
        }
        Ok(count)
    }

    /// Sends a part that is whole, or that nothing more will be written to.
    fn send(self: &Arc<Self>, index: usize, part: &mut Part) {
        let (bytes, room) = match std::mem::replace(part, Part::Sent) {
            Part::Filling { buffer, mut room, .. } => {
                room.fly();
                (Bytes::from(buffer), Some(room))
            }
            // A hole. Zeroed memory that nobody has touched is not there yet.
            Part::Untouched => (Bytes::from(vec![0; self.part_len(index)]), None),
            Part::Sent => return,
        };
        let shared = Arc::clone(self);
        let mut state = self.state();
        state.flying += 1;
        let task = self.client.handle.spawn(async move {
            let sent = shared.send_part(index, bytes).await;
            drop(room);
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

    async fn send_part(&self, index: usize, bytes: Bytes) -> Result<Option<PartId>> {
        let client = &self.client;
        let _pass = client.uploads.enter().await;
        let len = bytes.len() as u64;
        let ask = Ask {
            gate: Some(&client.uploads),
            ..client.ask("cannot upload a part of an object", &self.key, len)
        };
        if self.parts.len() <= 1 {
            self.put_whole(&bytes).await?;
            client.uploads.moved(len);
            return Ok(None);
        }
        let id = self.id.get_or_try_init(|| self.begin()).await?;
        let request = || {
            let payload = PutPayload::from(bytes.clone());
            client.multipart.put_part(&self.path, id, index, payload)
        };
        let (part, _) = client.retries.ask(&ask, request).await?;
        client.uploads.moved(len);
        Ok(Some(part))
    }

    async fn put_whole(&self, bytes: &Bytes) -> Result<()> {
        let write = self.client.unique();
        let put = PutAsk {
            what: "cannot upload an object",
            mode: PutMode::Overwrite,
            write: &write,
            until: None,
            tampered: None,
        };
        self.client.put_small(&self.key, bytes, &put).await?;
        Ok(())
    }

    async fn begin(&self) -> Result<String> {
        let ask = self.client.ask("cannot begin an upload", &self.key, 0);
        let request = || self.client.multipart.create_multipart(&self.path);
        let (id, _) = self.client.retries.ask(&ask, request).await?;
        Ok(id)
    }

    /// Waits until nothing is on its way.
    fn landed(&self) -> Result<Vec<PartId>> {
        let mut state = self.state();
        while state.flying > 0 && state.failed.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = &state.failed {
            return Err(error.again());
        }
        Ok(state.ids.iter_mut().filter_map(Option::take).collect())
    }

    async fn complete(&self, parts: Vec<PartId>) -> Result<()> {
        let Some(id) = self.id.get() else {
            return if self.parts.is_empty() {
                self.put_whole(&Bytes::new()).await
            } else {
                Ok(())
            };
        };
        if parts.len() != self.parts.len() {
            let what = format!("{} of {} parts were uploaded", parts.len(), self.parts.len());
            return Err(Error::new(Code::Io, what).at(self.client.place(&self.key)));
        }
        let request = || self.client.multipart.complete_multipart(&self.path, id, parts.clone());
        let ask = self.client.ask("cannot complete an upload", &self.key, self.bytes / 64);
        let Err(failed) = self.client.retries.ask(&ask, request).await else { return Ok(()) };
        // The store forgets an upload that is complete: no such upload may mean that an earlier try was heard.
        if failed.unsure || failed.kind == Kind::NotFound {
            let there = self.client.look(&self.key).await?;
            if there.is_some_and(|there| there.bytes == self.bytes && !there.is_removed()) {
                return Ok(());
            }
        }
        Err(failed.error)
    }

    fn abort(&self) {
        for task in self.state().tasks.drain(..) {
            task.abort();
        }
        for part in &self.parts {
            *lock(part) = Part::Sent;
        }
        let Some(id) = self.id.get() else { return };
        let aborted = wait(&self.client.handle, async {
            let request = || self.client.multipart.abort_multipart(&self.path, id);
            let ask = self.client.ask("cannot abort an upload", &self.key, 0);
            tokio::time::timeout(ABORT_TIME, self.client.retries.ask(&ask, request)).await
        });
        match aborted {
            Ok(Ok(_)) => {}
            Ok(Err(failed)) => tracing::warn!(error = %failed.error, "parts of an upload stay"),
            Err(_) => tracing::warn!(key = self.key, "parts of an upload stay: no answer in time"),
        }
    }
}

impl DataObject for Upload {
    fn sink(&self) -> &dyn RangeSink {
        self
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
