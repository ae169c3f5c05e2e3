//! Resharding, bit for bit, against moving element by element.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::{chunked, holds, inside, places};
use forebay_error::Code;
use forebay_tensor::{
    ChunkIndex, Dtype, Mesh, MeshLayout, Placement, Region, Repeats, Strides, Tiling, byte_len,
    check_cover, copy_runs, copy_runs_strided,
};
use proptest::prelude::*;

/// The row-major number of an element of a region, within the region.
fn number_in(region: &Region, at: &[u64]) -> u64 {
    let sides = region.offsets.iter().zip(&region.sizes).zip(at);
    sides.fold(0, |number, ((offset, size), at)| number * size + (at - offset))
}

/// Bit `bit` of packed elements; which end of a byte comes first does not matter as long as all do the same.
fn bit(bytes: &[u8], bit: u64) -> bool {
    bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 1
}

fn set_bit(bytes: &mut [u8], bit: u64) {
    bytes[(bit / 8) as usize] |= 1 << (bit % 8);
}

/// The bytes of a region of a tensor, copied bit by bit.
fn cut_out(dtype: Dtype, shape: &[u64], tensor: &[u8], region: &Region) -> Option<Vec<u8>> {
    let mut bytes = vec![0; byte_len(dtype, &region.sizes).ok()? as usize];
    let whole = Region::whole(shape);
    for at in places(shape).iter().filter(|at| holds(region, at)) {
        let (from, to) = (number_in(&whole, at), number_in(region, at));
        for number in 0..dtype.bits() {
            if bit(tensor, from * dtype.bits() + number) {
                set_bit(&mut bytes, to * dtype.bits() + number);
            }
        }
    }
    Some(bytes)
}

/// Bytes of which no two stretches look alike.
fn noise(len: u64) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 800, ..ProptestConfig::default()
    })]

    #[test]
    fn any_chunking_to_any_region_is_bit_for_bit(
        (shape, chunks) in chunked(6),
        numbers in prop::collection::vec((any::<u64>(), any::<u64>()), 4),
        whole in prop::bool::weighted(0.2),
        dtype in prop::sample::select(Dtype::ALL),
    ) {
        let wanted = if whole { Region::whole(&shape) } else { inside(&shape, &numbers) };
        let Ok(len) = byte_len(dtype, &shape) else { return Ok(()) };
        let tensor = noise(len);
        let Some(right) = cut_out(dtype, &shape, &tensor, &wanted) else { return Ok(()) };
        let mut got = vec![0; right.len()];
        let index = ChunkIndex::build(&shape, &chunks).unwrap();
        let mut copied = 0;
        for (number, shared) in index.intersecting(&wanted).unwrap() {
            let chunk = &chunks[number as usize];
            prop_assert_eq!(Some(shared.clone()), chunk.intersect(&wanted));
            let Some(stored) = cut_out(dtype, &shape, &tensor, chunk) else { return Ok(()) };
            let runs = match copy_runs(dtype, chunk, &wanted) {
                Ok(runs) => runs.unwrap(),
                Err(error) => {
                    prop_assert!(dtype.bits() < 8);
                    prop_assert_eq!(error.code(), Code::Misaligned);
                    return Ok(());
                }
            };
            runs.copy(&stored, &mut got).unwrap();
            prop_assert_eq!(runs.total_bytes() * 8, shared.elements() * dtype.bits());
            let in_rows = runs.rows().map(|rows| rows.run * rows.rows).sum::<u64>();
            prop_assert_eq!(runs.total_bytes(), in_rows);
            for rows in runs.rows() {
                let apart = rows.from_stride >= rows.run && rows.to_stride >= rows.run;
                prop_assert!(apart && rows.rows > 0 && rows.run > 0);
            }
            // Nothing that could be one run or one loop is two.
            for pair in runs.dims.windows(2) {
                let one = pair[1].count * pair[1].from_stride == pair[0].from_stride
                    && pair[1].count * pair[1].to_stride == pair[0].to_stride;
                prop_assert!(!one, "{:?}", runs);
            }
            copied += runs.total_bytes();
        }
        prop_assert_eq!(got, right);
        prop_assert_eq!(copied, byte_len(dtype, &wanted.sizes).unwrap());
    }

    #[test]
    fn chunks_that_lie_strided_in_memory(
        shape in prop::collection::vec(1_u64..5, 0..4),
        numbers in prop::collection::vec((any::<u64>(), any::<u64>()), 8),
        order in any::<u64>(),
        gap in 0_u64..3,
        offset in 0_u64..5,
        repeated in 0_usize..8,
    ) {
        let chunk = inside(&shape, &numbers);
        let wanted = inside(&shape, &numbers[4..]);
        // Any order of the dimensions in memory, with gaps, and perhaps one that repeats (an expanded tensor).
        let mut dims: Vec<usize> = (0..shape.len()).collect();
        let turn = order as usize % dims.len().max(1);
        dims.rotate_left(turn);
        if order >> 32 & 1 == 1 {
            dims.reverse();
        }
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for dim in dims {
            if dim != repeated {
                strides[dim] = stride;
                stride = stride * chunk.sizes[dim].max(1) + gap;
            }
        }
        let memory = Strides { offset, strides };
        let span = memory.span_bytes(Dtype::I16, &chunk.sizes).unwrap();
        let stored = noise(span);
        let mut right = vec![0xaa; byte_len(Dtype::I16, &wanted.sizes).unwrap() as usize];
        let mut got = right.clone();
        for at in places(&shape).iter().filter(|at| holds(&chunk, at) && holds(&wanted, at)) {
            let sides = at.iter().zip(&chunk.offsets).zip(&memory.strides);
            let from = sides.fold(offset, |sum, ((at, first), stride)| sum + (at - first) * stride);
            let (from, to) = (from as usize * 2, number_in(&wanted, at) as usize * 2);
            right[to..to + 2].copy_from_slice(&stored[from..from + 2]);
        }
        if let Some(runs) = copy_runs_strided(Dtype::I16, &chunk, &memory, &wanted).unwrap() {
            runs.copy(&stored, &mut got).unwrap();
            let rows = |rows: forebay_tensor::CopyRows| {
                rows.rows == 1 || rows.from_stride >= rows.run && rows.to_stride >= rows.run
            };
            prop_assert!(runs.rows().all(rows), "{:?}", runs);
        }
        prop_assert_eq!(got, right);
    }

    #[test]
    fn an_index_finds_what_a_scan_finds(
        boxes in prop::collection::vec(prop::collection::vec((0_u64..40, 0_u64..12), 2), 0..300),
        numbers in prop::collection::vec((any::<u64>(), any::<u64>()), 2),
    ) {
        // Boxes that overlap, in no order: more than one level of the tree.
        let shape = [40, 40];
        let chunks: Vec<Region> = boxes.iter().map(|numbers| inside(&shape, numbers)).collect();
        let wanted = inside(&shape, &numbers);
        let index = ChunkIndex::build(&shape, &chunks).unwrap();
        let mut found: Vec<_> = index.intersecting(&wanted).unwrap().collect();
        let in_order =
            found.iter().map(|(number, _)| (&chunks[*number as usize].offsets, *number));
        prop_assert!(in_order.is_sorted());
        found.sort();
        let scan = (0..).zip(&chunks);
        let scan = scan.filter_map(|(at, chunk)| Some((at, chunk.intersect(&wanted)?)));
        prop_assert_eq!(found, scan.collect::<Vec<_>>());
    }
}

/// Any number, most of them near where arithmetic goes wrong.
fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..5, any::<u64>(), Just(u64::MAX), (u64::MAX - 5)..u64::MAX]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 1000, ..ProptestConfig::default()
    })]

    #[test]
    fn no_claim_makes_arithmetic_wrap(
        numbers in prop::collection::vec(any_number(), 12),
        dims in 0_usize..3,
        dtype in prop::sample::select(Dtype::ALL),
    ) {
        let list = |at: usize| numbers[at..at + dims].to_vec();
        let shape = list(0);
        let chunk = Region { offsets: list(2), sizes: list(4) };
        let wanted = Region { offsets: list(6), sizes: list(8) };
        let memory = Strides { offset: numbers[11], strides: list(9) };
        // Arithmetic that wraps panics in tests; results must lie inside what they are of.
        if let Ok(Some(runs)) = copy_runs_strided(dtype, &chunk, &memory, &wanted) {
            let span = memory.span_bytes(dtype, &chunk.sizes).unwrap();
            let last = runs.dims.iter().map(|dim| (dim.count - 1) * dim.from_stride).sum::<u64>();
            prop_assert!(runs.from + last + runs.run <= span);
        }
        if let Ok(Some(runs)) = copy_runs(dtype, &chunk, &wanted) {
            let shared = chunk.intersect(&wanted).unwrap();
            prop_assert_eq!(runs.total_bytes(), byte_len(dtype, &shared.sizes).unwrap());
        }
        let chunks = [chunk, Region::whole(&shape), wanted.clone()];
        let _ = check_cover(&shape, &chunks, Repeats::AreReplicas);
        if let Ok(index) = ChunkIndex::build(&shape, &chunks[1..2]) {
            let shared = Region::whole(&shape).intersect(&wanted);
            let found: Vec<_> = index.intersecting(&wanted).unwrap().collect();
            let whole: Vec<_> = shared.map(|shared| (0, shared)).into_iter().collect();
            prop_assert_eq!(found, whole);
        }
    }

    #[test]
    fn no_layout_makes_arithmetic_wrap(
        shape in prop::collection::vec(any_number(), 2),
        mesh in prop::collection::vec(1_u64..4, 3),
        cuts in prop::collection::vec((0_usize..2, prop::option::of(any_number())), 3),
        wanted in prop::collection::vec(any_number(), 4),
    ) {
        let cuts = cuts.into_iter().map(|(dim, split)| match split {
            Some(split_factor) => Placement::StridedShard { dim, split_factor },
            None => Placement::Shard(dim),
        });
        let mesh = Arc::new(Mesh::new(mesh).unwrap());
        let Ok(layout) = MeshLayout::new(mesh, cuts.collect()) else { return Ok(()) };
        let wanted = Region { offsets: wanted[..2].to_vec(), sizes: wanted[2..].to_vec() };
        for layout in [Some(layout.clone()), layout.right_to_left()].into_iter().flatten() {
            let Ok(tiling) = Tiling::new(&layout, &shape) else { continue };
            let tiles: Vec<Region> = tiling.tiles().take(5000).map(|tile| tile.region).collect();
            if tiles.len() < 5000 {
                check_cover(&shape, &tiles, Repeats::Overlap).unwrap();
                let met = tiles.iter().filter(|tile| tile.intersect(&wanted).is_some()).count();
                prop_assert_eq!(tiling.intersecting(&wanted).unwrap().count(), met);
            }
            for index in 0..layout.mesh().size() {
                let shard = layout.local(&shape, &layout.mesh().coordinate(index));
                let Ok(shard) = shard else { continue };
                for piece in &shard.pieces {
                    prop_assert!(piece.region.check_within(&shape).is_ok());
                }
            }
        }
    }
}

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets.to_vec(), sizes.to_vec()).unwrap()
}

#[test]
fn rows_and_columns_are_few_moves() {
    // Rows of a shard to rows of another: one run.
    let runs = copy_runs(Dtype::F32, &region(&[4, 0], &[4, 8]), &region(&[6, 0], &[6, 8])).unwrap();
    let runs = runs.unwrap();
    assert_eq!((runs.from, runs.to, runs.run, runs.dims.len()), (64, 0, 64, 0));
    // Columns: one move of rows with a stride on each side.
    let runs = copy_runs(Dtype::F32, &region(&[0, 0], &[4, 8]), &region(&[0, 6], &[4, 4]));
    let rows: Vec<_> = runs.unwrap().unwrap().rows().collect();
    let [row] = rows[..] else { panic!("{rows:?}") };
    assert_eq!((row.from, row.from_stride, row.to, row.to_stride), (24, 32, 0, 16));
    assert_eq!((row.run, row.rows), (8, 4));
    // A box inside a box: as many as the outermost dimension is long.
    let runs = copy_runs(Dtype::U8, &Region::whole(&[9, 9, 9]), &region(&[3, 3, 3], &[5, 4, 3]));
    let runs = runs.unwrap().unwrap();
    assert_eq!((runs.run, runs.run_count(), runs.rows().count()), (3, 20, 5));
}

#[test]
fn transposed_and_expanded_chunks_are_moves_that_an_engine_takes() {
    let whole = region(&[0, 0], &[3, 4]);
    let transposed = Strides { offset: 0, strides: vec![1, 3] };
    let runs = copy_runs_strided(Dtype::U8, &whole, &transposed, &whole).unwrap().unwrap();
    let mut got = vec![0; 12];
    runs.copy(&[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11], &mut got).unwrap();
    assert_eq!(got, (0..12).collect::<Vec<u8>>());
    assert_eq!(runs.rows().count(), 3);
    let expanded = Strides { offset: 1, strides: vec![1, 0] };
    let runs = copy_runs_strided(Dtype::U8, &whole, &expanded, &whole).unwrap().unwrap();
    runs.copy(&[9, 1, 2, 3], &mut got).unwrap();
    assert_eq!(got, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
    assert!(runs.rows().all(|rows| rows.from_stride >= rows.run));
}

#[test]
fn absurd_claims_are_errors() {
    let huge = region(&[0, 0], &[u64::MAX, u64::MAX]);
    let code = |result: forebay_error::Result<_>| result.map(|_: Option<_>| ()).unwrap_err().code();
    assert_eq!(code(copy_runs(Dtype::F32, &huge, &huge)), Code::Overflow);
    let scalar = region(&[], &[]);
    let two = region(&[0], &[2]);
    assert_eq!(code(copy_runs(Dtype::F32, &two, &scalar)), Code::BadSlice);
    let strided = |offset, stride| Strides { offset, strides: vec![stride] };
    let far = copy_runs_strided(Dtype::U8, &two, &strided(1, u64::MAX), &two);
    assert_eq!(code(far), Code::Overflow);
    let far = copy_runs_strided(Dtype::U8, &two, &strided(u64::MAX, 0), &two);
    assert_eq!(code(far), Code::Overflow);
    let missing = Strides { offset: 0, strides: vec![] };
    assert_eq!(code(copy_runs_strided(Dtype::U8, &two, &missing, &two)), Code::BadSlice);
    // The stride of a single element does not matter.
    let one = region(&[1], &[1]);
    let runs = copy_runs_strided(Dtype::U8, &one, &strided(0, u64::MAX), &two).unwrap().unwrap();
    assert_eq!((runs.from, runs.to, runs.run), (0, 1, 1));
    // Bytes that are shorter than the region says.
    let runs = copy_runs(Dtype::U8, &two, &two).unwrap().unwrap();
    assert_eq!(runs.copy(&[1], &mut [0, 0]).unwrap_err().code(), Code::OutOfBounds);
    assert_eq!(runs.copy(&[1, 2], &mut [0]).unwrap_err().code(), Code::OutOfBounds);
}
