//! Where the tensors of a new file go, and its header.
//!
//! The same bytes as the safetensors library writes for the same tensors: dtypes in descending order of their place
//! in its list (widest first, so that each starts aligned when sizes are whole), names ascending within one dtype, no
//! spaces in the JSON, and spaces after it up to a multiple of eight. The library writes the metadata in the order of a
//! hash map, which is chance; here it keeps the order it was given in. Without tensors but with empty metadata the
//! library writes a header that is not JSON; here it is.

use super::{LENGTH_WORD, MAX_HEADER_BYTES, METADATA_KEY};
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, byte_len};
use std::io::Write;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides, in elements.
    pub shape: Vec<u64>,
}

/// The plan of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveLayout {
    /// What the file starts with: length word, JSON, padding. The data starts after it, at a multiple of eight.
    pub header: Vec<u8>,
    /// Byte of the file where each tensor starts, in the order the tensors were given in.
    pub offsets: Vec<u64>,
    /// Bytes of each tensor, in the order they were given in.
    pub bytes: Vec<u64>,
    /// Places in the list given, in the order the tensors have in the file.
    pub order: Vec<usize>,
    /// Bytes of the file.
    pub total: u64,
}

/// Plans a file. Metadata of `Some` and empty is written as an empty object.
pub fn layout(tensors: &[TensorSpec], metadata: Option<&[(String, String)]>) -> Result<SaveLayout> {
    layout_of(&tensors.iter().collect::<Vec<_>>(), metadata)
}

/// [`layout`] for tensors picked out of a list.
pub(crate) fn layout_of(
    tensors: &[&TensorSpec],
    metadata: Option<&[(String, String)]>,
) -> Result<SaveLayout> {
    let mut rows: Vec<Row<'_>> = Vec::with_capacity(tensors.len());
    for (index, &spec) in tensors.iter().enumerate() {
        if spec.name == METADATA_KEY {
            return Err(Error::new(Code::Usage, format!("no tensor can be named {METADATA_KEY}")));
        }
        let bytes = byte_len(spec.dtype, &spec.shape)
            .map_err(|error| error.at(format!("tensor {}", quoted(&spec.name))))?;
        rows.push(Row { spec, index, bytes, begin: 0 });
    }
    rows.sort_by(|a, b| b.spec.dtype.cmp(&a.spec.dtype).then(a.spec.name.cmp(&b.spec.name)));
    refuse_duplicates(&rows)?;
    let mut end = 0_u64;
    for row in &mut rows {
        row.begin = end;
        let sum = end.checked_add(row.bytes);
        end =
            sum.ok_or_else(|| Error::new(Code::Overflow, "the tensors have more than 2^64 bytes"))?;
    }
    let header = header(&rows, metadata)?;
    let data_start = header.len() as u64;
    let total = data_start.checked_add(end);
    let mut offsets = vec![0; rows.len()];
    let mut bytes = vec![0; rows.len()];
    for row in &rows {
        if let (Some(offset), Some(len)) = (offsets.get_mut(row.index), bytes.get_mut(row.index)) {
            (*offset, *len) = (data_start + row.begin, row.bytes);
        }
    }
    Ok(SaveLayout {
        header,
        offsets,
        bytes,
        order: rows.iter().map(|row| row.index).collect(),
        total: total
            .ok_or_else(|| Error::new(Code::Overflow, "the file has more than 2^64 bytes"))?,
    })
}

struct Row<'a> {
    spec: &'a TensorSpec,
    index: usize,
    bytes: u64,
    begin: u64,
}

fn refuse_duplicates(rows: &[Row<'_>]) -> Result<()> {
    let mut names: Vec<&str> = rows.iter().map(|row| row.spec.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair.first() == pair.last()).and_then(<[_]>::first) {
        Some(name) => {
            let what = format!("two tensors are named {}", quoted(name));
            Err(Error::new(Code::Usage, what))
        }
        None => Ok(()),
    }
}

fn header(rows: &[Row<'_>], metadata: Option<&[(String, String)]>) -> Result<Vec<u8>> {
    let mut out = vec![0; LENGTH_WORD as usize];
    write_json(&mut out, rows, metadata).map_err(|error| {
        Error::new(Code::Internal, "cannot write the header").with_source(error)
    })?;
    out.resize(out.len().next_multiple_of(LENGTH_WORD as usize), b' ');
    let len = out.len() as u64 - LENGTH_WORD;
    if len > MAX_HEADER_BYTES {
        let what =
            format!("the header would have {len} bytes, {MAX_HEADER_BYTES} is the most allowed");
        return Err(Error::new(Code::HeaderTooLarge, what).hint("save the model in several files"));
    }
    if let Some(word) = out.first_chunk_mut::<8>() {
        *word = len.to_le_bytes();
    }
    Ok(out)
}

fn write_json(
    out: &mut Vec<u8>,
    rows: &[Row<'_>],
    metadata: Option<&[(String, String)]>,
) -> serde_json::Result<()> {
    let io = serde_json::Error::io;
    let mut comma = "";
    out.push(b'{');
    if let Some(pairs) = metadata {
        write!(out, "\"{METADATA_KEY}\":{{").map_err(io)?;
        for (key, value) in pairs {
            out.extend_from_slice(comma.as_bytes());
            serde_json::to_writer(&mut *out, key)?;
            out.push(b':');
            serde_json::to_writer(&mut *out, value)?;
            comma = ",";
        }
        out.push(b'}');
        comma = ",";
    }
    for row in rows {
        out.extend_from_slice(comma.as_bytes());
        serde_json::to_writer(&mut *out, &row.spec.name)?;
        write!(out, ":{{\"dtype\":\"{}\",\"shape\":", row.spec.dtype).map_err(io)?;
        serde_json::to_writer(&mut *out, &row.spec.shape)?;
        write!(out, ",\"data_offsets\":[{},{}]}}", row.begin, row.begin + row.bytes).map_err(io)?;
        comma = ",";
    }
    out.push(b'}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
    }

    fn code(tensors: &[TensorSpec]) -> Option<Code> {
        layout(tensors, None).err().map(|error| error.code())
    }

    #[test]
    fn widest_first_then_by_name() {
        let tensors = [
            spec("b", Dtype::U8, &[3]),
            spec("z", Dtype::F32, &[2]),
            spec("a", Dtype::F32, &[1]),
            spec("i", Dtype::I64, &[]),
        ];
        let metadata = [("format".to_owned(), "pt".to_owned())];
        let plan = layout(&tensors, Some(&metadata)).unwrap();
        assert_eq!(plan.order, [3, 2, 1, 0]);
        let start = plan.header.len() as u64;
        assert_eq!(start % 8, 0);
        assert_eq!(plan.offsets, [start + 20, start + 12, start + 8, start]);
        assert_eq!(plan.bytes, [3, 8, 4, 8]);
        assert_eq!(plan.total, start + 23);
        let json = std::str::from_utf8(&plan.header[8..]).unwrap();
        let first = r#""i":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a""#;
        assert!(json.starts_with(&format!(r#"{{"__metadata__":{{"format":"pt"}},{first}"#)));
    }

    #[test]
    fn what_no_file_can_hold_is_refused() {
        assert_eq!(code(&[spec("__metadata__", Dtype::U8, &[1])]), Some(Code::Usage));
        let twice =
            [spec("a", Dtype::U8, &[1]), spec("b", Dtype::U8, &[1]), spec("a", Dtype::F32, &[1])];
        assert_eq!(code(&twice), Some(Code::Usage));
        assert_eq!(code(&[spec("a", Dtype::F4, &[1])]), Some(Code::Misaligned));
        let many: Vec<_> =
            (0..9).map(|at| spec(&at.to_string(), Dtype::U8, &[(1 << 61) - 1])).collect();
        assert_eq!(code(&many), Some(Code::Overflow));
    }

    #[test]
    fn nothing_is_an_empty_object() {
        assert_eq!(layout(&[], None).unwrap().header, b"\x08\0\0\0\0\0\0\0{}      ");
        let empty = layout(&[], Some(&[])).unwrap();
        assert_eq!(&empty.header[8..], b"{\"__metadata__\":{}}     ");
    }
}
