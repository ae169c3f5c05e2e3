//! From the parts of all ranks to the two files that make a commit: the manifest, and `.metadata` for stock readers.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::dcp::{KeyStep, MetadataWriter, StorageMeta, TensorProps};

use super::plan::{torch_dtype, torch_shape};
use super::seal::{ATTRIBUTE, Seal};
use crate::commit::{Assembled, AttemptId, FileRef};
use crate::manifest::{Builder, Info, Manifest, MemorySource, Structure, Value};
use crate::model::{Chunk, DataFile, PathStep};

/// What the committer says of the save.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The attempt.
    pub attempt: AttemptId,
    /// What goes into the manifest.
    pub info: Info,
    /// Where it is saved, for people.
    pub place: String,
    /// Ways in the nested state, where the parts do not have them.
    pub paths: HashMap<String, Vec<PathStep>>,
}

/// Makes manifest and `.metadata` from parts, in the order of ranks. `structure` is what the ranks agreed on, to which
/// the parts refer ([`SavePlan::structure`](super::SavePlan::structure)): every rank has it, so any of them can commit.
///
/// Errors: those of [`Builder`]; `unsupported` for a dtype that torch does not have.
pub fn assemble(
    facts: &Facts,
    structure: &Arc<Structure>,
    parts: &[Vec<u8>],
    manifest_name: String,
) -> Result<Assembled> {
    let mut builder = Builder::new(facts.info.clone(), Arc::clone(structure));
    for part in parts {
        builder.add_part(part)?;
    }
    let head = builder.finish()?;
    let mut bytes = head.bytes;
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    let source = MemorySource::new(manifest_name.clone(), bytes.clone());
    let manifest = Manifest::open(Arc::new(source), Some(&head.seal))?;
    let seal = Seal { attempt: facts.attempt, manifest: manifest_name, hash: head.seal };
    let files = manifest.files()?;
    let metadata = metadata(facts, &manifest, &files, &seal, true)?;
    let files = files.into_iter().map(|file| {
        let bytes = file.bytes.unwrap_or_default();
        FileRef { name: file.name, bytes }
    });
    Ok(Assembled { metadata, manifest: bytes, files: files.collect() })
}

/// The bytes of `.metadata`, with a CRC of all of them if it is to be `stamped`.
pub(crate) fn metadata(
    facts: &Facts,
    manifest: &Manifest,
    files: &[DataFile],
    seal: &Seal,
    stamped: bool,
) -> Result<Vec<u8>> {
    let table = manifest.table();
    let mut chunks: Vec<Vec<Chunk>> = table.values().iter().map(|_| Vec::new()).collect();
    manifest.visit(|_, number, chunk| {
        if let Some(own) = chunks.get_mut(number as usize) {
            own.push(chunk);
        }
        Ok(())
    })?;
    let holder = |number: usize| match table.values().get(number).map(|named| &named.value) {
        Some(Value::Alias { of }) => table.find(of).map_or(number, |(other, _)| other as usize),
        _ => number,
    };
    chunks.iter_mut().for_each(keep_stock);
    let mut writer = MetadataWriter::new(Vec::new())?;
    for (number, named) in table.values().iter().enumerate() {
        let value = table.values().get(holder(number)).map(|named| &named.value);
        let Some(Value::Tensor(tensor)) = value else {
            writer.object(&named.name)?;
            continue;
        };
        let props = TensorProps {
            dtype: torch_dtype(tensor.dtype)?,
            requires_grad: tensor.requires_grad,
            pin_memory: false,
        };
        writer.tensor(&named.name, &props, &torch_shape(tensor.dtype, &tensor.shape)?)?;
        for chunk in chunks.get(holder(number)).into_iter().flatten() {
            let offsets = torch_shape(tensor.dtype, &chunk.region.offsets)?;
            writer.chunk(&offsets, &torch_shape(tensor.dtype, &chunk.region.sizes)?)?;
        }
    }
    for (number, named) in (0_u32..).zip(table.values()) {
        let path = facts.paths.get(&named.name).unwrap_or(&named.path);
        let steps: Vec<KeyStep<'_>> = match path.is_empty() {
            true => vec![KeyStep::Key(&named.name)],
            false => path.iter().map(key_step).collect(),
        };
        writer.path(number, &steps)?;
    }
    for (number, named) in (0_u32..).zip(table.values()) {
        let own = chunks.get(holder(number as usize)).map(Vec::as_slice).unwrap_or_default();
        if own.is_empty() {
            let error = Error::new(Code::InvalidMetadata, "a value that nobody stored");
            return Err(error.at(&named.name));
        }
        for (chunk, place) in (0_u32..).zip(own) {
            let file = files.get(place.file as usize).map(|file| file.name.as_str());
            let file = file.ok_or_else(|| super::write::internal("a chunk without its file"))?;
            writer.stored(number, chunk, file, place.offset, place.length)?;
        }
    }
    let meta =
        StorageMeta { checkpoint_id: facts.place.clone(), save_id: facts.attempt.to_string() };
    let mut bytes = writer.finish(&meta, &[(ATTRIBUTE, seal.value(stamped))])?;
    super::stamp::stamp(&mut bytes);
    Ok(bytes)
}

/// Chunks as stock metadata may list them: it tells them apart by their offsets alone, so one without elements is
/// listed only where there is no other.
fn keep_stock(chunks: &mut Vec<Chunk>) {
    if chunks.iter().any(|chunk| !chunk.region.is_empty()) {
        chunks.retain(|chunk| !chunk.region.is_empty());
    } else {
        chunks.truncate(1);
    }
}

fn key_step(step: &PathStep) -> KeyStep<'_> {
    match step {
        PathStep::Key(key) => KeyStep::Key(key),
        PathStep::Index(index) => KeyStep::Index(*index),
    }
}
