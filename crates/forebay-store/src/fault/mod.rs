//! Faults on purpose: a store around a store, for tests of what must survive them.
//!
//! A [`FaultStore`] is *one client* of the store inside. Everything it does is counted in [`Step`]s: one for each call
//! that reads, two for each that changes something, before and after the change. A [`Plan`] gives faults to steps. A
//! test runs once without faults to learn how many steps there are, then once for each of them:
//!
//! ```
//! # use forebay_store::{MemoryStore, Store, fault::{Fault, FaultStore, Plan}};
//! # use std::sync::Arc;
//! # fn save(store: &dyn Store) -> forebay_error::Result<()> { store.put("a", b"1")?; store.put("b", b"2") }
//! let counting = FaultStore::new(Arc::new(MemoryStore::new()), Plan::none());
//! save(&counting)?;
//! assert_eq!(counting.steps(), 4);
//! for step in 0..counting.steps() {
//!     let store = MemoryStore::new();
//!     let victim = FaultStore::new(Arc::new(store.clone()), Plan::at(step, Fault::Kill));
//!     assert!(save(&victim).is_err());
//!     save(&store)?;      // another client, which finds what the victim left
//! }
//! # Ok::<(), forebay_error::Error>(())
//! ```
//!
//! What is inside of a call of the store (the temporary file of a `put`, the folder's fsync) is below this: for a
//! folder [`FaultFolder`] strikes there, at each call to the kernel that changes something. Nothing random happens
//! that the seed does not decide, as long as the client's calls come in one order; calls from several threads are
//! numbered as they arrive.

mod client;
mod folder;
mod io;
mod plan;

use std::sync::Arc;

use forebay_engine::RangeSource;
use forebay_error::Result;

pub use folder::FaultFolder;
pub(crate) use plan::mix;
pub use plan::{Action, Call, Fault, Plan, Step, When};

use crate::object::{Abilities, DataObject, Expect, Listed, Published, Version};
use crate::store::Store;
use client::{Client, Go};
use io::{FaultData, FaultSource};

/// How the errors of a killed client begin.
pub const KILLED: &str = "this client was killed";

/// A client of a store, with faults. See the module.
pub struct FaultStore<S: ?Sized> {
    inner: Arc<S>,
    client: Arc<Client>,
}

impl<S: Store + ?Sized> FaultStore<S> {
    /// A new client of `inner`.
    pub fn new(inner: Arc<S>, plan: Plan) -> Self {
        Self { inner, client: Arc::new(Client::new(plan)) }
    }

    /// How many steps were counted so far.
    pub fn steps(&self) -> u64 {
        self.client.steps()
    }

    /// How many faults struck.
    pub fn fired(&self) -> u64 {
        self.client.fired()
    }

    /// What the steps were.
    pub fn log(&self) -> Vec<Step> {
        self.client.log()
    }

    /// Kills the client from outside, between two steps.
    pub fn kill(&self) {
        self.client.kill();
    }

    /// Whether it was killed.
    pub fn killed(&self) -> bool {
        self.client.killed()
    }

    fn place(&self, key: &str) -> String {
        format!("{}/{key}", self.inner.name())
    }

    /// A call that changes nothing.
    fn look<T>(&self, action: Action, key: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let step = self.client.step(action, When::Before, key);
        step.map_err(|refusal| refusal.into_error(&self.place(key)))?;
        call()
    }

    /// A call that changes something.
    fn change<T>(
        &self,
        action: Action,
        key: &str,
        changed: impl FnOnce(&T) -> bool,
        call: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        change(&self.client, action, key, &self.place(key), changed, call)
    }
}

/// `changed`: whether there is a change that could fail to be durable.
fn change<T>(
    client: &Client,
    action: Action,
    key: &str,
    place: &str,
    changed: impl FnOnce(&T) -> bool,
    call: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let go = client.step(action, When::Before, key).map_err(|no| no.into_error(place))?;
    let result = call()?;
    match go {
        Go::LoseReply => {
            return Err(client.refusal(libc::ETIMEDOUT, action, key).into_error(place));
        }
        Go::NotDurable if changed(&result) => {
            return Err(client.refusal(libc::EIO, action, key).not_durable(place));
        }
        _ => {}
    }
    client.step(action, When::After, key).map_err(|no| no.into_error(place))?;
    Ok(result)
}

impl<S: Store + ?Sized> Store for FaultStore<S> {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn forget_abilities(&self) {
        self.inner.forget_abilities();
    }

    fn is_remote(&self) -> bool {
        self.inner.is_remote()
    }

    fn sees_all(&self) -> bool {
        self.inner.sees_all()
    }

    fn above(&self) -> Result<Option<(Arc<dyn Store>, String)>> {
        self.inner.above()
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.look(Action::Get, key, || self.inner.get(key, max_bytes))
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.change(Action::Create, key, |made| *made, || self.inner.create(key, bytes))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.change(Action::Put, key, |()| true, || self.inner.put(key, bytes))
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.look(Action::List, prefix, || self.inner.list(prefix, limit))
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.look(Action::Names, prefix, || self.inner.names(prefix, limit))
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.change(Action::Remove, key, |removed| *removed, || self.inner.remove(key))
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        let key = format!("{staged} -> {to}");
        let done = |end: &Published| matches!(end, Published::Done { .. });
        self.change(Action::Publish, &key, done, || self.inner.publish(staged, to, expect))
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        let data =
            self.change(Action::CreateData, key, |_| true, || self.inner.create_data(key, bytes))?;
        let client = Arc::clone(&self.client);
        Ok(Box::new(FaultData::new(data, client, key.to_owned(), self.place(key))))
    }

    fn resume_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        let resume = || self.inner.resume_data(key, bytes);
        let data = self.change(Action::CreateData, key, |_| true, resume)?;
        let client = Arc::clone(&self.client);
        Ok(Box::new(FaultData::new(data, client, key.to_owned(), self.place(key))))
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        let source = self.look(Action::OpenData, key, || self.inner.open_data(key))?;
        Ok(Arc::new(FaultSource::new(source, Arc::clone(&self.client), key.to_owned())))
    }
}
