//! What this rank contributes, from what it has written.

use forebay_error::Result;

use super::plan::{SaveItem, SavePlan, What};
use super::write::Writer;
use crate::commit::AttemptId;
use crate::manifest::{ItemPlace, Named, Part, PartFile, Place, Value, ValueRef};

/// A file of the rank: its name, bytes and, where it is known before the end, its CRC.
pub(super) type FileName = (String, u64, Option<u32>);

/// The encoded part of a rank that has written everything.
pub(super) fn encode(
    plan: &SavePlan,
    writer: &Writer,
    (attempt, rank, world): (AttemptId, u32, u32),
    files: &[FileName],
    side: &[FileName],
) -> Result<Vec<u8>> {
    let mut part = Part::builder(attempt.to_string(), rank, world);
    for (number, (name, bytes, crc)) in files.iter().chain(side).enumerate() {
        let crc = crc.or_else(|| writer.file_crc(number));
        part.file(PartFile { name: name.clone(), bytes: *bytes, crc });
    }
    let written = plan.tensors().map(Some).chain(plan.objects().map(Some));
    let mut last: Option<(&str, u32)> = None;
    for (number, item) in written.enumerate() {
        let Some(item) = item else { continue };
        // Regions of one tensor follow each other: the tensor is listed once.
        let value = match last {
            Some((name, value)) if name == item.name => value,
            _ => part.own(named(item)),
        };
        last = Some((&item.name, value));
        let Some(placed) = writer.files.items.get(number) else { continue };
        let place = match &item.what {
            What::Tensor { shape, region, .. } if !region.is_whole(shape) => {
                Place::Box(region.clone())
            }
            _ => Place::Whole,
        };
        let item = ItemPlace {
            file: placed.file as u32,
            offset: placed.item.offset,
            length: placed.item.len,
            data_offset: placed.item.data_offset,
            data_bytes: placed.item.data_bytes,
        };
        part.chunk(ValueRef::Own(value), place, item, &writer.crcs(number));
    }
    for alias in plan.aliases() {
        part.own(named(alias));
    }
    part.finish()?.encode()
}

fn named(item: &SaveItem) -> Named {
    let path = item.path.clone();
    match &item.what {
        What::Tensor { dtype, shape, requires_grad, .. } => {
            let mut named = Named::tensor(&item.name, *dtype, shape).with_path(path);
            if let Value::Tensor(tensor) = &mut named.value {
                tensor.requires_grad = *requires_grad;
            }
            named
        }
        What::Object => Named::object(&item.name).with_path(path),
        What::Alias { of } => Named::alias(&item.name, of).with_path(path),
    }
}
