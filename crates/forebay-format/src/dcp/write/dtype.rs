//! The data types of torch, as checkpoints name them.
//!
//! More than those of safetensors files ([`Dtype`]), and not the same: torch has complex types and opaque bits, and
//! its four-bit float has two values in an element. `torch.save` has two ways to write a tensor: old types by a storage
//! class of their own (`_rebuild_tensor_v2`), newer ones by bytes and the name of the type (`_rebuild_tensor_v3`).

use std::fmt;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;

macro_rules! torch_dtypes {
    ($(
        $(#[doc = $doc:literal])+
        $variant:ident = $name:literal, $bytes:literal, $class:expr, $dtype:expr;
    )+) => {
        /// A data type of torch that `torch.save` writes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum TorchDtype {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl TorchDtype {
            /// Every data type.
            pub const ALL: &[TorchDtype] = &[$(TorchDtype::$variant,)+];

            /// Its attribute of the module `torch`: `float32`.
            pub fn name(self) -> &'static str {
                match self { $(TorchDtype::$variant => $name,)+ }
            }

            /// Bytes of one element.
            pub fn item_bytes(self) -> u64 {
                match self { $(TorchDtype::$variant => $bytes,)+ }
            }

            /// The class of `torch` that a pickle names for its storage; `None` where it names bytes.
            pub(super) fn storage_class(self) -> Option<&'static str> {
                match self { $(TorchDtype::$variant => $class,)+ }
            }

            /// The type with the same bits in safetensors files. Sides differ for [`TorchDtype::Float4E2M1X2`] alone:
            /// its element is a byte, that of [`Dtype::F4`] half of one.
            pub fn dtype(self) -> Option<Dtype> {
                match self { $(TorchDtype::$variant => $dtype,)+ }
            }
        }
    };
}

torch_dtypes! {
    /// Truth values, a byte each.
    Bool = "bool", 1, Some("BoolStorage"), Some(Dtype::Bool);
    /// Unsigned byte.
    Uint8 = "uint8", 1, Some("ByteStorage"), Some(Dtype::U8);
    /// Signed byte.
    Int8 = "int8", 1, Some("CharStorage"), Some(Dtype::I8);
    /// Signed 16-bit integer.
    Int16 = "int16", 2, Some("ShortStorage"), Some(Dtype::I16);
    /// Signed 32-bit integer.
    Int32 = "int32", 4, Some("IntStorage"), Some(Dtype::I32);
    /// Signed 64-bit integer.
    Int64 = "int64", 8, Some("LongStorage"), Some(Dtype::I64);
    /// IEEE half.
    Float16 = "float16", 2, Some("HalfStorage"), Some(Dtype::F16);
    /// Brain float.
    BFloat16 = "bfloat16", 2, Some("BFloat16Storage"), Some(Dtype::BF16);
    /// IEEE single.
    Float32 = "float32", 4, Some("FloatStorage"), Some(Dtype::F32);
    /// IEEE double.
    Float64 = "float64", 8, Some("DoubleStorage"), Some(Dtype::F64);
    /// Complex of two singles.
    Complex64 = "complex64", 8, Some("ComplexFloatStorage"), Some(Dtype::C64);
    /// Complex of two doubles.
    Complex128 = "complex128", 16, Some("ComplexDoubleStorage"), None;
    /// Complex of two halves.
    Complex32 = "complex32", 4, None, None;
    /// Unsigned 16-bit integer.
    Uint16 = "uint16", 2, None, Some(Dtype::U16);
    /// Unsigned 32-bit integer.
    Uint32 = "uint32", 4, None, Some(Dtype::U32);
    /// Unsigned 64-bit integer.
    Uint64 = "uint64", 8, None, Some(Dtype::U64);
    /// Eight-bit float, five exponent bits.
    Float8E5M2 = "float8_e5m2", 1, None, Some(Dtype::F8E5M2);
    /// Eight-bit float, four exponent bits.
    Float8E4M3 = "float8_e4m3fn", 1, None, Some(Dtype::F8E4M3);
    /// Eight-bit float, five exponent bits, no negative zero.
    Float8E5M2Fnuz = "float8_e5m2fnuz", 1, None, Some(Dtype::F8E5M2Fnuz);
    /// Eight-bit float, four exponent bits, no negative zero.
    Float8E4M3Fnuz = "float8_e4m3fnuz", 1, None, Some(Dtype::F8E4M3Fnuz);
    /// Eight-bit exponent without mantissa; torch 2.7 and newer.
    Float8E8M0 = "float8_e8m0fnu", 1, None, Some(Dtype::F8E8M0);
    /// Two four-bit floats in a byte, which counts as one element; torch 2.8 and newer.
    Float4E2M1X2 = "float4_e2m1fn_x2", 1, None, Some(Dtype::F4);
    /// Opaque byte.
    Bits8 = "bits8", 1, None, None;
    /// Opaque two bytes.
    Bits16 = "bits16", 2, None, None;
    /// Opaque byte of eight values.
    Bits1x8 = "bits1x8", 1, None, None;
    /// Opaque byte of four values.
    Bits2x4 = "bits2x4", 1, None, None;
    /// Opaque byte of two values.
    Bits4x2 = "bits4x2", 1, None, None;
}

impl TorchDtype {
    /// The data type of an attribute of `torch`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// The data type of torch with the bits of `dtype`; `None` for the six-bit floats, which torch has not.
    pub fn of(dtype: Dtype) -> Option<Self> {
        Self::ALL.iter().copied().find(|own| own.dtype() == Some(dtype))
    }

    /// Elements and bytes of a tensor whose sides are `shape`, as torch counts them.
    pub fn size(self, shape: &[u64]) -> Result<(u64, u64)> {
        // A side of zero makes the tensor empty, whatever the product of the others.
        let elements = if shape.contains(&0) {
            Some(0)
        } else {
            shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side))
        };
        let bytes = elements
            .and_then(|elements| elements.checked_mul(self.item_bytes()))
            .filter(|&bytes| bytes <= i64::MAX as u64);
        match (elements, bytes) {
            (Some(elements), Some(bytes)) => Ok((elements, bytes)),
            _ => {
                let what = format!("a tensor of {self} with sides {shape:?} is too large");
                Err(Error::new(Code::Overflow, what))
            }
        }
    }
}

impl fmt::Display for TorchDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_sizes_agree_with_the_other_types() {
        for &dtype in TorchDtype::ALL {
            assert_eq!(TorchDtype::parse(dtype.name()), Some(dtype));
            if let Some(other) = dtype.dtype() {
                assert_eq!(TorchDtype::of(other), Some(dtype));
                let per_element = if other == Dtype::F4 { 2 } else { 1 };
                assert_eq!(dtype.item_bytes() * 8, other.bits() * per_element, "{dtype}");
            }
        }
        assert_eq!(TorchDtype::of(Dtype::F6E2M3), None);
        assert_eq!(TorchDtype::parse("float"), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(TorchDtype::Float32.size(&[]).unwrap(), (1, 4));
        assert_eq!(TorchDtype::Int16.size(&[u64::MAX, 0, 3]).unwrap(), (0, 0));
        let code = |shape: &[u64]| TorchDtype::Float32.size(shape).unwrap_err().code();
        assert_eq!(code(&[1 << 32, 1 << 32]), Code::Overflow);
        assert_eq!(code(&[1 << 61]), Code::Overflow);
    }
}
