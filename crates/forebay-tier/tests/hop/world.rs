//! What the tests move: steps that were really saved, by ranks with memory of their own. **unsafe**: memory is given by
//! address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, Clock, Policy, Root, RunId, Spec, StructureHash, SystemClock, claim,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{
    Commit, Object, OurMetadata, Request, Save, SaveItem, SavePlan, SideFile, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_store::{MemoryStore, Store};
use forebay_tensor::{Dtype, Region};
use forebay_tier::hop::{HopOptions, Share, Side};
use forebay_tier::limits::{Caps, Limits};

const LONG: Duration = Duration::from_secs(60);
/// Ranks of the job; each writes two files.
pub(crate) const WORLD: u32 = 2;
pub(crate) const PART_BYTES: u64 = 64 << 10;

/// A clock whose sleeps take no time, so that waits of minutes end at once.
#[derive(Default)]
pub(crate) struct Virtual(Mutex<Duration>);

impl Clock for Virtual {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

pub(crate) fn root(store: Arc<dyn Store>) -> Root {
    Root { store, clock: Arc::new(SystemClock::default()), identify: Arc::new(OurMetadata) }
}

pub(crate) fn side(store: Arc<dyn Store>) -> Side {
    let root = root(store);
    let limits = Arc::new(Limits::new(Arc::clone(&root.clock), Caps::default()));
    Side { root, limits }
}

/// One file at a time, so that steps of a store come in one order.
pub(crate) fn options(share: Share) -> HopOptions {
    HopOptions { share, part_bytes: PART_BYTES, files_at_once: 1, ..HopOptions::default() }
}

fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

/// Saves a step, all ranks.
pub(crate) fn save(store: &Arc<dyn Store>, step: u64, save: u32, epoch: u64) {
    save_rows(store, (step, save, epoch), 301);
}

/// The same, with so many rows of 800 bytes in the larger tensor.
pub(crate) fn save_rows(store: &Arc<dyn Store>, which: (u64, u32, u64), rows: u64) {
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            scope.spawn(move || save_rank(store, which, rank, rows));
        }
    });
}

fn save_rank(store: &Arc<dyn Store>, which: (u64, u32, u64), rank: u32, rows: u64) {
    let (root, step) = (root(Arc::clone(store)), which.0);
    let mut items = Vec::new();
    let mut memory = Vec::new();
    for (name, rows) in [("model.a", rows), ("model.b", 77)] {
        let shape = vec![rows, 200];
        let region = Region::shard(&shape, 0, rank.into(), WORLD.into()).unwrap();
        memory.push(bytes(step * 100 + rows + u64::from(rank), region.elements() * 4));
        let what = What::Tensor { dtype: Dtype::F32, shape, region, requires_grad: false };
        let path = name.split('.').map(|key| PathStep::Key(key.to_owned())).collect();
        items.push(SaveItem { name: name.to_owned(), path, what, writes: true });
    }
    let name = format!("object{rank}");
    let path = vec![PathStep::Key(name.clone())];
    items.push(SaveItem { name, path, what: What::Object, writes: true });
    let plan = SavePlan::new(items).unwrap();
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: 4 << 20, slot_bytes: 1 << 20 };
    let pool = Arena::new(&Device::Host, &config).unwrap();
    let sources: Vec<Source> = memory
        .iter()
        .map(|memory| Source { place: Place::Host, address: memory.as_ptr() as u64 })
        .collect();
    let request = request(&root, plan, which, rank);
    let objects = vec![Object::Pickle(b"\x80\x02K\x2a.".to_vec())];
    // SAFETY: the memory lives until the save has ended.
    let save = unsafe { Save::start(&engine, &pool, request, &sources, objects, None) }.unwrap();
    let staged = save.wait_staged(LONG);
    let done = save.wait(LONG);
    drop(memory);
    assert!(done.unwrap() && staged.unwrap());
}

fn request(
    root: &Root,
    plan: SavePlan,
    (step, save, epoch): (u64, u32, u64),
    rank: u32,
) -> Request {
    let attempt = AttemptId { run: RunId(0xabc), save };
    Request {
        plan: Arc::new(plan),
        root: root.clone(),
        policy: Policy { deadline: LONG, ..Policy::default() },
        hints: None,
        spec: Spec {
            folder: format!("step-{step}"),
            step,
            attempt,
            rank,
            world: WORLD,
            structure: StructureHash([1; 32]),
            epoch,
            parent: None,
            part_bytes: 1 << 16,
            who: "test".to_owned(),
        },
        info: Info {
            attempt: attempt.to_string(),
            run: attempt.run.to_string(),
            step,
            world_size: WORLD,
            ..Info::default()
        },
        side_files: vec![SideFile { name: "notes.txt".to_owned(), bytes: b"hello".to_vec() }],
        files: 2,
        writers: Some(1),
        stream: None,
        in_place: false,
        commit: Commit::Protocol,
    }
}

/// A store with step 7 of epoch 1, which was saved once for all tests.
pub(crate) fn source() -> MemoryStore {
    static SAVED: std::sync::OnceLock<MemoryStore> = std::sync::OnceLock::new();
    let saved = SAVED.get_or_init(|| {
        let store = MemoryStore::new();
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let epoch = claim(&root(Arc::clone(&shared)), RunId(0xabc), None, "test").unwrap();
        save(&shared, 7, 1, epoch);
        store
    });
    copy_of(saved)
}

/// A store of its own with the same objects.
pub(crate) fn copy_of(store: &MemoryStore) -> MemoryStore {
    let copy = MemoryStore::new();
    for (key, bytes) in objects(store, "") {
        copy.put(&key, &bytes).unwrap();
    }
    copy
}

/// All objects below a prefix.
pub(crate) fn objects(store: &dyn Store, prefix: &str) -> BTreeMap<String, Vec<u8>> {
    let listed = store.list(prefix, 1 << 20).unwrap();
    let object = |key: String| store.get(&key, 1 << 30).unwrap().map(|(bytes, _)| (key, bytes));
    listed.into_iter().filter_map(|listed| object(listed.key)).collect()
}

/// Each rank's data on a drive of its own, the rest where all see it.
pub(crate) fn split(whole: &dyn Store) -> (MemoryStore, Vec<MemoryStore>) {
    let records = MemoryStore::new();
    let drives: Vec<MemoryStore> = (0..WORLD).map(|_| MemoryStore::new()).collect();
    for (key, bytes) in objects(whole, "") {
        let rank: Option<u32> =
            key.rsplit('/').next().and_then(|name| name.split('_').nth(1)?.parse().ok());
        let place = match rank {
            Some(rank) if key.ends_with(".distcp") => &drives[rank as usize % drives.len()],
            _ => &records,
        };
        place.put(&key, &bytes).unwrap();
    }
    (records, drives)
}

/// The files of a step, without records.
pub(crate) fn files(store: &dyn Store, step: u64) -> BTreeMap<String, Vec<u8>> {
    let mut found = objects(store, &format!("step-{step}/"));
    found.retain(|key, _| !key.contains("/.forebay"));
    found
}

/// Bytes of data files and manifest of step 7.
pub(crate) fn data_bytes(store: &dyn Store) -> u64 {
    let of = |(key, bytes): (&String, &Vec<u8>)| {
        if key.ends_with("/.metadata") { 0 } else { bytes.len() as u64 }
    };
    files(store, 7).iter().map(of).sum()
}
