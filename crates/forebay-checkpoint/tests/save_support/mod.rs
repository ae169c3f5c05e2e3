//! What tests save: ranks with memory of their own, on a real file system. **unsafe**: memory is given by address.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{
    Commit, Object, OurMetadata, Request, Save, SaveItem, SavePlan, SideFile, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_store::PosixStore;
use forebay_tensor::{Dtype, Region};

const LONG: Duration = Duration::from_secs(60);

#[allow(dead_code, reason = "tests of buckets have roots of their own")]
pub(crate) fn root(folder: &Path) -> Root {
    Root {
        store: Arc::new(PosixStore::open(folder).unwrap()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    }
}

/// One rank's memory, and what it is.
pub(crate) struct Rank {
    items: Vec<SaveItem>,
    memory: Vec<Vec<u8>>,
    objects: Vec<Object>,
}

/// Bytes of no pattern.
pub(crate) fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

impl Rank {
    pub(crate) fn new() -> Self {
        Self { items: Vec::new(), memory: Vec::new(), objects: Vec::new() }
    }

    pub(crate) fn tensor(&mut self, name: &str, shape: &[u64], region: Region, seed: u64) {
        let len = region.elements() * 4;
        let what =
            What::Tensor { dtype: Dtype::F32, shape: shape.to_vec(), region, requires_grad: false };
        let path = name.split('.').map(|key| PathStep::Key(key.to_owned())).collect();
        self.items.push(SaveItem { name: name.to_owned(), path, what, writes: true });
        self.memory.push(bytes(seed, len));
    }

    pub(crate) fn object(&mut self, name: &str, pickle: &[u8]) {
        let path = vec![PathStep::Key(name.to_owned())];
        let what = What::Object;
        self.items.push(SaveItem { name: name.to_owned(), path, what, writes: true });
        self.objects.push(Object::Pickle(pickle.to_vec()));
    }
}

fn request(root: &Root, plan: SavePlan, number: u32, world: u32, save: u32) -> Request {
    let attempt = AttemptId { run: RunId(0xabc), save };
    Request {
        plan: Arc::new(plan),
        root: root.clone(),
        policy: Policy { deadline: LONG, ..Policy::default() },
        hints: None,
        spec: Spec {
            folder: "step-7".to_owned(),
            step: 7,
            attempt,
            rank: number,
            world,
            structure: StructureHash([1; 32]),
            epoch: 0,
            parent: None,
            part_bytes: 1 << 16,
            who: "test".to_owned(),
        },
        info: Info {
            attempt: attempt.to_string(),
            run: attempt.run.to_string(),
            step: 7,
            world_size: world,
            ..Info::default()
        },
        side_files: vec![SideFile { name: "notes.txt".to_owned(), bytes: b"hello".to_vec() }],
        files: 2,
        writers: Some(2),
        stream: None,
        in_place: false,
        commit: Commit::Protocol,
    }
}

/// Saves one rank's part of step 7 of `world` ranks.
pub(crate) fn save(
    root: &Root,
    rank: Rank,
    (number, world): (u32, u32),
    save_number: u32,
) -> forebay_error::Result<()> {
    let plan = SavePlan::new(rank.items).unwrap();
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: 16 << 20, slot_bytes: 1 << 20 };
    let pool = Arena::new(&Device::Host, &config).unwrap();
    let sources: Vec<Source> = rank
        .memory
        .iter()
        .map(|memory| Source { place: Place::Host, address: memory.as_ptr() as u64 })
        .collect();
    let request = request(root, plan, number, world, save_number);
    // SAFETY: the memory lives until the save has ended.
    let save = unsafe { Save::start(&engine, &pool, request, &sources, rank.objects, None) }?;
    let staged = save.wait_staged(LONG);
    let done = save.wait(LONG);
    drop(rank.memory);
    assert!(done? && staged?);
    Ok(())
}
