//! Checkpoints of torch's Hugging Face storage writer: safetensors files that hold parts of tensors.
//!
//! ```text
//! shard-0000R-model-0000I-of-0000N.safetensors     of rank R (from 1 on); R is absent where the save was not
//! distributed
//!   "__metadata__": "DCP_SHARDING_INFO": text of JSON {TENSOR: {"saved_offsets": [first element in each dimension]}}
//!                   "DCP_VERSION": "1.0"
//! ```
//!
//! There is no list of files and no whole shape: a tensor is as large as its parts reach, so a missing last part cannot
//! be told from a smaller tensor. Numbers of ranks that are left out in the middle can, and are an error.

use crate::safetensors::{Header, HeaderTensor};
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, Region, Repeats, check_cover};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The key of the text metadata that tells such a file.
pub const SHARDING_KEY: &str = "DCP_SHARDING_INFO";

/// A tensor of such a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides.
    pub shape: Vec<u64>,
    /// Its parts; they cover it without overlap.
    pub parts: Vec<ShardPart>,
}

/// A part of a tensor in one file, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPart {
    /// Which part.
    pub region: Region,
    /// Which of the files.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Whether a header is one of a file that holds parts.
pub fn is_shard(header: &Header) -> bool {
    sharding(header).is_some()
}

fn sharding(header: &Header) -> Option<&str> {
    let pairs = header.metadata.as_ref()?;
    pairs.iter().rev().find(|(key, _)| key == SHARDING_KEY).map(|(_, value)| value.as_str())
}

/// Puts the tensors of these files together, given as (name, header).
///
/// Errors: `missing_file` for a gap in the numbers of ranks; `invalid_metadata` for sharding information that is not
/// JSON of the form above or does not fit the header; `dtype_mismatch` where parts differ; `overlap` and `hole`. All
/// name tensor and file.
pub fn assemble(files: &[(String, Header)]) -> Result<Vec<ShardedTensor>> {
    check_ranks(files)?;
    let mut tensors: BTreeMap<&str, ShardedTensor> = BTreeMap::new();
    for (index, (name, header)) in files.iter().enumerate() {
        let offsets = saved_offsets(header).map_err(|error| error.at(quoted(name)))?;
        for tensor in &header.tensors {
            let place = || format!("{}, tensor {}", quoted(name), quoted(&tensor.name));
            let region = region_of(tensor, offsets.as_ref()).map_err(|error| error.at(place()))?;
            let whole = tensors.entry(&tensor.name).or_insert_with(|| ShardedTensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: vec![0; tensor.shape.len()],
                parts: Vec::new(),
            });
            if whole.dtype != tensor.dtype {
                let what = format!("parts of one tensor are {} and {}", whole.dtype, tensor.dtype);
                return Err(Error::new(Code::DtypeMismatch, what).at(place()));
            }
            if whole.shape.len() != tensor.shape.len() {
                let what = "parts of one tensor have different numbers of dimensions";
                return Err(invalid(what).at(place()));
            }
            for (side, (at, size)) in
                whole.shape.iter_mut().zip(region.offsets.iter().zip(&region.sizes))
            {
                *side = (*side).max(at + size);
            }
            let offset = header.data_start + tensor.begin;
            let bytes = tensor.end - tensor.begin;
            whole.parts.push(ShardPart { region, file: index, offset, bytes });
        }
    }
    let mut tensors: Vec<ShardedTensor> = tensors.into_values().collect();
    for tensor in &mut tensors {
        // Replicated tensors are in each file that has them; one copy is enough.
        tensor.parts.sort_by(|a, b| (&a.region, a.file).cmp(&(&b.region, b.file)));
        tensor.parts.dedup_by(|a, b| a.region == b.region);
        let regions = tensor.parts.iter().map(|part| &part.region);
        check_cover(&tensor.shape, regions, Repeats::Overlap)
            .map_err(|error| error.at(format!("tensor {}", quoted(&tensor.name))))?;
    }
    Ok(tensors)
}

/// The offsets of each tensor; `None` where a file says nothing, then its tensors are whole.
fn saved_offsets(header: &Header) -> Result<Option<HashMap<String, Vec<u64>>>> {
    #[derive(serde::Deserialize)]
    struct Saved {
        saved_offsets: Vec<u64>,
    }
    let Some(text) = sharding(header) else { return Ok(None) };
    let saved: HashMap<String, Saved> = serde_json::from_str(text)
        .map_err(|error| invalid(format!("{SHARDING_KEY} is not read: {error}")))?;
    Ok(Some(saved.into_iter().map(|(name, saved)| (name, saved.saved_offsets)).collect()))
}

fn region_of(tensor: &HeaderTensor, offsets: Option<&HashMap<String, Vec<u64>>>) -> Result<Region> {
    let Some(offsets) = offsets else { return Ok(Region::whole(&tensor.shape)) };
    let offsets = offsets
        .get(&tensor.name)
        .ok_or_else(|| invalid(format!("{SHARDING_KEY} does not say which part it is")))?;
    Region::new(offsets.clone(), tensor.shape.clone())
        .map_err(|error| invalid(format!("{SHARDING_KEY} gives an impossible part: {error}")))
}

/// Ranks are numbered from 1 on without gaps.
fn check_ranks(files: &[(String, Header)]) -> Result<()> {
    let ranks: BTreeSet<u64> = files.iter().filter_map(|(name, _)| rank_of(name)).collect();
    let Some(&last) = ranks.last() else { return Ok(()) };
    let missing: Vec<u64> = (1..=last).filter(|rank| !ranks.contains(rank)).take(20).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let what = format!("files of ranks {missing:?} are not there, those of rank {last} are");
    Err(Error::new(Code::MissingFile, what).hint("copy the files shard-RANK-... again"))
}

/// The number R of `shard-R-model-I-of-N.safetensors`.
fn rank_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("shard-")?.split('-').next()?;
    let plain = (1..=7).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Code::InvalidMetadata, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::parse_header;

    /// A file of one F32 tensor `w`: its shape, and where it starts in the whole.
    fn file(rank: u64, shape: &[u64], offsets: &str) -> (String, Header) {
        let bytes = shape.iter().product::<u64>() * 4;
        let info = format!("{{\\\"w\\\":{{\\\"saved_offsets\\\":{offsets}}}}}");
        let json = format!(
            "{{\"__metadata__\":{{\"DCP_SHARDING_INFO\":\"{info}\"}},\
             \"w\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[0,{bytes}]}}}}"
        );
        let name = format!("shard-{rank:05}-model-00001-of-00001.safetensors");
        (name, parse_header(json.as_bytes(), bytes).unwrap())
    }

    fn code(files: &[(String, Header)]) -> Code {
        assemble(files).unwrap_err().code()
    }

    #[test]
    fn parts_make_tensors() {
        let two = [file(1, &[3, 2], "[0, 0]"), file(2, &[2, 2], "[3, 0]")];
        let tensors = assemble(&two).unwrap();
        assert_eq!((tensors.len(), tensors[0].shape.as_slice()), (1, [5, 2].as_slice()));
        assert_eq!(tensors[0].parts[1].region.offsets, [3, 0]);
        assert!(is_shard(&two[0].1));
        // A replica.
        let same = [file(1, &[3, 2], "[0, 0]"), file(2, &[3, 2], "[0, 0]")];
        assert_eq!(assemble(&same).unwrap()[0].parts.len(), 1);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        assert_eq!(code(&[file(1, &[3], "[0]"), file(2, &[2], "[4]")]), Code::Hole);
        assert_eq!(code(&[file(1, &[3], "[0]"), file(2, &[2], "[2]")]), Code::Overlap);
        assert_eq!(code(&[file(1, &[3], "[0]"), file(3, &[2], "[3]")]), Code::MissingFile);
        assert_eq!(
            code(&[file(1, &[3], "[0]"), file(2, &[1, 1], "[3, 0]")]),
            Code::InvalidMetadata
        );
        assert_eq!(code(&[file(1, &[3], "[0, 0]")]), Code::InvalidMetadata);
        assert_eq!(code(&[file(1, &[3], "[-1]")]), Code::InvalidMetadata);
        assert_eq!(code(&[file(1, &[3], "[18446744073709551615]")]), Code::InvalidMetadata);
        assert_eq!(code(&[file(1, &[3], "7")]), Code::InvalidMetadata);
    }
}
