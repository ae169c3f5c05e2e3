//! What a save would put into the manifest, without a save: to know the size of a manifest before the job is large.

use forebay_error::Result;
use forebay_format::dcp::{LayoutOptions, plan_files};

use super::files::placed;
use super::part;
use super::plan::SavePlan;
use crate::commit::{AttemptId, data_file};
use crate::manifest::PartFile;
use crate::model::BLOCK_BYTES;

/// Whose part is sketched, and into how many files it writes.
#[derive(Clone, Copy, Debug)]
pub struct Sketch {
    /// The attempt.
    pub attempt: AttemptId,
    /// The rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world: u32,
    /// Files that the rank writes at a time.
    pub files: usize,
}

/// The part that a save of this plan contributes, made by the same code, with `crc` as the checksum of each block (its
/// item's number, its own in the item) and none of the files: as long as the real one, but for those.
///
/// Errors: those of laying out files and of encoding a part.
pub fn sketch_part(
    plan: &SavePlan,
    objects: &[Vec<u8>],
    sketch: Sketch,
    crc: impl Fn(usize, u64) -> u32,
) -> Result<Vec<u8>> {
    let options = LayoutOptions { files: sketch.files.max(1), ..LayoutOptions::default() };
    let files = plan_files(&plan.specs(objects), &options)?;
    let (placed, _) = placed(&files);
    let crcs = |number: usize| {
        let bytes = placed.get(number).map_or(0, |placed| placed.item.data_bytes);
        (0..bytes.div_ceil(BLOCK_BYTES)).map(|block| crc(number, block)).collect()
    };
    let named = (0..).zip(&files).map(|(number, file)| PartFile {
        name: data_file(sketch.attempt, sketch.rank, number),
        bytes: file.len,
        crc: None,
    });
    let named = named.collect();
    part::encode(plan, &placed, crcs, (sketch.attempt, sketch.rank, sketch.world), named)
}
