//! Where the bytes of a region lie inside the bytes of its tensor.
//!
//! The dimensions are walked from the innermost outwards with one contiguous run in hand. A dimension whose stride
//! is the length of the run lengthens the run; one whose stride continues the dimension inside it lengthens that
//! dimension; any other opens a new one; a dimension of one element adds nothing. What is left is the least nest of
//! loops that visits the runs in order, so that the engine sees one run where there is one.

use crate::{Dtype, Region, byte_len};
use forebay_error::{Code, Error, Result};

/// One loop over runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StridedDim {
    /// How often; at least two.
    pub count: u64,
    /// Bytes from one start to the next.
    pub stride: u64,
}

/// The bytes of a region: runs of one length, in a nest of strided dimensions, outermost first.
///
/// Row-major order, so the runs are in ascending order of their place, and the region's own bytes, packed, are the
/// runs one after another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ByteRuns {
    /// Byte of the tensor where the first run starts.
    pub start: u64,
    /// Bytes of each run; 0 for an empty region.
    pub run: u64,
    /// The loops, outermost first; none where the region is one run.
    pub dims: Vec<StridedDim>,
}

/// The bytes of `region` inside a row-major tensor.
///
/// Fails with `bad_slice` where the region leaves the shape, `misaligned` where runs of a sub-byte type do not fall on
/// bytes, and as [`byte_len`] does.
pub fn byte_runs(dtype: Dtype, shape: &[u64], region: &Region) -> Result<ByteRuns> {
    region.check_within(shape)?;
    byte_len(dtype, shape)?;
    if region.is_empty() {
        return Ok(ByteRuns { start: 0, run: 0, dims: Vec::new() });
    }
    // The region is not empty, so no side of the shape is zero, and every stride and start below is at most the bits
    // of the whole tensor, which `byte_len` found to fit.
    let mut run = dtype.bits();
    let mut stride = dtype.bits();
    let mut start = 0;
    let mut dims: Vec<StridedDim> = Vec::new();
    let sides = region.offsets.iter().zip(&region.sizes).zip(shape);
    for ((&offset, &count), &side) in sides.rev() {
        start += offset * stride;
        match dims.last_mut() {
            _ if count == 1 => {}
            None if stride == run => run *= count,
            Some(inner) if inner.count * inner.stride == stride => inner.count *= count,
            _ => dims.push(StridedDim { count, stride }),
        }
        stride *= side;
    }
    dims.reverse();
    in_bytes(start, run, dims).ok_or_else(|| {
        let what =
            format!("region {region} of {dtype} {shape:?} does not start and end on whole bytes");
        Error::new(Code::Misaligned, what)
    })
}

fn in_bytes(start: u64, run: u64, mut dims: Vec<StridedDim>) -> Option<ByteRuns> {
    let bytes = |bits: u64| bits.is_multiple_of(8).then_some(bits / 8);
    for dim in &mut dims {
        dim.stride = bytes(dim.stride)?;
    }
    Some(ByteRuns { start: bytes(start)?, run: bytes(run)?, dims })
}

impl ByteRuns {
    /// Number of runs.
    pub fn run_count(&self) -> u64 {
        if self.run == 0 { 0 } else { self.dims.iter().map(|dim| dim.count).product() }
    }

    /// Bytes of the region.
    pub fn total_bytes(&self) -> u64 {
        self.run * self.run_count()
    }

    /// Bytes from the start of the first run to the end of the last.
    pub fn span_bytes(&self) -> u64 {
        let steps: u64 = self.dims.iter().map(|dim| (dim.count - 1) * dim.stride).sum();
        steps + self.run
    }

    /// Each run as (byte of the tensor, byte of the packed region), in ascending order of both.
    pub fn iter(&self) -> RunIter<'_> {
        RunIter {
            runs: self,
            at: vec![0; self.dims.len()],
            source: self.start,
            destination: 0,
            left: self.run_count(),
        }
    }
}

impl<'a> IntoIterator for &'a ByteRuns {
    type Item = (u64, u64);
    type IntoIter = RunIter<'a>;

    fn into_iter(self) -> RunIter<'a> {
        self.iter()
    }
}

/// Iterator over the runs of [`ByteRuns`].
#[derive(Clone, Debug)]
pub struct RunIter<'a> {
    runs: &'a ByteRuns,
    at: Vec<u64>,
    source: u64,
    destination: u64,
    left: u64,
}

impl Iterator for RunIter<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        self.left = self.left.checked_sub(1)?;
        let item = (self.source, self.destination);
        self.destination += self.runs.run;
        for (at, dim) in self.at.iter_mut().zip(&self.runs.dims).rev() {
            *at += 1;
            if *at < dim.count {
                self.source += dim.stride;
                break;
            }
            *at = 0;
            self.source -= (dim.count - 1) * dim.stride;
        }
        Some(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match usize::try_from(self.left) {
            Ok(left) => (left, Some(left)),
            Err(_) => (usize::MAX, None),
        }
    }
}
