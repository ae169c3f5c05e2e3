//! Coverage against counting the holders of every element.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod common;

use common::{chunked, holds, inside, places};
use forebay_error::{Code, Error};
use forebay_tensor::{Region, Repeats, check_cover};
use proptest::prelude::*;

/// The first element, in row-major order, that is not held exactly once, and how often it is.
fn first_fault(shape: &[u64], pieces: &[Region]) -> Option<(Vec<u64>, usize)> {
    places(shape).into_iter().find_map(|at| {
        let holders = pieces.iter().filter(|piece| holds(piece, &at)).count();
        (holders != 1).then_some((at, holders))
    })
}

/// The boxes that a message names, which are written `[0:4, 2:4]`.
fn named(error: &Error) -> Vec<Region> {
    let text = error.what();
    let boxes = text.split('[').skip(1).filter_map(|part| part.split(']').next());
    let sides = |part: &str| -> Option<Region> {
        let ends = part.split(", ").filter(|side| !side.is_empty()).map(|side| {
            let (start, end) = side.split_once(':')?;
            let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
            Some((start, end - start))
        });
        let (offsets, sizes) = ends.collect::<Option<Vec<_>>>()?.into_iter().unzip();
        Some(Region { offsets, sizes })
    };
    boxes.filter_map(sides).collect()
}

/// Checks the verdict, and that what it names is so.
fn agrees(shape: &[u64], pieces: &[Region]) -> Result<(), TestCaseError> {
    let verdict = check_cover(shape, pieces, Repeats::Overlap);
    let Some((at, holders)) = first_fault(shape, pieces) else {
        prop_assert!(verdict.is_ok(), "{:?}", verdict);
        return Ok(());
    };
    let Err(error) = verdict else { panic!("{at:?} is held {holders} times") };
    let boxes = named(&error);
    if holders == 0 {
        prop_assert_eq!(error.code(), Code::Hole);
        let free = &boxes[0];
        prop_assert!(holds(free, &at));
        prop_assert!(pieces.iter().all(|piece| piece.intersect(free).is_none()), "{:?}", error);
        // As long as it gets: behind its end in the last dimension is the tensor's end, or a piece.
        if let Some(last) = shape.len().checked_sub(1) {
            let mut longer = free.clone();
            longer.sizes[last] += 1;
            let met = pieces.iter().any(|piece| piece.intersect(&longer).is_some());
            prop_assert!(met || longer.check_within(shape).is_err(), "{:?}", error);
        }
    } else {
        prop_assert_eq!(error.code(), Code::Overlap);
        prop_assert!(boxes[..2].iter().all(|one| holds(one, &at)), "{:?}", error);
        prop_assert!(error.what().starts_with("pieces "));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 1500, ..ProptestConfig::default()
    })]

    #[test]
    fn what_was_cut_from_a_tensor_covers_it((shape, pieces) in chunked(6)) {
        prop_assert_eq!(first_fault(&shape, &pieces), None);
        agrees(&shape, &pieces)?;
        // Replicas count once where they may.
        let twice: Vec<_> = pieces.iter().chain(&pieces).collect();
        prop_assert!(check_cover(&shape, twice.iter().copied(), Repeats::AreReplicas).is_ok());
        if first_fault(&shape, &[]).is_some() {
            let error = check_cover(&shape, twice, Repeats::Overlap).unwrap_err();
            prop_assert_eq!(error.code(), Code::Overlap);
        }
    }

    #[test]
    fn what_is_lost_grown_or_moved_is_found(
        (shape, mut pieces) in chunked(6),
        changes in prop::collection::vec((any::<usize>(), 0..4, any::<u64>(), any::<u64>()), 1..4),
    ) {
        for (which, change, a, b) in changes {
            if pieces.is_empty() {
                break;
            }
            let which = which % pieces.len();
            match change {
                0 => { pieces.swap_remove(which); }
                1 => pieces.push(pieces[which].clone()),
                2 => pieces[which] = inside(&shape, &[(a, b), (b, a)]),
                _ => pieces.push(inside(&shape, &[(a, b), (b, a)])),
            }
        }
        agrees(&shape, &pieces)?;
    }

    #[test]
    fn any_boxes_at_all(
        shape in prop::collection::vec(0_u64..5, 0..4),
        numbers in prop::collection::vec(prop::collection::vec((0_u64..5, 0_u64..5), 3), 0..6),
    ) {
        let pieces: Vec<Region> = numbers.iter().map(|numbers| inside(&shape, numbers)).collect();
        agrees(&shape, &pieces)?;
    }
}

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets.to_vec(), sizes.to_vec()).unwrap()
}

#[test]
fn a_pinwheel_has_no_straight_cut() {
    let mut pieces = vec![
        region(&[0, 0], &[1, 2]),
        region(&[0, 2], &[2, 1]),
        region(&[2, 1], &[1, 2]),
        region(&[1, 0], &[2, 1]),
        region(&[1, 1], &[1, 1]),
    ];
    check_cover(&[3, 3], &pieces, Repeats::Overlap).unwrap();
    pieces.pop();
    let error = check_cover(&[3, 3], &pieces, Repeats::Overlap).unwrap_err();
    assert_eq!(error.what(), "no piece covers [1:2, 1:2] of the tensor [3, 3]");
    // A hole and an overlap of the same size: volumes add up, and it is still seen.
    pieces.push(region(&[0, 0], &[1, 1]));
    let error = check_cover(&[3, 3], &pieces, Repeats::Overlap).unwrap_err();
    let what = "pieces 0 [0:1, 0:2] and 4 [0:1, 0:1] of the tensor [3, 3] overlap";
    assert_eq!((error.code(), error.what()), (Code::Overlap, what));
}

#[test]
fn scalars_are_one_piece() {
    let scalar = region(&[], &[]);
    check_cover(&[], [&scalar], Repeats::Overlap).unwrap();
    check_cover(&[], [&scalar, &scalar], Repeats::AreReplicas).unwrap();
    let code = |pieces: &[Region]| check_cover(&[], pieces, Repeats::Overlap).unwrap_err().code();
    assert_eq!(code(&[]), Code::Hole);
    assert_eq!(code(&[scalar.clone(), scalar]), Code::Overlap);
}

#[test]
fn pieces_of_size_zero_are_fine_inside() {
    let rows = [region(&[0, 0], &[6, 2]), region(&[6, 0], &[0, 2])];
    check_cover(&[6, 2], &rows, Repeats::Overlap).unwrap();
    check_cover(&[0, 2], [], Repeats::Overlap).unwrap();
    check_cover(&[0, 2], [&region(&[0, 0], &[0, 2])], Repeats::Overlap).unwrap();
    let outside = [region(&[0, 0], &[6, 2]), region(&[7, 0], &[0, 2])];
    let error = check_cover(&[6, 2], &outside, Repeats::Overlap).unwrap_err();
    assert_eq!(error.code(), Code::OutOfBounds);
    assert_eq!(error.what(), "piece 1 [7:7, 0:2] leaves the tensor [6, 2]");
}

#[test]
fn claims_of_files_do_not_wrap() {
    let wrapping = Region { offsets: vec![u64::MAX], sizes: vec![2] };
    let code = |shape: &[u64], pieces: &[Region]| {
        check_cover(shape, pieces, Repeats::Overlap).unwrap_err().code()
    };
    assert_eq!(code(&[u64::MAX], &[wrapping]), Code::OutOfBounds);
    assert_eq!(code(&[4], &[region(&[0, 0], &[4, 1])]), Code::OutOfBounds);
    let uneven = Region { offsets: vec![0], sizes: vec![1, 4] };
    assert_eq!(code(&[4], &[uneven]), Code::OutOfBounds);
    // More elements than 2^64, of which none is lost.
    let huge = [u64::MAX; 3];
    check_cover(&huge, [&Region::whole(&huge)], Repeats::Overlap).unwrap();
    let mut short = Region::whole(&huge);
    short.sizes[2] -= 1;
    assert_eq!(code(&huge, &[short]), Code::Hole);
    assert_eq!(code(&[1; 65], &[]), Code::Unsupported);
}
