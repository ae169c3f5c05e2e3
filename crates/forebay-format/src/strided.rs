//! Copies between two arrangements of the same box of elements: what a tensor with strides is read by.
//!
//! torch saves a tensor as it lies in memory: a transposed one stays transposed, an expanded one is one row that is
//! used many times. To read it row-major, each dimension is a loop with a step in the source and one in the target.
//! [`Gather`] puts the loops in the order of the source, largest step outside, so that the source is read forwards once
//! (but for dimensions of step 0, which are outermost and repeat it), and merges what lies side by side in both.

use forebay_error::{Code, Error, Result};

/// One loop of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// How often; at least two.
    pub count: u64,
    /// Bytes from one to the next in the source.
    pub from: u64,
    /// Bytes from one to the next in the target.
    pub to: u64,
}

/// A copy of a box: runs of equal length in a nest of loops, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Bytes of each run, side by side in source and target; 0 for a box without elements.
    pub run: u64,
    /// The loops.
    pub loops: Vec<Loop>,
}

impl Gather {
    /// The copy of a box of `sizes` elements of `element` bytes, with strides in elements of source and target.
    ///
    /// Errors: `overflow` where a place leaves 64 bits.
    pub fn new(element: u64, sizes: &[u64], from: &[u64], to: &[u64]) -> Result<Self> {
        if sizes.contains(&0) {
            return Ok(Self { run: 0, loops: Vec::new() });
        }
        let bytes = |stride: u64| {
            stride.checked_mul(element).ok_or_else(|| {
                Error::new(Code::Overflow, format!("a stride of {stride} elements leaves 64 bits"))
            })
        };
        let mut loops = Vec::with_capacity(sizes.len());
        for ((&count, &from), &to) in sizes.iter().zip(from).zip(to) {
            if count > 1 {
                loops.push(Loop { count, from: bytes(from)?, to: bytes(to)? });
            }
        }
        // Stable, so that dimensions of one stride keep their order.
        loops.sort_by_key(|dim| std::cmp::Reverse(if dim.from == 0 { u64::MAX } else { dim.from }));
        let mut run = element;
        while let Some(inner) = loops.pop_if(|dim| dim.from == run && dim.to == run) {
            run = run.saturating_mul(inner.count);
        }
        let mut merged: Vec<Loop> = Vec::with_capacity(loops.len());
        for dim in loops.into_iter().rev() {
            match merged.last_mut() {
                Some(inner) if continues(&dim, inner) => {
                    inner.count = inner.count.saturating_mul(dim.count);
                }
                _ => merged.push(dim),
            }
        }
        merged.reverse();
        Ok(Self { run, loops: merged })
    }

    /// Bytes from the start of the first run in the source to the end of the last one; `None` past 64 bits.
    pub fn span(&self) -> Option<u64> {
        let last = self.loops.iter().try_fold(0_u64, |sum, dim| {
            (dim.count - 1).checked_mul(dim.from).and_then(|steps| sum.checked_add(steps))
        });
        last?.checked_add(self.run)
    }

    /// Takes one loop off that can be a row of runs (`from` and `to` at least a run, so that neither overlaps): the
    /// innermost such one; a loop of one where there is none. What is left are the loops around it.
    pub fn split_rows(mut self) -> (Vec<Loop>, Loop, u64) {
        let fits = |dim: &Loop| dim.from >= self.run && dim.to >= self.run;
        let row = self.loops.iter().rposition(fits);
        let rows = match row {
            Some(at) => self.loops.remove(at),
            None => Loop { count: 1, from: self.run, to: self.run },
        };
        (self.loops, rows, self.run)
    }

    /// Copies within memory: the box whose first element is at the start of `source` into the one at the start of
    /// `target`. Fails with `internal` where either is too short, which callers have checked.
    pub fn copy(&self, source: &[u8], target: &mut [u8]) -> Result<()> {
        if self.run == 0 {
            return Ok(());
        }
        let run = usize::try_from(self.run).unwrap_or(usize::MAX);
        let mut short = false;
        walk(&self.loops, |from, to| {
            let part = usize::try_from(from)
                .ok()
                .and_then(|from| source.get(from..from.checked_add(run)?));
            let place =
                usize::try_from(to).ok().and_then(|to| target.get_mut(to..to.checked_add(run)?));
            match part.zip(place) {
                Some((part, place)) => place.copy_from_slice(part),
                None => short = true,
            }
        });
        match short {
            false => Ok(()),
            true => Err(Error::new(Code::Internal, "a strided copy leaves its buffers")),
        }
    }
}

/// Whether the outer loop goes on where the inner one ends, on both sides.
fn continues(outer: &Loop, inner: &Loop) -> bool {
    inner.count.checked_mul(inner.from) == Some(outer.from)
        && inner.count.checked_mul(inner.to) == Some(outer.to)
}

/// Calls `each` with the place of each turn of the loops, (source, target) in bytes from the first.
pub fn walk(loops: &[Loop], mut each: impl FnMut(u64, u64)) {
    let mut at = vec![0_u64; loops.len()];
    let (mut from, mut to) = (0_u64, 0_u64);
    loop {
        each(from, to);
        let mut more = false;
        for (dim, count) in loops.iter().zip(&mut at).rev() {
            *count += 1;
            if *count < dim.count {
                from += dim.from;
                to += dim.to;
                more = true;
                break;
            }
            *count = 0;
            from -= (dim.count - 1) * dim.from;
            to -= (dim.count - 1) * dim.to;
        }
        if !more {
            return;
        }
    }
}

/// Strides of a row-major tensor, in elements.
pub fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1_u64;
    for (place, &side) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        stride = stride.saturating_mul(side.max(1));
    }
    strides
}

/// Whether a tensor of these strides lies row-major without gaps. Strides of dimensions of one element say nothing, nor
/// do those of a tensor without elements.
pub fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    shape.contains(&0)
        || shape
            .iter()
            .zip(strides)
            .zip(row_major(shape))
            .all(|((&side, &stride), plain)| side == 1 || stride == plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element by element, from the definition.
    fn naive(sizes: &[u64], from: &[u64], source: &[u8], element: usize) -> Vec<u8> {
        let count: u64 = sizes.iter().product();
        let mut out = Vec::new();
        for index in 0..count {
            let mut rest = index;
            let mut at = 0;
            for (&size, &stride) in sizes.iter().zip(from).rev() {
                at += (rest % size) * stride;
                rest /= size;
            }
            let at = at as usize * element;
            out.extend_from_slice(&source[at..at + element]);
        }
        out
    }

    #[test]
    fn gathers_equal_the_definition() {
        let source: Vec<u8> = (0..4096_u32).map(|at| (at * 7 + at / 256) as u8).collect();
        let cases: [(&[u64], &[u64]); 9] = [
            (&[4, 6], &[6, 1]),
            (&[4, 6], &[1, 4]),
            (&[3, 4], &[0, 1]),
            (&[3, 4], &[1, 0]),
            (&[2, 3, 4, 5], &[60, 1, 15, 3]),
            (&[5, 2], &[1, 1]),
            (&[3, 4], &[8, 2]),
            (&[], &[]),
            (&[1, 7, 1], &[900, 3, 77]),
        ];
        for (sizes, strides) in cases {
            for element in [1, 2, 4, 8] {
                let gather =
                    Gather::new(element as u64, sizes, strides, &row_major(sizes)).unwrap();
                let total = sizes.iter().product::<u64>() as usize * element;
                let mut target = vec![0; total];
                gather.copy(&source, &mut target).unwrap();
                assert_eq!(
                    target,
                    naive(sizes, strides, &source, element),
                    "{sizes:?} {strides:?}"
                );
                // The same, with one loop taken out.
                let (outer, rows, run) = gather.clone().split_rows();
                assert!(rows.from >= run && rows.to >= run);
                let mut turns = 0;
                walk(&outer, |_, _| turns += rows.count);
                assert_eq!(turns * run, total as u64);
            }
        }
    }

    #[test]
    fn what_lies_together_is_one_run() {
        let whole = Gather::new(4, &[4, 6, 2], &[12, 2, 1], &[12, 2, 1]).unwrap();
        assert_eq!((whole.run, whole.loops.len()), (192, 0));
        let columns = Gather::new(2, &[4, 2, 3], &[60, 3, 1], &[6, 3, 1]).unwrap();
        assert_eq!((columns.run, columns.loops), (12, vec![Loop { count: 4, from: 120, to: 12 }]));
        let transposed = Gather::new(4, &[4, 6], &[1, 4], &[6, 1]).unwrap();
        let inner = Loop { count: 4, from: 4, to: 24 };
        assert_eq!(transposed.loops, [Loop { count: 6, from: 16, to: 4 }, inner]);
        assert_eq!(transposed.span(), Some(96));
        assert_eq!(Gather::new(4, &[4, 0], &[1, 4], &[0, 1]).unwrap().run, 0);
        assert!(Gather::new(4, &[2], &[u64::MAX], &[1]).is_err());
        let far = Gather::new(1, &[u64::MAX], &[u64::MAX], &[1]).unwrap();
        assert_eq!(far.span(), None);
    }

    #[test]
    fn short_buffers_are_an_error() {
        let gather = Gather::new(1, &[2, 2], &[1, 2], &[2, 1]).unwrap();
        assert!(gather.copy(&[0; 3], &mut [0; 4]).is_err());
        assert!(gather.copy(&[0; 4], &mut [0; 3]).is_err());
    }

    #[test]
    fn row_major_is_known_with_sides_of_one() {
        assert!(is_row_major(&[2, 1, 3], &[3, 99, 1]));
        assert!(!is_row_major(&[2, 3], &[1, 2]));
        assert!(is_row_major(&[0, 3], &[1, 2]));
        assert!(is_row_major(&[], &[]));
    }
}
