//! Tiers of tests: stores, a configuration for them, a runner, and waits.

use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::{RunId, SystemClock, claim};
use forebay_engine::RangeSource;
use forebay_error::Result;
use forebay_store::{Abilities, DataObject, Expect, Listed, Published, Store, Version};
use forebay_tier::config::{Beside, Config};
use forebay_tier::runner::{Runner, Tiers};
use forebay_tier::status::{Status, TierStatus};

use crate::world::{root, save};

/// How long anything may take here.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A configuration. Looks and grace times are short.
pub(crate) fn config(text: &str) -> Config {
    let short = "look_every = \"50 ms\"\npart_bytes = \"64 KiB\"\n";
    let text = match text.contains("[tiers]") {
        true => text.replace("[tiers]\n", &format!("[tiers]\n{short}")),
        false => format!("{text}\n[tiers]\ngrace = 0\n{short}"),
    };
    Config::from_text(&text, Path::new("/x/forebay.toml"), &Beside::default()).unwrap()
}

/// `[[tier]]` tables for stores that are given.
pub(crate) fn tables(names: &[&str]) -> String {
    let table = |name: &&str| format!("[[tier]]\nname = \"{name}\"\nplace = \"memory:\"\n");
    names.iter().map(table).collect()
}

pub(crate) fn start(config: &Config, stores: &[Arc<dyn Store>]) -> Runner {
    let clock = Arc::new(SystemClock::default());
    Runner::start(Tiers::with_stores(config, stores.to_vec(), clock).unwrap()).unwrap()
}

/// Saves steps, in this order.
pub(crate) fn save_all(store: &Arc<dyn Store>, steps: &[u64]) {
    let epoch = claim(&root(Arc::clone(store)), RunId(0xabc), None, "test").unwrap();
    for (number, step) in steps.iter().enumerate() {
        save(store, *step, number as u32 + 1, epoch);
    }
}

/// Waits until something holds of the status.
pub(crate) fn until(runner: &Runner, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
    let start = Instant::now();
    loop {
        let status = runner.status();
        if holds(&status) {
            return status;
        }
        assert!(start.elapsed() < LONG, "never {what}: {status:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until everything is where it should be.
pub(crate) fn settle(runner: &Runner) {
    let start = Instant::now();
    loop {
        assert!(runner.look(LONG));
        let pending = runner.pending();
        if pending.is_none() {
            return;
        }
        assert!(start.elapsed() < LONG, "{pending:?} {:#?}", runner.status());
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn tier<'a>(status: &'a Status, name: &str) -> &'a TierStatus {
    status.tiers.iter().find(|tier| tier.name == name).unwrap()
}

/// A store whose reads and writes can be sent elsewhere while it is used.
pub(crate) struct Switch {
    name: String,
    reads: RwLock<Arc<dyn Store>>,
    writes: RwLock<Arc<dyn Store>>,
    careless: bool,
}

impl Switch {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self::of(&store, false))
    }

    /// One that honours no preconditions.
    pub(crate) fn careless(store: &Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self::of(store, true))
    }

    fn of(store: &Arc<dyn Store>, careless: bool) -> Self {
        let (reads, writes) = (RwLock::new(Arc::clone(store)), RwLock::new(Arc::clone(store)));
        Self { name: store.name(), reads, writes, careless }
    }

    pub(crate) fn set_reads(&self, store: Arc<dyn Store>) {
        *self.reads.write().unwrap() = store;
    }

    pub(crate) fn set_writes(&self, store: Arc<dyn Store>) {
        *self.writes.write().unwrap() = store;
    }

    fn reads(&self) -> Arc<dyn Store> {
        Arc::clone(&self.reads.read().unwrap())
    }

    fn writes(&self) -> Arc<dyn Store> {
        Arc::clone(&self.writes.read().unwrap())
    }
}

impl Store for Switch {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn abilities(&self) -> Abilities {
        let abilities = self.reads().abilities();
        match self.careless {
            true => Abilities { create_if_absent: false, replace_if_version: false, ..abilities },
            false => abilities,
        }
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.reads().get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.writes().create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.writes().put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.reads().list(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.reads().names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.writes().remove(key)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        self.writes().publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.writes().create_data(key, bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        self.reads().open_data(key)
    }
}
