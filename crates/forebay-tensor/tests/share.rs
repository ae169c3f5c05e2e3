//! Who writes what several ranks hold.

use std::collections::{BTreeSet, HashMap};

use forebay_error::Code;
use forebay_tensor::{
    Mesh, MeshLayout, Placement, Replicated, SMALL_BYTES, Tiling, assign_writers, byte_len,
};
use proptest::prelude::*;

/// Bytes of each rank.
fn loads(items: &[Replicated<'_>], writers: &[u32]) -> HashMap<u32, u64> {
    let mut loads = HashMap::new();
    for (item, writer) in items.iter().zip(writers) {
        *loads.entry(*writer).or_default() += item.bytes;
    }
    loads
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_holder_writes_and_no_rank_gets_more_than_it_must(
        lists in prop::collection::vec(prop::collection::vec(0_u32..12, 1..6), 1..8),
        items in prop::collection::vec((any::<usize>(), 0_u64..40 << 20), 0..60),
    ) {
        let item = |&(list, bytes): &(usize, u64)| {
            Replicated { bytes, ranks: &lists[list % lists.len()] }
        };
        let items: Vec<_> = items.iter().map(item).collect();
        let writers = assign_writers(&items).unwrap();
        prop_assert!(items.iter().zip(&writers).all(|(item, writer)| item.ranks.contains(writer)));
        // Other memory and another order of the ranks: the same answer.
        let mut copies: Vec<Vec<u32>> = items.iter().map(|item| item.ranks.to_vec()).collect();
        copies.iter_mut().step_by(2).for_each(|ranks| ranks.reverse());
        let again = items.iter().zip(&copies);
        let again = again.map(|(item, ranks)| Replicated { bytes: item.bytes, ranks });
        prop_assert_eq!(&assign_writers(&again.collect::<Vec<_>>()).unwrap(), &writers);
        // Greedy by size: a rank is over the lightest holder of its last item by no more than that item.
        let loads = loads(&items, &writers);
        for (rank, load) in &loads {
            let mine = items.iter().zip(&writers).filter(|(_, writer)| *writer == rank);
            let free: Vec<_> = mine.clone().filter(|(item, _)| item.ranks.len() > 1).collect();
            let slack = free.iter().map(|(item, _)| item.bytes).min().unwrap_or(0);
            let settled = free.iter().filter(|(item, _)| {
                let others = item.ranks.iter().map(|rank| loads.get(rank).copied().unwrap_or(0));
                others.min().is_some_and(|least| load.saturating_sub(least) <= slack + (17 << 20))
            });
            prop_assert!(free.is_empty() || settled.count() > 0, "{rank}: {loads:?}");
        }
    }
}

#[test]
fn replicas_share_by_real_bytes() {
    // Four replicas of each of two shards, tensors of very different sizes.
    let groups = [[0, 2, 4, 6], [1, 3, 5, 7]];
    let sizes = (1..=200_u64).map(|number| (number * number) << 12);
    let items: Vec<_> = sizes
        .flat_map(|bytes| groups.iter().map(move |ranks| Replicated { bytes, ranks }))
        .collect();
    let loads = loads(&items, &assign_writers(&items).unwrap());
    let (least, most) = (loads.values().min().unwrap(), loads.values().max().unwrap());
    assert_eq!(loads.len(), 8);
    assert!(most * 100 <= least * 101, "{least} to {most}");
}

#[test]
fn what_only_one_rank_holds_counts_against_it() {
    let (all, first) = ([0, 1], [0]);
    let mega = 1 << 20;
    let mut items = vec![Replicated { bytes: mega, ranks: &all }; 4];
    items.push(Replicated { bytes: 3 * mega, ranks: &first });
    let writers = assign_writers(&items).unwrap();
    assert_eq!(writers, [1, 1, 1, 0, 0]);
}

#[test]
fn small_items_stay_together() {
    let all: Vec<u32> = (0..512).collect();
    let large = Replicated { bytes: 8 << 20, ranks: &all };
    let small = Replicated { bytes: 4, ranks: &all };
    // A scalar behind each large tensor, as optimizers have them.
    let items: Vec<_> = (0..20_000).map(|at| if at % 2 == 0 { large } else { small }).collect();
    let writers = assign_writers(&items).unwrap();
    let of_small = items.iter().zip(&writers).filter(|(item, _)| item.bytes < SMALL_BYTES);
    assert_eq!(of_small.map(|(_, writer)| writer).collect::<BTreeSet<_>>().len(), 1);
    assert_eq!(writers.iter().collect::<BTreeSet<_>>().len(), 512);
    // The order of a list says nothing.
    let either = [Replicated { bytes: 9, ranks: &[1, 0] }, Replicated { bytes: 9, ranks: &[0, 1] }];
    assert_eq!(assign_writers(&either).unwrap(), [0, 0]);
    // So many of them that one rank would be late: bundles, of which each rank has one.
    let many = vec![Replicated { bytes: SMALL_BYTES - 1, ranks: &all[..8] }; 16 * 256];
    let writers = assign_writers(&many).unwrap();
    assert_eq!(writers.iter().collect::<BTreeSet<_>>().len(), 8);
    assert!(writers.windows(2).filter(|pair| pair[0] != pair[1]).count() < 20);
}

#[test]
fn an_item_that_nobody_holds_is_an_error() {
    let items = [Replicated { bytes: 1, ranks: &[3] }, Replicated { bytes: 1, ranks: &[] }];
    let error = assign_writers(&items).unwrap_err();
    assert_eq!((error.code(), error.what()), (Code::Usage, "no rank holds item 1"));
    assert!(assign_writers(&[]).unwrap().is_empty());
}

#[test]
fn replicated_fsdp_writes_each_tile_once_and_evenly() {
    let mesh = std::sync::Arc::new(Mesh::new(vec![4, 8]).unwrap());
    let placements = vec![Placement::Replicate, Placement::Shard(0)];
    let layout = MeshLayout::new(mesh, placements).unwrap();
    let shape = [1000, 333];
    let tiling = Tiling::new(&layout, &shape).unwrap();
    let held: Vec<(u64, Vec<u32>)> = tiling
        .tiles()
        .map(|tile| {
            let bytes = byte_len(forebay_tensor::Dtype::F32, &tile.region.sizes).unwrap();
            (bytes, tiling.holders(&tile).collect())
        })
        .collect();
    // Eight tensors of that shape.
    let items = held.iter().map(|(bytes, ranks)| Replicated { bytes: *bytes, ranks });
    let items: Vec<_> = items.cycle().take(8 * held.len()).collect();
    let loads = loads(&items, &assign_writers(&items).unwrap());
    assert_eq!(loads.len(), 32);
    assert!(loads.values().all(|&bytes| bytes == 2 * 125 * 333 * 4), "{loads:?}");
}
