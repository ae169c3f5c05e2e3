//! To bytes.

use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;

use super::super::{Object, Request, SaveItem, SavePlan, SideFile, What};
use super::{MAGIC, MAX_BEQUEST_BYTES};
use crate::commit::Spec;
use crate::manifest::rows::put_path;
use crate::manifest::wire::{Put, seal_head};
use crate::manifest::{MAJOR, MINOR};

pub(super) fn encode(request: &Request, objects: &[Object], offsets: &[u64]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&MAJOR.to_le_bytes());
    out.extend_from_slice(&MINOR.to_le_bytes());
    out.extend_from_slice(&[0; 12]);
    let mut field = Vec::new();
    put_spec(&mut field, &request.spec);
    out.put_field(1, &field);
    out.put_field(2, &request.info.encode()?);
    field.clear();
    field.put_varint(request.files.max(1) as u64);
    field.put_varint(u64::from(request.policy.overwrite));
    out.put_field(3, &field);
    field.clear();
    request.plan.structure().put(&mut field);
    out.put_field(4, &field);
    field.clear();
    put_items(&mut field, &request.plan);
    out.put_field(5, &field);
    field.clear();
    offsets.iter().for_each(|&offset| field.put_varint(offset));
    out.put_field(6, &field);
    field.clear();
    for object in objects {
        let (kind, bytes) = match object {
            Object::Pickle(bytes) => (0, bytes),
            Object::Archive(bytes) => (1, bytes),
        };
        field.put_field(kind, bytes);
    }
    out.put_field(7, &field);
    field.clear();
    field.put_varint(request.side_files.len() as u64);
    for SideFile { name, bytes } in &request.side_files {
        field.put_text(name);
        field.put_varint(bytes.len() as u64);
        field.extend_from_slice(bytes);
    }
    out.put_field(8, &field);
    seal(out)
}

fn seal(mut out: Vec<u8>) -> Result<Vec<u8>> {
    let bytes = out.len() as u64;
    if bytes > MAX_BEQUEST_BYTES {
        let what = format!("{bytes} bytes beside the tensors, {MAX_BEQUEST_BYTES} is the most");
        return Err(Error::new(Code::Unsupported, what));
    }
    seal_head(&mut out);
    Ok(out)
}

fn put_spec(out: &mut Vec<u8>, spec: &Spec) {
    out.put_varint(spec.step);
    out.extend_from_slice(&spec.attempt.run.0.to_le_bytes());
    out.put_varint(u64::from(spec.attempt.save));
    out.put_varint(u64::from(spec.rank));
    out.put_varint(u64::from(spec.world));
    out.extend_from_slice(&spec.structure.0);
    out.put_varint(spec.epoch);
    out.put_varint(u64::from(spec.parent.is_some()));
    spec.parent.into_iter().for_each(|parent| out.put_varint(parent));
    out.put_varint(spec.part_bytes);
    out.put_text(&spec.who);
}

/// Items that are written; of others a save says nothing.
fn put_items(out: &mut Vec<u8>, plan: &SavePlan) {
    let (mut dtypes, mut rows, mut count): (Vec<Dtype>, _, _) = (Vec::new(), Vec::new(), 0);
    for item in plan.items().iter().filter(|item| item.writes) {
        put_item(&mut rows, item, &mut dtypes);
        count += 1;
    }
    out.put_varint(dtypes.len() as u64);
    dtypes.iter().for_each(|dtype| out.put_text(dtype.name()));
    out.put_varint(count);
    out.extend_from_slice(&rows);
}

fn put_item(out: &mut Vec<u8>, item: &SaveItem, dtypes: &mut Vec<Dtype>) {
    out.put_text(&item.name);
    put_path(out, &item.name, &item.path);
    match &item.what {
        What::Tensor { dtype, shape, region, requires_grad } => {
            out.put_varint(u64::from(*requires_grad));
            let known = dtypes.iter().position(|one| one == dtype);
            let number = known.unwrap_or_else(|| {
                dtypes.push(*dtype);
                dtypes.len() - 1
            });
            out.put_varint(number as u64);
            out.put_varint(shape.len() as u64);
            let box_ = region.offsets.iter().zip(&region.sizes);
            for (side, (offset, size)) in shape.iter().zip(box_) {
                out.put_varint(*side);
                out.put_varint(*offset);
                out.put_varint(*size);
            }
        }
        What::Object => out.put_varint(2),
        What::Alias { of } => {
            out.put_varint(3);
            out.put_text(of);
        }
    }
}
