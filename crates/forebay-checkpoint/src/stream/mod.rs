//! All tensors of a checkpoint or model, one piece after the other through bounded memory: what export and diff read
//! by.
//!
//! A [`Source`] lists the tensors. `slabs` cuts them into boxes of a few MiB, in the order of the files, and
//! [`Loader`] reads some boxes at a time with the engine into a slot of a small pool: at the device's speed, every
//! checksum compared.

mod load;
mod slabs;

use std::borrow::Cow;
use std::collections::HashMap;

use forebay_engine::Wanted;
use forebay_error::{Code, Error, Result};
use forebay_format::torch_zip::PlainObject;
use forebay_format::{Model, Stored};
use forebay_tensor::{Dtype, byte_len};

use crate::model::{Chunk, Kind, PathStep};
use crate::open::{Checkpoint, Opened, Place, open_model};

pub(crate) use load::{Loaded, Loader, SLOTS};
pub(crate) use slabs::{BATCH_BYTES, Want, batches};

/// A tensor of a source.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    /// The way to it in the nested state; empty where none is known.
    pub(crate) path: Vec<PathStep>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
    /// Where it starts: file and byte, for an order of reading.
    pub(crate) place: (u64, u64),
    /// An earlier tensor of the list that is the same, stored once.
    pub(crate) same_as: Option<usize>,
    /// Its number among the entries of a checkpoint, or in the catalog of a model.
    number: usize,
}

/// A checkpoint or a model.
pub(crate) struct Source {
    opened: Opened,
    /// By name.
    pub(crate) tensors: Vec<TensorInfo>,
}

impl Source {
    /// Opens what is at a place.
    pub(crate) fn open(place: impl Into<Place>) -> Result<Self> {
        let opened = open_model(place)?;
        let mut tensors = match opened.checkpoint() {
            Some(checkpoint) => of_checkpoint(checkpoint)?,
            None => of_model(&opened.listing),
        };
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let source = Self { opened, tensors };
        Ok(source.with_aliases())
    }

    /// The checkpoint, where it is one.
    pub(crate) fn checkpoint(&self) -> Option<&Checkpoint> {
        self.opened.checkpoint()
    }

    /// What was accepted but is odd.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.opened.listing.catalog.warnings
    }

    /// The objects of these names.
    pub(crate) fn objects(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> Vec<(String, Result<PlainObject>)> {
        self.opened.objects(wanted)
    }

    /// Whether there is an object of that name.
    pub(crate) fn has_object(&self, name: &str) -> bool {
        match self.checkpoint() {
            Some(checkpoint) => {
                let entry = checkpoint.get(name);
                entry.is_some_and(|entry| matches!(entry.kind, Kind::Object { .. }))
            }
            None => self.opened.listing.catalog.objects.iter().any(|object| object.name == name),
        }
    }

    /// Whether there is a tensor of that name.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.binary_search_by(|info| info.name.as_str().cmp(name)).is_ok()
    }

    /// The model that holds some boxes, and those boxes in it.
    fn model(&self, wants: &[Want]) -> Result<(Cow<'_, Model>, Vec<Wanted>)> {
        let number = |want: &Want| self.tensors.get(want.tensor).map(|tensor| tensor.number);
        let lost = || Error::new(Code::Internal, "a tensor that is not in its source");
        let regions = wants.iter().map(|want| Ok((number(want).ok_or_else(lost)?, &want.region)));
        let regions: Vec<_> = regions.collect::<Result<_>>()?;
        let Some(checkpoint) = self.checkpoint() else {
            let wanted = regions
                .into_iter()
                .map(|(tensor, region)| Wanted { tensor, region: Some(region.clone()) })
                .collect();
            return Ok((Cow::Borrowed(&self.opened.listing), wanted));
        };
        let regions: Vec<_> =
            regions.into_iter().map(|(number, region)| (number, region.clone())).collect();
        let model = checkpoint.model_for(&regions)?;
        let mut wanted = Vec::with_capacity(wants.len());
        for want in wants {
            let name = self.tensors.get(want.tensor).map(|tensor| tensor.name.as_str());
            let tensor = name.and_then(|name| model.catalog.find(name)).ok_or_else(lost)?;
            wanted.push(Wanted { tensor, region: Some(want.region.clone()) });
        }
        Ok((Cow::Owned(model), wanted))
    }

    /// Finds tensors that are the same bytes under two names.
    fn with_aliases(mut self) -> Self {
        let mut first: HashMap<Identity, usize> = HashMap::new();
        for at in 0..self.tensors.len() {
            let Some(tensor) = self.tensors.get(at).filter(|tensor| tensor.bytes > 0) else {
                continue;
            };
            let Some(identity) = self.identity(tensor) else { continue };
            match first.get(&identity) {
                Some(&same) => {
                    if let Some(tensor) = self.tensors.get_mut(at) {
                        tensor.same_as = Some(same);
                    }
                }
                None => drop(first.insert(identity, at)),
            }
        }
        self
    }

    fn identity(&self, tensor: &TensorInfo) -> Option<Identity> {
        let places = match self.checkpoint() {
            Some(checkpoint) => {
                let chunks = checkpoint.entries.get(tensor.number)?.chunks();
                chunks.iter().map(|chunk: &Chunk| (u64::from(chunk.file), chunk.offset)).collect()
            }
            None => {
                let entry = self.opened.listing.catalog.tensors.get(tensor.number)?;
                // Views with strides of their own are seldom the same, and never compared.
                (entry.stored == Stored::Run).then(|| vec![tensor.place])?
            }
        };
        Some((tensor.dtype, tensor.shape.clone(), places))
    }
}

/// What is the same for tensors that are the same: type, sides, places of all pieces.
type Identity = (Dtype, Vec<u64>, Vec<(u64, u64)>);

fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::new();
    for (number, entry) in checkpoint.entries.iter().enumerate() {
        let Kind::Tensor { dtype, shape, chunks } = &entry.kind else { continue };
        let place = chunks.iter().map(|chunk| (u64::from(chunk.file), chunk.offset)).min();
        tensors.push(TensorInfo {
            name: entry.name.clone(),
            path: entry.path.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            bytes: byte_len(*dtype, shape)?,
            place: place.unwrap_or_default(),
            same_as: None,
            number,
        });
    }
    Ok(tensors)
}

fn of_model(model: &Model) -> Vec<TensorInfo> {
    let tensors = model.catalog.tensors.iter().enumerate();
    let info = |(number, entry): (usize, &forebay_format::TensorEntry)| TensorInfo {
        name: entry.name.clone(),
        path: Vec::new(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        bytes: entry.bytes,
        place: (entry.file as u64, entry.offset),
        same_as: None,
        number,
    };
    tensors.map(info).collect()
}
