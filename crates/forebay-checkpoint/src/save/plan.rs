//! What one rank holds and writes: pure data, made once for each structure of the state.

use std::collections::HashSet;
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
    /// torch; `usage` where regions that are written of one tensor do not follow each other or disagree on what it is,
    /// and for a name that stands for two things; all name the item.
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
        let plan = Self { items, tensors, objects, aliases, specs, bytes, shared: None };
        plan.check_names()?;
        Ok(plan)
    }

    /// A part lists each value once, with its regions after it.
    fn check_names(&self) -> Result<()> {
        let mut seen = HashSet::new();
        let mut last: Option<&SaveItem> = None;
        for Written { item, .. } in self.written().chain(self.aliases()) {
            let fault = |what| Err(Error::new(Code::Usage, what).at(&item.name));
            if let Some(last) = last.filter(|last| last.name == item.name) {
                if !is_same_tensor(&last.what, &item.what) {
                    return fault("two things of one name, or regions of different tensors");
                }
            } else if !seen.insert(&item.name) {
                return fault("regions of one tensor must follow each other");
            }
            last = Some(item);
        }
        Ok(())
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

fn is_same_tensor(one: &What, other: &What) -> bool {
    match (one, other) {
        (
            What::Tensor { dtype, shape, requires_grad, .. },
            What::Tensor { dtype: dtype2, shape: shape2, requires_grad: grad2, .. },
        ) => (dtype, shape, requires_grad) == (dtype2, shape2, grad2),
        _ => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn part_of(name: &str, rows: std::ops::Range<u64>, shape: &[u64]) -> SaveItem {
        let mut region = Region::whole(shape);
        region.offsets[0] = rows.start;
        region.sizes[0] = rows.end - rows.start;
        let (dtype, shape) = (Dtype::F32, shape.to_vec());
        let what = What::Tensor { dtype, shape, region, requires_grad: false };
        SaveItem { name: name.to_owned(), path: Vec::new(), what, writes: true }
    }

    fn other(name: &str, what: What) -> SaveItem {
        SaveItem { name: name.to_owned(), path: Vec::new(), what, writes: true }
    }

    #[test]
    fn what_no_part_can_say_is_refused_before_anything_is_written() {
        let a = |rows| part_of("a", rows, &[4, 2]);
        let b = part_of("b", 0..4, &[4, 2]);
        SavePlan::new(vec![a(0..2), a(2..4), b.clone()]).unwrap();
        let alias = other("c", What::Alias { of: "a".to_owned() });
        SavePlan::new(vec![a(0..4), b.clone(), other("o", What::Object), alias]).unwrap();
        // One that is not written may stand anywhere.
        let held = SaveItem { writes: false, ..a(2..4) };
        SavePlan::new(vec![a(0..2), b.clone(), held]).unwrap();
        let bad = [
            vec![a(0..2), b.clone(), a(2..4)],
            vec![a(0..2), part_of("a", 2..4, &[4, 3])],
            vec![b.clone(), other("b", What::Object)],
            vec![other("o", What::Object), other("o", What::Object)],
            vec![b, other("b", What::Alias { of: "a".to_owned() })],
        ];
        for items in bad {
            let name = items.last().unwrap().name.clone();
            let error = SavePlan::new(items).unwrap_err();
            assert_eq!((error.code(), error.place()), (Code::Usage, Some(name.as_str())));
        }
    }
}
