//! The names that torch gives to data types and to the classes of storages.

use forebay_tensor::Dtype;

/// The data type that torch calls `torch.NAME`; `None` for those that no tensor here can have (complex128, quantized
/// ones, the shell types of one to seven bits).
///
/// `float4_e2m1fn_x2` is [`Dtype::F4`], whose elements are halves of torch's: shapes have a last side twice as long.
pub fn dtype_of(name: &str) -> Option<Dtype> {
    Some(match name {
        "bool" => Dtype::Bool,
        "uint8" => Dtype::U8,
        "int8" => Dtype::I8,
        "int16" | "short" => Dtype::I16,
        "uint16" => Dtype::U16,
        "int32" | "int" => Dtype::I32,
        "uint32" => Dtype::U32,
        "int64" | "long" => Dtype::I64,
        "uint64" => Dtype::U64,
        "float16" | "half" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "float32" | "float" => Dtype::F32,
        "float64" | "double" => Dtype::F64,
        "complex64" | "cfloat" => Dtype::C64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e8m0fnu" => Dtype::F8E8M0,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "float4_e2m1fn_x2" => Dtype::F4,
        _ => return None,
    })
}

/// The data type of a class of storages, `torch.FloatStorage` and its kin.
pub(super) fn dtype_of_storage(class: &str) -> Option<Dtype> {
    Some(match class {
        "BoolStorage" => Dtype::Bool,
        "ByteStorage" => Dtype::U8,
        "CharStorage" => Dtype::I8,
        "ShortStorage" => Dtype::I16,
        "IntStorage" => Dtype::I32,
        "LongStorage" => Dtype::I64,
        "HalfStorage" => Dtype::F16,
        "BFloat16Storage" => Dtype::BF16,
        "FloatStorage" => Dtype::F32,
        "DoubleStorage" => Dtype::F64,
        "ComplexFloatStorage" => Dtype::C64,
        _ => return None,
    })
}
