//! The memory of a save that fails is kept until nobody reads it any more. **unsafe**: memory is given by address.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock, data_file,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{
    Commit, OurMetadata, Request, Save, SaveItem, SavePlan, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_error::Code;
use forebay_store::PosixStore;
use forebay_tensor::{Dtype, Region};

/// More than is copied while a file cannot be created.
const BYTES: usize = 256 << 20;
const LONG: Duration = Duration::from_secs(120);

/// Memory that is given back to the system when it is dropped: who reads it after that is killed.
struct Kept {
    _memory: Vec<u8>,
    gone: Arc<AtomicBool>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Release);
    }
}

fn request(root: &Root, attempt: AttemptId, in_place: bool) -> Request {
    let item = SaveItem {
        name: "w".to_owned(),
        path: vec![PathStep::Key("w".to_owned())],
        what: What::Tensor {
            dtype: Dtype::U8,
            shape: vec![BYTES as u64],
            region: Region::whole(&[BYTES as u64]),
            requires_grad: false,
        },
        writes: true,
    };
    Request {
        plan: Arc::new(SavePlan::new(vec![item]).unwrap()),
        root: root.clone(),
        policy: Policy::default(),
        hints: None,
        spec: Spec {
            folder: "step-1".to_owned(),
            step: 1,
            attempt,
            rank: 0,
            world: 1,
            structure: StructureHash([1; 32]),
            epoch: 0,
            parent: None,
            part_bytes: 1 << 16,
            who: "test".to_owned(),
        },
        info: Info {
            attempt: attempt.to_string(),
            run: attempt.run.to_string(),
            step: 1,
            world_size: 1,
            ..Info::default()
        },
        side_files: Vec::new(),
        files: 1,
        writers: Some(2),
        stream: None,
        in_place,
        commit: Commit::Protocol,
    }
}

#[test]
fn a_save_that_fails_while_it_copies_frees_nothing_under_the_copies() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root {
        store: Arc::new(PosixStore::create(folder.path()).unwrap()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    };
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: BYTES + (64 << 20), slot_bytes: 4 << 20 };
    let pool = Arena::new(&Device::Host, &config).unwrap();
    std::fs::create_dir(folder.path().join("step-1")).unwrap();
    for save in 0..6 {
        let attempt = AttemptId { run: RunId(0xabc), save };
        let in_the_way = folder.path().join("step-1").join(data_file(attempt, 0, 0));
        std::fs::write(in_the_way, b"in the way").unwrap();
        let memory = vec![7_u8; BYTES];
        let source = Source { place: Place::Host, address: memory.as_ptr() as u64 };
        let gone = Arc::new(AtomicBool::new(false));
        let kept = Box::new(Kept { _memory: memory, gone: gone.clone() });
        let request = request(&root, attempt, save % 2 == 1);
        // SAFETY: what is kept owns the memory.
        let started =
            unsafe { Save::start(&engine, &pool, request, &[source], Vec::new(), Some(kept)) };
        let started = started.unwrap();
        let error = started.wait(LONG).unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists, "{error}");
        // Nothing hangs here, so it is over when the outcome is told: the slots are free too.
        assert!(gone.load(Ordering::Acquire));
        drop(pool.acquire(pool.slot_count(), &|| true).unwrap());
    }
}
