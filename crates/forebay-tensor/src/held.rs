//! Which elements of one dimension a rank holds.
//!
//! Cutting a dimension keeps some of the elements held so far, counted by their number among those held; a strided cut
//! keeps several stretches of them. Order is never changed, so what is held is a list of ascending runs.

use forebay_error::{Code, Error, Result};

/// Runs that one rank may hold of one dimension. Real layouts have as many as another dimension of the mesh has ranks.
const MAX_RUNS: u64 = 1 << 20;

/// Elements of one dimension, ascending: runs (start, length), none empty, none touching the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    runs: Vec<(u64, u64)>,
    len: u64,
}

impl Held {
    /// All of a dimension.
    pub(crate) fn all(side: u64) -> Self {
        let mut held = Self { runs: Vec::new(), len: 0 };
        held.push(0, side);
        held
    }

    pub(crate) fn runs(&self) -> &[(u64, u64)] {
        &self.runs
    }

    /// Elements in all runs.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// What `part` of `parts` keeps when the elements held are cut as `torch.chunk` does.
    pub(crate) fn shard(&self, part: u64, parts: u64) -> Self {
        self.keep(std::iter::once(chunk(self.len, part, parts)))
    }

    /// What `part` of `parts` keeps when the elements held are first cut into `split_factor` pieces, then each of
    /// those for `parts`. Fails with `unsupported` where that are too many runs.
    pub(crate) fn strided(&self, part: u64, parts: u64, split_factor: u64) -> Result<Self> {
        let rows = self.len.div_ceil(split_factor).max(1);
        // Later pieces may be empty: no more are looked at than there are elements.
        let pieces = self.len.div_ceil(rows);
        if pieces.saturating_add(self.runs.len() as u64) > MAX_RUNS {
            let what = format!("a strided shard has {pieces} pieces, over {MAX_RUNS}");
            return Err(Error::new(Code::Unsupported, what));
        }
        Ok(self.keep((0..pieces).map(|piece| {
            let first = piece * rows;
            let (start, len) = chunk(rows.min(self.len - first), part, parts);
            (first + start, len)
        })))
    }

    /// Keeps stretches (first, length) of the elements held, which must come in ascending order.
    fn keep(&self, stretches: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut kept = Self { runs: Vec::new(), len: 0 };
        let mut runs = self.runs.iter();
        // The run in hand, and the number of its first element among those held.
        let mut run = runs.next();
        let mut number = 0;
        for (mut first, mut len) in stretches {
            while len > 0
                && let Some(&(start, run_len)) = run
            {
                let skip = first - number;
                if skip >= run_len {
                    number += run_len;
                    run = runs.next();
                    continue;
                }
                let taken = len.min(run_len - skip);
                kept.push(start + skip, taken);
                first += taken;
                len -= taken;
            }
        }
        kept
    }

    fn push(&mut self, start: u64, len: u64) {
        if len == 0 {
            return;
        }
        self.len += len;
        match self.runs.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += len,
            _ => self.runs.push((start, len)),
        }
    }
}

/// (first, length) of `part` when `len` elements are cut into `parts` as `torch.chunk` does: ceil(len / parts) each, so
/// that later parts may have fewer or none.
fn chunk(len: u64, part: u64, parts: u64) -> (u64, u64) {
    let rows = len.div_ceil(parts);
    let first = part.saturating_mul(rows).min(len);
    (first, rows.min(len - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_cuts_are_those_of_torch() {
        // The example in torch's own documentation: nine elements, split factor 2, four ranks.
        let runs = |part| Held::all(9).strided(part, 4, 2).unwrap().runs().to_vec();
        assert_eq!(runs(0), [(0, 2), (5, 1)]);
        assert_eq!(runs(1), [(2, 2), (6, 1)]);
        assert_eq!(runs(2), [(4, 1), (7, 1)]);
        assert_eq!(runs(3), [(8, 1)]);
        // Neighbours are one run.
        assert_eq!(Held::all(8).strided(0, 1, 4).unwrap().runs(), [(0, 8)]);
    }

    #[test]
    fn cuts_of_cuts() {
        let held = Held::all(16).strided(1, 2, 4).unwrap();
        assert_eq!(held.runs(), [(2, 2), (6, 2), (10, 2), (14, 2)]);
        assert_eq!(held.shard(1, 3).runs(), [(7, 1), (10, 2)]);
        assert_eq!(held.strided(1, 2, 2).unwrap().runs(), [(6, 2), (14, 2)]);
        assert_eq!(held.shard(2, 3).len(), 2);
        assert_eq!(held.shard(7, 8).runs(), [(15, 1)]);
        assert!(held.shard(4, 5).runs().is_empty());
        assert_eq!(Held::all(0).shard(0, 3).len(), 0);
        assert_eq!(Held::all(0).strided(0, 3, 2).unwrap().len(), 0);
    }

    #[test]
    fn absurd_split_factors_cost_nothing() {
        assert_eq!(Held::all(4).strided(0, 2, u64::MAX).unwrap().len(), 4);
        let error = Held::all(u64::MAX).strided(0, 2, u64::MAX).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported);
        assert_eq!(Held::all(u64::MAX).shard(u64::MAX - 2, u64::MAX - 1).runs().len(), 0);
    }
}
