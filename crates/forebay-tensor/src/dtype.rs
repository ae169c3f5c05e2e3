//! The data types that tensor files hold.

use std::fmt;

macro_rules! dtypes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $bits:literal;)+) => {
        /// The type of one element. The order of the variants is that of the safetensors library, which sorts the
        /// tensors of a file by it (last first) when it writes one; so it must not change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Dtype {
            /// Every data type, in order.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant,)+];

            /// Bits of one element. Elements of fewer than eight are packed without gaps.
            pub fn bits(self) -> u64 {
                match self { $(Dtype::$variant => $bits,)+ }
            }

            /// The name in safetensors files.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)+ }
            }

            /// The data type of a safetensors name; case matters, as it does for the library.
            pub fn parse(name: &str) -> Option<Self> {
                match name { $($name => Some(Dtype::$variant),)+ _ => None }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1; other values pass through.
    Bool = "BOOL", 8;
    /// Four-bit float, two in a byte.
    F4 = "F4", 4;
    /// Six-bit float, two exponent bits, four elements in three bytes.
    F6E2M3 = "F6_E2M3", 6;
    /// Six-bit float, three exponent bits.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// Eight-bit float, five exponent bits.
    F8E5M2 = "F8_E5M2", 8;
    /// Eight-bit float, four exponent bits.
    F8E4M3 = "F8_E4M3", 8;
    /// Eight-bit exponent without mantissa, as the scales of block formats.
    F8E8M0 = "F8_E8M0", 8;
    /// Eight-bit float, four exponent bits, no negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// Eight-bit float, five exponent bits, no negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// IEEE half.
    F16 = "F16", 16;
    /// Brain float.
    BF16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// IEEE single.
    F32 = "F32", 32;
    /// Complex of two singles.
    C64 = "C64", 64;
    /// IEEE double.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_nothing_else_does() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(dtype.name()), Some(dtype));
            assert_eq!(Dtype::parse(&dtype.name().to_lowercase()), None);
        }
        assert_eq!(Dtype::ALL.len(), 22);
        assert_eq!(Dtype::parse("F128"), None);
        assert_eq!(format!("{:>5}|", Dtype::BF16), " BF16|");
    }

    #[test]
    fn bits_agree_with_the_digits_of_the_name() {
        for &dtype in Dtype::ALL {
            let digits = dtype.name().trim_start_matches(char::is_alphabetic);
            let digits = digits.split('_').next().unwrap_or_default();
            let bits = digits.parse().unwrap_or(8);
            assert_eq!(dtype.bits(), bits, "{dtype}");
        }
    }
}
