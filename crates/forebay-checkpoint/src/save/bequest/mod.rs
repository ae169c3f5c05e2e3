//! What finishes a save whose process has died: everything but the tensors' bytes, which are in memory that outlives
//! it.
//!
//! A rank that saves from such memory gives both to somebody who lives on: the memory, and its *bequest*, which says
//! what is to be written, where in the memory each tensor lies, and holds objects and side files. Whoever has them
//! runs the same [`Save`](super::Save) as the rank would have, as the
//! [successor](crate::commit::AttemptId::successor) of its attempt. If that is done for every rank the step is
//! committed, by the same protocol.
//!
//! ```text
//! bequest   8 bytes magic, 89 "FBQ" 0D 0A 1A 0A
//!           u16 major version, u16 minor version
//!           u32 CRC-32 of all that follows it
//!           u64 bytes of the bequest, magic included
//!           fields: varint tag, varint length, that many bytes; by ascending tag, each once, all of them there
//!  1 spec       varint step, u32 run, varint save, varint rank, varint ranks of the job, 32 bytes structure hash of
//!               the attempt, varint epoch, varint 0 or 1 and varint parent step, varint bytes of room for the part,
//!               text who
//!  2 info       JSON, as in a manifest
//!  3 how        varint files, varint 1 where a committed step may be replaced, else 0
//!  4 structure  what the ranks agreed on: varint bytes of meshes and layouts, those, rows
//!  5 items      varint dtypes, text each; varint count; each: text name, path (see `rows`), varint kind:
//!               0 and 1 a tensor (1: requires_grad): varint dtype, varint dims, each: varint side, offset, size
//!               2 an object; 3 an alias: text of the other name
//!  6 places     for each tensor: varint offset in the memory
//!  7 objects    for each object: varint kind (0 pickle, 1 archive), varint length, bytes
//!  8 files      varint count; each: text name, varint length, bytes
//! ```
//!
//! It comes from another process, so nothing in it is believed: counts are bounded by the bytes that are there, every
//! tensor lies inside of the memory, and all together are no more than it.

mod decode;
mod encode;

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::byte_len;

use super::{Object, Request, SavePlan, SideFile, What};
use crate::commit::Spec;
use crate::manifest::Info;

const MAGIC: &[u8; 8] = b"\x89FBQ\r\n\x1a\n";

/// Bytes of a bequest; objects and side files are in it.
pub const MAX_BEQUEST_BYTES: u64 = 1 << 30;

/// Everything that a rank's save needs, but for the memory of its tensors.
#[derive(Clone, Debug)]
pub struct Bequest {
    /// The attempt that the rank has begun, or was about to; the folder is that of the step.
    pub spec: Spec,
    /// What the manifest says of the save as a whole.
    pub info: Info,
    /// Files at a time.
    pub files: usize,
    /// Whether a committed step may be replaced.
    pub overwrite: bool,
    /// What is written.
    pub plan: Arc<SavePlan>,
    /// Of each tensor that is written, its first byte in the memory.
    pub offsets: Vec<u64>,
    /// The objects.
    pub objects: Vec<Object>,
    /// Files to commit with the step.
    pub side_files: Vec<SideFile>,
}

impl Bequest {
    /// The bequest of a save that is started with this request, these objects, and tensors at these places of `bytes`
    /// bytes of memory.
    ///
    /// Errors: `usage` for lists that do not fit the plan, and for places outside of the memory; `unsupported` for more
    /// than [`MAX_BEQUEST_BYTES`].
    pub fn encode(
        request: &Request,
        objects: &[Object],
        offsets: &[u64],
        bytes: u64,
    ) -> Result<Vec<u8>> {
        if objects.len() != request.plan.object_count() {
            let what = format!("{} objects for a plan of others", objects.len());
            return Err(Error::new(Code::Usage, what));
        }
        check_places(&request.plan, offsets, bytes)?;
        encode::encode(request, objects, offsets)
    }

    /// Reads one for `bytes` bytes of memory; `place` is what errors call it.
    ///
    /// Errors: `truncated`, `checksum`, `invalid_metadata`, `unsupported` for another version; those of
    /// [`SavePlan::new`] and [`SavePlan::with_structure`]; `usage` for tensors outside of the memory.
    pub fn decode(from: &[u8], bytes: u64, place: &str) -> Result<Self> {
        let bequest = decode::decode(from, place)?;
        check_places(&bequest.plan, &bequest.offsets, bytes).map_err(|error| error.at(place))?;
        Ok(bequest)
    }
}

/// Each tensor lies inside of the memory, and all have room in it beside one another: so nobody is made to write more
/// than was kept.
fn check_places(plan: &SavePlan, offsets: &[u64], bytes: u64) -> Result<()> {
    let refused = |what: String| Err(Error::new(Code::Usage, what));
    if offsets.len() != plan.tensor_count() {
        let (have, want) = (offsets.len(), plan.tensor_count());
        return refused(format!("{have} places for {want} tensors that are to be written"));
    }
    if plan.bytes() > bytes {
        return refused(format!("{} bytes of tensors in {bytes} bytes of memory", plan.bytes()));
    }
    let written = plan.items().iter().filter(|item| item.writes);
    let tensors = written.filter_map(|item| match &item.what {
        What::Tensor { dtype, region, .. } => Some((item, byte_len(*dtype, &region.sizes))),
        What::Object | What::Alias { .. } => None,
    });
    for ((item, len), offset) in tensors.zip(offsets) {
        let end = offset.checked_add(len?);
        if end.is_none_or(|end| end > bytes) {
            let what = format!("a tensor lies at byte {offset} of {bytes} bytes of memory");
            return Err(Error::new(Code::Usage, what).at(&item.name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
