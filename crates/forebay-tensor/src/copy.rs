//! Which bytes of a chunk go where in a wanted region.
//!
//! As in [`byte_runs`](crate::byte_runs) the dimensions are walked from the innermost outwards, here with a stride on
//! both sides at once: what lies side by side in the chunk *and* in the wanted region becomes one run, what continues
//! on both sides one loop. The chunk may lie in strided memory (a transposed tensor is stored transposed, an expanded
//! one repeats its bytes); the wanted region is row-major.

use forebay_error::{Code, Error, Result};

use crate::{Dtype, Region, byte_len};

/// Where the elements of a chunk lie in what is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// Elements in front of the first.
    pub offset: u64,
    /// Elements from one to the next in each dimension; zero repeats one.
    pub strides: Vec<u64>,
}

impl Strides {
    /// Row-major, without gaps.
    pub fn row_major(sizes: &[u64]) -> Self {
        let mut stride = 1_u64;
        let mut strides = vec![0; sizes.len()];
        for (at, &size) in strides.iter_mut().zip(sizes).rev() {
            *at = stride;
            // An overflow is one of the whole size too, which `byte_len` refuses.
            stride = stride.saturating_mul(size.max(1));
        }
        Self { offset: 0, strides }
    }

    /// Bytes from the start of what is stored to the end of the last element; 0 where there is none.
    ///
    /// Fails with `overflow` where the bits of that leave 64 bits, with `misaligned` where it ends inside a byte, with
    /// `bad_slice` where there is not one stride for each size.
    pub fn span_bytes(&self, dtype: Dtype, sizes: &[u64]) -> Result<u64> {
        if sizes.len() != self.strides.len() {
            let (sides, strides) = (sizes.len(), self.strides.len());
            let what = format!("{strides} strides for a chunk of {sides} dimensions");
            return Err(Error::new(Code::BadSlice, what));
        }
        if sizes.contains(&0) {
            return Ok(0);
        }
        let mut last = Some(self.offset);
        for (size, stride) in sizes.iter().zip(&self.strides) {
            let step = (size - 1).checked_mul(*stride);
            last = last.zip(step).and_then(|(last, step)| last.checked_add(step));
        }
        match last.and_then(|last| last.checked_add(1)) {
            Some(elements) => byte_len(dtype, &[elements]),
            None => Err(Error::new(Code::Overflow, "a strided chunk has more than 2^64 elements")),
        }
    }
}

/// One loop over runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyDim {
    /// How often; at least two.
    pub count: u64,
    /// Bytes from one start to the next in the chunk.
    pub from_stride: u64,
    /// Bytes from one start to the next in the wanted region.
    pub to_stride: u64,
}

/// Moves from the bytes of a chunk to the bytes of a wanted region: runs of one length in a nest of loops, outermost
/// first, in ascending order of their place in the wanted region.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CopyRuns {
    /// Where the first run starts in the chunk's bytes.
    pub from: u64,
    /// Where it goes in the wanted region's bytes.
    pub to: u64,
    /// Bytes of each run; never 0.
    pub run: u64,
    /// The loops; none where all is one run.
    pub dims: Vec<CopyDim>,
}

/// Equal runs at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyRows {
    /// Where the first run starts in the chunk's bytes.
    pub from: u64,
    /// Bytes from run to run there; at least `run`.
    pub from_stride: u64,
    /// Where the first run goes in the wanted region's bytes.
    pub to: u64,
    /// Bytes from run to run there; at least `run`.
    pub to_stride: u64,
    /// Bytes of one run.
    pub run: u64,
    /// How many runs; at least one.
    pub rows: u64,
}

/// What to copy from the row-major bytes of `chunk` to those of `wanted`, both regions of one tensor; `None` where they
/// share no element.
///
/// Fails with `bad_slice` where they differ in the number of dimensions, with `misaligned` where runs of a sub-byte
/// type do not fall on bytes, with `overflow` where the bits of one of them leave 64 bits.
pub fn copy_runs(dtype: Dtype, chunk: &Region, wanted: &Region) -> Result<Option<CopyRuns>> {
    byte_len(dtype, &[chunk.elements()])?;
    copy_runs_strided(dtype, chunk, &Strides::row_major(&chunk.sizes), wanted)
}

/// As [`copy_runs`] from a chunk in strided memory.
///
/// Fails as [`Strides::span_bytes`] does too.
pub fn copy_runs_strided(
    dtype: Dtype,
    chunk: &Region,
    memory: &Strides,
    wanted: &Region,
) -> Result<Option<CopyRuns>> {
    if chunk.rank() != wanted.rank() {
        let what = format!("chunk {chunk} and region {wanted} are not of one tensor");
        return Err(Error::new(Code::BadSlice, what));
    }
    // Every place below is inside these, so that no sum or product of bits leaves 64 bits.
    memory.span_bytes(dtype, &chunk.sizes)?;
    byte_len(dtype, &[wanted.elements()])?;
    let Some(shared) = chunk.intersect(wanted) else { return Ok(None) };
    let bits = dtype.bits();
    let to_strides = Strides::row_major(&wanted.sizes).strides;
    let mut walk = Walk { from: memory.offset * bits, to: 0, run: bits, dims: Vec::new() };
    for dim in (0..shared.rank()).rev() {
        let side = |numbers: &[u64]| numbers.get(dim).copied().unwrap_or_default();
        let start = side(&shared.offsets);
        // The stride of a single element was not checked, and does not matter.
        let from_stride = if side(&chunk.sizes) > 1 { side(&memory.strides) * bits } else { 0 };
        let to_stride = side(&to_strides) * bits;
        walk.from += (start - side(&chunk.offsets)) * from_stride;
        walk.to += (start - side(&wanted.offsets)) * to_stride;
        walk.enter(CopyDim { count: side(&shared.sizes), from_stride, to_stride });
    }
    match walk.in_bytes() {
        Some(runs) => Ok(Some(runs)),
        None => {
            let what = format!("what chunk {chunk} and region {wanted} of {dtype} share");
            let what = format!("{what} does not start and end on whole bytes");
            Err(Error::new(Code::Misaligned, what))
        }
    }
}

/// Runs in the making: all in bits, loops innermost first.
struct Walk {
    from: u64,
    to: u64,
    run: u64,
    dims: Vec<CopyDim>,
}

impl Walk {
    /// Puts a loop around what is there.
    fn enter(&mut self, dim: CopyDim) {
        if dim.count == 1 {
            return;
        }
        match self.dims.last_mut() {
            None if dim.from_stride == self.run && dim.to_stride == self.run => {
                self.run *= dim.count;
            }
            Some(inner)
                if inner.count.checked_mul(inner.from_stride) == Some(dim.from_stride)
                    && inner.count.checked_mul(inner.to_stride) == Some(dim.to_stride) =>
            {
                inner.count *= dim.count;
            }
            _ => self.dims.push(dim),
        }
    }

    fn in_bytes(mut self) -> Option<CopyRuns> {
        let bytes = |bits: u64| bits.is_multiple_of(8).then_some(bits / 8);
        for dim in &mut self.dims {
            dim.from_stride = bytes(dim.from_stride)?;
            dim.to_stride = bytes(dim.to_stride)?;
        }
        self.dims.reverse();
        let (from, to, run) = (bytes(self.from)?, bytes(self.to)?, bytes(self.run)?);
        Some(CopyRuns { from, to, run, dims: self.dims })
    }
}

impl CopyRuns {
    /// Number of runs.
    pub fn run_count(&self) -> u64 {
        self.dims.iter().map(|dim| dim.count).product()
    }

    /// Bytes copied.
    pub fn total_bytes(&self) -> u64 {
        self.run * self.run_count()
    }

    /// The same as rows: the innermost loop whose runs lie apart on both sides becomes rows, the loops around it are
    /// unrolled. One item for whole tensors, rows and columns; as many as the outer loops turn for inner boxes. In
    /// ascending order of their place in a row-major chunk.
    pub fn rows(&self) -> impl Iterator<Item = CopyRows> + '_ {
        let apart = |dim: &CopyDim| dim.from_stride >= self.run && dim.to_stride >= self.run;
        let inner = self.dims.iter().rposition(apart);
        let rows = inner.and_then(|at| self.dims.get(at)).copied();
        let CopyDim { count: rows, from_stride, to_stride } =
            rows.unwrap_or(CopyDim { count: 1, from_stride: self.run, to_stride: self.run });
        let outer = self.dims.iter().enumerate().filter(move |(at, _)| Some(*at) != inner);
        let outer: Vec<CopyDim> = outer.map(|(_, dim)| *dim).collect();
        let turns = outer.iter().map(|dim| dim.count).product();
        (0..turns).map(move |turn: u64| {
            let (mut rest, mut from, mut to) = (turn, self.from, self.to);
            for dim in outer.iter().rev() {
                let at = rest % dim.count;
                rest /= dim.count;
                from += at * dim.from_stride;
                to += at * dim.to_stride;
            }
            CopyRows { from, from_stride, to, to_stride, run: self.run, rows }
        })
    }

    /// Copies in host memory, from the chunk's bytes to the wanted region's.
    ///
    /// Fails with `out_of_bounds` where a run leaves one of the two; what was copied before stays.
    pub fn copy(&self, chunk: &[u8], wanted: &mut [u8]) -> Result<()> {
        for rows in self.rows() {
            for row in 0..rows.rows {
                let from = part(chunk.len(), rows.from + row * rows.from_stride, self.run);
                let to = part(wanted.len(), rows.to + row * rows.to_stride, self.run);
                let source = from.and_then(|range| chunk.get(range));
                let target = to.and_then(|range| wanted.get_mut(range));
                match source.zip(target) {
                    Some((source, target)) => target.copy_from_slice(source),
                    None => {
                        let (from, to) = (chunk.len(), wanted.len());
                        let what = format!("a copy leaves the {from} or {to} bytes it is between");
                        return Err(Error::new(Code::OutOfBounds, what));
                    }
                }
            }
        }
        Ok(())
    }
}

/// A range of `run` bytes from `start`, where that lies inside `len`.
fn part(len: usize, start: u64, run: u64) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(start).ok()?;
    let end = start.checked_add(usize::try_from(run).ok()?)?;
    (end <= len).then_some(start..end)
}
