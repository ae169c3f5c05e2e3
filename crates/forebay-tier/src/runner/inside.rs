//! A store that is a folder of another, for one step: what belongs to the step and what belongs to the root both lie in
//! it, so that the folder is a checkpoint by itself.
//!
//! ```text
//! step-<N>/<rest>     is   <NAME>/<rest>
//! <rest>              is   <NAME>/<rest>        records of the root: epochs
//! ```

use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::Result;
use forebay_store::{Abilities, DataObject, Expect, Listed, Published, Store, Version};

/// See the module.
pub(super) struct Inside {
    store: Arc<dyn Store>,
    /// `step-<N>/`
    step: String,
    /// `<NAME>/`
    folder: String,
}

impl Inside {
    pub(super) fn new(store: Arc<dyn Store>, step: &str, name: &str) -> Self {
        Self { store, step: format!("{step}/"), folder: format!("{name}/") }
    }

    /// Where a key or prefix really is.
    fn real(&self, key: &str) -> String {
        format!("{}{}", self.folder, key.strip_prefix(&self.step).unwrap_or(key))
    }

    /// A key of a listing below `prefix`, as it is seen.
    fn seen(&self, prefix: &str, mut listed: Listed) -> Listed {
        let of_step = if prefix.starts_with(&self.step) { self.step.as_str() } else { "" };
        if let Some(rest) = listed.key.strip_prefix(&self.folder) {
            listed.key = format!("{of_step}{rest}");
        }
        listed
    }
}

impl Store for Inside {
    fn name(&self) -> String {
        format!("{}/{}", self.store.name(), self.folder.trim_end_matches('/'))
    }

    fn abilities(&self) -> Abilities {
        self.store.abilities()
    }

    fn sees_all(&self) -> bool {
        self.store.sees_all()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.store.get(&self.real(key), max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.store.create(&self.real(key), bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.store.put(&self.real(key), bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        let listed = self.store.list(&self.real(prefix), limit)?;
        Ok(listed.into_iter().map(|object| self.seen(prefix, object)).collect())
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.store.names(&self.real(prefix), limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.store.remove(&self.real(key))
    }

    fn discard(&self, keys: &[String]) -> Result<()> {
        let keys: Vec<String> = keys.iter().map(|key| self.real(key)).collect();
        self.store.discard(&keys)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        self.store.publish(&self.real(staged), &self.real(to), expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.store.create_data(&self.real(key), bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        self.store.open_data(&self.real(key))
    }
}
