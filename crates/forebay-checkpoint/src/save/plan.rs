//! What one rank holds and writes: pure data, made once for each structure of the state.

use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_format::dcp::{ItemSpec, TorchDtype};
use forebay_tensor::{Dtype, Region, byte_len};

use super::shared::Shared;
use crate::manifest::Structure;
use crate::model::PathStep;

/// What an item is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A region of a tensor, row-major in one stretch of memory.
    Tensor {
        /// The type of its elements.
        dtype: Dtype,
        /// Sides of the whole tensor, in elements.
        shape: Vec<u64>,
        /// The region that this rank holds.
        region: Region,
        /// Whether gradients are computed for it.
        requires_grad: bool,
    },
    /// Anything else.
    Object,
    /// The same value as another name's.
    Alias {
        /// The other name.
        of: String,
    },
}

/// One value, or region of one, that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveItem {
    /// Its flat name.
    pub name: String,
    /// The way to it in the nested state.
    pub path: Vec<PathStep>,
    /// What it is.
    pub what: What,
    /// Whether this rank writes it; another one that holds the same does otherwise.
    pub writes: bool,
}

/// What one rank writes.
#[derive(Clone, Debug)]
pub struct SavePlan {
    items: Vec<SaveItem>,
    /// Items that are tensors and written, in order; then those that are objects; then aliases.
    tensors: Vec<usize>,
    objects: Vec<usize>,
    aliases: Vec<usize>,
    specs: Vec<ItemSpec>,
    bytes: u64,
    shared: Option<Shared>,
}

/// An item that is written, with its place among all of the plan.
#[derive(Clone, Copy)]
pub(super) struct Written<'a> {
    pub(super) place: usize,
    pub(super) item: &'a SaveItem,
}

impl SavePlan {
    /// Checks the items and sorts out those that are written.
    ///
    /// Errors: `bad_slice` for a region outside of its tensor; `overflow`; `unsupported` for a dtype without a form in
    /// torch; all name the item.
    pub fn new(items: Vec<SaveItem>) -> Result<Self> {
        let (mut tensors, mut objects, mut aliases) = (Vec::new(), Vec::new(), Vec::new());
        let (mut specs, mut bytes) = (Vec::new(), 0_u64);
        for (place, item) in items.iter().enumerate().filter(|(_, item)| item.writes) {
            match &item.what {
                What::Tensor { dtype, shape, region, .. } => {
                    let spec = tensor_spec(*dtype, shape, region);
                    let (spec, len) = spec.map_err(|error| error.at(&item.name))?;
                    bytes = bytes.saturating_add(len);
                    specs.push(spec);
                    tensors.push(place);
                }
                What::Object => objects.push(place),
                What::Alias { .. } => aliases.push(place),
            }
        }
        Ok(Self { items, tensors, objects, aliases, specs, bytes, shared: None })
    }

    /// The same as a part of what all ranks agreed on: its part of the manifest refers to values by their numbers in
    /// the structure, and leaves out regions that follow from a layout and the rank. Each such region is compared with
    /// what the layout gives; where they differ, it is named.
    ///
    /// Errors: `structure_mismatch` for an item that is something else in the structure; it names the item.
    pub fn with_structure(mut self, structure: Arc<Structure>, rank: u32) -> Result<Self> {
        let agreed = !structure.values().is_empty();
        self.shared = match agreed {
            true => Some(Shared::new(&self.items, structure, rank)?),
            false => None,
        };
        Ok(self)
    }

    /// What all ranks agreed on; empty where they did not.
    pub fn structure(&self) -> Arc<Structure> {
        self.shared.as_ref().map(|shared| shared.structure.clone()).unwrap_or_default()
    }

    pub(super) fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref()
    }

    /// Everything the rank holds.
    pub fn items(&self) -> &[SaveItem] {
        &self.items
    }

    /// How many tensor regions are written.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// How many objects are written.
    pub fn object_count(&self) -> usize {
        self.objects.len()
    }

    /// Bytes of the tensor regions that are written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What files hold, in their order: tensor regions that are written, then objects.
    pub(super) fn written(&self) -> impl Iterator<Item = Written<'_>> {
        let places = self.tensors.iter().chain(&self.objects);
        places.filter_map(|&place| Some(Written { place, item: self.items.get(place)? }))
    }

    /// Other names that are written down.
    pub(super) fn aliases(&self) -> impl Iterator<Item = Written<'_>> {
        let places = self.aliases.iter();
        places.filter_map(|&place| Some(Written { place, item: self.items.get(place)? }))
    }

    /// What the files hold: the tensor regions, then objects of these lengths.
    pub(crate) fn specs(&self, objects: &[Vec<u8>]) -> Vec<ItemSpec> {
        let lengths = objects.iter().map(|bytes| ItemSpec::Bytes(bytes.len() as u64));
        self.specs.iter().cloned().chain(lengths).collect()
    }
}

fn tensor_spec(dtype: Dtype, shape: &[u64], region: &Region) -> Result<(ItemSpec, u64)> {
    region.check_within(shape)?;
    let len = byte_len(dtype, &region.sizes)?;
    let torch = torch_dtype(dtype)?;
    Ok((ItemSpec::Tensor { dtype: torch, shape: torch_shape(dtype, &region.sizes)? }, len))
}

/// The form of a dtype in torch. Errors: `unsupported`.
pub(crate) fn torch_dtype(dtype: Dtype) -> Result<TorchDtype> {
    TorchDtype::of(dtype)
        .ok_or_else(|| Error::new(Code::Unsupported, format!("torch has no dtype for {dtype}")))
}

/// Sides or offsets as torch counts them: of F4 it counts pairs in the last dimension.
pub(crate) fn torch_shape(dtype: Dtype, sides: &[u64]) -> Result<Vec<u64>> {
    let mut sides = sides.to_vec();
    if dtype == Dtype::F4
        && let Some(last) = sides.last_mut()
    {
        if *last % 2 != 0 {
            return Err(Error::new(Code::Misaligned, "half a byte of F4"));
        }
        *last /= 2;
    }
    Ok(sides)
}
