//! Checkpoints as models: a catalog that the engine loads tensors from, straight out of the data files.
//!
//! A tensor's pieces are where its chunks are: the bytes inside of each item, row-major or strided. To know them the
//! items have to be opened, so it goes in two steps: a listing from the metadata alone ([`open_model`]), and the
//! pieces of those tensors that are wanted ([`Opened::resolve`]). A tensor whose item is damaged keeps its error,
//! which whoever loads it gets; the others load. Items that were compressed are decoded into memory first.

use super::item::Elements;
use super::place::Place;
use super::{Checkpoint, Concern, Origin};
use crate::model::{BLOCK_BYTES, Chunk, DataPlace, Entry, Kind};
use forebay_error::{Code, Error, Result};
use forebay_format::dcp::TensorItem;
use forebay_format::dcp::hf::is_shard;
use forebay_format::safetensors::read_header;
use forebay_format::torch_zip::PlainObject;
use forebay_format::{
    Catalog, CatalogFile, Check, Fault, Folder, Format, Model, OpenFile, Piece, Stored,
    TensorEntry, open_files_in, open_model_in, parallel,
};
use forebay_tensor::byte_len;
use std::collections::HashMap;
use std::sync::Arc;

/// A model or a checkpoint, listed.
#[derive(Debug)]
pub struct Opened {
    /// What it holds. Of a checkpoint: no tensor can be read yet.
    pub listing: Model,
    checkpoint: Option<Checkpoint>,
}

/// Opens what is at a place: a checkpoint (its folder, or the `.metadata` in it), or a model as
/// [`forebay_format::open_model`] does. In a bucket a name like a file's is a folder's where there is no such object.
pub fn open_model(place: impl Into<Place>) -> Result<Opened> {
    let place = place.into();
    match (open_at(&place), place.as_folder()) {
        (Err(error), Some(folder)) if error.code() == Code::NotFound => {
            // Where that is not there either, the file is what was asked for.
            let or_file = |none: Error| if none.code() == Code::NotFound { error } else { none };
            open_at(&folder).map_err(or_file)
        }
        (opened, _) => opened,
    }
}

fn open_at(place: &Place) -> Result<Opened> {
    let folder = place.folder();
    if let Some(folder) = &folder
        && is_checkpoint(folder)?
    {
        let checkpoint = Checkpoint::open(folder)?;
        let listing = list(&checkpoint)?;
        return Ok(Opened { listing, checkpoint: Some(checkpoint) });
    }
    let listing = match (place, &folder) {
        (Place::Local(path), _) => forebay_format::open_model(path)?,
        (Place::Remote { folder, name }, _) => open_model_in(folder, name.as_deref())?,
    };
    Ok(Opened { listing, checkpoint: None })
}

/// Opens these files as one model. A tensor in two of them is `duplicate_tensor`.
pub fn open_files(places: &[Place]) -> Result<Model> {
    let local = |place: &Place| match place {
        Place::Local(path) => Some(path.clone()),
        Place::Remote { .. } => None,
    };
    if let Some(paths) = places.iter().map(local).collect::<Option<Vec<_>>>() {
        return forebay_format::open_files(&paths);
    }
    let files = places.iter().map(|place| match place {
        Place::Remote { folder, name: Some(name) } => Ok((folder.clone(), name.clone())),
        Place::Remote { .. } => {
            let what = "is a folder; a list is of files";
            Err(Error::new(Code::Usage, what).at(place.path().display()))
        }
        Place::Local(path) => {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((path.parent().unwrap_or(std::path::Path::new("")).into(), name))
        }
    });
    open_files_in(&files.collect::<Result<Vec<_>>>()?)
}

/// Whether a folder is to be opened as a checkpoint, be it as one that was not committed.
fn is_checkpoint(folder: &Folder) -> Result<bool> {
    let listing = super::files::list(folder)?;
    if listing.has_metadata {
        return Ok(true);
    }
    if listing.safetensors.is_empty() {
        let found = [&listing.distcp, &listing.leftovers, &listing.per_rank];
        return Ok(found.iter().any(|names| !names.is_empty()));
    }
    if listing.has_index {
        return Ok(false);
    }
    // One file tells: the writer marks each.
    let Some(first) = listing.safetensors.first() else { return Ok(false) };
    // A file that cannot be read is a matter for whoever opens the model.
    let header = folder.open(first).and_then(|file| read_header(&file));
    Ok(header.is_ok_and(|header| is_shard(&header)))
}

/// A catalog of a checkpoint's tensors, none of them opened.
fn list(checkpoint: &Checkpoint) -> Result<Model> {
    let folder = checkpoint.location();
    let names: Vec<&str> = checkpoint.files.iter().map(|file| file.name.as_str()).collect();
    let mut warnings: Vec<String> =
        checkpoint.warnings.iter().map(|warning| warning.text.clone()).collect();
    let sizes = folder.sizes(&names).unwrap_or_else(|error| {
        // A listing shows them; nothing is read by them.
        warnings.push(format!("the sizes of the files are not known: {}", error.what()));
        vec![None; names.len()]
    });
    let files = names.iter().zip(sizes).map(|(name, size)| {
        let path = folder.path().join(name);
        CatalogFile { name: (*name).to_owned(), path, size: size.unwrap_or(0) }
    });
    let files = files.collect();
    let mut tensors = Vec::new();
    for entry in &checkpoint.entries {
        let Kind::Tensor { dtype, shape, chunks } = &entry.kind else { continue };
        let first = chunks.first();
        tensors.push(TensorEntry {
            name: entry.name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            file: first.map_or(0, |chunk| chunk.file as usize),
            offset: first.map_or(0, |chunk| chunk.offset),
            bytes: byte_len(*dtype, shape)?,
            stored: Stored::Unopened(None),
        });
    }
    let format = match checkpoint.origin {
        Origin::Dcp { .. } => Format::Dcp,
        Origin::HfShards => Format::SafetensorsShards,
        Origin::Forebay(_) => Format::Dcp,
    };
    let catalog = Catalog::new(format, None, files, tensors, warnings)?;
    Ok(Model { catalog, files: Vec::new() })
}

impl Opened {
    /// The checkpoint, where it is one.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }

    /// The model with the tensors of these names ready to be read; they keep their numbers in the catalog. Of a model
    /// that is no checkpoint all are, always.
    pub fn resolve(&self, wanted: impl Fn(&str) -> bool) -> Result<Model> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(self.listing.clone()) };
        let mut catalog = self.listing.catalog.clone();
        let mut jobs = Vec::new();
        for (number, tensor) in catalog.tensors.iter_mut().enumerate() {
            let entry = checkpoint.get(&tensor.name).filter(|entry| wanted(&entry.name));
            if let Some(entry) = entry {
                jobs.extend(entry.chunks().iter().map(|chunk| Job { number, entry, chunk }));
                tensor.stored = Stored::Pieces(Vec::new());
            }
        }
        let parts = Parts::of(checkpoint, jobs, &mut catalog.tensors)?;
        (catalog.files, catalog.checks) = (parts.catalog, parts.checks);
        catalog.has_blocks = matches!(checkpoint.origin, Origin::Forebay(_));
        Ok(Model { catalog, files: parts.files })
    }

    /// The model with all tensors ready.
    pub fn resolve_all(&self) -> Result<Model> {
        self.resolve(|_| true)
    }

    /// The values that are no tensors, of these names; each may be had or not.
    pub fn objects(&self, wanted: impl Fn(&str) -> bool) -> Vec<(String, Result<PlainObject>)> {
        match &self.checkpoint {
            Some(checkpoint) => checkpoint.objects(wanted),
            None => {
                let objects = self.listing.catalog.objects.iter();
                let objects = objects.filter(|entry| wanted(&entry.name));
                objects.map(|entry| (entry.name.clone(), Ok(entry.object.clone()))).collect()
            }
        }
    }
}

impl Checkpoint {
    /// The objects of these names.
    pub fn objects(&self, wanted: impl Fn(&str) -> bool) -> Vec<(String, Result<PlainObject>)> {
        let is_object = |entry: &&Entry| matches!(entry.kind, Kind::Object { .. });
        let entries = self.entries.iter().filter(is_object).filter(|entry| wanted(&entry.name));
        let entries: Vec<&Entry> = entries.collect();
        let read = parallel::map(&entries, |entry| self.read_object(entry));
        entries.iter().map(|entry| entry.name.clone()).zip(read).collect()
    }

    /// Names of entries that were left out, and why, as one warning each.
    pub fn left_out(&self) -> impl Iterator<Item = &str> {
        let left_out = self.warnings.iter().filter(|told| told.concern == Concern::LeftOut);
        left_out.map(|warning| warning.text.as_str())
    }
}

/// A chunk to find.
pub(super) struct Job<'c> {
    pub(super) number: usize,
    pub(super) entry: &'c Entry,
    pub(super) chunk: &'c Chunk,
}

impl Job<'_> {
    fn locate(&self, checkpoint: &Checkpoint) -> Result<(Arc<OpenFile>, Elements)> {
        let Kind::Tensor { dtype, .. } = &self.entry.kind else {
            return Err(Error::new(Code::Internal, "an object in place of a tensor"));
        };
        let (file, elements) = checkpoint
            .locate(*dtype, self.chunk)
            .map_err(|error| checkpoint.place(&self.entry.name, error))?;
        match elements {
            Elements::Item(item) if item.decoded.is_some() => {
                let bytes = item.read(file.as_ref())?;
                // Messages name the file that the item came from.
                let memory = OpenFile::in_memory(&file.path, &bytes)?;
                Ok((Arc::new(memory), Elements::Item(item)))
            }
            elements => Ok((file, elements)),
        }
    }
}

/// A catalog in the making: only the files that are needed, in the order of their first use.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) catalog: Vec<CatalogFile>,
    pub(super) files: Vec<Arc<OpenFile>>,
    numbers: HashMap<u32, usize>,
    pub(super) checks: Vec<Check>,
}

impl Parts {
    /// Opens what is wanted, in the order of the files, and gives each tensor its pieces.
    pub(super) fn of(
        checkpoint: &Checkpoint,
        mut jobs: Vec<Job<'_>>,
        tensors: &mut [TensorEntry],
    ) -> Result<Self> {
        jobs.sort_by_key(|job| (job.chunk.file, job.chunk.offset));
        let located = parallel::map(&jobs, |job| Ok(job.locate(checkpoint)));
        let mut parts = Self::default();
        for (job, located) in jobs.iter().zip(located) {
            if let Some(tensor) = tensors.get_mut(job.number) {
                parts.add(tensor, job, located?);
            }
        }
        tensors.iter_mut().for_each(settle);
        parts.checks.sort_by_key(|check| (check.file, check.offset));
        parts.checks.dedup();
        Ok(parts)
    }

    /// Adds what was found of a chunk to its tensor. One fault decides for the whole tensor.
    fn add(
        &mut self,
        tensor: &mut TensorEntry,
        job: &Job<'_>,
        located: Result<(Arc<OpenFile>, Elements)>,
    ) {
        let Stored::Pieces(pieces) = &mut tensor.stored else { return };
        let (file, elements) = match located {
            Ok(found) => found,
            Err(error) => {
                tensor.stored = Stored::Unopened(Some(Fault::from(&error)));
                return;
            }
        };
        let region = job.chunk.region.clone();
        let piece = match elements {
            Elements::Place(place) => {
                let file = self.number(job.chunk.file, file);
                self.checks.extend(blocks(&place, file));
                Piece { region, file, offset: place.offset, strides: None }
            }
            Elements::Item(item) if item.decoded.is_some() => {
                let file = self.push(file);
                self.checks.extend(decoded(&item, file));
                Piece { region, file, offset: 0, strides: None }
            }
            Elements::Item(item) => {
                let file = self.number(job.chunk.file, file);
                self.checks.push(check(&item, file));
                let strides = (!item.view.is_row_major()).then(|| item.view.memory.strides.clone());
                Piece { region, file, offset: item.start(), strides }
            }
        };
        pieces.push(piece);
    }

    fn number(&mut self, of: u32, file: Arc<OpenFile>) -> usize {
        match self.numbers.get(&of) {
            Some(&number) => number,
            None => {
                let number = self.push(file);
                self.numbers.insert(of, number);
                number
            }
        }
    }

    fn push(&mut self, file: Arc<OpenFile>) -> usize {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.catalog.push(CatalogFile { name, path: file.path.clone(), size: file.size() });
        self.files.push(file);
        self.files.len() - 1
    }
}

/// The checksums of a chunk's blocks.
fn blocks(place: &DataPlace, file: usize) -> impl Iterator<Item = Check> {
    let (end, mut offset) = (place.offset.saturating_add(place.bytes), place.offset);
    place.crcs.iter().map(move |&crc| {
        let bytes = BLOCK_BYTES.min(end.saturating_sub(offset));
        let check = Check { file, offset, bytes, crc };
        offset += bytes;
        check
    })
}

fn check(item: &TensorItem, file: usize) -> Check {
    let record = item.record;
    Check { file, offset: record.offset, bytes: record.bytes, crc: record.crc }
}

/// The checksum of what was decoded into memory, where that is the record as it was.
fn decoded(item: &TensorItem, file: usize) -> Option<Check> {
    let is_record = item.view.is_row_major() && item.view.bytes() == item.record.bytes;
    is_record.then(|| Check { offset: 0, ..check(item, file) })
}

/// Sets file and offset of a tensor to those of its first piece; one piece that is all of it is a plain run.
fn settle(tensor: &mut TensorEntry) {
    let Stored::Pieces(pieces) = &tensor.stored else {
        tensor.file = usize::MAX;
        return;
    };
    let Some(first) = pieces.first() else { return };
    (tensor.file, tensor.offset) = (first.file, first.offset);
    let is_whole = first.region.is_whole(&tensor.shape) && first.strides.is_none();
    if is_whole && pieces.len() == 1 {
        tensor.stored = Stored::Run;
    }
}
