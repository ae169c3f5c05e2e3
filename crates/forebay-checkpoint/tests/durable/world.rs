//! What is saved, and what must hold whatever happened. **unsafe**: memory is given by address.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, GcOptions, Policy, PruneOptions, Retention, Root, RunId, Spec, StructureHash,
    SystemClock, gc, prune, steps,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::open::{Checkpoint, verify_folder};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::save::{
    Commit, Object, OurMetadata, Request, Save, SaveItem, SavePlan, SideFile, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_error::Result;
use forebay_store::{PosixStore, Store};
use forebay_tensor::{Dtype, Region};

/// Elements of the tensor, all ranks together: more than a sector and a page, so that it can be torn.
const ELEMENTS: u64 = 3000;
const LONG: Duration = Duration::from_secs(60);

/// A folder where nothing waits for a disk: what a disk does is `power`'s business, and thousands of saves are made.
pub(crate) fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

pub(crate) fn root(store: impl Store + 'static) -> Root {
    Root {
        store: Arc::new(store),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    }
}

pub(crate) fn plain(folder: &Path) -> Root {
    root(PosixStore::open(folder).unwrap())
}

/// Times that keep real waits short: a rank that was killed is missed after four of the beats of a save.
pub(crate) fn hurried() -> Policy {
    Policy {
        deadline: Duration::from_secs(30),
        lease: Duration::from_secs(2),
        takeover: Duration::from_millis(300),
        appear: Duration::from_secs(2),
        poll: (Duration::from_millis(1), Duration::from_millis(20)),
        ..Policy::default()
    }
}

/// One rank of a save. Its number is also the seed of what it saves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Which {
    pub(crate) step: u64,
    pub(crate) save: u32,
    pub(crate) rank: u32,
    pub(crate) world: u32,
}

fn memory(which: Which) -> Vec<u8> {
    let elements = ELEMENTS / u64::from(which.world);
    let first = u64::from(which.rank) * elements;
    (first..first + elements).flat_map(|at| value(which.save, at).to_le_bytes()).collect()
}

fn value(save: u32, at: u64) -> u32 {
    (save + 1).wrapping_mul(0x9e37_79b9) ^ at as u32
}

fn plan(which: Which) -> SavePlan {
    let Which { rank, world, .. } = which;
    let shape = vec![ELEMENTS];
    let region = Region::shard(&shape, 0, rank.into(), world.into()).unwrap();
    let what = What::Tensor { dtype: Dtype::F32, shape, region, requires_grad: false };
    let item = |name: String, what| {
        let path = vec![PathStep::Key(name.clone())];
        SaveItem { name, path, what, writes: true }
    };
    SavePlan::new(vec![item("w".to_owned(), what), item(format!("o{rank}"), What::Object)]).unwrap()
}

pub(crate) fn request(root: &Root, which: Which) -> Request {
    let attempt = AttemptId { run: RunId(0xabc), save: which.save };
    Request {
        plan: Arc::new(plan(which)),
        root: root.clone(),
        policy: Policy::default(),
        hints: None,
        spec: Spec {
            folder: format!("step-{}", which.step),
            step: which.step,
            attempt,
            rank: which.rank,
            world: which.world,
            structure: StructureHash([1; 32]),
            epoch: 0,
            parent: None,
            part_bytes: 1 << 12,
            who: "test".to_owned(),
        },
        info: Info {
            attempt: attempt.to_string(),
            run: attempt.run.to_string(),
            step: which.step,
            world_size: which.world,
            ..Info::default()
        },
        side_files: vec![SideFile { name: "notes.txt".to_owned(), bytes: vec![7; 700] }],
        files: 1,
        writers: Some(1),
        stream: None,
        in_place: false,
        commit: Commit::Protocol,
    }
}

/// Saves as asked; whether the commit is durable.
pub(crate) fn save_as(request: Request, which: Which) -> Result<bool> {
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: 1 << 20, slot_bytes: 64 << 10 };
    let pool = Arena::new(&Device::Host, &config).unwrap();
    let memory = memory(which);
    let sources = [Source { place: Place::Host, address: memory.as_ptr() as u64 }];
    let objects = vec![Object::Pickle(b"\x80\x02K\x2a.".to_vec())];
    let keep = Box::new(memory);
    // SAFETY: the memory is kept by the save.
    let save = unsafe { Save::start(&engine, &pool, request, &sources, objects, Some(keep)) }?;
    assert!(save.wait(LONG)?, "a save hangs");
    Ok(save.report().durable)
}

pub(crate) fn save(root: &Root, which: Which) -> Result<bool> {
    save_as(request(root, which), which)
}

/// All ranks of a save, each with a client of its own.
pub(crate) fn save_all(roots: &[Root], step: u64, number: u32) -> Vec<Result<bool>> {
    save_with(&Policy::default(), roots, step, number)
}

/// The same with times of its own.
pub(crate) fn save_with(
    policy: &Policy,
    roots: &[Root],
    step: u64,
    number: u32,
) -> Vec<Result<bool>> {
    let world = roots.len() as u32;
    std::thread::scope(|scope| {
        let rank = |(rank, root)| {
            scope.spawn(move || {
                let which = Which { step, save: number, rank, world };
                save_as(Request { policy: policy.clone(), ..request(root, which) }, which)
            })
        };
        let ranks: Vec<_> = (0..world).zip(roots).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub(crate) fn step(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// Which save a step is of, if it is committed: then it opens, verifies, and holds what that save had.
pub(crate) fn load(folder: &Path, number: u64) -> Option<u32> {
    load_at(&step(folder, number))
}

pub(crate) fn load_at(step: &Path) -> Option<u32> {
    if !step.join(".metadata").exists() {
        return None;
    }
    let verified = verify_folder(step, &Unwatched).unwrap();
    assert!(verified.faults.is_empty(), "{:?}", verified.faults);
    let checkpoint = Checkpoint::open(step).unwrap();
    let read = checkpoint.read_tensor(checkpoint.get("w").unwrap()).unwrap();
    let first = u32::from_le_bytes(read[..4].try_into().unwrap());
    let save = (0..100).find(|save| value(*save, 0) == first).unwrap();
    let whole = (0..ELEMENTS).flat_map(|at| value(save, at).to_le_bytes());
    assert!(whole.eq(read), "{} is not all of save {save}", step.display());
    Some(save)
}

/// Life goes on: another save of the step, and a collection that leaves what is committed.
pub(crate) fn go_on(folder: &Path, number: u64, save_number: u32) {
    let root = plain(folder);
    let which = Which { step: number, save: save_number, rank: 0, world: 1 };
    save(&root, which).unwrap();
    assert_eq!(load(folder, number), Some(save_number));
    let at_once =
        GcOptions { grace: Duration::ZERO, settle: Duration::ZERO, ..GcOptions::default() };
    let report = gc(&root, &at_once).unwrap();
    assert!(report.failed.is_empty() && report.kept.is_empty(), "{report:?}");
    assert_eq!(load(folder, number), Some(save_number), "collected");
    let left = steps(&root, Duration::ZERO).unwrap();
    assert!(left.iter().all(|state| state.attempts.is_empty()), "{left:?}");
}

/// Keeps the newest commit alone; whether all of it was done.
pub(crate) fn prune_to_one(root: &Root) -> bool {
    let gc = GcOptions { grace: Duration::ZERO, settle: Duration::ZERO, ..GcOptions::default() };
    let retention = Retention { keep_last: 1, ..Retention::default() };
    match prune(root, &retention, &PruneOptions { gc, wait: true }) {
        Ok(report) => report.failed.is_empty() && report.gc.failed.is_empty(),
        Err(_) => false,
    }
}
