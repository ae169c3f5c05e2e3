//! Layouts against what real DTensors hold: tests/data/layouts.py wrote the cases.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_error::Code;
use forebay_tensor::{
    Layout, LocalShard, Mesh, MeshLayout, Placement, Region, Repeats, Tiling, check_cover,
};
use serde_json::Value;

/// What one place of the mesh holds.
struct Place {
    sizes: Vec<u64>,
    offsets: Option<Vec<u64>>,
    elements: Vec<u64>,
}

struct Case {
    shape: Vec<u64>,
    layout: MeshLayout,
    places: Vec<Place>,
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn placement(value: &Value) -> Placement {
    let part = |at: usize| value[at].as_u64().unwrap();
    match value.as_str().or(value[0].as_str()).unwrap() {
        "R" => Placement::Replicate,
        "S" => Placement::Shard(part(1) as usize),
        "SS" => Placement::StridedShard { dim: part(1) as usize, split_factor: part(2) },
        other => panic!("unknown placement {other}"),
    }
}

fn cases(name: &str) -> Vec<Case> {
    let all: Value = serde_json::from_str(include_str!("data/layouts.json")).unwrap();
    let case = |case: &Value| {
        let mesh = Arc::new(Mesh::new(numbers(&case[1])).unwrap());
        let placements = case[2].as_array().unwrap().iter().map(placement).collect();
        let place = |place: &Value| Place {
            sizes: numbers(&place[0]),
            offsets: (!place[1].is_null()).then(|| numbers(&place[1])),
            elements: numbers(&place[2]),
        };
        Case {
            shape: numbers(&case[0]),
            layout: MeshLayout::new(mesh, placements).unwrap(),
            places: case[3].as_array().unwrap().iter().map(place).collect(),
        }
    };
    all[name].as_array().unwrap().iter().map(case).collect()
}

/// The row-major number of an element.
fn flat(shape: &[u64], at: &[u64]) -> u64 {
    shape.iter().zip(at).fold(0, |flat, (side, at)| flat * side + at)
}

/// The row-major numbers, in a tensor of this shape, of the elements of a box.
fn elements(shape: &[u64], region: &Region) -> Vec<u64> {
    let mut places = vec![Vec::new()];
    for (&offset, &size) in region.offsets.iter().zip(&region.sizes) {
        let longer = places.iter().flat_map(|place: &Vec<u64>| {
            (offset..offset + size).map(move |at| [place.as_slice(), &[at]].concat())
        });
        places = longer.collect();
    }
    places.iter().map(|at| flat(shape, at)).collect()
}

/// The elements of a rank's own tensor, in order, put together from its pieces.
fn assembled(shape: &[u64], shard: &LocalShard) -> Vec<u64> {
    let mut all = BTreeMap::new();
    for piece in &shard.pieces {
        let local = Region { offsets: piece.local.clone(), sizes: piece.region.sizes.clone() };
        let (to, from) = (elements(&shard.shape, &local), elements(shape, &piece.region));
        assert_eq!(to.len(), from.len());
        for (to, from) in to.into_iter().zip(from) {
            assert_eq!(all.insert(to, from), None, "two pieces hold one element");
        }
    }
    let count = all.len() as u64;
    assert!(all.keys().copied().eq(0..count), "the pieces leave gaps in the rank's tensor");
    all.into_values().collect()
}

fn compare(cases: &[Case], layout_of: impl Fn(&Case) -> MeshLayout) {
    for Case { shape, places, .. } in cases.iter() {
        assert!(!places.is_empty(), "{shape:?}");
    }
    for case in cases {
        let layout = layout_of(case);
        for (index, place) in (0..).zip(&case.places) {
            let shape = &case.shape;
            let coordinate = layout.mesh().coordinate(index);
            let shard = layout.local(shape, &coordinate).unwrap();
            let what = format!("{shape:?} {:?} at {coordinate:?}", layout.placements());
            assert_eq!(shard.shape, place.sizes, "{what}");
            if let Some(offsets) = &place.offsets {
                assert_eq!(&shard.pieces[0].region.offsets, offsets, "{what}");
            }
            assert_eq!(assembled(shape, &shard), place.elements, "{what}");
        }
    }
}

#[test]
fn shards_are_those_of_real_dtensors() {
    let cases = cases("dtensor");
    assert!(cases.len() > 400);
    let split = |case: &&Case| {
        let places = 0..case.layout.mesh().size();
        let shards =
            places.map(|at| case.layout.local(&case.shape, &case.layout.mesh().coordinate(at)));
        shards.into_iter().any(|shard| shard.unwrap().pieces.len() > 1)
    };
    assert!(cases.iter().filter(split).count() > 50, "few cases hold several pieces");
    compare(&cases, |case| case.layout.clone());
}

#[test]
fn uneven_fsdp_over_tensor_parallelism_is_what_the_ranks_hold() {
    let cases = cases("fsdp_over_tp");
    compare(&cases, |case| case.layout.right_to_left().unwrap());
    // Read as DTensor reads them the placements say something else, for some of these.
    let differs = cases.iter().filter(|case| {
        (0..case.layout.mesh().size()).any(|at| {
            let coordinate = case.layout.mesh().coordinate(at);
            let shard = case.layout.local(&case.shape, &coordinate).unwrap();
            shard.shape != case.places[at as usize].sizes
        })
    });
    assert!(differs.count() > 0);
}

#[test]
fn right_to_left_puts_each_strided_cut_behind_what_it_stands_on() {
    let layout = |mesh: &[u64], placements: &[Placement]| {
        let mesh = Arc::new(Mesh::new(mesh.to_vec()).unwrap());
        MeshLayout::new(mesh, placements.to_vec()).unwrap()
    };
    let strided = |split_factor| Placement::StridedShard { dim: 0, split_factor };
    let shard = Placement::Shard(0);
    // Even layouts mean the same either way: FSDP over experts over tensor parallelism, replicated FSDP, split only
    // half way.
    for (mesh, placements) in [
        (&[2, 2, 2][..], &[strided(4), shard, shard][..]),
        (&[2, 2, 2], &[strided(2), shard, shard]),
        (&[3, 2, 2], &[Placement::Replicate, strided(2), shard]),
        (&[2, 2], &[shard, strided(1)]),
    ] {
        let left = layout(mesh, placements);
        let right = left.right_to_left().unwrap();
        for index in 0..left.mesh().size() {
            let at = left.mesh().coordinate(index);
            let by = |layout: &MeshLayout| layout.local(&[16], &at).unwrap();
            assert_eq!(assembled(&[16], &by(&left)), assembled(&[16], &by(&right)), "{at:?}");
        }
    }
    assert_eq!(layout(&[2, 2], &[strided(3), shard]).right_to_left(), None);
    assert_eq!(layout(&[2, 2], &[shard, strided(2)]).right_to_left(), None);
}

#[test]
fn tilings_and_holders_agree_with_the_shards_of_all_ranks() {
    for case in cases("dtensor").iter().chain(&cases("fsdp_over_tp")) {
        let (shape, layout) = (&case.shape, &case.layout);
        let mut held: BTreeMap<Region, Vec<u32>> = BTreeMap::new();
        for index in 0..layout.mesh().size() {
            let shard = layout.local(shape, &layout.mesh().coordinate(index)).unwrap();
            for piece in shard.pieces.into_iter().filter(|piece| !piece.region.is_empty()) {
                held.entry(piece.region).or_default().push(index);
            }
        }
        let what = format!("{shape:?} {:?}", layout.placements());
        check_cover(shape, held.keys(), Repeats::Overlap).unwrap();
        let tiling = Tiling::new(layout, shape).unwrap();
        assert_eq!(tiling.len(), held.len() as u64, "{what}");
        let chunks = Layout::Mesh(layout.clone()).chunks(shape).unwrap();
        assert!(chunks.into_iter().eq(held.clone()), "{what}");
        let by_rank = Layout::Explicit(by_rank(&held));
        by_rank.check(shape).unwrap();
        assert!(by_rank.chunks(shape).unwrap().into_iter().eq(held.clone()), "{what}");
        for tile in tiling.tiles() {
            let ranks = &held[&tile.region];
            assert_eq!((ranks[0], ranks.len()), (tile.index, layout.holder_count() as usize));
            for &rank in ranks {
                assert_eq!(layout.first_holder(rank), tile.index, "{what}");
                assert!(layout.holders(rank).eq(ranks.iter().copied()), "{what}");
                let shard = layout.local(shape, &layout.mesh().coordinate(rank)).unwrap();
                let piece = &shard.pieces[tile.piece as usize];
                assert_eq!((&piece.region, &piece.local), (&tile.region, &tile.local), "{what}");
            }
        }
    }
}

fn by_rank(held: &BTreeMap<Region, Vec<u32>>) -> BTreeMap<u32, Vec<Region>> {
    let mut ranks: BTreeMap<u32, Vec<Region>> = BTreeMap::new();
    for (region, holders) in held {
        for &rank in holders {
            ranks.entry(rank).or_default().push(region.clone());
        }
    }
    ranks
}

#[test]
fn wanted_regions_find_the_tiles_that_they_meet() {
    let mesh = Arc::new(Mesh::new(vec![2, 3, 2]).unwrap());
    let placements = vec![
        Placement::StridedShard { dim: 0, split_factor: 2 },
        Placement::Shard(1),
        Placement::Shard(0),
    ];
    let tiling = Tiling::new(&MeshLayout::new(mesh, placements).unwrap(), &[9, 7]).unwrap();
    for (top, left) in (0..10).flat_map(|top| (0..8).map(move |left| (top, left))) {
        for (height, width) in [(0, 3), (1, 1), (3, 2), (9, 7), (u64::MAX, 1)] {
            let wanted = Region { offsets: vec![top, left], sizes: vec![height, width] };
            let found: Vec<_> = tiling.intersecting(&wanted).unwrap().collect();
            let all = tiling.tiles();
            let plain = all.filter_map(|tile| {
                tile.region.intersect(&wanted).map(|shared| (tile.clone(), shared))
            });
            assert!(found.into_iter().eq(plain), "{wanted}");
        }
    }
    assert!(tiling.intersecting(&Region::whole(&[9])).err().unwrap().code() == Code::BadSlice);
}

#[test]
fn ranks_without_elements_are_not_ranks_without_the_tensor() {
    let mesh = Arc::new(Mesh::with_ranks(vec![4], vec![10, 11, 12, 13]).unwrap());
    let layout = Layout::Mesh(MeshLayout::new(mesh, vec![Placement::Shard(0)]).unwrap());
    let rows = |rank| layout.regions(&[6, 2], rank).unwrap();
    assert_eq!(rows(12), [Region { offsets: vec![4, 0], sizes: vec![2, 2] }]);
    assert_eq!(rows(13), [Region { offsets: vec![6, 0], sizes: vec![0, 2] }]);
    assert_eq!(rows(0), []);
    assert_eq!(layout.chunks(&[6, 2]).unwrap()[1].1, [11]);
    assert!(layout.chunks(&[0, 2]).unwrap().is_empty());
}

#[test]
fn ragged_shards_are_checked_to_cover() {
    let rows = |first, count| Region { offsets: vec![first], sizes: vec![count] };
    let layout = |lists: &[&[Region]]| {
        Layout::Explicit((0..).zip(lists.iter().map(|list| list.to_vec())).collect())
    };
    layout(&[&[rows(0, 5)], &[], &[rows(5, 1), rows(6, 3)]]).check(&[9]).unwrap();
    layout(&[&[rows(0, 9)], &[rows(0, 9)]]).check(&[9]).unwrap();
    let code = |lists: &[&[Region]]| layout(lists).check(&[9]).unwrap_err().code();
    assert_eq!(code(&[&[rows(0, 5)], &[rows(6, 3)]]), Code::Hole);
    assert_eq!(code(&[&[rows(0, 5)], &[rows(4, 5)]]), Code::Overlap);
    // A flat buffer with padding at its end.
    assert_eq!(code(&[&[rows(0, 5)], &[rows(5, 5)]]), Code::OutOfBounds);
}

#[test]
fn layouts_that_contradict_themselves() {
    let mesh = Arc::new(Mesh::new(vec![2, 2]).unwrap());
    let code = |placements: &[Placement]| {
        let layout = MeshLayout::new(Arc::clone(&mesh), placements.to_vec());
        layout.and_then(|layout| layout.local(&[4], &[0, 0])).unwrap_err().code()
    };
    let shard = Placement::Shard(0);
    assert_eq!(code(&[shard]), Code::InvalidMetadata);
    assert_eq!(code(&[shard, Placement::Shard(1)]), Code::InvalidMetadata);
    assert_eq!(code(&[shard, Placement::Partial]), Code::Unsupported);
    let zero = Placement::StridedShard { dim: 0, split_factor: 0 };
    assert_eq!(code(&[shard, zero]), Code::InvalidMetadata);
    let layout = MeshLayout::new(mesh, vec![shard, shard]).unwrap();
    assert_eq!(layout.local(&[4], &[0, 2]).unwrap_err().code(), Code::InvalidMetadata);
    assert_eq!(layout.local(&[4], &[0]).unwrap_err().code(), Code::InvalidMetadata);
    let absurd = vec![Placement::StridedShard { dim: 0, split_factor: u64::MAX }, shard];
    let layout = MeshLayout::new(Arc::clone(layout.mesh()), absurd).unwrap();
    let error = Tiling::new(&layout, &[u64::MAX]).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
}
