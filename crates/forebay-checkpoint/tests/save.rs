//! Saves of several ranks, end to end, on a real file system. **unsafe**: memory is given by address.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock,
};
use forebay_checkpoint::manifest::{Info, Manifest};
use forebay_checkpoint::model::{Kind, PathStep};
use forebay_checkpoint::open::Checkpoint;
use forebay_checkpoint::save::{
    Commit, Object, OurMetadata, Request, Save, SaveItem, SavePlan, Seal, SideFile, Source, What,
};
use forebay_device::{Arena, ArenaConfig, Device};
use forebay_engine::stage::Place;
use forebay_engine::{Engine, EngineConfig, LocalFile};
use forebay_error::Code;
use forebay_format::OpenFile;
use forebay_store::PosixStore;
use forebay_tensor::{Dtype, Region};

const LONG: Duration = Duration::from_secs(60);

fn root(folder: &Path) -> Root {
    Root {
        store: Arc::new(PosixStore::open(folder).unwrap()),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    }
}

/// One rank's memory, and what it is.
struct Rank {
    items: Vec<SaveItem>,
    memory: Vec<Vec<u8>>,
    objects: Vec<Object>,
}

fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

impl Rank {
    fn new() -> Self {
        Self { items: Vec::new(), memory: Vec::new(), objects: Vec::new() }
    }

    fn tensor(&mut self, name: &str, shape: &[u64], region: Region, seed: u64) {
        let len = region.elements() * 4;
        let what =
            What::Tensor { dtype: Dtype::F32, shape: shape.to_vec(), region, requires_grad: false };
        let path = name.split('.').map(|key| PathStep::Key(key.to_owned())).collect();
        self.items.push(SaveItem { name: name.to_owned(), path, what, writes: true });
        self.memory.push(bytes(seed, len));
    }

    fn object(&mut self, name: &str, pickle: &[u8]) {
        let path = vec![PathStep::Key(name.to_owned())];
        let what = What::Object;
        self.items.push(SaveItem { name: name.to_owned(), path, what, writes: true });
        self.objects.push(Object::Pickle(pickle.to_vec()));
    }
}

/// Row shards of a large tensor, many small ones, empty and 0-d ones, objects.
fn rank_of(number: u64, world: u64, seed: u64) -> Rank {
    let mut rank = Rank::new();
    let shape = [1001, 1500];
    let region = Region::shard(&shape, 0, number, world).unwrap();
    rank.tensor("model.large", &shape, region, seed + number);
    for small in 0..200 {
        let whole = Region::whole(&[small, 3]);
        rank.tensor(&format!("r{number}.small{small}"), &[small, 3], whole, seed + 1000 + small);
    }
    rank.tensor(&format!("r{number}.scalar"), &[], Region::whole(&[]), seed + 7);
    rank.object(&format!("object{number}"), b"\x80\x02K\x2a.");
    rank
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

fn save(
    root: &Root,
    number: u32,
    world: u32,
    save_number: u32,
    seed: u64,
) -> forebay_error::Result<()> {
    let rank = rank_of(number.into(), world.into(), seed);
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

fn save_all(root: &Root, world: u32, number: u32, seed: u64) {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| scope.spawn(move || save(root, rank, world, number, seed)))
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
}

fn manifest(folder: &Path) -> Manifest {
    let open = |name: &str| {
        Arc::new(LocalFile::new(Arc::new(OpenFile::open(&folder.join(name)).unwrap())).unwrap())
    };
    let seal = Seal::find(open(".metadata").as_ref()).unwrap().unwrap();
    Manifest::open(open(&seal.manifest), Some(&seal.hash)).unwrap()
}

fn check(folder: &Path, world: u64, seed: u64) {
    // By the stock metadata, with its archives and their CRCs.
    let stock = Checkpoint::open(folder).unwrap();
    let verdict = stock.verify(|_| Ok(())).unwrap();
    assert!(verdict.faults.is_empty(), "{:?}", verdict.faults);
    let whole = stock.read_tensor(stock.get("model.large").unwrap()).unwrap();
    let parts: Vec<u8> = (0..world)
        .flat_map(|number| {
            let region = Region::shard(&[1001, 1500], 0, number, world).unwrap();
            bytes(seed + number, region.elements() * 4)
        })
        .collect();
    assert!(whole == parts);
    for small in 0..200 {
        let entry = stock.get(&format!("r0.small{small}")).unwrap();
        let wanted = bytes(seed + 1000 + small, small * 3 * 4);
        assert_eq!(stock.read_tensor(entry).unwrap(), wanted, "small {small}");
    }
    // By the manifest, block by block.
    let manifest = manifest(folder);
    let files = manifest.files().unwrap();
    let mut blocks = 0;
    for entry in manifest.entries().unwrap() {
        for chunk in entry.chunks() {
            let data = chunk.data.as_ref().unwrap();
            let file = std::fs::read(folder.join(&files[chunk.file as usize].name)).unwrap();
            let own = &file[data.offset as usize..][..data.bytes as usize];
            let crcs: Vec<u32> = own.chunks(1 << 20).map(forebay_format::crc::crc32).collect();
            assert_eq!(crcs, data.crcs, "{}", entry.name);
            blocks += crcs.len();
            if matches!(entry.kind, Kind::Tensor { .. }) && data.bytes >= 64 << 10 {
                assert_eq!(data.offset % 4096, 0);
            }
        }
    }
    assert!(blocks > 200);
    for number in 0..world as u32 {
        for file in manifest.part_files(number).unwrap() {
            let bytes = std::fs::read(folder.join(&file.name)).unwrap();
            assert_eq!(file.crc, Some(forebay_format::crc::crc32(&bytes)), "{}", file.name);
        }
    }
    let bytes = std::fs::read(folder.join(manifest_name(folder))).unwrap();
    let findings = forebay_checkpoint::audit::check_manifest(&bytes, Some(&manifest.seal()));
    assert!(findings.is_empty(), "{findings:?}");
}

fn manifest_name(folder: &Path) -> String {
    let open = OpenFile::open(&folder.join(".metadata")).unwrap();
    let source = LocalFile::new(Arc::new(open)).unwrap();
    Seal::find(&source).unwrap().unwrap().manifest
}

#[test]
fn ranks_save_a_step_that_stock_readers_and_we_can_read() {
    for world in [1, 2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let root = root(folder.path());
        save_all(&root, world, 1, 5);
        check(&folder.path().join("step-7"), world.into(), 5);
        // And over it again: the new one counts.
        save_all(&root, world, 2, 6);
        check(&folder.path().join("step-7"), world.into(), 6);
    }
}

#[test]
fn a_rank_that_cannot_write_fails_the_save_on_all_and_the_old_step_stays() {
    let folder = tempfile::tempdir().unwrap();
    let root = root(folder.path());
    save_all(&root, 2, 1, 5);
    // The data file of rank 1 is there already: it cannot be created.
    let step = folder.path().join("step-7");
    std::fs::write(step.join("00000abc-2_1_0.distcp"), b"in the way").unwrap();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| save(&root, 0, 2, 2, 6).unwrap_err());
        let one = scope.spawn(|| save(&root, 1, 2, 2, 6).unwrap_err());
        let (zero, one) = (zero.join().unwrap(), one.join().unwrap());
        assert_eq!(one.code(), Code::AlreadyExists, "{one}");
        assert_eq!(zero.code(), Code::AlreadyExists, "{zero}");
        println!("{}\n{}", zero.render(), one.render());
    });
    check(&step, 2, 5);
}
