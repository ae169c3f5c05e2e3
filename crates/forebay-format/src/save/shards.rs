//! Which tensors go to which file, and the index that says so, in the Hugging Face form.

use crate::folder::SINGLE;
use crate::index::MAX_FILES;
use crate::safetensors::TensorSpec;
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use forebay_tensor::byte_len;
use serde_json::{Map, Value, json};

/// One file of a model that is about to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    /// `model-00001-of-00003.safetensors`, or `model.safetensors` where it is the only one.
    pub name: String,
    /// Places of its tensors in the list given, ascending.
    pub tensors: Vec<usize>,
}

/// Deals tensors out to files of at most `max_shard_bytes` of tensor bytes, in the order given, as the Hugging Face
/// library does: a tensor that is larger than that has a file of its own.
pub fn shard_layout(tensors: &[TensorSpec], max_shard_bytes: u64) -> Result<Vec<ShardPlan>> {
    if max_shard_bytes == 0 {
        return Err(Error::new(Code::Usage, "files of at most 0 bytes hold no tensors"));
    }
    let mut shards: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let mut open_bytes = 0_u64;
    for (place, tensor) in tensors.iter().enumerate() {
        let bytes = byte_len(tensor.dtype, &tensor.shape)
            .map_err(|error| error.at(format!("tensor {}", quoted(&tensor.name))))?;
        if bytes > max_shard_bytes {
            shards.push(vec![place]);
            continue;
        }
        if bytes > max_shard_bytes - open_bytes {
            shards.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open.push(place);
        open_bytes += bytes;
    }
    if !open.is_empty() || shards.is_empty() {
        shards.push(open);
    }
    if shards.len() > MAX_FILES {
        let what = format!("the model would have {} files, {MAX_FILES} is the most", shards.len());
        return Err(Error::new(Code::Usage, what).hint("allow larger files"));
    }
    let total = shards.len();
    let name = |index| match total {
        1 => SINGLE.to_owned(),
        _ => shard_name("model", index, total),
    };
    let plans = shards.into_iter().enumerate();
    Ok(plans.map(|(index, tensors)| ShardPlan { name: name(index), tensors }).collect())
}

/// The name of a numbered file; `index` counts from 0.
pub(super) fn shard_name(stem: &str, index: usize, total: usize) -> String {
    format!("{stem}-{:05}-of-{total:05}.safetensors", index + 1)
}

/// The index of a model in these files.
pub fn index_json(shards: &[ShardPlan], tensors: &[TensorSpec]) -> Result<String> {
    let mut total = 0_u64;
    let mut map = Map::new();
    for shard in shards {
        for tensor in shard.tensors.iter().filter_map(|&place| tensors.get(place)) {
            total = total.saturating_add(byte_len(tensor.dtype, &tensor.shape)?);
            map.insert(tensor.name.clone(), Value::from(shard.name.as_str()));
        }
    }
    map.sort_keys();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let text = serde_json::to_string_pretty(&index)
        .map_err(|error| Error::new(Code::Internal, "cannot write the index").with_source(error))?;
    Ok(text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Index;
    use forebay_tensor::Dtype;

    fn specs(sizes: &[u64]) -> Vec<TensorSpec> {
        let spec = |(index, &size): (usize, &u64)| TensorSpec {
            name: format!("t{}", sizes.len() - index),
            dtype: Dtype::U8,
            shape: vec![size],
        };
        sizes.iter().enumerate().map(spec).collect()
    }

    fn dealt(sizes: &[u64], max: u64) -> Vec<Vec<usize>> {
        shard_layout(&specs(sizes), max).unwrap().into_iter().map(|shard| shard.tensors).collect()
    }

    #[test]
    fn tensors_fill_files_in_order() {
        assert_eq!(dealt(&[4, 4, 4], 8), [vec![0, 1], vec![2]]);
        assert_eq!(dealt(&[4, 20, 4, 4], 8), [vec![1], vec![0, 2], vec![3]]);
        assert_eq!(dealt(&[0, 0], 1), [vec![0, 1]]);
        assert_eq!(dealt(&[], 1), [Vec::<usize>::new()]);
        assert_eq!(dealt(&[20], 8), [vec![0]]);
        assert!(shard_layout(&specs(&[1]), 0).is_err());
    }

    #[test]
    fn one_file_has_the_plain_name() {
        let names = |sizes: &[u64], max| -> Vec<String> {
            shard_layout(&specs(sizes), max).unwrap().into_iter().map(|shard| shard.name).collect()
        };
        assert_eq!(names(&[4], 8), ["model.safetensors"]);
        assert_eq!(
            names(&[8, 8], 8),
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        );
    }

    #[test]
    fn the_index_reads_back() {
        let tensors = specs(&[8, 8, 2]);
        let shards = shard_layout(&tensors, 8).unwrap();
        let text = index_json(&shards, &tensors).unwrap();
        assert!(text.starts_with(
            "{\n  \"metadata\": {\n    \"total_size\": 18\n  },\n  \"weight_map\": {\n    \"t1\""
        ));
        let index = Index::parse(text.as_bytes()).unwrap();
        assert_eq!(index.total_size, Some(18));
        assert_eq!(index.files.len(), 3);
        assert_eq!(index.files[2].tensors, ["t1"]);
    }
}
