//! Sizes of whole tensors.

use crate::Dtype;
use forebay_error::{Code, Error, Result};
use std::fmt;

/// Shows a shape as `[2, 3]`; a long one (files may hold millions of sides) is cut after sixteen.
#[derive(Clone, Copy, Debug)]
pub struct ShowShape<'a>(pub &'a [u64]);

impl fmt::Display for ShowShape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.get(..16) {
            Some(head) if self.0.len() > 16 => write!(f, "{head:?}... ({} sides)", self.0.len()),
            _ => write!(f, "{:?}", self.0),
        }
    }
}

/// Elements of a shape. Multiplies from the first side on and fails where a product leaves 64 bits, as the
/// safetensors library does: `[0, 2^62, 2^62]` has no elements, `[2^62, 2^62, 0]` is an overflow.
pub fn element_count(shape: &[u64]) -> Result<u64> {
    shape.iter().try_fold(1_u64, |product, &side| product.checked_mul(side)).ok_or_else(|| {
        Error::new(
            Code::Overflow,
            format!("shape {} has more than 2^64 elements", ShowShape(shape)),
        )
    })
}

/// Bytes of a whole tensor. Fails with `overflow` where the count of *bits* leaves 64 bits and with `misaligned`
/// where it ends inside a byte, as the safetensors library does.
pub fn byte_len(dtype: Dtype, shape: &[u64]) -> Result<u64> {
    let bits = element_count(shape)?.checked_mul(dtype.bits()).ok_or_else(|| {
        Error::new(
            Code::Overflow,
            format!("{dtype} of shape {} has more than 2^64 bits", ShowShape(shape)),
        )
    })?;
    if !bits.is_multiple_of(8) {
        let shape = ShowShape(shape);
        let what = format!("{dtype} of shape {shape} has {bits} bits, no whole number of bytes");
        return Err(Error::new(Code::Misaligned, what));
    }
    Ok(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(dtype: Dtype, shape: &[u64]) -> Option<Code> {
        byte_len(dtype, shape).err().map(|error| error.code())
    }

    #[test]
    fn sizes() {
        assert_eq!(byte_len(Dtype::F32, &[]).unwrap(), 4);
        assert_eq!(byte_len(Dtype::F32, &[3, 5]).unwrap(), 60);
        assert_eq!(byte_len(Dtype::F4, &[2, 3]).unwrap(), 3);
        assert_eq!(byte_len(Dtype::F6E2M3, &[4]).unwrap(), 3);
        assert_eq!(byte_len(Dtype::F64, &[0, 1 << 62, 1 << 62]).unwrap(), 0);
    }

    #[test]
    fn overflow_depends_on_the_order_of_the_sides() {
        assert_eq!(code(Dtype::F64, &[1 << 62, 1 << 62, 0]), Some(Code::Overflow));
        assert_eq!(code(Dtype::F64, &[1 << 32, 1 << 32]), Some(Code::Overflow));
        // 2^61 bytes would fit, 2^64 bits do not.
        assert_eq!(code(Dtype::U8, &[1 << 61]), Some(Code::Overflow));
        assert_eq!(byte_len(Dtype::U8, &[(1 << 61) - 1]).unwrap(), (1 << 61) - 1);
    }

    #[test]
    fn long_shapes_are_cut() {
        assert_eq!(ShowShape(&[2, 3]).to_string(), "[2, 3]");
        assert!(ShowShape(&[1; 5000]).to_string().len() < 100);
    }

    #[test]
    fn half_bytes_are_refused() {
        assert_eq!(code(Dtype::F4, &[3]), Some(Code::Misaligned));
        assert_eq!(code(Dtype::F6E3M2, &[2]), Some(Code::Misaligned));
        assert_eq!(code(Dtype::F4, &[]), Some(Code::Misaligned));
    }
}
