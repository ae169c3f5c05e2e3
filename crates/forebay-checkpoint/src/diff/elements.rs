//! Elements compared.

use forebay_tensor::Dtype;

use crate::stream::TensorInfo;

/// How two tensors of one form differ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// Elements of either; of types below a byte, bytes.
    pub elements: u64,
    /// Those whose bits differ.
    pub differing: u64,
    /// Of floats of 16, 32 and 64 bits: the largest difference among the elements that are finite on both sides;
    /// `None` for other types, and where no such element differs.
    pub max_abs: Option<f64>,
    /// Of those: elements that differ and are infinite or NaN on one side at least.
    pub not_finite: u64,
}

impl Difference {
    /// None so far, of a tensor.
    pub(super) fn new(info: &TensorInfo) -> Self {
        let unit = (info.dtype.bits() / 8).max(1);
        Self { elements: info.bytes / unit, ..Self::default() }
    }

    /// Adds what was found in another part.
    pub(super) fn add(&mut self, other: &Self) {
        self.differing += other.differing;
        self.not_finite += other.not_finite;
        self.max_abs = match (self.max_abs, other.max_abs) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
    }
}

/// Compares whole elements.
pub(super) fn compare(dtype: Dtype, a: &[u8], b: &[u8]) -> Difference {
    if a == b {
        return Difference::default();
    }
    match dtype {
        Dtype::F64 => floats::<8>(a, b, f64::from_le_bytes),
        Dtype::F32 => floats::<4>(a, b, |bits| f32::from_le_bytes(bits).into()),
        Dtype::BF16 => floats::<2>(a, b, |bits| {
            f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16).into()
        }),
        Dtype::F16 => floats::<2>(a, b, half),
        _ => match dtype.bits() {
            16 => bits::<2>(a, b),
            32 => bits::<4>(a, b),
            64 => bits::<8>(a, b),
            _ => bits::<1>(a, b),
        },
    }
}

fn bits<const BYTES: usize>(a: &[u8], b: &[u8]) -> Difference {
    let pairs = a.as_chunks::<BYTES>().0.iter().zip(b.as_chunks::<BYTES>().0);
    Difference { differing: pairs.filter(|(a, b)| a != b).count() as u64, ..Difference::default() }
}

fn floats<const BYTES: usize>(
    a: &[u8],
    b: &[u8],
    value: impl Fn([u8; BYTES]) -> f64,
) -> Difference {
    let mut found = Difference::default();
    for (a, b) in a.as_chunks::<BYTES>().0.iter().zip(b.as_chunks::<BYTES>().0) {
        if a == b {
            continue;
        }
        found.differing += 1;
        let (a, b) = (value(*a), value(*b));
        if a.is_finite() && b.is_finite() {
            found.max_abs = Some(found.max_abs.unwrap_or(0.0).max((a - b).abs()));
        } else {
            found.not_finite += 1;
        }
    }
    found
}

/// A half's value.
fn half(bits: [u8; 2]) -> f64 {
    let mut single = Vec::with_capacity(4);
    crate::export::cast(Dtype::F16, Dtype::F32, &bits, &mut single);
    single.first_chunk().map_or(f64::NAN, |bits| f32::from_le_bytes(*bits).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_decide_and_differences_are_of_finite_elements() {
        let bytes = |values: &[f32]| -> Vec<u8> {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        let a = bytes(&[1.0, f32::NAN, 0.0, f32::INFINITY, 2.0, -3.0]);
        let b = bytes(&[1.0, f32::NAN, -0.0, 5.0, 2.5, -3.0]);
        let found = compare(Dtype::F32, &a, &b);
        assert_eq!((found.differing, found.not_finite, found.max_abs), (3, 1, Some(0.5)));
        assert_eq!(compare(Dtype::F32, &a, &a), Difference::default());
        assert_eq!(compare(Dtype::I64, &[0; 16], &[1; 16]).differing, 2);
        assert_eq!(compare(Dtype::F8E4M3, &[0, 1, 2], &[0, 2, 3]).differing, 2);
        // 1.0 and 1.5 as halves and as brain floats.
        let half = compare(Dtype::F16, &[0x00, 0x3c], &[0x00, 0x3e]);
        let brain = compare(Dtype::BF16, &[0x80, 0x3f], &[0xc0, 0x3f]);
        assert_eq!((half.max_abs, brain.max_abs), (Some(0.5), Some(0.5)));
    }

    #[test]
    fn parts_add_up() {
        let mut sum = Difference::default();
        for (differing, max_abs) in [(1, None), (2, Some(0.5)), (0, None), (3, Some(0.25))] {
            sum.add(&Difference { differing, max_abs, ..Difference::default() });
        }
        assert_eq!((sum.differing, sum.max_abs), (6, Some(0.5)));
    }
}
