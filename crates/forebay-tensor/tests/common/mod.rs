//! Random ways to cut a tensor, for the property tests.

use forebay_tensor::Region;
use proptest::prelude::*;

/// A shape of up to four small dimensions and boxes that cover it, in an order of their own: grids, and what comes out
/// when each box is cut further by itself.
pub(crate) fn chunked(max_side: u64) -> impl Strategy<Value = (Vec<u64>, Vec<Region>)> {
    let shape = prop::collection::vec(0..=max_side, 0..=4);
    let cuts = prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..12);
    (shape, cuts, any::<bool>(), any::<u64>()).prop_map(|(shape, cuts, grid, seed)| {
        let mut pieces = vec![Region::whole(&shape)];
        for (which, dim, at) in cuts {
            cut(&mut pieces, &shape, grid, (which, dim, at));
        }
        let mut order: Vec<(u64, Region)> =
            pieces.into_iter().enumerate().map(|(n, p)| (scrambled(seed, n as u64), p)).collect();
        order.sort();
        (shape, order.into_iter().map(|(_, piece)| piece).collect())
    })
}

/// Cuts one box in two, or everything along a plane. The plane may leave one of the two empty.
fn cut(pieces: &mut Vec<Region>, shape: &[u64], grid: bool, (which, dim, at): (u64, u64, u64)) {
    if shape.is_empty() {
        return;
    }
    let dim = (dim % shape.len() as u64) as usize;
    let which = (which % pieces.len() as u64) as usize;
    let chosen = pieces[which].clone();
    let plane = chosen.offsets[dim] + at % (chosen.sizes[dim] + 1);
    for at in 0..pieces.len() {
        let piece = &mut pieces[at];
        let (start, size) = (piece.offsets[dim], piece.sizes[dim]);
        let through = if grid { plane > start && plane < start + size } else { at == which };
        if through {
            let mut rest = piece.clone();
            piece.sizes[dim] = plane - start;
            rest.offsets[dim] = plane;
            rest.sizes[dim] = start + size - plane;
            pieces.push(rest);
        }
    }
}

/// A number that looks random (splitmix64).
fn scrambled(seed: u64, number: u64) -> u64 {
    let mut x = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A region inside a shape, from any three numbers a dimension.
pub(crate) fn inside(shape: &[u64], numbers: &[(u64, u64)]) -> Region {
    let sides = shape.iter().zip(numbers.iter().cycle());
    let (offsets, sizes) = sides
        .map(|(&side, &(a, b))| {
            let offset = a % (side + 1);
            (offset, b % (side - offset + 1))
        })
        .unzip();
    Region { offsets, sizes }
}

/// All coordinates of a shape, in row-major order.
pub(crate) fn places(shape: &[u64]) -> Vec<Vec<u64>> {
    shape.iter().fold(vec![Vec::new()], |places, &side| {
        let longer =
            places.iter().flat_map(|place| (0..side).map(|at| [place.as_slice(), &[at]].concat()));
        longer.collect()
    })
}

/// Whether a region holds an element, said as plainly as possible.
pub(crate) fn holds(region: &Region, at: &[u64]) -> bool {
    let sides = region.offsets.iter().zip(&region.sizes).zip(at);
    sides.into_iter().all(|((&offset, &size), &at)| at >= offset && at - offset < size)
}
