//! The size of a manifest at 16,384 ranks with a thousand tensors each, how much of it a restoring rank reads, and how
//! fast a rank with 20,000 tiny tensors is. Fails where a limit is not kept.
//!
//! ```sh
//! cargo run --release -p forebay-checkpoint --example manifest_scale [RANKS]
//! ```
//!
//! The state is that of a sharded optimizer: every tensor is cut over all ranks along its first dimension, each rank
//! stores one chunk of at most 1 MiB of each. Parts are made by the code of saves (`save::sketch_part`), with the
//! layout of files that they have. Nothing but the manifest is written, and it is written twice over: parts are made
//! once for the builder and once for the file, so that memory stays bounded. All numbers are of this process on this
//! machine;
//! sizes do not depend on either.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_checkpoint::commit::{AttemptId, RunId};
use forebay_checkpoint::manifest::{
    Builder, Info, Layout, Manifest, MemorySource, Named, Part, Structure, Value,
};
use forebay_checkpoint::model::Chunk;
use forebay_checkpoint::save::{SaveItem, SavePlan, Sketch, What, sketch_part};
use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, Mesh, Placement, Region};

const ATTEMPT: AttemptId = AttemptId { run: RunId(0x0123_abcd), save: 47 };
const TENSORS: u64 = 1000;
/// What the whole manifest may have, and what a restoring rank may read of it, at 16,384 ranks.
const MAX_TOTAL: u64 = 512_000_000;
const MAX_READ: u64 = 100_000_000;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(Some(16_384), |text| text.parse().ok());
    let ranks: u32 = ranks
        .filter(|&ranks| ranks > 0)
        .ok_or_else(|| Error::new(Code::Usage, "RANKS is a number above 0"))?;
    let folder = tempfile::tempdir().map_err(|error| Error::io("no folder for a file", error))?;
    let path = folder.path().join("manifest");
    let structure = Arc::new(state(ranks)?);
    let seal = write(ranks, &structure, &path)?;
    let file = File::open(&path).map_err(|error| Error::io("cannot open", error))?;
    let bytes = file.metadata().map_err(|error| Error::io("cannot stat", error))?.len();
    limit("manifest", bytes, MAX_TOTAL)?;
    for (what, share) in [("the same ranks", ranks), ("half of the ranks", ranks / 2)] {
        limit(what, restore(&file, bytes, &seal, share.max(1))?, MAX_READ)?;
    }
    say(format!("peak memory: {}", peak_memory()))?;
    tiny()
}

/// A thousand tensors of a large model: weights and two moments, with names as they are.
fn state(ranks: u32) -> Result<Structure> {
    let mesh = Arc::new(Mesh::new(vec![u64::from(ranks)])?);
    let layout = Layout { mesh: 0, placements: vec![Placement::Shard(0)], right_to_left: false };
    let modules = [("self_attn.q_proj", 16, 4096), ("mlp.down_proj", 8, 28_672), ("norm", 64, 0)];
    let mut values = Vec::new();
    for number in 0..TENSORS {
        let (layer, kind) = (number / 9, number % 9);
        let (module, rows, columns) = modules[kind as usize % 3];
        let state = ["", ".exp_avg", ".exp_avg_sq"][kind as usize / 3];
        let name = format!("optim.state.model.layers.{layer}.{module}.weight{state}");
        let rows = rows * u64::from(ranks) - kind;
        let shape = if columns == 0 { vec![rows] } else { vec![rows, columns] };
        values.push(Named::tensor(name, Dtype::F32, &shape).with_layout(0));
    }
    Structure::new(vec![mesh], vec![layout], values)
}

/// A rank's part, as a save of what the layout gives it makes it.
fn part(rank: u32, ranks: u32, structure: &Arc<Structure>) -> Result<Vec<u8>> {
    let mut items = Vec::new();
    for (named, number) in structure.values().iter().zip(0..) {
        let Value::Tensor(tensor) = &named.value else { continue };
        for region in structure.boxes_of(number, rank)?.unwrap_or_default() {
            let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
            let what = What::Tensor { dtype, shape, region, requires_grad: false };
            let (name, path) = (named.name.clone(), Vec::new());
            items.push(SaveItem { name, path, what, writes: true });
        }
    }
    let plan = SavePlan::new(items)?.with_structure(Arc::clone(structure), rank)?;
    let sketch = Sketch { attempt: ATTEMPT, rank, world: ranks, files: 1 };
    // Checksums do not compress, so any spread of bits will do.
    let crc = |item: usize, block: u64| {
        let seed = (u64::from(rank) << 40) ^ ((item as u64) << 20) ^ block;
        (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
    };
    sketch_part(&plan, &[], sketch, crc)
}

fn write(ranks: u32, structure: &Arc<Structure>, path: &std::path::Path) -> Result<[u8; 32]> {
    let info = Info {
        attempt: ATTEMPT.to_string(),
        run: ATTEMPT.run.to_string(),
        world_size: ranks,
        forebay: env!("CARGO_PKG_VERSION").into(),
        ..Info::default()
    };
    let mut builder = Builder::new(info, Arc::clone(structure));
    let (mut part_bytes, mut committing) = (0, std::time::Duration::ZERO);
    for rank in 0..ranks {
        let bytes = part(rank, ranks, structure)?;
        part_bytes = bytes.len();
        let start = Instant::now();
        builder.add_part(&bytes)?;
        committing += start.elapsed();
    }
    let start = Instant::now();
    let head = builder.finish()?;
    committing += start.elapsed();
    let chunks = u64::from(ranks) * TENSORS;
    say(format!("{ranks} ranks, {chunks} chunks: the last part has {part_bytes} bytes"))?;
    say(format!("checked and indexed by one thread in {:.2} s", committing.as_secs_f64()))?;
    let failed = |error| Error::io("cannot write the manifest", error);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(&head.bytes).map_err(failed)?;
    for rank in 0..ranks {
        file.write_all(&part(rank, ranks, structure)?).map_err(failed)?;
    }
    file.into_inner().map_err(|error| failed(error.into_error()))?;
    say(format!("head: {} bytes", head.bytes.len()))?;
    Ok(head.seal)
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    bytes: u64,
    read: Arc<AtomicU64>,
}

impl RangeSource for Counted {
    fn name(&self) -> String {
        "manifest".into()
    }

    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = self.file.read_at(into, offset)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    fn check_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// One rank of a job of `ranks` finds all of its chunks; gives the bytes that it read.
fn restore(file: &File, bytes: u64, seal: &[u8; 32], ranks: u32) -> Result<u64> {
    let file = file.try_clone().map_err(|error| Error::io("cannot clone a descriptor", error))?;
    let read = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let source = Counted { file, bytes, read: Arc::clone(&read) };
    let manifest = Manifest::open(Arc::new(source), Some(seal))?;
    let opened = start.elapsed();
    let (mut regions, mut wanted_elements) = (Vec::new(), 0);
    for named in manifest.table().values() {
        let Value::Tensor(tensor) = &named.value else { continue };
        let wanted = Region::shard(&tensor.shape, 0, u64::from(ranks / 3), u64::from(ranks))?;
        wanted_elements += wanted.elements();
        regions.push((named.name.as_str(), wanted));
    }
    let wants: Vec<(&str, &Region)> =
        regions.iter().map(|(name, region)| (*name, region)).collect();
    let found = manifest.find(&wants)?;
    let shared = |(chunks, (_, wanted)): (&Vec<Chunk>, &(&str, Region))| -> u64 {
        let shared = chunks.iter().filter_map(|chunk| chunk.region.intersect(wanted));
        shared.map(|shared| shared.elements()).sum()
    };
    let elements: u64 = found.chunks.iter().zip(&regions).map(shared).sum();
    let chunks: usize = found.chunks.iter().map(Vec::len).sum();
    if elements != wanted_elements {
        return Err(Error::new(Code::Internal, format!("{elements} of {wanted_elements} found")));
    }
    say(format!(
        "restored on {ranks} ranks: opened in {:.1} ms, {chunks} chunks found after {:.1} ms",
        opened.as_secs_f64() * 1e3,
        start.elapsed().as_secs_f64() * 1e3
    ))?;
    Ok(read.load(Ordering::Relaxed))
}

/// 20,000 tensors of 64 bytes on one rank: part and manifest, there and back.
fn tiny() -> Result<()> {
    let layout = Layout { mesh: 0, placements: vec![Placement::Replicate], right_to_left: false };
    let tensor = |number| {
        Named::tensor(format!("model.layer.{number}.bias"), Dtype::F32, &[16]).with_layout(0)
    };
    let mesh = Arc::new(Mesh::new(vec![1])?);
    let values = (0..20_000).map(tensor).collect();
    let structure = Arc::new(Structure::new(vec![mesh], vec![layout], values)?);
    let mut times = Vec::new();
    for _ in 0..10 {
        let mut marks = vec![Instant::now()];
        let bytes = part(0, 1, &structure)?;
        marks.push(Instant::now());
        Part::decode(&bytes, "part")?;
        marks.push(Instant::now());
        let info = Info { attempt: ATTEMPT.to_string(), world_size: 1, ..Info::default() };
        let mut builder = Builder::new(info, Arc::clone(&structure));
        builder.add_part(&bytes)?;
        let head = builder.finish()?;
        marks.push(Instant::now());
        let all = [head.bytes, bytes].concat();
        let manifest = Manifest::open(Arc::new(MemorySource::new("m", all)), Some(&head.seal))?;
        marks.push(Instant::now());
        for named in manifest.table().values() {
            manifest.chunks_for(&named.name, &Region::whole(&[16]))?;
        }
        marks.push(Instant::now());
        let steps = marks.windows(2).map(|pair| match pair {
            [from, to] => (*to - *from).as_secs_f64() * 1e3,
            _ => 0.0,
        });
        times.push(steps.collect::<Vec<_>>());
    }
    let best = |step: usize| times.iter().map(|run| run[step]).fold(f64::INFINITY, f64::min);
    say(format!(
        "20,000 tensors of 64 bytes on one rank, best of 10 in ms: part made and encoded {:.1}, \
         decoded {:.1}, manifest built {:.1}, opened {:.1}, all chunks found {:.1}",
        best(0),
        best(1),
        best(2),
        best(3),
        best(4)
    ))
}

fn limit(what: &str, bytes: u64, limit: u64) -> Result<()> {
    say(format!("{what}: {bytes} bytes, limit {limit}"))?;
    match bytes < limit {
        true => Ok(()),
        false => Err(Error::new(Code::Internal, format!("{what}: over the limit"))),
    }
}

fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap_or("unknown").trim().to_owned()
}

fn say(line: String) -> Result<()> {
    writeln!(io::stdout(), "{line}").map_err(|error| Error::io("cannot print", error))
}
