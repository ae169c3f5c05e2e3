//! Jobs whose ranks agreed on a structure, saved by the code of saves into a folder, without the protocol: 64 ranks are
//! saved one after the other. **unsafe**: memory is given by address.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Assembled, AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock, manifest,
};
use forebay_checkpoint::manifest::{
    Info, Layout, MemorySource, Structure, Tensor, Value, ValueRef,
};
use forebay_checkpoint::restore::Reader;
use forebay_checkpoint::save::{
    Commit, Facts, Object, OurMetadata, Request, Save, SaveItem, SavePlan, Seal, Source, What,
    assemble,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig, LoadOptions, RangeSource, sources_of};
use forebay_error::Result;
use forebay_store::PosixStore;
use forebay_tensor::{Dtype, Mesh, Placement, Region, byte_len};

const ATTEMPT: AttemptId = AttemptId { run: RunId(0xabc), save: 1 };
const PICKLE: &[u8] = b"\x80\x02K\x2a.";
const LONG: Duration = Duration::from_secs(60);

pub(crate) fn mesh(sides: &[u64]) -> Arc<Mesh> {
    Arc::new(Mesh::new(sides.to_vec()).unwrap())
}

pub(crate) fn layout(mesh: u32, placements: &[Placement]) -> Layout {
    Layout { mesh, placements: placements.to_vec(), right_to_left: false }
}

/// The bytes of a region of a tensor of F32: each element tells its name and place.
pub(crate) fn bytes_of(name: &str, dtype: Dtype, shape: &[u64], region: &Region) -> Vec<u8> {
    assert_eq!(dtype, Dtype::F32);
    let seed = name.bytes().fold(17_u32, |seed, byte| seed.wrapping_mul(31) ^ u32::from(byte));
    let mut places: Vec<u64> = vec![0];
    for ((&side, &offset), &size) in shape.iter().zip(&region.offsets).zip(&region.sizes) {
        let inner = |place: u64| (offset..offset + size).map(move |at| place * side + at);
        places = places.into_iter().flat_map(inner).collect();
    }
    places.into_iter().flat_map(|place| (seed ^ place as u32).to_le_bytes()).collect()
}

/// A plan of one tensor.
pub(crate) fn fill(name: &str, dtype: Dtype, shape: &[u64], region: Region) -> SavePlan {
    let what = What::Tensor { dtype, shape: shape.to_vec(), region, requires_grad: false };
    let item = SaveItem { name: name.into(), path: Vec::new(), what, writes: true };
    SavePlan::new(vec![item]).unwrap()
}

/// What a save left.
pub(crate) struct Job {
    pub(crate) folder: PathBuf,
    pub(crate) parts: Vec<Vec<u8>>,
    pub(crate) manifest: Vec<u8>,
    pub(crate) seal: Seal,
    structure: Arc<Structure>,
}

impl Job {
    /// Saves all ranks and commits. `choose` says what a rank writes of a tensor, given what its layout gives it.
    pub(crate) fn save(
        folder: &Path,
        structure: Structure,
        world: u32,
        choose: impl Fn(&str, u32, Vec<Region>) -> Vec<Region>,
    ) -> Self {
        let (structure, parts) = Self::parts_of(folder, &Arc::new(structure), world, choose);
        let assembled = Self::assemble(&structure, &parts).unwrap();
        let source = MemorySource::new("metadata", assembled.metadata.clone());
        let seal = Seal::find(&source).unwrap().unwrap();
        std::fs::write(folder.join(&seal.manifest), &assembled.manifest).unwrap();
        std::fs::write(folder.join(".metadata"), &assembled.metadata).unwrap();
        Self { folder: folder.to_owned(), parts, manifest: assembled.manifest, seal, structure }
    }

    /// Saves all ranks, and gives what each contributes.
    pub(crate) fn parts_of(
        folder: &Path,
        structure: &Arc<Structure>,
        world: u32,
        choose: impl Fn(&str, u32, Vec<Region>) -> Vec<Region>,
    ) -> (Arc<Structure>, Vec<Vec<u8>>) {
        let engine = Engine::new(Device::Host, EngineConfig::default());
        let config = ArenaConfig { size_bytes: 8 << 20, slot_bytes: 1 << 20 };
        let pool = Arena::new(&Device::Host, &config).unwrap();
        let parts = (0..world).map(|rank| {
            let items = items(structure, rank, &choose);
            let plan = SavePlan::new(items).unwrap();
            let plan = plan.with_structure(structure.clone(), rank).unwrap();
            save(folder, &engine, &pool, plan, (rank, world))
        });
        (structure.clone(), parts.collect())
    }

    pub(crate) fn assemble(structure: &Arc<Structure>, parts: &[Vec<u8>]) -> Result<Assembled> {
        let info = Info {
            attempt: ATTEMPT.to_string(),
            run: ATTEMPT.run.to_string(),
            step: 7,
            world_size: parts.len() as u32,
            forebay: env!("CARGO_PKG_VERSION").to_owned(),
            ..Info::default()
        };
        let facts =
            Facts { attempt: ATTEMPT, info, place: "here".into(), paths: Default::default() };
        assemble(&facts, structure, parts, manifest(ATTEMPT, 0))
    }

    /// The manifest as it is in the folder.
    pub(crate) fn manifest_source(&self) -> Arc<dyn RangeSource> {
        let bytes = std::fs::read(self.folder.join(&self.seal.manifest)).unwrap();
        Arc::new(MemorySource::new("manifest", bytes))
    }

    /// The name of a value of the structure.
    pub(crate) fn name(&self, value: ValueRef) -> &str {
        match value {
            ValueRef::Shared(number) => &self.structure.values()[number as usize].name,
            ValueRef::Own(_) => panic!("a value of one rank"),
        }
    }

    /// Bytes of the archive of an object.
    pub(crate) fn object_bytes(&self) -> usize {
        forebay_format::dcp::ObjectItem::encode(PICKLE).len()
    }
}

fn items(
    structure: &Structure,
    rank: u32,
    choose: &impl Fn(&str, u32, Vec<Region>) -> Vec<Region>,
) -> Vec<SaveItem> {
    let mut items = Vec::new();
    for (named, number) in structure.values().iter().zip(0..) {
        let item = |what, writes| SaveItem {
            name: named.name.clone(),
            path: named.path.clone(),
            what,
            writes,
        };
        match &named.value {
            Value::Tensor(Tensor { dtype, shape, .. }) => {
                let boxes = structure.boxes_of(number, rank).unwrap();
                // What has no layout is rank 0's.
                let whole = if rank == 0 { vec![Region::whole(shape)] } else { Vec::new() };
                for region in choose(&named.name, rank, boxes.unwrap_or(whole)) {
                    let (dtype, shape) = (*dtype, shape.clone());
                    items.push(item(
                        What::Tensor { dtype, shape, region, requires_grad: false },
                        true,
                    ));
                }
            }
            Value::Object => items.push(item(What::Object, rank == 0)),
            Value::Alias { of } => items.push(item(What::Alias { of: of.clone() }, rank == 0)),
        }
    }
    items
}

fn save(
    folder: &Path,
    engine: &Arc<Engine>,
    pool: &Arc<Arena>,
    plan: SavePlan,
    (rank, world): (u32, u32),
) -> Vec<u8> {
    let memory: Vec<Vec<u8>> = plan
        .items()
        .iter()
        .filter_map(|item| match &item.what {
            What::Tensor { dtype, shape, region, .. } => {
                Some(bytes_of(&item.name, *dtype, shape, region))
            }
            _ => None,
        })
        .collect();
    let source = |bytes: &Vec<u8>| Source { place: Place::Host, address: bytes.as_ptr() as u64 };
    let sources: Vec<Source> = memory.iter().map(source).collect();
    let objects = (0..plan.object_count()).map(|_| Object::Pickle(PICKLE.to_vec())).collect();
    let request = Request {
        plan: Arc::new(plan),
        root: Root {
            store: Arc::new(PosixStore::open(folder).unwrap()),
            clock: Arc::new(SystemClock::default()),
            identify: Arc::new(OurMetadata),
        },
        policy: Policy::default(),
        hints: None,
        spec: Spec {
            folder: String::new(),
            step: 7,
            attempt: ATTEMPT,
            rank,
            world,
            structure: StructureHash([1; 32]),
            epoch: 0,
            parent: None,
            part_bytes: 0,
            who: "test".to_owned(),
        },
        info: Info::default(),
        side_files: Vec::new(),
        files: 1,
        writers: Some(1),
        stream: None,
        in_place: false,
        commit: Commit::External,
    };
    // SAFETY: the memory lives until the save has ended.
    let save = unsafe { Save::start(engine, pool, request, &sources, objects, None) }.unwrap();
    assert!(save.wait(LONG).unwrap());
    drop(memory);
    save.part().unwrap()
}

/// Loads regions by the engine.
pub(crate) fn read_region(reader: &Reader, wants: &[(usize, Region)]) -> Result<Vec<Vec<u8>>> {
    let selected = reader.select(wants)?;
    let engine = Engine::new(Device::Host, EngineConfig::default());
    let (order, plan) = selected.plan(engine.config().piece_bytes)?;
    let lengths = wants.iter().map(|(item, region)| {
        let (dtype, _) = reader.items()[*item].tensor.as_ref().unwrap();
        byte_len(*dtype, &region.sizes).unwrap() as usize
    });
    let mut memory: Vec<Vec<u8>> = lengths.map(|len| vec![0; len]).collect();
    let addresses: Vec<u64> = order.iter().map(|&at| memory[at].as_mut_ptr() as u64).collect();
    let session = engine.start(plan, sources_of(&selected.model.files)?, LoadOptions::default())?;
    // SAFETY: each region has memory of its own, which lives until the session has ended.
    unsafe { session.provide(&addresses, None, None)? };
    assert!(session.wait(LONG)?);
    session.finish()?;
    Ok(memory)
}
