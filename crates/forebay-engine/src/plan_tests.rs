//! Plans against a model: bytes moved one by one.

use proptest::prelude::*;

use super::*;

const PIECE: u64 = 64 << 10;

/// Executes a plan on bytes in memory, through staging memory as a worker does.
fn execute(plan: &Plan, objects: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut targets: Vec<Vec<u8>> =
        plan.target_bytes().iter().map(|&len| vec![0; len as usize]).collect();
    for piece in plan.pieces() {
        assert!(piece.offset / PIECE == (piece.offset + piece.len - 1) / PIECE, "inside one cell");
        assert!(piece.staged_len <= PIECE);
        let object = &objects[piece.object as usize];
        let mut staged = vec![0; piece.staged_len as usize];
        if piece.packed {
            for op in plan.ops_of(piece) {
                for row in 0..op.part.rows {
                    let from = (op.part.from + row * op.part.from_stride) as usize;
                    let at = (op.staged + row * op.staged_stride) as usize;
                    let run = op.part.run as usize;
                    staged[at..at + run].copy_from_slice(&object[from..from + run]);
                }
            }
        } else {
            let from = piece.offset as usize;
            staged.copy_from_slice(&object[from..from + piece.len as usize]);
        }
        for op in plan.ops_of(piece) {
            assert!(op.part.target <= piece.last_target);
            for row in 0..op.part.rows {
                let at = (op.staged + row * op.staged_stride) as usize;
                let to = (op.part.to + row * op.part.to_stride) as usize;
                let run = op.part.run as usize;
                targets[op.part.target as usize][to..to + run]
                    .copy_from_slice(&staged[at..at + run]);
            }
        }
    }
    targets
}

fn object(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u64).wrapping_mul(2654435761).to_le_bytes()[2] ^ seed).collect()
}

prop_compose! {
    fn some_move(object_len: u64)(
        object in 0_u32..2,
        run in 1_u64..40_000,
        gap in prop_oneof![0_u64..64, 15_000_u64..20_000, 0_u64..60_000],
        rows in 1_u64..40,
        from in 0_u64..200_000,
        to_gap in 0_u64..9,
    ) -> Move {
        let from_stride = run + gap;
        let fit = (object_len - from - run) / from_stride + 1;
        let rows = rows.min(fit);
        Move { object, target: 0, from, from_stride, to: 0, to_stride: run + to_gap, run, rows }
    }
}

proptest! {
    #[test]
    fn every_byte_lands_where_the_move_says(
        moves in prop::collection::vec(some_move(600_000), 1..12),
    ) {
        let objects = [object(1, 600_000), object(2, 600_000)];
        let mut moves = moves;
        moves.sort_by_key(|part| (part.object, part.from));
        let mut sizes = Vec::new();
        for (index, part) in moves.iter_mut().enumerate() {
            part.target = index as u32;
            sizes.push((part.rows - 1) * part.to_stride + part.run);
        }
        let plan = Plan::build(moves.clone(), sizes, PIECE, &[]).unwrap();
        let targets = execute(&plan, &objects);
        let mut bytes = 0;
        for part in &moves {
            bytes += part.bytes();
            for row in 0..part.rows {
                let from = (part.from + row * part.from_stride) as usize;
                let to = (row * part.to_stride) as usize;
                let run = part.run as usize;
                prop_assert_eq!(
                    &targets[part.target as usize][to..to + run],
                    &objects[part.object as usize][from..from + run]
                );
            }
        }
        prop_assert_eq!(plan.bytes(), bytes);
        prop_assert_eq!(plan.pieces().iter().map(|piece| piece.bytes).sum::<u64>(), bytes);
    }
}

#[test]
fn a_whole_file_is_read_once_in_grid_cells() {
    let moves = vec![
        Move::contiguous(0, 0, 100, 0, 200_000),
        Move::contiguous(0, 1, 200_100, 0, 10),
        Move::contiguous(0, 2, 200_110, 0, 3 * PIECE),
    ];
    let plan = Plan::build(moves, vec![200_000, 10, 3 * PIECE], PIECE, &[]).unwrap();
    assert_eq!(plan.read_bytes(), plan.bytes());
    let mut at = 100;
    for piece in plan.pieces() {
        assert_eq!(piece.offset, at);
        at += piece.len;
    }
    assert_eq!(at, 200_110 + 3 * PIECE);
}

#[test]
fn near_rows_are_read_as_a_span_and_far_rows_one_by_one() {
    let rows = |run, stride| Move {
        object: 0,
        target: 0,
        from: 0,
        from_stride: stride,
        to: 0,
        to_stride: run,
        run,
        rows: 100,
    };
    let near = Plan::build(vec![rows(512, 1024)], vec![51_200], PIECE, &[]).unwrap();
    assert!(near.pieces().iter().all(|piece| !piece.packed));
    assert!(near.read_bytes() < 2 * near.bytes() && near.read_bytes() > near.bytes());
    let far = Plan::build(vec![rows(512, 32 << 10)], vec![51_200], PIECE, &[]).unwrap();
    assert_eq!(far.read_bytes(), far.bytes());
}

#[test]
fn moves_that_leave_their_target_are_refused() {
    let outside = Move::contiguous(0, 0, 0, 1, 10);
    assert!(Plan::build(vec![outside], vec![10], PIECE, &[]).is_err());
    let huge = Move { rows: u64::MAX, ..Move::contiguous(0, 0, 0, 0, 2) };
    assert!(Plan::build(vec![huge], vec![10], PIECE, &[]).is_err());
    let none = Move::contiguous(0, 7, 0, 0, 2);
    assert!(Plan::build(vec![none], vec![10], PIECE, &[]).is_err());
}

#[test]
fn nothing_to_move_is_an_empty_plan() {
    let plan = Plan::build(vec![Move::contiguous(0, 0, 5, 0, 0)], vec![0], PIECE, &[]).unwrap();
    assert!(plan.pieces().is_empty());
}

#[test]
fn no_piece_holds_two_batches() {
    let moves = (0..9).map(|index| Move::contiguous(0, index, u64::from(index) * 100, 0, 100));
    let plan = Plan::build(moves.collect(), vec![100; 9], PIECE, &[0, 4, 5]).unwrap();
    let targets: Vec<Vec<u32>> = plan
        .pieces()
        .iter()
        .map(|piece| plan.ops_of(piece).iter().map(|op| op.part.target).collect())
        .collect();
    assert_eq!(targets, [vec![0, 1, 2, 3], vec![4], vec![5, 6, 7, 8]]);
    assert_eq!(plan.needs(), [4, 4, 4, 4, 5, 9, 9, 9, 9]);
}
