//! Times the region arithmetic at the sizes that checkpoints reach: a million chunks, and 16,384 ranks.
//!
//! `cargo run --release -p forebay-tensor --example regions [chunks]`

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use forebay_tensor::{
    ChunkIndex, Dtype, Mesh, MeshLayout, Placement, Region, Repeats, Replicated, Tiling,
    assign_writers, check_cover, copy_runs,
};

/// Boxes of one size that fill `counts` places in each dimension, or a pattern of bricks.
fn grid(counts: &[u64], size: u64) -> (Vec<u64>, Vec<Region>) {
    let total: u64 = counts.iter().product();
    let chunk = |number: u64| {
        let mut rest = number;
        let mut offsets = vec![0; counts.len()];
        for (offset, count) in offsets.iter_mut().zip(counts).rev() {
            *offset = rest % count * size;
            rest /= count;
        }
        Region { offsets, sizes: vec![size; counts.len()] }
    };
    let shape = counts.iter().map(|count| count * size).collect();
    (shape, (0..total).map(chunk).collect())
}

/// Two-by-one boxes that lie across and along in turn, as a parquet floor: a plane has no straight cut through all.
fn parquet(side: u64) -> (Vec<u64>, Vec<Region>) {
    let pair = |number: u64| {
        let (top, left) = (number / side * 2, number % side * 2);
        let across = (number / side + number % side).is_multiple_of(2);
        let (second, sizes) = if across { ([1, 0], [1, 2]) } else { ([0, 1], [2, 1]) };
        let region = |at: [u64; 2]| Region {
            offsets: vec![top + at[0], left + at[1]],
            sizes: sizes.to_vec(),
        };
        [region([0, 0]), region(second)]
    };
    (vec![side * 2; 2], (0..side * side).flat_map(pair).collect())
}

/// Mixes the order, so that nothing comes sorted.
fn scattered(mut chunks: Vec<Region>) -> Vec<Region> {
    let len = chunks.len() as u64;
    for at in 0..len {
        let other = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) % len;
        chunks.swap(at as usize, other as usize);
    }
    chunks
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let start = Instant::now();
    Ok((work()?, start.elapsed()))
}

fn line(text: std::fmt::Arguments<'_>) -> Result<()> {
    let written = writeln!(std::io::stdout(), "{text}");
    written.map_err(|error| Error::io("cannot write to standard output", error))
}

fn chunks(name: &str, shape: &[u64], chunks: &[Region]) -> Result<()> {
    let ((), cover) = timed(|| check_cover(shape, chunks, Repeats::Overlap))?;
    let mut missing = chunks.to_vec();
    missing.swap_remove(chunks.len() / 2);
    let start = Instant::now();
    let found = check_cover(shape, &missing, Repeats::Overlap).map_err(|error| error.code());
    let hole = start.elapsed();
    if found != Err(Code::Hole) {
        return Err(Error::new(Code::Internal, "the hole was not found"));
    }
    let (index, build) = timed(|| ChunkIndex::build(shape, chunks))?;
    // One of a hundred parts of the first dimension, then of the last.
    let mut queries = String::new();
    for dim in [0, shape.len() - 1] {
        let wanted = Region::shard(shape, dim, 41, 100)?;
        let count = || index.intersecting(&wanted).map(Iterator::count);
        let (count, query) = timed(count)?;
        queries += &format!(", {count} found in {:.1} ms", query.as_secs_f64() * 1e3);
    }
    let ms = |time: Duration| time.as_millis();
    let (cover, hole, build) = (ms(cover), ms(hole), ms(build));
    let many = chunks.len();
    line(format_args!(
        "{name}: {many} chunks, cover {cover} ms, hole found {hole} ms, index {build} ms{queries}"
    ))
}

/// 16,384 ranks: what each holds, the tiles of the mesh, and what one of 12,288 other ranks reads.
fn ranks() -> Result<()> {
    let shape = [1 << 16, 1 << 14];
    let strided = Placement::StridedShard { dim: 0, split_factor: 8 };
    for (name, mesh, placements) in [
        ("FSDP 16384", vec![16384], vec![Placement::Shard(0)]),
        ("FSDP 2048 x TP 8", vec![2048, 8], vec![strided, Placement::Shard(0)]),
        ("HSDP 128 x 128", vec![128, 128], vec![Placement::Replicate, Placement::Shard(0)]),
        ("128 x 128 grid", vec![128, 128], vec![Placement::Shard(0), Placement::Shard(1)]),
    ] {
        let layout = MeshLayout::new(Arc::new(Mesh::new(mesh)?), placements)?;
        let mesh = layout.mesh();
        let (pieces, local) = timed(|| {
            (0..mesh.size()).try_fold(0, |sum, index| {
                Ok(sum + layout.local(&shape, &mesh.coordinate(index))?.pieces.len())
            })
        })?;
        let (tiling, build) = timed(|| Tiling::new(&layout, &shape))?;
        let (tiles, all) = timed(|| Ok(tiling.tiles().count()))?;
        let wanted = Region::shard(&shape, 1, 5000, 12288)?;
        let (runs, query) = timed(|| {
            tiling.intersecting(&wanted)?.try_fold(0, |sum, (tile, _)| {
                let runs = copy_runs(Dtype::F32, &tile.region, &wanted)?;
                Ok(sum + runs.map_or(0, |runs| runs.rows().count()))
            })
        })?;
        let us = |time: Duration| time.as_micros();
        let (local, build, all, query) = (us(local), us(build), us(all), us(query));
        line(format_args!(
            "{name}: {pieces} pieces of all ranks {local} us, tiling {build} us, its {tiles} tiles \
             {all} us, {runs} moves of one reader {query} us"
        ))?;
    }
    Ok(())
}

fn writers(count: usize) -> Result<()> {
    let groups: Vec<Vec<u32>> =
        (0..128).map(|shard| (0..128).map(|replica| replica * 128 + shard).collect()).collect();
    let items: Vec<Replicated<'_>> = (0..count)
        .zip(groups.iter().cycle())
        .map(|(number, ranks)| Replicated { bytes: (number as u64 * 7919) % (4 << 20), ranks })
        .collect();
    let (writers, time) = timed(|| assign_writers(&items))?;
    let mut loads = vec![0; 16384];
    for (item, &writer) in items.iter().zip(&writers) {
        if let Some(load) = loads.get_mut(writer as usize) {
            *load += item.bytes;
        }
    }
    let (least, most) = (loads.iter().min(), loads.iter().max());
    let mib = |bytes: Option<&u64>| bytes.map_or(0.0, |&bytes| bytes as f64 / (1 << 20) as f64);
    line(format_args!(
        "writers of {count} items among 16384 ranks: {} ms, {:.1} to {:.1} MiB a rank",
        time.as_millis(),
        mib(least),
        mib(most)
    ))
}

fn main() -> Result<()> {
    let count: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1 << 20);
    let side = (count as f64).sqrt() as u64;
    let (shape, rows) = grid(&[count], 8);
    chunks("1-d grid", &shape, &rows)?;
    chunks("1-d grid, no order", &shape, &scattered(rows))?;
    let (shape, boxes) = grid(&[side, side], 8);
    chunks("2-d grid", &shape, &boxes)?;
    chunks("2-d grid, no order", &shape, &scattered(boxes))?;
    let third = (count as f64).cbrt() as u64;
    let (shape, boxes) = grid(&[third, third, third], 8);
    chunks("3-d grid, no order", &shape, &scattered(boxes))?;
    let (shape, boxes) = parquet((count as f64 / 2.0).sqrt() as u64);
    chunks("parquet, no order", &shape, &scattered(boxes))?;
    ranks()?;
    writers(count as usize)
}
