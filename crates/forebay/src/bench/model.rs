//! A model to load: bf16, in shapes of a transformer's layers, up to four files and an index. Its bytes are random, so
//! that no file system or disk can store less than it is said to hold.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_error::{Code, Error, Result};
use forebay_format::safetensors::TensorSpec;
use forebay_format::{ModelSave, Shard};
use forebay_tensor::Dtype;

use crate::console::Console;
use crate::progress::Progress;
use crate::{interrupt, parallel};

/// Files of the model; a small one has fewer.
const SHARDS: u64 = 4;

/// Columns of every matrix.
const COLUMNS: u64 = 4096;

/// Bytes of a large matrix: 8192 rows of 4096 bf16 numbers are 64 MiB.
const MATRIX_BYTES: u64 = 64 << 20;

/// Bytes written at a time.
const PIECE: usize = 4 << 20;

/// Removed when dropped.
pub(crate) struct Made {
    folder: PathBuf,
}

impl Made {
    /// Makes a model of `gb` GB in a new folder inside `parent`.
    pub(crate) fn new(parent: Option<&Path>, gb: f64, console: &Console) -> Result<Self> {
        let parent = parent.map_or_else(default_parent, Path::to_owned);
        let folder = parent.join(format!("forebay-bench-{}", std::process::id()));
        std::fs::create_dir(&folder).map_err(|error| {
            Error::io("cannot make a folder for the model", error).at(folder.display())
        })?;
        interrupt::remember_leftover(&folder);
        // From here on the folder goes with `made`, whatever happens.
        let made = Self { folder };
        let bytes = (gb * 1e9) as u64;
        let specs = specs(bytes);
        console.note(&format!("making a model of {gb} GB in {}", made.folder.display()));
        let metadata = [("format".to_owned(), "pt".to_owned())];
        let save = ModelSave::create(
            &made.folder,
            &specs,
            Some(&metadata),
            bytes / SHARDS + MATRIX_BYTES,
        )?;
        let total = save.shards().iter().map(|shard| shard.layout.total).sum();
        let progress = Progress::new(console, "writing", total);
        let shards: Vec<&Shard> = save.shards().iter().collect();
        parallel::map(&shards, forebay_topology::worker_cpus(), |index, shard| {
            fill(shard, index as u64, &progress)
        })?;
        save.commit()?;
        Ok(made)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            tracing::warn!(%error, folder = %self.folder.display(), "the model was not removed");
        }
        interrupt::forget_leftover(&self.folder);
    }
}

/// Where large temporary files belong: `/tmp` is often memory.
fn default_parent() -> PathBuf {
    match std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => folder.into(),
        None if Path::new("/var/tmp").is_dir() => "/var/tmp".into(),
        None => std::env::temp_dir(),
    }
}

/// Matrices of 64 MiB with a vector each, as a layer has, and one matrix that takes what is left.
fn specs(bytes: u64) -> Vec<TensorSpec> {
    let spec = |name: String, shape: Vec<u64>| TensorSpec { name, dtype: Dtype::BF16, shape };
    let row = COLUMNS * 2;
    let mut specs = Vec::new();
    let mut left = bytes;
    let mut layer = 0;
    while left >= MATRIX_BYTES + row {
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        specs.push(spec(name, vec![MATRIX_BYTES / row, COLUMNS]));
        specs.push(spec(format!("model.layers.{layer}.input_layernorm.weight"), vec![COLUMNS]));
        left -= MATRIX_BYTES + row;
        layer += 1;
    }
    specs.push(spec("lm_head.weight".to_owned(), vec![(left / row).max(1), COLUMNS]));
    specs
}

/// Writes random bytes after the header.
fn fill(shard: &Shard, seed: u64, progress: &Progress) -> Result<()> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x0DDB_1A5E_5BAD_5EED;
    let mut buffer = vec![0_u8; PIECE];
    let mut offset = shard.layout.header.len() as u64;
    while offset < shard.layout.total {
        interrupt::check()?;
        for word in buffer.chunks_exact_mut(8) {
            word.copy_from_slice(&next(&mut state).to_le_bytes());
        }
        let len = (shard.layout.total - offset).min(PIECE as u64);
        let part = buffer
            .get(..len as usize)
            .ok_or_else(|| Error::new(Code::Internal, "a piece larger than its buffer"))?;
        shard.file.file().write_all_at(part, offset).map_err(|error| {
            Error::io("cannot write the model", error).at(shard.file.dest().display())
        })?;
        offset += len;
        progress.add(len);
    }
    Ok(())
}

/// SplitMix64 (Steele, Lea and Flood, 2014): a full-period generator of one addition and three mixing steps.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_about_the_bytes_asked_for() {
        for bytes in [1_000_000, 64 << 20, 4_000_000_000_u64] {
            let total: u64 =
                specs(bytes).iter().map(|spec| spec.shape.iter().product::<u64>() * 2).sum();
            assert!(total.abs_diff(bytes) <= COLUMNS * 2, "{bytes}: {total}");
        }
        let mut state = 0;
        // The first output for seed 0 in the paper's reference code.
        assert_eq!(next(&mut state), 0xE220_A839_7B1D_CDAF);
    }
}
