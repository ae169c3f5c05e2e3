//! Writing safetensors: a folder with an index as the Hugging Face libraries have it, or one file.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_error::{Code, Error, Result};
use forebay_format::safetensors::{SaveLayout, TensorSpec, layout};
use forebay_format::{ModelSave, shown};
use forebay_tensor::{Dtype, byte_len};

use super::stream::{Sink, stream};
use super::{Aliases, Exported, Item, Items, Options, objects_left_out};
use crate::progress::Progress;
use crate::stream::Source;

/// What readers of Hugging Face want to see of tensors for torch.
const FORMAT: (&str, &str) = ("format", "pt");

pub(super) fn write(
    source: &Source,
    items: &Items,
    to: &Path,
    options: &Options<'_>,
    progress: &impl Progress,
) -> Result<Exported> {
    let written = |item: &Item| item.same_as.is_none() || options.aliases == Aliases::Copy;
    let mut exported =
        Exported { left_out: objects_left_out(source, options), ..Exported::default() };
    for item in items.0.iter().filter(|item| !written(item)) {
        let same = item.same_as.and_then(|same| items.0.get(same));
        let same = same.map(|same| same.name.clone()).unwrap_or_default();
        exported.aliases.insert(item.name.clone(), same);
    }
    let chosen: Vec<&Item> = items.0.iter().filter(|item| written(item)).collect();
    let specs = chosen.iter().map(|item| spec(source, item)).collect::<Result<Vec<_>>>()?;
    exported.tensors = specs.len();
    for spec in &specs {
        exported.bytes += byte_len(spec.dtype, &spec.shape)?;
    }
    let mut metadata = vec![(FORMAT.0.to_owned(), FORMAT.1.to_owned())];
    let notes = exported.aliases.iter().filter(|(left_out, _)| *left_out != FORMAT.0);
    metadata.extend(notes.map(|(left_out, written)| (left_out.clone(), written.clone())));
    let order = items.reading_order(source, written);
    if to.extension().is_some_and(|extension| extension == "safetensors") {
        let plan = layout(&specs, Some(&metadata))?;
        let file = super::new_file(to)?;
        file.preallocate(plan.total)?;
        write_at(file.file(), &plan.header, 0, to)?;
        let mut targets = Targets::default();
        targets.add(file.file(), to, &plan, &chosen, 0..chosen.len());
        stream(source, &order, &targets, progress)?;
        drop(targets);
        progress.add(0)?;
        file.commit()?;
        let name = to.file_name().unwrap_or_default();
        exported.files.push(name.to_string_lossy().into_owned());
        return Ok(exported);
    }
    let save = ModelSave::create(to, &specs, Some(&metadata), options.max_shard_bytes)?;
    let mut targets = Targets::default();
    for shard in save.shards() {
        let tensors = shard.tensors.iter().copied();
        targets.add(shard.file.file(), to, &shard.layout, &chosen, tensors);
    }
    stream(source, &order, &targets, progress)?;
    drop(targets);
    let saved = save.commit_if(|| progress.add(0).is_ok())?;
    exported.files = saved.files;
    exported.warnings = saved.warnings;
    Ok(exported)
}

fn spec(source: &Source, item: &Item) -> Result<TensorSpec> {
    let info = source.tensors.get(item.tensor);
    let info = info.ok_or_else(|| Error::new(Code::Internal, "an item without a tensor"))?;
    Ok(TensorSpec { name: item.name.clone(), dtype: item.dtype, shape: info.shape.clone() })
}

/// Where the tensors of the source go: each to one place, or to several.
#[derive(Default)]
struct Targets<'a>(HashMap<usize, (Dtype, Vec<Target<'a>>)>);

struct Target<'a> {
    file: &'a File,
    folder: &'a Path,
    offset: u64,
}

impl<'a> Targets<'a> {
    /// Adds the tensors of a file: `tensors` are their places in `chosen`.
    fn add(
        &mut self,
        file: &'a File,
        folder: &'a Path,
        plan: &SaveLayout,
        chosen: &[&Item],
        tensors: impl Iterator<Item = usize>,
    ) {
        for (tensor, &offset) in tensors.zip(&plan.offsets) {
            let Some(item) = chosen.get(tensor) else { continue };
            let targets = self.0.entry(item.tensor).or_insert_with(|| (item.dtype, Vec::new()));
            targets.1.push(Target { file, folder, offset });
        }
    }
}

impl Sink for Targets<'_> {
    fn dtype(&self, tensor: usize) -> Option<Dtype> {
        self.0.get(&tensor).map(|(dtype, _)| *dtype)
    }

    fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let targets = self.0.get(&tensor).map(|(_, targets)| targets.as_slice());
        targets.unwrap_or_default().iter().try_for_each(|target| {
            write_at(target.file, bytes, target.offset + offset, target.folder)
        })
    }
}

pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64, place: &Path) -> Result<()> {
    file.write_all_at(bytes, offset).map_err(|error| {
        let what = format!("cannot write {} bytes at byte {offset}", bytes.len());
        Error::io(what, error).at(shown(place))
    })
}
