//! From names and regions to a plan.

use forebay_error::{Code, Error, Result};
use forebay_format::{Catalog, Stored, TensorEntry};
use forebay_tensor::{Region, byte_len, byte_runs};

use crate::plan::{Check, Move, Plan};

/// Moves that one tensor's region may take: a region cut in every dimension of a many-dimensional tensor can ask for
/// more rows than anybody wants to list.
const MOVES_MAX: u64 = 4 << 20;

/// One tensor, or a region of it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Index of the tensor in the catalog.
    pub tensor: usize,
    /// The region; `None` for all of it.
    pub region: Option<Region>,
}

/// What to load, in reading order: the target of `wanted[i]` is target `i` of the plan.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Tensors and regions, ordered by file and offset.
    pub wanted: Vec<Wanted>,
    /// Bytes of each.
    pub bytes: Vec<u64>,
    moves: Vec<Move>,
    checks: Vec<Check>,
    /// Whether those are of blocks, or of whole records.
    has_blocks: bool,
}

impl Selection {
    /// Orders `wanted` as the files have it and works out its bytes.
    ///
    /// Errors: `no_such_tensor`; `bad_slice` for a region outside of its tensor; `misaligned` for a region of a
    /// sub-byte dtype that does not fall on bytes; `unsupported` for one in too many runs.
    pub fn new(catalog: &Catalog, mut wanted: Vec<Wanted>) -> Result<Self> {
        for want in &wanted {
            if want.tensor >= catalog.tensors.len() {
                let text = format!("the catalog has no tensor number {}", want.tensor);
                return Err(Error::new(Code::NoSuchTensor, text));
            }
        }
        let place = |want: &Wanted| {
            catalog.tensors.get(want.tensor).map(|entry| (entry.file, entry.offset))
        };
        wanted.sort_by_key(place);
        let mut bytes = Vec::with_capacity(wanted.len());
        let mut moves = Vec::with_capacity(wanted.len());
        for (target, want) in wanted.iter().enumerate() {
            bytes.push(add_moves(catalog, want, target as u32, &mut moves)?);
        }
        let (checks, has_blocks) = (checks_of(catalog), catalog.has_blocks);
        Ok(Self { wanted, bytes, moves, checks, has_blocks })
    }

    /// Every tensor whole.
    pub fn all(catalog: &Catalog) -> Result<Self> {
        let all = (0..catalog.tensors.len()).map(|tensor| Wanted { tensor, region: None });
        Self::new(catalog, all.collect())
    }

    /// Without its checksums: nothing is compared with them. For measurements of what that costs, and for callers that
    /// compare those of records themselves.
    pub fn unchecked(self) -> Self {
        Self { checks: Vec::new(), ..self }
    }

    /// The plan, cut in pieces of `piece_bytes`.
    pub fn plan(self, piece_bytes: u64) -> Result<(Vec<Wanted>, Plan)> {
        self.cut(piece_bytes, &[])
    }

    /// The plan for a load in batches of neighbouring targets, each of at most `batch_bytes` or of one target: a batch
    /// completes when its own targets have been provided, whatever comes next ([`Plan::needs`]).
    pub fn plan_in_batches(
        self,
        piece_bytes: u64,
        batch_bytes: u64,
    ) -> Result<(Vec<Wanted>, Plan)> {
        let mut starts = Vec::new();
        let mut held = 0_u64;
        for (target, &bytes) in self.bytes.iter().enumerate() {
            if target == 0 || held.saturating_add(bytes) > batch_bytes {
                starts.push(target as u32);
                held = 0;
            }
            held = held.saturating_add(bytes);
        }
        self.cut(piece_bytes, &starts)
    }

    fn cut(self, piece_bytes: u64, batches: &[u32]) -> Result<(Vec<Wanted>, Plan)> {
        let build = if self.has_blocks { Plan::build_checked } else { Plan::build_recorded };
        let plan = build(self.moves, self.bytes, piece_bytes, batches, self.checks)?;
        Ok((self.wanted, plan))
    }
}

/// Adds the moves of one tensor or region; returns its bytes.
fn add_moves(catalog: &Catalog, want: &Wanted, target: u32, moves: &mut Vec<Move>) -> Result<u64> {
    let Some(entry) = catalog.tensors.get(want.tensor) else { return Ok(0) };
    if entry.stored != Stored::Run {
        return add_pieces(entry, want.region.as_ref(), target, moves)
            .map_err(|error| error.at(format!("tensor {:?}", entry.name)));
    }
    let object = entry.file as u32;
    let Some(region) = &want.region else {
        moves.push(Move::contiguous(object, target, entry.offset, 0, entry.bytes));
        return Ok(entry.bytes);
    };
    let place = |error: Error| error.at(format!("tensor {:?}", entry.name));
    region.check_within(&entry.shape).map_err(place)?;
    let runs = byte_runs(entry.dtype, &entry.shape, region).map_err(|error| {
        // The data is sound; it is the region that cannot be had.
        let code = if error.code() == Code::Misaligned { Code::BadSlice } else { error.code() };
        place(Error::new(code, error.what()))
    })?;
    let total = runs.total_bytes();
    if total == 0 {
        return Ok(0);
    }
    let (outer, (rows, from_stride)) = match runs.dims.split_last() {
        Some((last, outer)) => (outer, (last.count, last.stride)),
        None => (&[][..], (1, runs.run)),
    };
    let block = rows * runs.run;
    let blocks = total / block.max(1);
    if blocks > MOVES_MAX {
        return Err(place(too_many(blocks)).hint("load the whole tensor and slice it in memory"));
    }
    let mut at = vec![0_u64; outer.len()];
    for index in 0..blocks {
        let offset: u64 = outer.iter().zip(&at).map(|(dim, &count)| dim.stride * count).sum();
        let from = entry.offset + runs.start + offset;
        let (to, to_stride) = (index * block, runs.run);
        moves.push(Move { object, target, from, from_stride, to, to_stride, run: runs.run, rows });
        // The next place of the outer dimensions, the last counting fastest.
        for (dim, count) in outer.iter().zip(&mut at).rev() {
            *count += 1;
            if *count < dim.count {
                break;
            }
            *count = 0;
        }
    }
    Ok(total)
}

fn checks_of(catalog: &Catalog) -> Vec<Check> {
    let check = |check: &forebay_format::Check| Check {
        object: check.file as u32,
        offset: check.offset,
        len: check.bytes,
        crc: check.crc,
    };
    catalog.checks.iter().map(check).collect()
}

fn too_many(blocks: u64) -> Error {
    let text = format!("the region consists of {blocks} separate blocks, at most {MOVES_MAX}");
    Error::new(Code::Unsupported, text)
}

/// Adds the moves of a tensor that is stored in pieces or with strides. They follow the order of the file, whatever the
/// order of the target, so that bytes are read once: a transposed matrix is scattered column by column.
fn add_pieces(
    entry: &TensorEntry,
    region: Option<&Region>,
    target: u32,
    moves: &mut Vec<Move>,
) -> Result<u64> {
    if let Some(region) = region {
        region.check_within(&entry.shape)?;
    }
    let mut total = 0_u64;
    for placed in entry.gathers(region)? {
        let turns = placed.runs.rows().size_hint().0 as u64;
        total = total.saturating_add(turns);
        if total > MOVES_MAX {
            return Err(too_many(total).hint("save tensor.contiguous()"));
        }
        moves.extend(placed.runs.rows().map(|rows| Move {
            object: placed.file as u32,
            target,
            from: rows.from,
            from_stride: rows.from_stride,
            to: rows.to,
            to_stride: rows.to_stride,
            run: rows.run,
            rows: rows.rows,
        }));
    }
    byte_len(entry.dtype, region.map_or(&entry.shape, |region| &region.sizes))
}
