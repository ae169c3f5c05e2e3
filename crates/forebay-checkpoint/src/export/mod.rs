//! From a checkpoint to files that everybody reads: safetensors as Hugging Face lays them out, or one file of
//! `torch.save`.
//!
//! Tensors go through bounded memory, a few boxes of 32 MiB at a time ([`MEMORY_BYTES`]), read by the engine with every
//! checksum compared and written as they come. The file or model appears at the end, whole, or not at all.
//!
//! **Two names for one tensor.** Safetensors have no such thing. As `save_model` of that library does, the bytes are
//! written once, under the first of the names, and the metadata says `{left out: written}`; with [`Aliases::Copy`]
//! each name has bytes of its own. In a file of torch both names share one storage, as they did when they were saved.
//!
//! **Objects** (what is no tensor) have no place in safetensors and are told as left out. In a file of torch they are
//! what they were, as far as they are plain data (numbers, texts, lists, tuples, dicts); nothing is ever executed.

mod apart;
mod cast;
mod counted;
mod pickle;
mod rename;
mod safetensors;
mod state;
mod stream;
mod torch;
mod zip;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use forebay_error::{Code, Error, Result};
use forebay_format::safetensors::METADATA_KEY;
use forebay_format::{AtomicFile, clean_stale_temps};
use forebay_tensor::Dtype;

pub(crate) use cast::cast;
pub use rename::Rename;

use crate::open::Place;
use crate::progress::Progress;
use crate::stream::{BATCH_BYTES, SLOTS, Source, TensorInfo};

/// The most memory that tensors take on the way: batches, their casts, and the engine's staging. What lists the tensors
/// (some hundred bytes each), and items that were saved compressed, come on top.
pub const MEMORY_BYTES: u64 = SLOTS as u64 * (BATCH_BYTES + (1 << 20)) + (64 << 20) + (64 << 20);

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A folder of safetensors with an index, or one file where the destination ends in `.safetensors`.
    Safetensors,
    /// One file of `torch.save`.
    Torch,
}

/// What becomes of tensors with two names in safetensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aliases {
    /// Written under one name; the metadata names the others.
    #[default]
    Note,
    /// Written under each name.
    Copy,
}

/// How to export.
pub struct Options<'a> {
    /// The format.
    pub format: Format,
    /// What floats of 16, 32 and 64 bits become; `None`: what they are.
    pub dtype: Option<Dtype>,
    /// Other names; the first rule that fits counts.
    pub renames: Vec<Rename>,
    /// Which names of the checkpoint.
    pub select: Option<&'a dyn Fn(&str) -> bool>,
    /// Bytes of tensors in one file of safetensors, at the most.
    pub max_shard_bytes: u64,
    /// Tensors with two names.
    pub aliases: Aliases,
    /// Of a file of torch: names as they are in place of nested dicts and lists.
    pub flat: bool,
    /// Replace what is at the destination.
    pub overwrite: bool,
}

/// What was written.
#[derive(Clone, Debug, Default)]
pub struct Exported {
    /// Names of tensors.
    pub tensors: usize,
    /// Objects.
    pub objects: usize,
    /// Bytes of tensors that were written.
    pub bytes: u64,
    /// The files, relative to the destination where that is a folder.
    pub files: Vec<String>,
    /// Names that were not written because another has the same tensor, and that.
    pub aliases: BTreeMap<String, String>,
    /// Objects that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// What went less than well.
    pub warnings: Vec<String>,
}

/// Writes what is at a place (a checkpoint, or any model) to `to`.
///
/// Errors: those of reading, among them `checksum`; `usage` where `to` is the source or lies in it, for names
/// that a rule makes twice or empty, and where
/// nothing is selected; `already_exists`; `unsupported` for a dtype that the format lacks; those of writing.
pub fn export(
    place: impl Into<Place>,
    to: &Path,
    options: &Options<'_>,
    progress: &impl Progress,
) -> Result<Exported> {
    let place = place.into();
    if let Place::Local(path) = &place {
        apart::check(path, to)?;
    }
    let source = Source::open(place)?;
    let (items, unused) = Items::choose(&source, options)?;
    if !options.overwrite {
        refuse_existing(to)?;
    }
    let mut exported = match options.format {
        Format::Safetensors => safetensors::write(&source, &items, to, options, progress)?,
        Format::Torch => torch::write(&source, &items, to, options, progress)?,
    };
    exported.warnings.splice(0..0, source.warnings().iter().cloned().chain(unused));
    Ok(exported)
}

/// A tensor to be written.
struct Item {
    /// Its place in the source's list.
    tensor: usize,
    /// Its new name.
    name: String,
    /// Its type in the file.
    dtype: Dtype,
    /// The item before it that is the same tensor.
    same_as: Option<usize>,
}

/// What is selected, by new name.
struct Items(Vec<Item>);

impl Items {
    /// And what to say of rules that fit no name.
    fn choose(source: &Source, options: &Options<'_>) -> Result<(Self, Vec<String>)> {
        let mut items = Vec::new();
        let mut idle: Vec<&Rename> = options.renames.iter().collect();
        for (tensor, info) in source.tensors.iter().enumerate() {
            if !is_selected(options, &info.name) {
                continue;
            }
            idle.retain(|rule| rule.apply(&info.name).is_none());
            let name = rename::rename(&options.renames, &info.name);
            if name.is_empty() && !info.name.is_empty() {
                let what = format!("a rule gives {:?} an empty name", info.name);
                return Err(Error::new(Code::Usage, what));
            }
            if options.format == Format::Safetensors && name == METADATA_KEY {
                let what = format!("safetensors can hold no tensor of the name {name}");
                return Err(
                    Error::new(Code::Usage, what).hint("give it another: `--rename OLD=NEW`")
                );
            }
            let dtype = target_dtype(info, options.dtype);
            items.push(Item { tensor, name, dtype, same_as: None });
        }
        if items.is_empty() && !source.tensors.is_empty() {
            return Err(Error::new(Code::Usage, "no tensor is selected"));
        }
        items.sort_by(|a, b| a.name.cmp(&b.name));
        let twice = items.windows(2).find_map(|pair| match pair {
            [a, b] if a.name == b.name => Some((a, b)),
            _ => None,
        });
        if let Some((a, b)) = twice {
            let old = |item: &Item| source.tensors.get(item.tensor).map(|info| info.name.clone());
            let (old_a, old_b) = (old(a).unwrap_or_default(), old(b).unwrap_or_default());
            let what = format!("{old_a:?} and {old_b:?} would both be called {:?}", a.name);
            return Err(Error::new(Code::Usage, what).hint("change the rules for names"));
        }
        let idle = idle.iter().map(|rule| format!("the rule `{rule}` fits no name"));
        Ok((Self(items).with_aliases(source), idle.collect()))
    }

    fn with_aliases(mut self, source: &Source) -> Self {
        let mut first: HashMap<usize, usize> = HashMap::new();
        for (place, item) in self.0.iter_mut().enumerate() {
            let root = source.tensors.get(item.tensor).and_then(|info| info.same_as);
            let root = root.unwrap_or(item.tensor);
            item.same_as = first.get(&root).copied();
            first.entry(root).or_insert(place);
        }
        self
    }

    /// Places in the source's list of what is read, in the order of the files.
    fn reading_order(&self, source: &Source, wanted: impl Fn(&Item) -> bool) -> Vec<usize> {
        let items = self.0.iter().filter(|item| wanted(item));
        let mut order: Vec<usize> = items.map(|item| item.tensor).collect();
        order.sort_by_key(|&tensor| source.tensors.get(tensor).map(|info| info.place));
        order
    }
}

fn is_selected(options: &Options<'_>, name: &str) -> bool {
    options.select.is_none_or(|select| select(name))
}

fn target_dtype(info: &TensorInfo, wanted: Option<Dtype>) -> Dtype {
    wanted.filter(|_| cast::is_float(info.dtype)).unwrap_or(info.dtype)
}

/// Fails where there is something at the destination. An empty folder is nothing.
fn refuse_existing(to: &Path) -> Result<()> {
    let exists = match std::fs::read_dir(to) {
        Ok(mut names) => names.next().is_some(),
        Err(_) => to.symlink_metadata().is_ok(),
    };
    match exists {
        false => Ok(()),
        true => Err(Error::new(Code::AlreadyExists, "there is something at the destination")
            .at(forebay_format::shown(to))
            .hint("choose another, or say that it may be replaced: `--overwrite`")),
    }
}

/// A file to export to. What exports left in its folder that were killed goes first: they reserve all of their space.
fn new_file(to: &Path) -> Result<AtomicFile> {
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
    match clean_stale_temps(folder.unwrap_or(Path::new("."))) {
        Ok(removed) => removed.iter().for_each(|path| {
            tracing::info!(path = %path.display(), "removed what a killed writer left");
        }),
        // A folder that may be written and not read. Creating the file says if there is more to it.
        Err(error) => tracing::debug!(%error, "what killed writers left is not looked for"),
    }
    AtomicFile::create(to)
}

/// Objects whose names are selected and cannot be written to a format of tensors alone.
fn objects_left_out(source: &Source, options: &Options<'_>) -> Vec<(String, String)> {
    let tensors: HashSet<&str> = source.tensors.iter().map(|info| info.name.as_str()).collect();
    let names: Vec<String> = match source.checkpoint() {
        Some(checkpoint) => checkpoint.entries.iter().map(|entry| entry.name.clone()).collect(),
        None => source.objects(|_| true).into_iter().map(|(name, _)| name).collect(),
    };
    let left = names.into_iter().filter(|name| !tensors.contains(name.as_str()));
    let left = left.filter(|name| is_selected(options, name));
    left.map(|name| (name, "safetensors hold tensors alone".to_owned())).collect()
}
