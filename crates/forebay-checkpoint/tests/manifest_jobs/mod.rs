//! Jobs for the tests of manifests: states that are cut over ranks, with items laid out in files as a save does, and
//! beside each manifest the list of what it must say, kept in the plainest form.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_checkpoint::manifest::{
    Builder, Head, Info, ItemPlace, Layout, Manifest, MemorySource, Named, Part, PartBuilder,
    PartFile, Place, Structure, Value, ValueRef,
};
use forebay_checkpoint::model::{BLOCK_BYTES, Chunk, DataFile, DataPlace, Entry, Kind};
use forebay_error::Result;
use forebay_tensor::{Dtype, Mesh, MeshLayout, Placement, Region, byte_len};

/// The attempt of all jobs here.
pub(crate) const ATTEMPT: &str = "0123abcd-1";

/// Numbers that look random; the same ones for the same seed.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// A job whose ranks add chunks; `finish` gives its parts and what the manifest must say.
pub(crate) struct Job {
    pub(crate) numbers: Numbers,
    pub(crate) world: u32,
    pub(crate) structure: Arc<Structure>,
    ranks: Vec<Rank>,
    /// By name: rank, number of the file in the rank, chunk.
    chunks: BTreeMap<String, Vec<(u32, u32, Chunk)>>,
    own: BTreeMap<String, Named>,
}

struct Rank {
    part: PartBuilder,
    files: Vec<DataFile>,
    own: BTreeMap<String, u32>,
}

/// A whole checkpoint: the parts, and what its manifest must say.
pub(crate) struct Saved {
    pub(crate) info: Info,
    pub(crate) structure: Arc<Structure>,
    pub(crate) parts: Vec<Vec<u8>>,
    pub(crate) files: Vec<DataFile>,
    pub(crate) entries: Vec<Entry>,
}

impl Job {
    pub(crate) fn new(seed: u64, world: u32, structure: Structure) -> Self {
        let hash = structure.hash();
        let values = structure.values().len() as u32;
        let ranks = (0..world).map(|rank| {
            let mut part = Part::builder(ATTEMPT, rank, world);
            if values > 0 {
                part.structure(hash, values);
            }
            Rank { part, files: Vec::new(), own: BTreeMap::new() }
        });
        Self {
            numbers: Numbers(seed),
            world,
            ranks: ranks.collect(),
            structure: Arc::new(structure),
            chunks: BTreeMap::new(),
            own: BTreeMap::new(),
        }
    }

    /// The rank has this value of its own; other ranks may have it too.
    pub(crate) fn own(&mut self, rank: u32, named: &Named) {
        self.number_of_own(rank, named);
    }

    fn number_of_own(&mut self, rank: u32, named: &Named) -> u32 {
        self.own.insert(named.name.clone(), named.clone());
        let rank = &mut self.ranks[rank as usize];
        let part = &mut rank.part;
        *rank.own.entry(named.name.clone()).or_insert_with(|| part.own(named.clone()))
    }

    /// The rank stores a chunk of a shared value or one of its own.
    pub(crate) fn store(&mut self, rank: u32, named: &Named, place: Place, region: &Region) {
        let value = match self.structure.find(&named.name) {
            Some((number, _)) => ValueRef::Shared(number),
            None => ValueRef::Own(self.number_of_own(rank, named)),
        };
        let data_bytes = match &named.value {
            Value::Tensor(tensor) => byte_len(tensor.dtype, &region.sizes).unwrap(),
            _ => 1 + self.numbers.below(3 * BLOCK_BYTES / 2),
        };
        let is_object = matches!(named.value, Value::Object);
        let (gap, lead, tail) = match is_object {
            true => (self.numbers.below(3), 0, 0),
            false => (self.numbers.below(64), self.numbers.below(5000), self.numbers.below(400)),
        };
        let crcs: Vec<u32> =
            (0..data_bytes.div_ceil(BLOCK_BYTES)).map(|_| self.numbers.next() as u32).collect();
        let new_file = self.numbers.below(4) == 0;
        let own = &mut self.ranks[rank as usize];
        if own.files.is_empty() || new_file {
            let name = format!("{ATTEMPT}_{rank}_{}.distcp", own.files.len());
            own.part.file(PartFile { name: name.clone(), bytes: 0, crc: None });
            own.files.push(DataFile { name, bytes: Some(0) });
        }
        let file = own.files.len() as u32 - 1;
        let end = own.files[file as usize].bytes.unwrap();
        let item = ItemPlace {
            file,
            offset: end + gap,
            length: lead + data_bytes + tail,
            data_offset: end + gap + lead,
            data_bytes,
        };
        own.files[file as usize].bytes = Some(item.offset + item.length);
        own.part.chunk(value, place, item, &crcs);
        let data = DataPlace { offset: item.data_offset, bytes: data_bytes, crcs };
        let chunk = Chunk {
            region: region.clone(),
            file,
            offset: item.offset,
            length: item.length,
            transforms: Vec::new(),
            data: Some(data),
        };
        self.chunks.entry(named.name.clone()).or_default().push((rank, file, chunk));
    }

    /// The rank stores all boxes that its layout gives it.
    pub(crate) fn store_shard(&mut self, rank: u32, named: &Named) {
        let (number, _) = self.structure.find(&named.name).unwrap();
        for region in self.structure.boxes_of(number, rank).unwrap().unwrap() {
            self.store(rank, named, Place::Implied, &region);
        }
    }

    /// The rank stores all of it.
    pub(crate) fn store_whole(&mut self, rank: u32, named: &Named) {
        let shape = match &named.value {
            Value::Tensor(tensor) => tensor.shape.clone(),
            _ => Vec::new(),
        };
        self.store(rank, named, Place::Whole, &Region::whole(&shape));
    }

    /// The parts, as they stand.
    pub(crate) fn finish(mut self) -> Saved {
        let (mut parts, mut files, mut first_files) = (Vec::new(), Vec::new(), Vec::new());
        for mut rank in self.ranks {
            for (number, file) in (0..).zip(&rank.files) {
                let crc = self.numbers.below(2) == 0;
                let crc = crc.then(|| self.numbers.next() as u32);
                rank.part.set_file(number, file.bytes.unwrap(), crc);
            }
            first_files.push(files.len() as u32);
            files.extend(rank.files);
            parts.push(rank.part.finish().unwrap().encode().unwrap());
        }
        let mut values: Vec<Named> = self.structure.values().to_vec();
        values.extend(self.own.into_values());
        values.sort_by(|a, b| a.name.cmp(&b.name));
        let entries = values.iter().map(|named| entry(named, &values, &self.chunks, &first_files));
        let info = Info {
            attempt: ATTEMPT.into(),
            run: "0123abcd".into(),
            step: 7,
            world_size: self.world,
            ..Info::default()
        };
        Saved { info, structure: self.structure, parts, files, entries: entries.collect() }
    }
}

fn entry(
    named: &Named,
    values: &[Named],
    chunks: &BTreeMap<String, Vec<(u32, u32, Chunk)>>,
    first_files: &[u32],
) -> Entry {
    let value = match &named.value {
        Value::Alias { of } => values.iter().find(|other| other.name == *of).unwrap(),
        _ => named,
    };
    let mut own = chunks.get(&value.name).cloned().unwrap_or_default();
    own.sort_by_key(|(rank, file, chunk)| (*rank, *file, chunk.offset));
    let mut own: Vec<Chunk> = own
        .into_iter()
        .filter(|(_, _, chunk)| !chunk.region.is_empty())
        .map(|(rank, file, chunk)| Chunk { file: first_files[rank as usize] + file, ..chunk })
        .collect();
    let kind = match &value.value {
        Value::Tensor(tensor) => {
            Kind::Tensor { dtype: tensor.dtype, shape: tensor.shape.clone(), chunks: own }
        }
        // One that nobody stores makes a test of its own, which does not look here.
        _ if own.is_empty() => Kind::Tensor { dtype: Dtype::U8, shape: Vec::new(), chunks: own },
        _ => Kind::Object { chunk: own.remove(0) },
    };
    Entry { name: named.name.clone(), path: named.path.clone(), kind }
}

impl Saved {
    pub(crate) fn head(&self) -> Result<Head> {
        let mut builder = Builder::new(self.info.clone(), Arc::clone(&self.structure));
        self.parts.iter().try_for_each(|part| builder.add_part(part))?;
        builder.finish()
    }

    /// All bytes of the manifest, and its seal.
    pub(crate) fn bytes(&self) -> (Vec<u8>, [u8; 32]) {
        let head = self.head().unwrap();
        let mut bytes = head.bytes;
        for (part, offset) in self.parts.iter().zip(head.part_offsets) {
            assert_eq!(bytes.len() as u64, offset);
            bytes.extend_from_slice(part);
        }
        assert_eq!(bytes.len() as u64, head.total_bytes);
        (bytes, head.seal)
    }
}

/// Opens bytes as a manifest.
pub(crate) fn open(bytes: &[u8], seal: Option<&[u8; 32]>) -> Result<Manifest> {
    Manifest::open(Arc::new(MemorySource::new("m", bytes.to_vec())), seal)
}

/// A layout on the first mesh.
pub(crate) fn layout(placements: &[Placement]) -> Layout {
    Layout { mesh: 0, placements: placements.to_vec(), right_to_left: false }
}

/// A state with everything in it, over four ranks: shards of one and of two dimensions, uneven, empty, strided,
/// replicas held by different ranks, regions, tensors without dimensions and without elements, objects, other names,
/// values of one rank.
pub(crate) fn everything() -> Saved {
    use Placement::{Replicate, Shard, StridedShard};
    let meshes = vec![
        Arc::new(Mesh::new(vec![4]).unwrap()),
        Arc::new(Mesh::with_ranks(vec![2, 2], vec![3, 1, 2, 0]).unwrap()),
    ];
    let strided = StridedShard { dim: 0, split_factor: 2 };
    let on = |mesh, placements: &[Placement], right_to_left| Layout {
        mesh,
        placements: placements.to_vec(),
        right_to_left,
    };
    let layouts = vec![
        on(0, &[Shard(0)], false),
        on(1, &[Replicate, Shard(1)], false),
        on(1, &[strided, Shard(0)], false),
        on(1, &[strided, Shard(0)], true),
        on(0, &[Replicate], false),
    ];
    let path = |text: &str| {
        let step = |part: &str| match part.parse() {
            Ok(index) => forebay_checkpoint::model::PathStep::Index(index),
            Err(_) => forebay_checkpoint::model::PathStep::Key(part.to_owned()),
        };
        text.split('/').map(step).collect()
    };
    let tensor = |name: &str, dtype, shape: &[u64], layout| {
        Named::tensor(name, dtype, shape)
            .with_layout(layout)
            .with_path(path(&name.replace('.', "/")))
    };
    let values = vec![
        tensor("model.rows", Dtype::F32, &[6, 3], 0),
        tensor("model.big", Dtype::BF16, &[4096, 600], 0),
        tensor("model.hybrid", Dtype::F32, &[3, 5], 1),
        tensor("model.strided", Dtype::U8, &[9], 2),
        tensor("model.fsdp", Dtype::U8, &[9], 3),
        tensor("model.norm", Dtype::F64, &[5], 4),
        tensor("step", Dtype::I64, &[], 4),
        tensor("nothing", Dtype::F32, &[0, 4], 0),
        Named::tensor("ragged", Dtype::F4, &[6, 4]).with_path(path("ragged")),
        Named::alias("model.tied", "model.big").with_path(path("model/tied")),
        Named::object("optim.param_groups.0.lr").with_path(path("optim/param_groups/0/lr")),
        Named::object("odd").with_path(path("elsewhere/3")),
    ];
    store_everything(Structure::new(meshes, layouts, values).unwrap())
}

fn store_everything(structure: Structure) -> Saved {
    let mut job = Job::new(11, 4, structure);
    let find = |job: &Job, name: &str| job.structure.find(name).unwrap().1.clone();
    for name in ["model.rows", "model.big", "model.strided", "model.fsdp"] {
        let named = find(&job, name);
        (0..4).for_each(|rank| job.store_shard(rank, &named));
    }
    // Shard 0 is held by ranks 3 and 2, shard 1 by 1 and 0.
    let named = find(&job, "model.hybrid");
    job.store_shard(3, &named);
    job.store_shard(0, &named);
    let named = find(&job, "model.norm");
    job.store_shard(2, &named);
    let named = find(&job, "step");
    job.store_whole(1, &named);
    let named = find(&job, "ragged");
    for (rank, offset, size) in
        [(0, [0, 0], [2, 4]), (2, [2, 0], [4, 2]), (2, [2, 2], [0, 2]), (3, [2, 2], [4, 2])]
    {
        let region = Region::new(offset.to_vec(), size.to_vec()).unwrap();
        job.store(rank, &named, Place::Box(region.clone()), &region);
    }
    for (name, rank) in [("optim.param_groups.0.lr", 0), ("odd", 3)] {
        let named = find(&job, name);
        job.store_whole(rank, &named);
    }
    for rank in 0..4 {
        let named = Named::object(format!("rng.rank{rank}"));
        job.store_whole(rank, &named);
    }
    let loose = Named::tensor("loader.cursor", Dtype::I64, &[4]);
    for rank in [1, 2] {
        let region = Region::new(vec![u64::from(rank - 1) * 2], vec![2]).unwrap();
        job.store(rank, &loose, Place::Box(region.clone()), &region);
    }
    job.own(3, &loose);
    job.own(0, &Named::alias("loader.tied", "loader.cursor"));
    job.own(2, &Named::alias("loader.tied", "loader.cursor"));
    job.own(2, &Named::alias("own.big", "model.big"));
    job.finish()
}

/// Tensors cut over random meshes in random ways, some of it as explicit regions, with replicas held at random.
pub(crate) fn random(seed: u64) -> Saved {
    let mut numbers = Numbers(seed);
    let sides: Vec<u64> = (0..=numbers.below(3)).map(|_| 1 + numbers.below(3)).collect();
    let size = sides.iter().product::<u64>() as u32;
    let world = size + numbers.below(3) as u32;
    let mut ranks: Vec<u32> = (0..world).collect();
    (1..ranks.len()).rev().for_each(|at| ranks.swap(at, numbers.below(at as u64 + 1) as usize));
    ranks.truncate(size as usize);
    let mesh = Arc::new(Mesh::with_ranks(sides.clone(), ranks).unwrap());
    let (mut layouts, mut values) = (Vec::new(), Vec::new());
    for number in 0..1 + numbers.below(30) {
        let shape: Vec<u64> = (0..numbers.below(4)).map(|_| numbers.below(9)).collect();
        let dtype = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C64][numbers.below(4) as usize];
        let name = format!("{}.{number}", ["m", "m.layer", "o"][numbers.below(3) as usize]);
        let mut named = match numbers.below(8) {
            0 => Named::object(name),
            _ => Named::tensor(name, dtype, &shape),
        };
        if numbers.below(5) > 0 {
            let placements: Vec<_> =
                sides.iter().map(|_| random_placement(&mut numbers, shape.len() as u64)).collect();
            let plain = MeshLayout::new(Arc::clone(&mesh), placements.clone()).unwrap();
            let right_to_left = numbers.below(2) == 0 && plain.right_to_left().is_some();
            layouts.push(Layout { mesh: 0, placements, right_to_left });
            named = named.with_layout(layouts.len() as u32 - 1);
        }
        values.push(named);
    }
    let shared = numbers.below(values.len() as u64 + 1) as usize;
    let own = values.split_off(shared);
    let mut aliases = Vec::new();
    for named in &values {
        if numbers.below(6) == 0 {
            aliases.push(Named::alias(format!("tied.{}", named.name), &named.name));
        }
    }
    values.extend(aliases);
    let structure = Structure::new(vec![mesh], layouts, values).unwrap();
    let mut job = Job::new(numbers.next(), world, structure);
    for named in job.structure.clone().values() {
        store_somehow(&mut job, named);
    }
    for mut named in own {
        if let Value::Tensor(tensor) = &mut named.value {
            tensor.layout = None;
        }
        store_somehow(&mut job, &named);
    }
    job.finish()
}

fn random_placement(numbers: &mut Numbers, dims: u64) -> Placement {
    let dim = numbers.below(dims) as usize;
    match (dims, numbers.below(3)) {
        (0, _) | (_, 0) => Placement::Replicate,
        (_, 1) => Placement::Shard(dim),
        _ => Placement::StridedShard { dim, split_factor: 1 + numbers.below(3) },
    }
}

fn store_somehow(job: &mut Job, named: &Named) {
    let rank = job.numbers.below(u64::from(job.world)) as u32;
    let tensor = match &named.value {
        Value::Alias { .. } => return,
        Value::Object => return job.store_whole(rank, named),
        Value::Tensor(tensor) => tensor,
    };
    match (tensor.layout, job.numbers.below(4)) {
        (_, 0) => job.store_whole(rank, named),
        (Some(_), 1 | 2) => store_by_layout(job, named, false),
        (Some(_), _) => store_by_layout(job, named, true),
        (None, _) => {
            for region in pieces(job, &Region::whole(&tensor.shape.clone()), 3) {
                let rank = job.numbers.below(u64::from(job.world)) as u32;
                job.store(rank, named, Place::Box(region.clone()), &region);
            }
        }
    }
}

/// Each different set of boxes is stored by one of the ranks that hold it; `mixed`: some as explicit regions.
fn store_by_layout(job: &mut Job, named: &Named, mixed: bool) {
    let (number, _) = job.structure.find(&named.name).unwrap();
    let mut holders: BTreeMap<Vec<Region>, Vec<u32>> = BTreeMap::new();
    for rank in 0..job.world {
        if let Some(boxes) = job.structure.boxes_of(number, rank).unwrap() {
            holders.entry(boxes).or_default().push(rank);
        }
    }
    for (boxes, ranks) in holders {
        let rank = ranks[job.numbers.below(ranks.len() as u64) as usize];
        if !mixed || job.numbers.below(2) == 0 {
            job.store_shard(rank, named);
            continue;
        }
        for region in boxes {
            for region in pieces(job, &region, 2) {
                job.store(rank, named, Place::Box(region.clone()), &region);
            }
        }
    }
}

/// Cuts a box at random.
fn pieces(job: &mut Job, region: &Region, depth: u32) -> Vec<Region> {
    let dim = job.numbers.below(region.rank() as u64) as usize;
    if depth == 0 || region.rank() == 0 || job.numbers.below(3) == 0 {
        return vec![region.clone()];
    }
    let at = job.numbers.below(region.sizes[dim] + 1);
    let (mut low, mut high) = (region.clone(), region.clone());
    low.sizes[dim] = at;
    high.offsets[dim] += at;
    high.sizes[dim] -= at;
    let mut both = pieces(job, &low, depth - 1);
    both.extend(pieces(job, &high, depth - 1));
    both
}
