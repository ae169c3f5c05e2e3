//! A store in memory: for tests of what is built on stores, and the model that other stores are compared with.
//!
//! It is deterministic: versions are a counter, and its clock stands still until [`MemoryStore::advance`] moves it. All
//! state is behind one lock, so every call is one step that others see whole or not at all. Clones are clients of the
//! same store.

mod blob;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_engine::{RangeSink, RangeSource};
use forebay_error::{Code, Error, Result};

use crate::key::{check_key, check_prefix};
use crate::object::{Abilities, Age, DataObject, Expect, Listed, Published, Version};
use crate::store::Store;
use blob::{Blob, Reader};

/// See the module.
#[derive(Clone)]
pub struct MemoryStore {
    state: Arc<Mutex<State>>,
}

struct State {
    objects: BTreeMap<String, Held>,
    now: Duration,
    last_version: u64,
    /// Most bytes of all objects together.
    capacity: u64,
    used: u64,
}

/// An object under its key.
struct Held {
    blob: Arc<Blob>,
    version: u64,
    written: Duration,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store without a limit.
    pub fn new() -> Self {
        Self::with_capacity(u64::MAX)
    }

    /// An empty store that is full at `bytes`, counted over all objects; room that data objects set aside counts from
    /// their start.
    pub fn with_capacity(bytes: u64) -> Self {
        let state = State {
            objects: BTreeMap::new(),
            now: Duration::ZERO,
            last_version: 0,
            capacity: bytes,
            used: 0,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Moves the store's clock: every object is older by that much.
    pub fn advance(&self, by: Duration) {
        let mut state = self.locked();
        state.now = state.now.saturating_add(by);
    }

    /// Changes the limit; what is there stays.
    pub fn set_capacity(&self, bytes: u64) {
        self.locked().capacity = bytes;
    }

    /// Bytes of all objects.
    pub fn used_bytes(&self) -> u64 {
        self.locked().used
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Puts a blob under a key, whatever is there.
    fn insert(&mut self, key: &str, blob: Arc<Blob>) -> Result<()> {
        let freed = self.objects.get(key).map_or(0, |held| held.blob.len());
        let used = (self.used - freed).saturating_add(blob.len());
        if used > self.capacity {
            let free = self.capacity.saturating_sub(self.used - freed);
            let what = format!("no space left: {} bytes are needed, {free} are free", blob.len());
            return Err(Error::new(Code::NoSpace, what).at(shown(key)));
        }
        self.used = used;
        self.last_version += 1;
        let held = Held { blob, version: self.last_version, written: self.now };
        if let Some(old) = self.objects.insert(key.to_owned(), held) {
            old.blob.retire();
        }
        Ok(())
    }

    fn remove(&mut self, key: &str) -> Option<Held> {
        let held = self.objects.remove(key)?;
        self.used -= held.blob.len();
        Some(held)
    }

    fn publish(&mut self, staged: &str, to: &str, expect: &Expect) -> Published {
        if !self.objects.contains_key(staged) {
            return Published::Withdrawn;
        }
        let there = self.objects.get(to).map(|held| held.version());
        let as_expected = match expect {
            Expect::Absent => there.is_none(),
            Expect::Version(version) => there.as_ref() == Some(version),
        };
        if !as_expected {
            return Published::Lost;
        }
        if let Some(old) = self.remove(to) {
            old.blob.retire();
        }
        if let Some(held) = self.objects.remove(staged) {
            self.objects.insert(to.to_owned(), held);
        }
        Published::Done { durable: true }
    }
}

impl Held {
    fn version(&self) -> Version {
        Version(self.version.to_le_bytes().to_vec())
    }
}

/// What errors call an object.
fn shown(key: &str) -> String {
    format!("memory:{key}")
}

fn too_many(prefix: &str, limit: usize) -> Error {
    Error::new(Code::Unsupported, format!("more than {limit} objects")).at(shown(prefix))
}

impl Store for MemoryStore {
    fn name(&self) -> String {
        "memory:".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            create_if_absent: true,
            replace_if_version: true,
            durable_publish: true,
            reserves_space: true,
            rejects_bad_checksums: false,
            returns_checksums: false,
            publish_time: Duration::ZERO,
        }
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        check_key(key)?;
        let state = self.locked();
        let Some(held) = state.objects.get(key) else { return Ok(None) };
        let len = held.blob.len();
        if len > max_bytes {
            let what = format!("object has {len} bytes, at most {max_bytes} are read");
            return Err(Error::new(Code::Unsupported, what).at(shown(key)));
        }
        Ok(Some((held.blob.bytes(), held.version())))
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        check_key(key)?;
        let mut state = self.locked();
        if state.objects.contains_key(key) {
            return Ok(false);
        }
        state.insert(key, Arc::new(Blob::of(bytes)))?;
        Ok(true)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        check_key(key)?;
        self.locked().insert(key, Arc::new(Blob::of(bytes)))
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        check_prefix(prefix)?;
        let state = self.locked();
        let mut found = Vec::new();
        for (key, held) in state.objects.range(prefix.to_owned()..) {
            if !key.starts_with(prefix) {
                break;
            }
            if found.len() == limit {
                return Err(too_many(prefix, limit));
            }
            let age = Age(state.now.saturating_sub(held.written));
            found.push(Listed { key: key.clone(), bytes: held.blob.len(), age });
        }
        Ok(found)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        check_prefix(prefix)?;
        let state = self.locked();
        let mut found = BTreeMap::new();
        for key in state.objects.range(prefix.to_owned()..).map(|(key, _)| key) {
            let Some(rest) = key.strip_prefix(prefix) else { break };
            let (name, is_folder) = match rest.split_once('/') {
                Some((folder, _)) => (folder, true),
                None => (rest, false),
            };
            if !found.contains_key(name) && found.len() == limit {
                return Err(too_many(prefix, limit));
            }
            found.insert(name.to_owned(), is_folder);
        }
        Ok(found.into_iter().collect())
    }

    fn remove(&self, key: &str) -> Result<bool> {
        check_key(key)?;
        let removed = self.locked().remove(key);
        Ok(removed.inspect(|held| held.blob.retire()).is_some())
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        check_key(staged)?;
        check_key(to)?;
        if staged == to {
            return Err(Error::new(Code::Usage, "published onto itself").at(shown(to)));
        }
        Ok(self.locked().publish(staged, to, expect))
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        let blob = Arc::new(Blob::reserved(bytes));
        let mut state = self.locked();
        if state.objects.contains_key(key) {
            return Err(Error::new(Code::AlreadyExists, "the key is taken").at(shown(key)));
        }
        state.insert(key, Arc::clone(&blob))?;
        Ok(Box::new(Data { key: key.to_owned(), blob, begun: false }))
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        check_key(key)?;
        let there = self.locked().objects.get(key).map(|held| Arc::clone(&held.blob));
        let Some(blob) = there else { return self.create_data(key, bytes) };
        if blob.len() != bytes || !blob.take_over() {
            return Err(Error::new(Code::AlreadyExists, "the key is taken").at(shown(key)));
        }
        Ok(Box::new(Data { key: key.to_owned(), blob, begun: true }))
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        check_key(key)?;
        let state = self.locked();
        let Some(held) = state.objects.get(key) else {
            return Err(Error::new(Code::NotFound, "no such object").at(shown(key)));
        };
        Ok(Arc::new(Reader::new(shown(key), Arc::clone(&held.blob))))
    }
}

/// A data object that is being written.
struct Data {
    key: String,
    blob: Arc<Blob>,
    /// By another writer.
    begun: bool,
}

impl Drop for Data {
    fn drop(&mut self) {
        self.blob.let_go();
    }
}

impl DataObject for Data {
    fn sink(&self) -> &dyn RangeSink {
        self
    }

    fn holds(&self, bytes: &[u8], offset: u64) -> Result<bool> {
        Ok(self.begun && self.blob.holds(bytes, offset))
    }

    fn seal(&self) -> Result<()> {
        Ok(())
    }
}

impl RangeSink for Data {
    fn name(&self) -> String {
        shown(&self.key)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        self.blob.write_at(bytes, offset)
    }

    fn flush_soon(&self, _offset: u64, _len: u64) {}
}
