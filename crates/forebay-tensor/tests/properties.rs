//! Byte runs, intersections and shards against the plainest models of them.

use forebay_error::Code;
use forebay_tensor::{Dtype, Region, byte_len, byte_runs};
use proptest::prelude::*;

/// A shape of up to five small dimensions and a region inside it.
fn shape_and_region() -> impl Strategy<Value = (Vec<u64>, Region)> {
    prop::collection::vec((0_u64..5, any::<u64>(), any::<u64>()), 0..5).prop_map(|sides| {
        let shape: Vec<u64> = sides.iter().map(|side| side.0).collect();
        let offsets: Vec<u64> = sides.iter().map(|&(side, a, _)| a % (side + 1)).collect();
        let sizes =
            sides.iter().zip(&offsets).map(|(&(side, _, b), offset)| b % (side - offset + 1));
        let sizes = sizes.collect();
        (shape, Region { offsets, sizes })
    })
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

/// Flat indices of the elements of a region, in order.
fn elements(shape: &[u64], region: &Region) -> Vec<u64> {
    let total: u64 = shape.iter().product();
    let inside = |&flat: &u64| {
        let mut rest = flat;
        let sides = shape.iter().zip(&region.offsets).zip(&region.sizes).rev();
        sides.into_iter().all(|((&side, &offset), &size)| {
            let at = rest % side;
            rest /= side;
            at >= offset && at < offset + size
        })
    };
    (0..total).filter(inside).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_cover_exactly_the_elements((shape, region) in shape_and_region(), dtype in dtype()) {
        let wanted = elements(&shape, &region);
        prop_assert_eq!(region.elements(), wanted.len() as u64);
        let bits = dtype.bits();
        let runs = match byte_runs(dtype, &shape, &region) {
            Ok(runs) => runs,
            Err(error) => {
                prop_assert!(bits < 8);
                prop_assert_eq!(error.code(), Code::Misaligned);
                return Ok(());
            }
        };
        // Every bit of every element, in order, is every bit of every run, in order.
        let wanted: Vec<u64> = wanted.iter().flat_map(|at| at * bits..(at + 1) * bits).collect();
        let mut got = Vec::new();
        let mut packed = 0;
        for (source, destination) in &runs {
            prop_assert_eq!(destination, packed);
            packed += runs.run;
            got.extend(source * 8..(source + runs.run) * 8);
        }
        prop_assert_eq!(&got, &wanted);
        prop_assert_eq!(runs.total_bytes() * 8, wanted.len() as u64);
        let span = wanted.last().map_or(0, |last| last + 1 - wanted[0]);
        prop_assert_eq!(runs.span_bytes() * 8, span);
        prop_assert!(runs.dims.iter().all(|dim| dim.count >= 2 && dim.stride > 0));
        // Collapsed: no run touches the next one.
        let places: Vec<u64> = runs.iter().map(|run| run.0).collect();
        prop_assert!(places.windows(2).all(|pair| pair[0] + runs.run < pair[1]));
        prop_assert_eq!(runs.iter().size_hint().0, places.len());
    }

    #[test]
    fn whole_tensors_and_rows_are_one_run(
        (shape, _) in shape_and_region(),
        dtype in dtype(),
        rank in 0_u64..3,
    ) {
        let Ok(len) = byte_len(dtype, &shape) else { return Ok(()) };
        let runs = byte_runs(dtype, &shape, &Region::whole(&shape)).unwrap();
        prop_assert!(runs.dims.is_empty());
        prop_assert_eq!((runs.start, runs.total_bytes()), (0, len));
        if let (Some(&rows), true) = (shape.first(), dtype.bits() >= 8) {
            let shard = Region::shard(&shape, 0, rank, 3).unwrap();
            let runs = byte_runs(dtype, &shape, &shard).unwrap();
            prop_assert!(runs.dims.is_empty(), "{rows} rows: {runs:?}");
        }
    }

    #[test]
    fn intersection_commutes_and_is_what_both_hold(
        (shape, a) in shape_and_region(),
        cuts in prop::collection::vec((any::<u64>(), any::<u64>()), 5),
    ) {
        let sides = shape.iter().zip(&cuts);
        let offsets: Vec<u64> = sides.clone().map(|(side, cut)| cut.0 % (side + 1)).collect();
        let sizes = sides.zip(&offsets).map(|((side, cut), at)| cut.1 % (side - at + 1)).collect();
        let b = Region::new(offsets, sizes).unwrap();
        let shared = a.intersect(&b);
        prop_assert_eq!(&shared, &b.intersect(&a));
        let in_b = elements(&shape, &b);
        let in_a = elements(&shape, &a).into_iter();
        let both: Vec<u64> = in_a.filter(|at| in_b.contains(at)).collect();
        match shared {
            Some(shared) => {
                prop_assert_eq!(elements(&shape, &shared), both);
                prop_assert!(a.contains(&shared) && b.contains(&shared));
                let inner = shared.relative_to(&a).unwrap();
                prop_assert!(inner.check_within(&a.sizes).is_ok());
            }
            None => prop_assert!(both.is_empty()),
        }
    }

    #[test]
    fn shards_cover_exactly(
        (shape, _) in shape_and_region(),
        dim in 0_usize..5,
        world in 1_u64..7,
    ) {
        if dim >= shape.len() {
            prop_assert!(Region::shard(&shape, dim, 0, world).is_err());
            return Ok(());
        }
        let mut next = 0;
        for rank in 0..world {
            let shard = Region::shard(&shape, dim, rank, world).unwrap();
            prop_assert!(shard.check_within(&shape).is_ok());
            prop_assert_eq!(shard.offsets[dim], next);
            next += shard.sizes[dim];
        }
        prop_assert_eq!(next, shape[dim]);
    }

    #[test]
    fn hostile_numbers_never_panic(
        shape in prop::collection::vec(any::<u64>(), 0..6),
        offsets in prop::collection::vec(any::<u64>(), 0..6),
        sizes in prop::collection::vec(any::<u64>(), 0..6),
        dtype in dtype(),
    ) {
        let region = Region { offsets, sizes };
        let _ = byte_runs(dtype, &shape, &region);
        let _ = byte_runs(dtype, &shape, &Region::whole(&shape));
        let _ = (region.elements(), region.to_string(), region.contains(&Region::whole(&shape)));
        let _ = region.intersect(&Region::whole(&shape));
    }
}

#[test]
fn large_tensors_do_not_overflow() {
    let shape = [1 << 20, 1 << 20, 1 << 17];
    let region = Region::new(vec![(1 << 20) - 1, 3, 5], vec![1, 1 << 19, 7]).unwrap();
    let runs = byte_runs(Dtype::U8, &shape, &region).unwrap();
    assert_eq!(runs.total_bytes(), 7 << 19);
    assert_eq!(runs.run_count(), 1 << 19);
    assert_eq!(runs.start, ((1 << 20) - 1) * (1 << 37) + 3 * (1 << 17) + 5);
    assert_eq!(runs.iter().nth(2), Some((runs.start + (2 << 17), 14)));
}

#[test]
fn zero_elements_beside_huge_sides() {
    let shape = [0, 1 << 62, 1 << 62];
    let runs = byte_runs(Dtype::F64, &shape, &Region::whole(&shape)).unwrap();
    assert_eq!((runs.total_bytes(), runs.iter().count()), (0, 0));
}
