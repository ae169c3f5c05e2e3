//! Restoring: regions of a checkpoint's tensors, and its objects, to whoever wants them.
//!
//! A [`Reader`] is an open checkpoint. [`Reader::select`] takes regions, whatever regions they were saved in, and
//! finds the chunks that they share elements with; what comes out is a model of just those, from which the engine
//! loads. Of our own checkpoints every block that is read is compared with its checksum before its bytes reach their
//! target.

use std::path::Path;

use forebay_engine::{Plan, Selection, Wanted};
use forebay_error::{Code, Error, Result};
use forebay_format::Model;
use forebay_format::crc::crc32;
use forebay_tensor::Region;

use crate::model::{BLOCK_BYTES, Chunk, Entry, Kind};
use crate::open::{Checkpoint, Origin};

/// Most bytes of an object or side file that are read into memory.
const OBJECT_BYTES_MAX: u64 = 4 << 30;

/// An open checkpoint.
pub struct Reader {
    checkpoint: Checkpoint,
}

/// Regions that were found.
pub struct Selected {
    /// The chunks that hold them.
    pub model: Model,
    wanted: Vec<(usize, Wanted)>,
}

impl Reader {
    /// Opens the checkpoint in a folder. Errors: those of [`Checkpoint::open`].
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self { checkpoint: Checkpoint::open(folder)? })
    }

    /// Everything that it holds, in the order of its metadata.
    pub fn entries(&self) -> &[Entry] {
        &self.checkpoint.entries
    }

    /// Who wrote it.
    pub fn origin(&self) -> &Origin {
        &self.checkpoint.origin
    }

    /// What was accepted but is worth telling.
    pub fn warnings(&self) -> Vec<String> {
        self.checkpoint.warnings.iter().map(|warning| warning.text.clone()).collect()
    }

    /// An entry. Errors: `no_such_tensor`.
    pub fn entry(&self, name: &str) -> Result<&Entry> {
        self.checkpoint.get(name).ok_or_else(|| {
            let what = format!("the checkpoint has no {name:?}");
            Error::new(Code::NoSuchTensor, what).at(self.checkpoint.folder().display())
        })
    }

    /// Finds regions: `(number of the entry, region)`.
    ///
    /// Errors: those of [`Checkpoint::model_for`].
    pub fn select(&self, wants: &[(usize, Region)]) -> Result<Selected> {
        let model = self.checkpoint.model_for(wants)?;
        let mut wanted = Vec::with_capacity(wants.len());
        for (number, (entry, region)) in wants.iter().enumerate() {
            let name = self.entries().get(*entry).map(|entry| entry.name.as_str());
            let tensor = name.and_then(|name| model.catalog.find(name)).ok_or_else(|| {
                Error::new(Code::Internal, "a tensor that was selected is not in the model")
            })?;
            wanted.push((number, Wanted { tensor, region: Some(region.clone()) }));
        }
        Ok(Selected { model, wanted })
    }

    /// Names of the files that were committed with the step.
    pub fn side_files(&self) -> Vec<String> {
        let mut names: Vec<String> = self.side().map(|(name, _)| name.to_owned()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// A file that was committed with the step; of several ranks' the first. Errors: `not_found`; `checksum`.
    pub fn side_file(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.side().find(|(own, _)| *own == name);
        let (_, number) = found.ok_or_else(|| {
            let what = format!("no file {name:?} was committed with the step");
            Error::new(Code::NotFound, what).at(self.checkpoint.folder().display())
        })?;
        let file = self.checkpoint.open_file(number)?;
        let mut bytes = buffer(file.size())?;
        file.read_exact_at(&mut bytes, 0)?;
        match self.checkpoint.file_crcs.get(number as usize).copied().flatten() {
            Some(crc) if crc != crc32(&bytes) => Err(wrong(file.path.display())),
            _ => Ok(bytes),
        }
    }

    fn side(&self) -> impl Iterator<Item = (&str, u32)> {
        let files = (0_u32..).zip(&self.checkpoint.files);
        files.filter_map(|(number, file)| {
            let mut words = file.name.splitn(3, '_');
            let (_, _, name) = (words.next()?, words.next()?, words.next()?);
            let data = name.strip_suffix(".distcp").is_some_and(|n| n.parse::<u32>().is_ok());
            let ours = matches!(self.checkpoint.origin, Origin::Forebay(_));
            (ours && !data).then_some((name, number))
        })
    }

    /// The bytes of an object's item, as `torch.save` makes it. Errors: `no_such_tensor`, `checksum`, `unsupported`.
    pub fn object_bytes(&self, name: &str) -> Result<Vec<u8>> {
        let entry = self.entry(name)?;
        let Kind::Object { chunk } = &entry.kind else {
            return Err(Error::new(Code::Usage, format!("{name:?} is a tensor")));
        };
        self.checkpoint.verify_item(entry, chunk)?;
        self.read_item(chunk)
    }

    fn read_item(&self, chunk: &Chunk) -> Result<Vec<u8>> {
        if !chunk.transforms.is_empty() {
            let what = "a compressed object is read as plain data alone";
            return Err(Error::new(Code::Unsupported, what));
        }
        let file = self.checkpoint.open_file(chunk.file)?;
        let mut bytes = buffer(chunk.length)?;
        file.read_exact_at(&mut bytes, chunk.offset)?;
        let crcs = chunk.data.as_ref().map(|place| place.crcs.as_slice()).unwrap_or_default();
        let right = crcs.iter().zip(bytes.chunks(BLOCK_BYTES as usize));
        match right.into_iter().all(|(&crc, block)| crc32(block) == crc) {
            true => Ok(bytes),
            false => Err(wrong(file.path.display())),
        }
    }

    /// An object that is plain data, as JSON. Errors: as [`Self::object_bytes`]; `forbidden_global` or `unsupported`
    /// for one that is not.
    pub fn object_json(&self, name: &str) -> Result<String> {
        let object = self.checkpoint.read_object(self.entry(name)?)?;
        object.json().map(str::to_owned)
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
        let wanted = wanted.into_iter().map(|(_, want)| want).collect();
        // Stable, like the sort above: the order stays.
        let (_, plan) = Selection::new(catalog, wanted)?.plan(piece_bytes)?;
        Ok((order, plan))
    }
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
