//! From bytes, which are not believed.

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_tensor::{Dtype, Region};

use super::super::{Object, SaveItem, SavePlan, SideFile, What};
use super::{Bequest, MAGIC, MAX_BEQUEST_BYTES};
use crate::commit::{AttemptId, RunId, Spec, StructureHash, step_folder};
use crate::manifest::limits::{
    MAX_DIMS, MAX_ENTRIES, MAX_FILE_NAME_BYTES, MAX_FILES, MAX_NAME_BYTES, MAX_RANKS,
};
use crate::manifest::rows::take_path;
use crate::manifest::version::check_version;
use crate::manifest::wire::Take;
use crate::manifest::wire::{CRC_END, HEAD_BYTES};
use crate::manifest::{Info, Structure};

/// Bytes of the text that says who it was.
const MAX_WHO_BYTES: u64 = 4096;
/// Room that a rank may ask for its part: parts are no larger.
const MAX_ROOM_BYTES: u64 = 1 << 30;

pub(super) fn decode(bytes: &[u8], place: &str) -> Result<Bequest> {
    let mut take = Take::new(open(bytes, place)?, place);
    let mut fields: [&[u8]; 8] = [&[]; 8];
    for (slot, tag) in fields.iter_mut().zip(1..) {
        if take.varint()? != tag {
            return Err(take.bad(format!("field {tag} is missing")));
        }
        let len = take.varint()?;
        *slot = take.take(len)?;
    }
    take.end()?;
    let [spec, info, how, structure, items, places, objects, files] = fields;
    let spec = whole(spec, place, take_spec)?;
    let info = Info::decode(info, place)?;
    let (at_a_time, overwrite) = whole(how, place, |take| {
        let files = take.at_most(MAX_FILES, "files")?;
        Ok((files.max(1) as usize, take.at_most(1, "as a choice")? == 1))
    })?;
    let structure = whole(structure, place, Structure::take)?;
    let items = whole(items, place, take_items)?;
    let plan = SavePlan::new(items)?.with_structure(Arc::new(structure), spec.rank)?;
    let tensors = plan.tensor_count();
    let offsets = whole(places, place, |take| (0..tensors).map(|_| take.varint()).collect())?;
    let count = plan.object_count();
    let objects = whole(objects, place, |take| (0..count).map(|_| take_object(take)).collect())?;
    let side_files = whole(files, place, take_files)?;
    let plan = Arc::new(plan);
    Ok(Bequest { spec, info, files: at_a_time, overwrite, plan, offsets, objects, side_files })
}

/// Reads a field to its end.
fn whole<T>(field: &[u8], place: &str, read: impl FnOnce(&mut Take<'_>) -> Result<T>) -> Result<T> {
    let mut take = Take::new(field, place);
    let read = read(&mut take)?;
    take.end()?;
    Ok(read)
}

/// Checks all that surrounds the fields; gives them.
fn open<'a>(bytes: &'a [u8], place: &str) -> Result<&'a [u8]> {
    let fault = |code, what: &str| Error::new(code, what).at(place);
    if !bytes.starts_with(MAGIC) {
        return Err(fault(Code::InvalidMetadata, "no bequest of a save"));
    }
    let mut take = Take::new(bytes.get(MAGIC.len()..).unwrap_or_default(), place);
    check_version(&mut take, "a bequest")
        .map_err(|error| error.hint("agent and package should be of one version"))?;
    let crc = take.u32()?;
    let len = take.u64()?;
    if len != bytes.len() as u64 || len > MAX_BEQUEST_BYTES {
        let what = format!("a bequest of {len} bytes, {} are there", bytes.len());
        return Err(fault(Code::Truncated, &what));
    }
    if crc32(bytes.get(CRC_END..).unwrap_or_default()) != crc {
        return Err(fault(Code::Checksum, "a bequest is not what was written"));
    }
    Ok(bytes.get(HEAD_BYTES..).unwrap_or_default())
}

fn take_spec(take: &mut Take<'_>) -> Result<Spec> {
    let step = take.at_most(i64::MAX as u64, "as a step")?;
    let run = RunId(take.u32()?);
    let save = take.small(u64::from(u32::MAX), "as a save")?;
    let attempt = AttemptId { run, save };
    if attempt.is_successor() {
        return Err(take.bad("a save that finishes another one"));
    }
    let rank = take.small(MAX_RANKS, "as a rank")?;
    let world = take.small(MAX_RANKS, "ranks")?;
    if rank >= world {
        return Err(take.bad(format!("rank {rank} of {world}")));
    }
    let structure = StructureHash(take.digest()?);
    let epoch = take.varint()?;
    let parent = match take.at_most(1, "parents")? {
        1 => Some(take.varint()?),
        _ => None,
    };
    let part_bytes = take.at_most(MAX_ROOM_BYTES, "bytes of room")?;
    let who = take.text(MAX_WHO_BYTES, "bytes of a name")?.to_owned();
    let folder = step_folder(step);
    Ok(Spec { folder, step, attempt, rank, world, structure, epoch, parent, part_bytes, who })
}

fn take_items(take: &mut Take<'_>) -> Result<Vec<SaveItem>> {
    let known = take.count(Dtype::ALL.len() as u64, 1, "dtypes")?;
    let mut dtypes = Vec::with_capacity(known);
    for _ in 0..known {
        let name = take.text(64, "bytes of a dtype's name")?;
        let dtype = Dtype::parse(name);
        dtypes.push(dtype.ok_or_else(|| take.bad(format!("unknown dtype {name:?}")))?);
    }
    // A name's length, a path, a kind.
    let count = take.count(MAX_ENTRIES, 3, "items")?;
    (0..count).map(|_| take_item(take, &dtypes)).collect()
}

fn take_item(take: &mut Take<'_>, dtypes: &[Dtype]) -> Result<SaveItem> {
    let name = take.text(MAX_NAME_BYTES, "bytes of a name")?.to_owned();
    let path = take_path(take, &name)?;
    let what = match take.at_most(3, "as a kind")? {
        2 => What::Object,
        3 => What::Alias { of: take.text(MAX_NAME_BYTES, "bytes of a name")?.to_owned() },
        requires_grad => take_tensor(take, dtypes, requires_grad == 1)?,
    };
    Ok(SaveItem { name, path, what, writes: true })
}

fn take_tensor(take: &mut Take<'_>, dtypes: &[Dtype], requires_grad: bool) -> Result<What> {
    let number = take.varint()?;
    let dtype = usize::try_from(number).ok().and_then(|number| dtypes.get(number).copied());
    let Some(dtype) = dtype else {
        return Err(take.bad("a dtype that is not in the list"));
    };
    let dims = take.count(MAX_DIMS, 3, "dimensions")?;
    let (mut shape, mut offsets, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..dims {
        shape.push(take.varint()?);
        offsets.push(take.varint()?);
        sizes.push(take.varint()?);
    }
    Ok(What::Tensor { dtype, shape, region: Region::new(offsets, sizes)?, requires_grad })
}

fn take_object(take: &mut Take<'_>) -> Result<Object> {
    let kind = take.at_most(1, "as a kind")?;
    let len = take.varint()?;
    let bytes = take.take(len)?.to_vec();
    Ok(if kind == 0 { Object::Pickle(bytes) } else { Object::Archive(bytes) })
}

fn take_files(take: &mut Take<'_>) -> Result<Vec<SideFile>> {
    let count = take.count(MAX_FILES, 2, "side files")?;
    let mut files = Vec::new();
    for _ in 0..count {
        let name = take.text(MAX_FILE_NAME_BYTES, "bytes of a name")?.to_owned();
        let len = take.varint()?;
        files.push(SideFile { name, bytes: take.take(len)?.to_vec() });
    }
    Ok(files)
}
