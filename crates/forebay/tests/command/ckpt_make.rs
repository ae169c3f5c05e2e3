//! Checkpoints of Forebay, saved for tests by the real thing. **unsafe**: memory is given by address.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock, step_folder,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{
    Commit, Object, OurMetadata, Request, Save, SaveItem, SavePlan, SideFile, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig};
use forebay_error::Result;
use forebay_store::PosixStore;
use forebay_tensor::{Dtype, Region};

use crate::util::noise;

const LONG: Duration = Duration::from_secs(60);
const RUN: RunId = RunId(0xabc);

/// A tensor of the state.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
    /// Rows are shared out among the ranks; else rank 0 has all.
    sharded: bool,
}

/// What is saved.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) tensors: Vec<Tensor>,
    /// (name, name that has the bytes)
    pub(crate) aliases: Vec<(String, String)>,
    /// (name, pickle of protocol 2)
    pub(crate) objects: Vec<(String, Vec<u8>)>,
    pub(crate) side: Vec<(String, Vec<u8>)>,
}

impl State {
    /// Sharded and whole tensors of all lengths (many blocks, less than one, none), two names for one, objects.
    pub(crate) fn new(seed: u64) -> Self {
        let tensor = |name: &str, dtype: Dtype, shape: &[u64], sharded| {
            let len = (shape.iter().product::<u64>() * dtype.bits() / 8) as usize;
            let salt = name.bytes().map(u64::from).sum::<u64>() << 8;
            let (name, shape) = (name.to_owned(), shape.to_vec());
            Tensor { name, dtype, shape, data: noise(len, seed + salt), sharded }
        };
        let mut tensors = vec![
            tensor("model.embed.weight", Dtype::F32, &[1001, 777], true),
            tensor("model.layers.0.weight", Dtype::BF16, &[300, 129], true),
            tensor("model.layers.0.bias", Dtype::F16, &[77], false),
            tensor("model.wide", Dtype::F64, &[41, 3], false),
            tensor("model.steps", Dtype::I64, &[5], false),
            tensor("model.mask", Dtype::Bool, &[10], false),
            tensor("model.scalar", Dtype::F32, &[], false),
            tensor("model.empty", Dtype::F32, &[0, 4], false),
        ];
        for flag in tensors.iter_mut().filter(|tensor| tensor.dtype == Dtype::Bool) {
            flag.data.iter_mut().for_each(|byte| *byte &= 1);
        }
        // {"betas": (0.9, 3), "name": "adam"}
        let groups = b"\x80\x02}(X\x05\0\0\0betas(G?\xec\xcc\xcc\xcc\xcc\xcc\xcdK\x03t\
                       X\x04\0\0\0nameX\x04\0\0\0adamu.";
        Self {
            tensors,
            aliases: vec![("model.head.weight".to_owned(), "model.embed.weight".to_owned())],
            objects: vec![
                ("optim.groups".to_owned(), groups.to_vec()),
                ("step".to_owned(), b"\x80\x02K\x2a.".to_vec()),
                // Calls os.getcwd: nothing may ever run it.
                ("odd".to_owned(), b"\x80\x02cposix\ngetcwd\n)R.".to_vec()),
            ],
            side: vec![("notes.txt".to_owned(), b"written with the step".to_vec())],
        }
    }

    /// And a tensor of so many rows of 4 KiB.
    pub(crate) fn with_rows(mut self, rows: u64) -> Self {
        let data = noise(rows as usize * 4096, 77);
        let (name, shape) = ("model.large".to_owned(), vec![rows, 1024]);
        self.tensors.push(Tensor { name, dtype: Dtype::F32, shape, data, sharded: true });
        self
    }

    /// A tensor's bytes, under any of its names.
    pub(crate) fn data(&self, name: &str) -> &[u8] {
        let alias = self.aliases.iter().find(|(alias, _)| alias == name);
        let name = alias.map_or(name, |(_, of)| of.as_str());
        &self.tensors.iter().find(|tensor| tensor.name == name).unwrap().data
    }
}

/// Saves a step below `root`, and gives its folder. `number` is that of the save, never used twice.
pub(crate) fn save(root: &Path, step: u64, world: u32, number: u32, state: &State) -> PathBuf {
    try_save(root, step, world, number, state).unwrap();
    root.join(step_folder(step))
}

/// Tries to; an error is that of the first rank that has one.
pub(crate) fn try_save(
    root: &Path,
    step: u64,
    world: u32,
    number: u32,
    state: &State,
) -> Result<()> {
    let store = root_at(root);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let store = &store;
                scope.spawn(move || save_rank(store, step, (rank, world), number, state))
            })
            .collect();
        // All of them, before the folder may go.
        let ended: Vec<Result<()>> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        ended.into_iter().collect()
    })
}

/// A folder as the protocol of commits has it.
pub(crate) fn root_at(folder: &Path) -> Root {
    Root {
        store: Arc::new(PosixStore::open(folder).unwrap()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    }
}

fn save_rank(
    root: &Root,
    step: u64,
    (rank, world): (u32, u32),
    number: u32,
    state: &State,
) -> Result<()> {
    let Rank { request, objects, memory } = rank_of(root, step, (rank, world), number, state);
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let config = ArenaConfig { size_bytes: 16 << 20, slot_bytes: 1 << 20 };
    let pool = Arena::new(&Device::Host, &config).unwrap();
    let sources: Vec<Source> = memory
        .iter()
        .map(|memory| Source { place: Place::Host, address: memory.as_ptr() as u64 })
        .collect();
    // SAFETY: the memory lives until the save has ended.
    let save = unsafe { Save::start(&engine, &pool, request, &sources, objects, None) }.unwrap();
    let done = save.wait(LONG);
    drop(memory);
    done.map(|done| assert!(done))
}

/// What one rank saves: what the save is told, its objects, and the memory of its tensors.
pub(crate) struct Rank {
    pub(crate) request: Request,
    pub(crate) objects: Vec<Object>,
    pub(crate) memory: Vec<Vec<u8>>,
}

/// The rank of a world of so many, in the save of that number.
pub(crate) fn rank_of(
    root: &Root,
    step: u64,
    (rank, world): (u32, u32),
    number: u32,
    state: &State,
) -> Rank {
    let (items, memory) = items(state, rank, world);
    let mine = |_: &_| rank == 0;
    let pickles = state.objects.iter().filter(mine);
    let objects = pickles.map(|(_, pickle)| Object::Pickle(pickle.clone())).collect();
    let attempt = AttemptId { run: RUN, save: number };
    let request = Request {
        plan: Arc::new(SavePlan::new(items).unwrap()),
        root: root.clone(),
        policy: Policy { deadline: LONG, ..Policy::default() },
        hints: None,
        spec: Spec {
            folder: step_folder(step),
            step,
            attempt,
            rank,
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
            step,
            world_size: world,
            forebay: env!("CARGO_PKG_VERSION").to_owned(),
            ..Info::default()
        },
        side_files: state
            .side
            .iter()
            .filter(|_| rank == 0)
            .map(|(name, bytes)| SideFile { name: name.clone(), bytes: bytes.clone() })
            .collect(),
        files: 2,
        writers: Some(2),
        stream: None,
        in_place: false,
        commit: Commit::Protocol,
    };
    Rank { request, objects, memory }
}

/// What a rank holds, and the memory of its tensors.
fn items(state: &State, rank: u32, world: u32) -> (Vec<SaveItem>, Vec<Vec<u8>>) {
    let item = |name: &str, what: What| {
        let path = name.splitn(2, '.').map(|key| PathStep::Key(key.to_owned())).collect();
        SaveItem { name: name.to_owned(), path, what, writes: true }
    };
    let (mut items, mut memory) = (Vec::new(), Vec::new());
    for tensor in state.tensors.iter().filter(|tensor| tensor.sharded || rank == 0) {
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        let region = match tensor.sharded {
            true => Region::shard(&shape, 0, rank.into(), world.into()).unwrap(),
            false => Region::whole(&shape),
        };
        // Rows lie one after the other.
        let row: u64 = shape.iter().skip(1).product::<u64>() * dtype.bits() / 8;
        let start = region.offsets.first().map_or(0, |first| first * row) as usize;
        let len = (region.elements() * dtype.bits() / 8) as usize;
        memory.push(tensor.data[start..start + len].to_vec());
        let requires_grad = false;
        items.push(item(&tensor.name, What::Tensor { dtype, shape, region, requires_grad }));
    }
    if rank == 0 {
        items.extend(state.objects.iter().map(|(name, _)| item(name, What::Object)));
        let alias = |(name, of): &(String, String)| item(name, What::Alias { of: of.clone() });
        items.extend(state.aliases.iter().map(alias));
    }
    (items, memory)
}
