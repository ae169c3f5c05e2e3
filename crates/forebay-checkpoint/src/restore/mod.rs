//! Restoring: regions of a checkpoint's tensors, and its objects, to whoever wants them.
//!
//! A [`Reader`] is an open checkpoint. [`Reader::select`] takes regions, whatever regions they were saved in, and
//! finds the chunks that they share elements with; what comes out is a model of just those, from which the engine
//! loads. Of our own checkpoints every block that is read is compared with its checksum before its bytes reach their
//! target; of others each record that is read whole is compared with its archive's checksum, when all of it is here.
//!
//! Of our own, opening reads the manifest as far as its index, and selecting the parts of those ranks that saved what
//! is wanted (`ours`): a rank that restores its shard of a job of thousands reads a fraction of a per cent. Others have
//! one list of everything, which is read when they are opened (`listed`).

mod listed;
mod objects;
mod ours;
mod together;

use std::path::Path;

use forebay_engine::{Plan, Selection, Wanted};
use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::{Folder, Model};
use forebay_tensor::{Dtype, Region};

use crate::manifest::Manifest;
use crate::model::{BLOCK_BYTES, Chunk, Entry, Kind, PathStep};
use crate::open::{Checkpoint, Origin};
use listed::Listed;
use ours::Ours;

/// Most bytes of an object or side file that are read into memory.
const OBJECT_BYTES_MAX: u64 = 4 << 30;

/// A named value of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its flat name.
    pub name: String,
    /// The way to it in the nested state; empty where that is not known.
    pub path: Vec<PathStep>,
    /// Dtype and sides of a tensor; `None` of an object.
    pub tensor: Option<(Dtype, Vec<u64>)>,
}

/// An open checkpoint.
pub struct Reader {
    found: Found,
    origin: Origin,
}

enum Found {
    Ours(Box<Ours>),
    Listed(Box<Listed>),
}

/// Regions that were found.
pub struct Selected {
    /// The chunks that hold them.
    pub model: Model,
    wanted: Vec<(usize, Wanted)>,
}

impl Reader {
    /// Opens the checkpoint in a folder. Errors: those of [`Checkpoint::open`].
    pub fn open(folder: impl Into<Folder>) -> Result<Self> {
        let folder = &folder.into();
        match crate::open::ours::find_manifest(folder)? {
            Some(manifest) => Self::of_manifest(folder, manifest),
            None => {
                let checkpoint = Checkpoint::open(folder)?;
                let origin = checkpoint.origin.clone();
                Ok(Self { found: Found::Listed(Box::new(Listed::new(checkpoint))), origin })
            }
        }
    }

    /// A checkpoint of ours whose manifest is open already. Errors: those of listing the folder; `invalid_metadata` for
    /// another name of nothing.
    pub fn of_manifest(folder: impl Into<Folder>, manifest: Manifest) -> Result<Self> {
        let folder = &folder.into();
        let origin = Origin::Forebay(Box::new(manifest.info().clone()));
        Ok(Self { found: Found::Ours(Box::new(Ours::new(folder, manifest)?)), origin })
    }

    /// Everything that it holds, in the order of its metadata.
    pub fn items(&self) -> &[Item] {
        match &self.found {
            Found::Ours(ours) => &ours.items,
            Found::Listed(listed) => &listed.items,
        }
    }

    /// One of them, by name. Errors: `no_such_tensor`.
    pub fn item(&self, name: &str) -> Result<&Item> {
        match &self.found {
            Found::Ours(ours) => ours.item(name),
            Found::Listed(listed) => listed.item(name),
        }
    }

    /// Who wrote it.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// What was accepted but is worth telling.
    pub fn warnings(&self) -> &[String] {
        match &self.found {
            Found::Ours(ours) => &ours.warnings,
            Found::Listed(listed) => &listed.warnings,
        }
    }

    /// The regions in which a tensor is stored, as far as they have elements; none of an object. Errors:
    /// `no_such_tensor`.
    pub fn regions(&self, name: &str) -> Result<Vec<Region>> {
        match &self.found {
            Found::Ours(ours) => ours.regions(name),
            Found::Listed(listed) => listed.regions(name),
        }
    }

    /// Whether two items, by their numbers, are one in the checkpoint: a tensor that was saved once, under both names.
    /// Of two that are stored apart it says no, whatever they hold.
    pub fn is_one(&self, one: usize, other: usize) -> bool {
        let items = self.items();
        let (Some(one), Some(other)) = (items.get(one), items.get(other)) else { return false };
        match &self.found {
            Found::Ours(ours) => ours.is_one(&one.name, &other.name),
            Found::Listed(listed) => listed.is_one(&one.name, &other.name),
        }
    }

    /// Whether two tensors, by their numbers, hold the same in these regions as far as their stored checksums say: no
    /// data is read. `None` where that cannot be told. A difference may lie beside the regions, in the same chunk.
    pub fn same_sums(&self, one: usize, other: usize, regions: &[Region]) -> Option<bool> {
        let (one, other) = (self.items().get(one)?, self.items().get(other)?);
        match &self.found {
            Found::Ours(ours) => ours.same_sums(one, other, regions),
            Found::Listed(_) => None,
        }
    }

    /// Finds regions: `(number of the item, region)`.
    ///
    /// Errors: those of [`Checkpoint::model_for`]; of ours those of [`Manifest::find`].
    pub fn select(&self, wants: &[(usize, Region)]) -> Result<Selected> {
        let model = match &self.found {
            Found::Ours(ours) => ours.model_for(wants)?,
            Found::Listed(listed) => listed.checkpoint.model_for(wants)?,
        };
        let mut wanted = Vec::with_capacity(wants.len());
        for (number, (item, region)) in wants.iter().enumerate() {
            let name = self.items().get(*item).map(|item| item.name.as_str());
            let tensor = name.and_then(|name| model.catalog.find(name)).ok_or_else(|| {
                Error::new(Code::Internal, "a tensor that was selected is not in the model")
            })?;
            wanted.push((number, Wanted { tensor, region: Some(region.clone()) }));
        }
        Ok(Selected { model, wanted })
    }

    /// Names of the files that were committed with the step. Reads all of the manifest.
    ///
    /// Errors: those of reading the manifest's parts.
    pub fn side_files(&self) -> Result<Vec<String>> {
        match &self.found {
            Found::Ours(ours) => ours.side_files(),
            Found::Listed(_) => Ok(Vec::new()),
        }
    }

    /// A file that was committed with the step; of several ranks' the first. Errors: `not_found`; `checksum`.
    pub fn side_file(&self, name: &str) -> Result<Vec<u8>> {
        match &self.found {
            Found::Ours(ours) => ours.side_file(name),
            Found::Listed(listed) => Err(no_side_file(name, listed.checkpoint.folder())),
        }
    }

    /// The bytes of an object's item, as `torch.save` makes it. Errors: `no_such_tensor`, `checksum`, `unsupported`.
    pub fn object_bytes(&self, name: &str) -> Result<Vec<u8>> {
        self.with_object(name, |checkpoint, entry| {
            let Kind::Object { chunk } = &entry.kind else {
                return Err(Error::new(Code::Usage, format!("{name:?} is a tensor")));
            };
            checkpoint.verify_item(entry, chunk)?;
            read_item(checkpoint, chunk)
        })
    }

    /// An object that is plain data, as JSON. Errors: as [`Self::object_bytes`]; `forbidden_global` or `unsupported`
    /// for one that is not.
    pub fn object_json(&self, name: &str) -> Result<String> {
        self.with_object(name, |checkpoint, entry| {
            checkpoint.read_object(entry)?.json().map(str::to_owned)
        })
    }

    fn with_object<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Checkpoint, &Entry) -> Result<T>,
    ) -> Result<T> {
        match &self.found {
            Found::Ours(ours) => {
                let checkpoint = ours.object(name)?;
                read(&checkpoint, checkpoint.get(name).ok_or_else(|| ours.no_such(name))?)
            }
            Found::Listed(listed) => read(&listed.checkpoint, listed.entry(name)?),
        }
    }
}

fn read_item(checkpoint: &Checkpoint, chunk: &Chunk) -> Result<Vec<u8>> {
    if !chunk.transforms.is_empty() {
        let what = "a compressed object is read as plain data alone";
        return Err(Error::new(Code::Unsupported, what));
    }
    let file = checkpoint.open_file(chunk.file)?;
    let mut bytes = buffer(chunk.length)?;
    file.read_exact_at(&mut bytes, chunk.offset)?;
    let crcs = chunk.data.as_ref().map(|place| place.crcs.as_slice()).unwrap_or_default();
    let right = crcs.iter().zip(bytes.chunks(BLOCK_BYTES as usize));
    match right.into_iter().all(|(&crc, block)| crc32(block) == crc) {
        true => Ok(bytes),
        false => Err(wrong(file.path.display())),
    }
}

impl Selected {
    /// The plan, and for each of its targets the place of the region in the list that was selected.
    pub fn plan(&self, piece_bytes: u64) -> Result<(Vec<usize>, Plan)> {
        let catalog = &self.model.catalog;
        let place = |want: &Wanted| {
            catalog.tensors.get(want.tensor).map(|tensor| (tensor.file, tensor.offset))
        };
        let mut wanted = self.wanted.clone();
        wanted.sort_by_key(|(_, want)| place(want));
        let order = wanted.iter().map(|(number, _)| *number).collect();
        let name = |(_, want): &(usize, Wanted)| {
            catalog.tensors.get(want.tensor).map_or_else(String::new, |tensor| tensor.name.clone())
        };
        let names = wanted.iter().map(name).collect();
        let wanted = wanted.into_iter().map(|(_, want)| want).collect();
        // Stable, like the sort above: the order stays.
        let (_, plan) = Selection::new(catalog, wanted)?.plan(piece_bytes)?;
        Ok((order, plan.with_names(names)))
    }
}

fn no_such(name: &str, folder: &Path) -> Error {
    let what = format!("the checkpoint has no {name:?}");
    Error::new(Code::NoSuchTensor, what).at(folder.display())
}

fn no_side_file(name: &str, folder: &Path) -> Error {
    let what = format!("no file {name:?} was committed with the step");
    Error::new(Code::NotFound, what).at(folder.display())
}

fn buffer(len: u64) -> Result<Vec<u8>> {
    if len > OBJECT_BYTES_MAX {
        let what =
            format!("{len} bytes are more than the {OBJECT_BYTES_MAX} that are read at once");
        return Err(Error::new(Code::Unsupported, what));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let room = room.ok_or_else(|| Error::new(Code::OutOfMemory, format!("no memory for {len}")))?;
    bytes.resize(room, 0);
    Ok(bytes)
}

fn wrong(place: impl std::fmt::Display) -> Error {
    Error::new(Code::Checksum, "bytes are not those that were written").at(place)
}
