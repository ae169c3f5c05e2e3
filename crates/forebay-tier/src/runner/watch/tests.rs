//! A store that was found to honour too little is asked again.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_checkpoint::commit::SystemClock;
use forebay_engine::RangeSource;
use forebay_store::{DataObject, Expect, Listed, MemoryStore, Published, Store, Version};

use super::*;
use crate::config::{Beside, Config};
use crate::runner::{Duties, Reach, Tiers};
use crate::status::Health;

/// A store that keeps what it found until that is to be forgotten.
struct Changing {
    inner: MemoryStore,
    honours: AtomicBool,
    found: Mutex<Option<Abilities>>,
}

impl Store for Changing {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn abilities(&self) -> Abilities {
        let honours = self.honours.load(Ordering::Relaxed);
        let can = Abilities { create_if_absent: honours, ..self.inner.abilities() };
        *self.found.lock().unwrap().get_or_insert(can)
    }

    fn forget_abilities(&self) {
        *self.found.lock().unwrap() = None;
    }

    fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.inner.get(key, max_bytes)
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        self.inner.create(key, bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.inner.put(key, bytes)
    }

    fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Listed>> {
        self.inner.list(prefix, limit)
    }

    fn names(&self, prefix: &str, limit: usize) -> Result<Vec<(String, bool)>> {
        self.inner.names(prefix, limit)
    }

    fn remove(&self, key: &str) -> Result<bool> {
        self.inner.remove(key)
    }

    fn publish(&self, staged: &str, to: &str, expect: &Expect) -> Result<Published> {
        self.inner.publish(staged, to, expect)
    }

    fn create_data(&self, key: &str, bytes: u64) -> Result<Box<dyn DataObject>> {
        self.inner.create_data(key, bytes)
    }

    fn open_data(&self, key: &str) -> Result<Arc<dyn RangeSource>> {
        self.inner.open_data(key)
    }
}

#[test]
fn a_store_that_was_found_unfit_is_asked_again_after_longer_and_longer_times() {
    let store = Arc::new(Changing {
        inner: MemoryStore::new(),
        honours: AtomicBool::new(false),
        found: Mutex::default(),
    });
    let text = "[[tier]]\nname = \"a\"\nplace = \"memory:\"\n";
    let config = Config::from_text(text, Path::new("/x/y.toml"), &Beside::default()).unwrap();
    let clock = Arc::new(SystemClock::default());
    let tiers = Tiers::with_stores(&config, vec![Arc::clone(&store) as _], clock).unwrap();
    let shared = Shared::new(tiers, Duties::Look, Reach::All);
    let look = || {
        let looked = look(&shared, 0, &mut Looker::default(), &BTreeSet::new());
        let mut state = shared.lock();
        settle(&mut state.tiers[0], 0, looked, BTreeSet::new());
        let tier = &state.tiers[0];
        let wait = tier.ask_at.map(|at| (at - Instant::now()).as_secs_f64().round() as u64);
        (tier.health(false), wait)
    };
    let due = || shared.lock().tiers[0].ask_at = Some(Instant::now());
    assert_eq!(look(), (Health::ReadOnly, Some(60)));
    for wait in [120, 240, 480, 600, 600] {
        due();
        assert_eq!(look(), (Health::ReadOnly, Some(wait)));
    }
    store.honours.store(true, Ordering::Relaxed);
    assert_eq!(look(), (Health::ReadOnly, Some(600)), "not before it is time");
    due();
    assert_eq!(look(), (Health::Ok, None));
    assert!(shared.lock().tiers[0].notes.iter().any(|note| note.contains("atomic")));
    assert_eq!(shared.lock().tiers[0].unfits, 0);
}
