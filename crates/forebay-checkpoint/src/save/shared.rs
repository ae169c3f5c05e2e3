//! What of a plan follows from the structure that all ranks agreed on.
//!
//! A value of the structure goes into the rank's part as a number, and a region that its layout gives to the rank is
//! not spelled out. The layout is what a framework said of a tensor, the regions are what this rank really holds: where
//! the two differ in anything, be it the order, the part names the regions, and the manifest stays right whatever the
//! layout says.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;

use super::plan::{SaveItem, What};
use crate::manifest::{Structure, Value};

/// The structure, and a plan's items in it.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) structure: Arc<Structure>,
    pub(super) hash: [u8; 32],
    /// Of each item its value's number; `None` for a value of this rank alone.
    numbers: Vec<Option<u32>>,
    /// Of each item, whether it is one of the boxes that the layout gives to the rank, all of them in their order.
    implied: Vec<bool>,
}

impl Shared {
    /// Finds items in the structure. Only those that are written need a region, so only these are compared.
    ///
    /// Errors: `structure_mismatch` for an item that is something else in the structure.
    pub(super) fn new(items: &[SaveItem], structure: Arc<Structure>, rank: u32) -> Result<Self> {
        let mut numbers = Vec::with_capacity(items.len());
        // Written regions by value, in the order of the items.
        let mut written: HashMap<u32, Vec<usize>> = HashMap::new();
        for (place, item) in items.iter().enumerate() {
            let found = structure.find(&item.name);
            if let Some((number, named)) = found {
                check(item, &named.value).map_err(|error| error.at(&item.name))?;
                if item.writes && matches!(item.what, What::Tensor { .. }) {
                    written.entry(number).or_default().push(place);
                }
            }
            numbers.push(found.map(|(number, _)| number));
        }
        let mut implied = vec![false; items.len()];
        for (number, places) in written {
            let boxes = structure.boxes_of(number, rank)?.unwrap_or_default();
            let held = places.iter().filter_map(|&place| region(items.get(place)?));
            if held.eq(&boxes) {
                for place in places {
                    if let Some(implied) = implied.get_mut(place) {
                        *implied = true;
                    }
                }
            }
        }
        Ok(Self { hash: structure.hash(), structure, numbers, implied })
    }

    /// The number of an item's value.
    pub(super) fn number(&self, item: usize) -> Option<u32> {
        self.numbers.get(item).copied().flatten()
    }

    /// Whether an item's region follows from the layout.
    pub(super) fn is_implied(&self, item: usize) -> bool {
        self.implied.get(item).is_some_and(|&implied| implied)
    }
}

fn region(item: &SaveItem) -> Option<&Region> {
    match &item.what {
        What::Tensor { region, .. } => Some(region),
        What::Object | What::Alias { .. } => None,
    }
}

fn check(item: &SaveItem, value: &Value) -> Result<()> {
    let fits = match (&item.what, value) {
        (What::Tensor { dtype, shape, requires_grad, .. }, Value::Tensor(tensor)) => {
            (*dtype, shape, *requires_grad) == (tensor.dtype, &tensor.shape, tensor.requires_grad)
        }
        (What::Object, Value::Object) => true,
        (What::Alias { of }, Value::Alias { of: agreed }) => of == agreed,
        _ => false,
    };
    match fits {
        true => Ok(()),
        false => {
            let what = "it is something else in the structure that the ranks agreed on";
            Err(Error::new(Code::StructureMismatch, what))
        }
    }
}
