//! Which rank writes what several ranks hold.
//!
//! Every rank computes the same from the same list, without a word to the others. Large items go one by one, the
//! largest first, each to the holder that has the fewest bytes by then; what only one rank holds counts before. Small
//! items that the same ranks hold go as bundles to one of them: spread over all files, a restore would open every file
//! for a few scalars.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use forebay_error::{Code, Error, Result};

/// Bytes below which an item is small.
pub const SMALL_BYTES: u64 = 64 << 10;

/// Bytes of a bundle of small items: 10 ms of one drive's time, and less than most single tensors.
const BUNDLE_BYTES: u64 = 16 << 20;

/// Items of a bundle: a writer spends microseconds on each.
const BUNDLE_ITEMS: u32 = 1 << 16;

/// Something to be written once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicated<'a> {
    /// Its size in bytes.
    pub bytes: u64,
    /// The ranks that hold it, in any order; at least one. Items that share a slice are cheaper than copies of it.
    pub ranks: &'a [u32],
}

/// Chooses the rank that writes each item: always the same for the same items in the same order.
///
/// Takes time near-linear in the items and the different lists. Fails with `usage` where an item has no rank.
pub fn assign_writers(items: &[Replicated<'_>]) -> Result<Vec<u32>> {
    let mut groups = Groups::default();
    let of_item = items.iter().enumerate().map(|(number, item)| groups.find(number, item.ranks));
    let of_item = of_item.collect::<Result<Vec<u32>>>()?;
    let mut loads = groups.loads();
    let mut writers = vec![0; items.len()];
    let (units, unit_of_item) = units(items, &of_item, &groups);
    // What has one holder counts first: there is nothing to choose.
    let mut order: Vec<usize> = (0..units.len()).collect();
    order.sort_by_key(|&at| {
        units.get(at).map(|unit| (groups.choices(unit.group) > 1, Reverse(unit.bytes)))
    });
    let mut chosen = vec![0; units.len()];
    for at in order {
        if let (Some(unit), Some(chosen)) = (units.get(at), chosen.get_mut(at)) {
            *chosen = groups.lightest(unit, &mut loads);
        }
    }
    for (writer, unit) in writers.iter_mut().zip(unit_of_item) {
        *writer = chosen.get(unit).copied().unwrap_or_default();
    }
    Ok(writers)
}

/// What is assigned at a time: a large item or a bundle.
struct Unit {
    group: u32,
    bytes: u64,
    items: u32,
}

/// The units in the order of their first items, and the unit of each item.
fn units(items: &[Replicated<'_>], of_item: &[u32], groups: &Groups) -> (Vec<Unit>, Vec<usize>) {
    let mut units: Vec<Unit> = Vec::new();
    // The bundle of each group that is not full yet.
    let mut open: Vec<Option<usize>> = vec![None; groups.heaps.len()];
    let mut unit_of_item = Vec::with_capacity(items.len());
    for (item, &group) in items.iter().zip(of_item) {
        let mut bundle = open.get_mut(group as usize).filter(|_| item.bytes < SMALL_BYTES);
        let last = bundle.as_ref().and_then(|bundle| **bundle);
        let room = |unit: &Unit| unit.bytes < BUNDLE_BYTES && unit.items < BUNDLE_ITEMS;
        match last.and_then(|at| units.get_mut(at).map(|unit| (at, unit))) {
            Some((at, unit)) if room(unit) => {
                unit.bytes += item.bytes;
                unit.items += 1;
                unit_of_item.push(at);
            }
            _ => {
                if let Some(bundle) = &mut bundle {
                    **bundle = Some(units.len());
                }
                unit_of_item.push(units.len());
                units.push(Unit { group, bytes: item.bytes, items: 1 });
            }
        }
    }
    (units, unit_of_item)
}

/// The different lists of ranks.
#[derive(Default)]
struct Groups {
    /// By address, for lists that items share; the items are borrowed all the while.
    by_slice: HashMap<(usize, usize), u32>,
    by_ranks: HashMap<Vec<u32>, u32>,
    /// (bytes, rank) of each group's ranks, least first; bytes may have grown since.
    heaps: Vec<BinaryHeap<Reverse<(u64, u32)>>>,
}

impl Groups {
    fn find(&mut self, number: usize, ranks: &[u32]) -> Result<u32> {
        let slice = (ranks.as_ptr() as usize, ranks.len());
        if let Some(&group) = self.by_slice.get(&slice) {
            return Ok(group);
        }
        if ranks.is_empty() {
            return Err(Error::new(Code::Usage, format!("no rank holds item {number}")));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        // One for each item at the most, and items in memory are fewer than 2^32 lists of ranks.
        let next = self.heaps.len() as u32;
        let group = *self.by_ranks.entry(sorted).or_insert_with_key(|ranks| {
            self.heaps.push(ranks.iter().map(|&rank| Reverse((0, rank))).collect());
            next
        });
        self.by_slice.insert(slice, group);
        Ok(group)
    }

    fn loads(&self) -> HashMap<u32, u64> {
        self.by_ranks.keys().flatten().map(|&rank| (rank, 0)).collect()
    }

    fn choices(&self, group: u32) -> usize {
        self.heaps.get(group as usize).map_or(0, BinaryHeap::len)
    }

    /// Gives a unit to the rank of its group that has the fewest bytes, the lowest of several.
    fn lightest(&mut self, unit: &Unit, loads: &mut HashMap<u32, u64>) -> u32 {
        let Some(heap) = self.heaps.get_mut(unit.group as usize) else { return 0 };
        while let Some(Reverse((seen, rank))) = heap.pop() {
            let load = loads.entry(rank).or_default();
            if seen == *load {
                *load = load.saturating_add(unit.bytes);
                heap.push(Reverse((*load, rank)));
                return rank;
            }
            // It got something through another group: back in, with what it has now.
            heap.push(Reverse((*load, rank)));
        }
        0
    }
}
