//! The size of a manifest at 16,384 ranks with a thousand tensors each, how much of it a restoring rank reads, and how
//! fast a rank with 20,000 tiny tensors is. Fails where a limit is not kept.
//!
//! ```sh
//! cargo run --release -p forebay-checkpoint --example manifest_scale [RANKS]
//! ```
//!
//! The state is that of a sharded optimizer: every tensor is cut over all ranks along its first dimension, each rank
//! stores one chunk of at most 1 MiB of each, with the items laid out as saves do. Nothing but the manifest is written,
//! and it is written twice over: parts are made once for the builder and once for the file, so that memory stays
//! bounded. All numbers are of this process on this machine; sizes do not depend on either.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_checkpoint::manifest::{
    Builder, Info, ItemPlace, Layout, Manifest, MemorySource, Named, Part, PartFile, Place,
    Structure, Value, ValueRef,
};
use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, Mesh, Placement, Region, byte_len};

const ATTEMPT: &str = "0123abcd-2f";
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

/// A rank's part, with items one after the other as a save lays them out: large elements on 4096, small ones on 64.
fn part(rank: u32, ranks: u32, structure: &Structure, hash: [u8; 32]) -> Result<Vec<u8>> {
    let mut part = Part::builder(ATTEMPT, rank, ranks);
    part.structure(hash, structure.values().len() as u32);
    let name = format!("{ATTEMPT}_{rank}_0.distcp");
    let file = part.file(PartFile { name, bytes: 0, crc: None });
    let (mut end, mut crc) = (0u64, rank.wrapping_mul(0x9E37_79B9) | 1);
    for (named, number) in structure.values().iter().zip(0..) {
        let Value::Tensor(tensor) = &named.value else { continue };
        for region in structure.boxes_of(number, rank)?.unwrap_or_default() {
            let bytes = byte_len(tensor.dtype, &region.sizes)?;
            let align = if bytes >= 64 << 10 { 4096 } else { 64 };
            let data_offset = (end + 480 + named.name.len() as u64 % 8).next_multiple_of(align);
            let length = data_offset - end + bytes + 410;
            let item = ItemPlace { file, offset: end, length, data_offset, data_bytes: bytes };
            let mut crcs = Vec::new();
            for _ in 0..bytes.div_ceil(1 << 20) {
                // Checksums do not compress, so any spread of bits will do.
                crc ^= crc << 13;
                crc ^= crc >> 17;
                crc ^= crc << 5;
                crcs.push(crc);
            }
            part.chunk(ValueRef::Shared(number), Place::Implied, item, &crcs);
            end += length;
        }
    }
    part.set_file(file, end, None);
    part.finish()?.encode()
}

fn write(ranks: u32, structure: &Arc<Structure>, path: &std::path::Path) -> Result<[u8; 32]> {
    let info = Info {
        attempt: ATTEMPT.into(),
        run: "0123abcd".into(),
        world_size: ranks,
        forebay: env!("CARGO_PKG_VERSION").into(),
        ..Info::default()
    };
    let hash = structure.hash();
    let mut builder = Builder::new(info, Arc::clone(structure));
    let (mut part_bytes, mut committing) = (0, std::time::Duration::ZERO);
    for rank in 0..ranks {
        let bytes = part(rank, ranks, structure, hash)?;
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
        file.write_all(&part(rank, ranks, structure, hash)?).map_err(failed)?;
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
    let (mut chunks, mut elements, mut wanted_elements) = (0, 0, 0);
    for named in manifest.table().values() {
        let Value::Tensor(tensor) = &named.value else { continue };
        let wanted = Region::shard(&tensor.shape, 0, u64::from(ranks / 3), u64::from(ranks))?;
        wanted_elements += wanted.elements();
        for chunk in manifest.chunks_for(&named.name, &wanted)? {
            chunks += 1;
            elements += chunk.region.intersect(&wanted).map_or(0, |shared| shared.elements());
        }
    }
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
    let hash = structure.hash();
    let mut times = Vec::new();
    for _ in 0..10 {
        let mut marks = vec![Instant::now()];
        let bytes = part(0, 1, &structure, hash)?;
        marks.push(Instant::now());
        Part::decode(&bytes, "part")?;
        marks.push(Instant::now());
        let info = Info { attempt: ATTEMPT.into(), world_size: 1, ..Info::default() };
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
