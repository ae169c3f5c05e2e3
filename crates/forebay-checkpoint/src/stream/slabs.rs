//! Cutting tensors into boxes that follow each other in row-major order, and boxes into batches.

use forebay_error::Result;
use forebay_tensor::{Dtype, Region, byte_len};

use super::TensorInfo;

/// Bytes of a batch, and the most of a box.
pub(crate) const BATCH_BYTES: u64 = 32 << 20;

/// Boxes start on multiples of this in their slot.
pub(super) const ALIGN: u64 = 64;

/// Elements of types below a byte go together in so many: 8 of any width are whole bytes.
const PACKED: u64 = 8;

/// A box of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    /// Its place in the list of tensors.
    pub(crate) tensor: usize,
    /// Which part.
    pub(crate) region: Region,
    /// First byte in the tensor, row-major: a box is without gaps there.
    pub(crate) offset: u64,
    /// Its bytes.
    pub(crate) bytes: u64,
}

/// Batches of boxes that make up these tensors, in the order given; each of at most [`BATCH_BYTES`] with its padding,
/// but for a box that cannot be cut. Tensors without bytes are in none.
pub(crate) fn batches(
    tensors: &[TensorInfo],
    order: &[usize],
) -> impl Iterator<Item = Result<Vec<Want>>> {
    let mut boxes = order.iter().flat_map(move |&number| match tensors.get(number) {
        Some(tensor) if tensor.bytes > 0 => boxes_of(number, tensor),
        _ => Vec::new(),
    });
    let mut next = boxes.next();
    std::iter::from_fn(move || {
        let mut batch: Vec<Want> = Vec::new();
        let mut bytes = 0;
        while let Some(want) = next.take() {
            let want = match want {
                Ok(want) => want,
                Err(error) => return Some(Err(error)),
            };
            let padded = want.bytes.next_multiple_of(ALIGN);
            if !batch.is_empty() && bytes + padded > BATCH_BYTES {
                next = Some(Ok(want));
                return Some(Ok(batch));
            }
            bytes += padded;
            batch.push(want);
            next = boxes.next();
        }
        (!batch.is_empty()).then_some(Ok(batch))
    })
}

/// The boxes of a tensor.
fn boxes_of(number: usize, tensor: &TensorInfo) -> Vec<Result<Want>> {
    let mut offset = 0;
    let regions = cut(tensor.dtype, &tensor.shape, BATCH_BYTES);
    let want = |region: Region| {
        let bytes = byte_len(tensor.dtype, &region.sizes)?;
        let want = Want { tensor: number, region, offset, bytes };
        offset += bytes;
        Ok(want)
    };
    regions.into_iter().map(want).collect()
}

/// Boxes of at most `most` bytes that follow one another row-major and make up a tensor that has elements.
fn cut(dtype: Dtype, shape: &[u64], most: u64) -> Vec<Region> {
    let row_bits = |dim: usize| {
        let inner = shape.iter().skip(dim + 1);
        inner.fold(u128::from(dtype.bits()), |bits, &side| bits.saturating_mul(u128::from(side)))
    };
    let limit = u128::from(most) * 8;
    let whole: u128 = shape
        .iter()
        .fold(u128::from(dtype.bits()), |bits, &side| bits.saturating_mul(u128::from(side)));
    if whole <= limit {
        return vec![Region::whole(shape)];
    }
    // The first dimension whose rows fit; one element always does.
    let Some(dim) = (0..shape.len()).find(|&dim| row_bits(dim) <= limit) else {
        return vec![Region::whole(shape)];
    };
    let rows = u64::try_from(limit / row_bits(dim).max(1)).unwrap_or(u64::MAX);
    let rows = match row_bits(dim) % 8 {
        0 => rows.max(1),
        _ => (rows / PACKED * PACKED).max(PACKED),
    };
    let mut regions = Vec::new();
    let mut corner = vec![0_u64; dim];
    loop {
        push_rows(&mut regions, shape, &corner, rows);
        if !advance(&mut corner, shape) {
            return regions;
        }
    }
}

/// The boxes of `rows` rows each at one place of the outer dimensions.
fn push_rows(regions: &mut Vec<Region>, shape: &[u64], corner: &[u64], rows: u64) {
    let dim = corner.len();
    let side = shape.get(dim).copied().unwrap_or(1);
    let mut row = 0;
    while row < side {
        let mut region = Region::whole(shape);
        for (at, &place) in corner.iter().enumerate() {
            if let (Some(offset), Some(size)) =
                (region.offsets.get_mut(at), region.sizes.get_mut(at))
            {
                (*offset, *size) = (place, 1);
            }
        }
        if let (Some(offset), Some(size)) = (region.offsets.get_mut(dim), region.sizes.get_mut(dim))
        {
            (*offset, *size) = (row, rows.min(side - row));
        }
        row += rows;
        regions.push(region);
    }
}

/// The next place of the outer dimensions, the last counting fastest; false after the last.
fn advance(corner: &mut [u64], shape: &[u64]) -> bool {
    for (at, &side) in corner.iter_mut().zip(shape).rev() {
        *at += 1;
        if *at < side {
            return true;
        }
        *at = 0;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places of all elements in order.
    fn places(shape: &[u64], regions: &[Region]) -> Vec<u64> {
        let mut places = Vec::new();
        for region in regions {
            for index in 0..region.elements() {
                let (mut left, mut place, mut stride) = (index, 0, 1);
                for dim in (0..shape.len()).rev() {
                    place += (region.offsets[dim] + left % region.sizes[dim]) * stride;
                    left /= region.sizes[dim];
                    stride *= shape[dim];
                }
                places.push(place);
            }
        }
        places
    }

    #[test]
    fn boxes_follow_each_other_without_a_gap() {
        for (shape, most, boxes) in [
            (&[7, 5][..], 40, 4),
            (&[7, 5], 19, 14),
            (&[3, 1, 4, 2], 8, 12),
            (&[100], 64, 7),
            (&[], 1, 1),
            (&[4, 4], 64, 1),
        ] {
            let regions = cut(Dtype::F32, shape, most);
            assert_eq!(regions.len(), boxes, "{shape:?}");
            let wanted: Vec<u64> = (0..shape.iter().product()).collect();
            assert_eq!(places(shape, &regions), wanted, "{shape:?}");
        }
        for region in cut(Dtype::F4, &[3, 50], 10) {
            assert!(byte_len(Dtype::F4, &region.sizes).is_ok(), "{region:?}");
        }
    }

    #[test]
    fn batches_hold_every_byte_once_and_stay_small() {
        let tensor = |rows: u64| TensorInfo {
            name: rows.to_string(),
            path: Vec::new(),
            dtype: Dtype::F32,
            shape: vec![rows, 1 << 20],
            bytes: rows << 22,
            place: (0, 0),
            same_as: None,
            number: 0,
        };
        let tensors: Vec<TensorInfo> = [1, 0, 20, 3, 2].map(tensor).into();
        let batches: Vec<_> = batches(&tensors, &[4, 3, 1, 2, 0]).map(Result::unwrap).collect();
        let bytes = |batch: &[Want]| batch.iter().map(|want| want.bytes).sum::<u64>();
        assert!(batches.iter().all(|batch| bytes(batch) <= BATCH_BYTES));
        assert_eq!(batches.iter().map(|batch| bytes(batch)).sum::<u64>(), 26 << 22);
        assert_eq!(batches[0].iter().map(|want| want.tensor).collect::<Vec<_>>(), [4, 3]);
        let large = batches.iter().flatten().filter(|want| want.tensor == 2);
        let offsets: Vec<u64> = large.map(|want| want.offset).collect();
        assert_eq!(offsets, [0, 8 << 22, 16 << 22]);
    }
}
