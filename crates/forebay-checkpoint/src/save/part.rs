//! What this rank contributes, from what it has written.
//!
//! Values that all ranks agreed on go in as numbers, and their regions as "the next that the layout gives", as far as
//! [`super::shared`] found that so; all others with name and region.

use forebay_error::Result;

use super::files::Placed;
use super::plan::{SaveItem, SavePlan, What, Written};
use super::write::internal;
use crate::commit::AttemptId;
use crate::manifest::{ItemPlace, Named, Part, PartBuilder, PartFile, Place, Value, ValueRef};

/// Whose part it is: attempt, rank, ranks of the job.
pub(super) type Who = (AttemptId, u32, u32);

/// The encoded part of a rank that has written everything: `placed` has where each item is, `crcs` gives the checksums
/// of its blocks, both by the order of [`SavePlan::written`].
pub(super) fn encode(
    plan: &SavePlan,
    placed: &[Placed],
    crcs: impl Fn(usize) -> Vec<u32>,
    (attempt, rank, world): Who,
    files: Vec<PartFile>,
) -> Result<Vec<u8>> {
    let mut part = Part::builder(attempt.to_string(), rank, world);
    if let Some(shared) = plan.shared() {
        part.structure(shared.hash, shared.structure.values().len() as u32);
    }
    for file in files {
        part.file(file);
    }
    let written: Vec<Written<'_>> = plan.written().collect();
    if written.len() != placed.len() {
        return Err(internal("items without a place"));
    }
    let mut number = 0;
    // Regions of one tensor follow each other.
    for group in written.chunk_by(|a, b| a.item.name == b.item.name) {
        let own = placed.get(number..number + group.len()).unwrap_or_default();
        let value = value_of(plan, &mut part, group);
        let implied = is_implied(plan, group, own);
        for (written, placed) in group.iter().zip(own) {
            let place = place_of(written.item, implied);
            part.chunk(value, place, item_place(placed), &crcs(number));
            number += 1;
        }
    }
    let alone =
        |alias: &Written<'_>| plan.shared().is_none_or(|it| it.number(alias.place).is_none());
    for alias in plan.aliases().filter(alone) {
        part.own(named(alias.item));
    }
    part.finish()?.encode()
}

/// The number of a group's value, which is listed in the part where it is the rank's own.
fn value_of(plan: &SavePlan, part: &mut PartBuilder, group: &[Written<'_>]) -> ValueRef {
    let first = group.first();
    let shared = plan.shared().zip(first).and_then(|(shared, first)| shared.number(first.place));
    match (shared, first) {
        (Some(number), _) => ValueRef::Shared(number),
        (None, Some(first)) => ValueRef::Own(part.own(named(first.item))),
        (None, None) => ValueRef::Own(0),
    }
}

/// Whether the regions of a value need not be named: they are what its layout gives, and in that order in the files.
fn is_implied(plan: &SavePlan, group: &[Written<'_>], placed: &[Placed]) -> bool {
    let Some(shared) = plan.shared() else { return false };
    let place = |placed: &Placed| (placed.file, placed.item.offset);
    group.iter().all(|written| shared.is_implied(written.place))
        && placed.is_sorted_by(|a, b| place(a) < place(b))
}

fn place_of(item: &SaveItem, implied: bool) -> Place {
    match &item.what {
        What::Tensor { shape, region, .. } if !region.is_whole(shape) => match implied {
            true => Place::Implied,
            false => Place::Box(region.clone()),
        },
        _ => Place::Whole,
    }
}

fn item_place(placed: &Placed) -> ItemPlace {
    ItemPlace {
        file: placed.file as u32,
        offset: placed.item.offset,
        length: placed.item.len,
        data_offset: placed.item.data_offset,
        data_bytes: placed.item.data_bytes,
    }
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
