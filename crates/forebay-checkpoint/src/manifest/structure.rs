//! The structure of a state: what all ranks agree on before a save, and its hash.
//!
//! A rank that knows the structure numbers its chunks by it and leaves out names, shapes and regions. The hash says
//! that two ranks, or two saves, speak of the same one.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};
use forebay_tensor::{Mesh, Region};

use super::grid::{Grid, Layout};
use super::limits::{MAX_ENTRIES, MAX_LAYOUTS};
use super::value::{Named, Value, shown};

/// Meshes, layouts on them and named values by name: checked, and in one canonical order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Structure {
    pub(crate) meshes: Vec<Arc<Mesh>>,
    pub(crate) layouts: Vec<Layout>,
    pub(crate) values: Vec<Named>,
    grids: Vec<Grid>,
}

impl Structure {
    /// Sorts values by name and renumbers meshes and layouts by first use, so that equal states give equal structures
    /// whoever lists them. What is not used is dropped.
    ///
    /// Errors: `structure_mismatch` for a name that occurs twice, an alias of no value, or a layout that does not fit
    /// its mesh or its tensor; `invalid_metadata`, `overflow`, `misaligned` beyond the limits of the format.
    pub fn new(
        meshes: Vec<Arc<Mesh>>,
        layouts: Vec<Layout>,
        mut values: Vec<Named>,
    ) -> Result<Self> {
        if values.len() as u64 > MAX_ENTRIES {
            let what = format!("{} named values, at most {MAX_ENTRIES} fit", values.len());
            return Err(Error::new(Code::Unsupported, what));
        }
        values.sort_by(|a, b| a.name.cmp(&b.name));
        let mut numbers = Renumber::default();
        for named in &mut values {
            named.check().map_err(|error| error.at(shown(&named.name)))?;
            if let Value::Tensor(tensor) = &mut named.value
                && let Some(layout) = tensor.layout
            {
                let new = numbers.layout(&meshes, &layouts, layout);
                tensor.layout = Some(new.map_err(|error| error.at(shown(&named.name)))?);
            }
        }
        Self::from_parts(numbers.meshes, numbers.layouts, values)
    }

    /// The same from what a framework says of its tensors, which need not be so: a value whose layout cannot be, on its
    /// mesh or for its shape, is taken without one, and ranks name its regions. The same lists give the same structure.
    ///
    /// Errors: as [`new`](Self::new), but for layouts.
    pub fn from_claims(
        meshes: Vec<Arc<Mesh>>,
        layouts: Vec<Layout>,
        mut values: Vec<Named>,
    ) -> Result<Self> {
        let grid_of = |layout: &Layout| Grid::new(meshes.get(layout.mesh as usize)?, layout).ok();
        let grids: Vec<Option<Grid>> = layouts.iter().map(grid_of).collect();
        for named in &mut values {
            if let Value::Tensor(tensor) = &mut named.value {
                tensor.layout = tensor.layout.filter(|&layout| {
                    let grid = grids.get(layout as usize).and_then(Option::as_ref);
                    grid.is_some_and(|grid| grid.check_shape(&tensor.shape).is_ok())
                });
            }
        }
        Self::new(meshes, layouts, values)
    }

    /// Takes lists as they are, and checks them.
    pub(crate) fn from_parts(
        meshes: Vec<Arc<Mesh>>,
        layouts: Vec<Layout>,
        values: Vec<Named>,
    ) -> Result<Self> {
        if layouts.len() as u64 > MAX_LAYOUTS {
            return Err(bad(format!("{} layouts, at most {MAX_LAYOUTS} fit", layouts.len())));
        }
        let grid_of = |layout: &Layout| match meshes.get(layout.mesh as usize) {
            Some(mesh) => Grid::new(mesh, layout),
            None => Err(bad(format!("mesh {} is not in the list", layout.mesh))),
        };
        let grids = layouts.iter().map(grid_of).collect::<Result<_>>()?;
        let structure = Self { meshes, layouts, values, grids };
        structure.check()?;
        Ok(structure)
    }

    fn check(&self) -> Result<()> {
        if let Some([one, _]) = self.values.windows(2).find(|pair| match pair {
            [a, b] => a.name >= b.name,
            _ => false,
        }) {
            return Err(
                bad("a name occurs twice, or names are not in order".into()).at(shown(&one.name))
            );
        }
        self.values.iter().try_for_each(|named| {
            self.check_value(named).map_err(|error| error.at(shown(&named.name)))
        })
    }

    fn check_value(&self, named: &Named) -> Result<()> {
        match &named.value {
            Value::Tensor(tensor) => match tensor.layout {
                Some(layout) => self.grid(layout)?.check_shape(&tensor.shape),
                None => Ok(()),
            },
            Value::Object => Ok(()),
            Value::Alias { of } => match self.find(of).map(|(_, named)| &named.value) {
                None => Err(bad(format!("an alias of {}, which is not there", shown(of)))),
                Some(Value::Alias { .. }) => {
                    Err(bad(format!("an alias of {}, which is one itself", shown(of))))
                }
                Some(_) => Ok(()),
            },
        }
    }

    /// The meshes.
    pub fn meshes(&self) -> &[Arc<Mesh>] {
        &self.meshes
    }

    /// The layouts.
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }

    /// The values, by name; a value's place is its number.
    pub fn values(&self) -> &[Named] {
        &self.values
    }

    /// A value and its number.
    pub fn find(&self, name: &str) -> Option<(u32, &Named)> {
        let at = self.values.binary_search_by(|named| named.name.as_str().cmp(name)).ok()?;
        Some((u32::try_from(at).ok()?, self.values.get(at)?))
    }

    /// The boxes of a tensor that a rank holds by its layout, in the order in which it stores them; `None` where the
    /// value has no layout or the rank is not on its mesh.
    pub fn boxes_of(&self, number: u32, rank: u32) -> Result<Option<Vec<Region>>> {
        let Some(Value::Tensor(tensor)) =
            self.values.get(number as usize).map(|named| &named.value)
        else {
            return Ok(None);
        };
        let Some(layout) = tensor.layout else {
            return Ok(None);
        };
        let grid = self.grid(layout)?;
        let place = grid.place_of(rank);
        place.map(|(shard, _)| grid.boxes(&tensor.shape, shard)).transpose()
    }

    pub(crate) fn grid(&self, layout: u32) -> Result<&Grid> {
        self.grids.get(layout as usize).ok_or_else(|| bad(format!("layout {layout} is not there")))
    }
}

#[derive(Default)]
struct Renumber {
    meshes: Vec<Arc<Mesh>>,
    layouts: Vec<Layout>,
    mesh_numbers: HashMap<Arc<Mesh>, u32>,
    layout_numbers: HashMap<Layout, u32>,
    seen: HashMap<u32, u32>,
}

impl Renumber {
    fn layout(&mut self, meshes: &[Arc<Mesh>], layouts: &[Layout], old: u32) -> Result<u32> {
        if let Some(&new) = self.seen.get(&old) {
            return Ok(new);
        }
        let layout = layouts.get(old as usize);
        let mesh = layout.and_then(|layout| meshes.get(layout.mesh as usize));
        let (Some(layout), Some(mesh)) = (layout, mesh) else {
            return Err(bad(format!("layout {old} or its mesh is not in the list")));
        };
        let next = self.meshes.len() as u32;
        let number = *self.mesh_numbers.entry(Arc::clone(mesh)).or_insert(next);
        if number == next {
            self.meshes.push(Arc::clone(mesh));
        }
        let layout = Layout { mesh: number, ..layout.clone() };
        let next = self.layouts.len() as u32;
        let new = *self.layout_numbers.entry(layout.clone()).or_insert(next);
        if new == next {
            self.layouts.push(layout);
        }
        self.seen.insert(old, new);
        Ok(new)
    }
}

fn bad(what: String) -> Error {
    Error::new(Code::StructureMismatch, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PathStep;
    use forebay_tensor::{Dtype, Placement};

    fn structure(values: Vec<Named>) -> Result<Structure> {
        let meshes = [3, 2, 2].map(|ranks| Arc::new(Mesh::new(vec![ranks]).unwrap())).to_vec();
        let placements = vec![Placement::Shard(0)];
        let shard = |mesh| Layout { mesh, placements: placements.clone(), right_to_left: false };
        Structure::new(meshes, vec![shard(0), shard(1), shard(2)], values)
    }

    #[test]
    fn the_order_of_listing_does_not_matter_and_the_content_does() {
        let a = || Named::tensor("a", Dtype::F32, &[4]).with_layout(1);
        let b = || Named::tensor("b", Dtype::F32, &[4]).with_layout(2);
        let one = structure(vec![a(), b()]).unwrap();
        let two = structure(vec![b(), a()]).unwrap();
        assert_eq!(one, two);
        assert_eq!((one.meshes().len(), one.layouts().len()), (1, 1));
        let others = [
            vec![a()],
            vec![a(), Named::tensor("b", Dtype::F32, &[4]).with_layout(0)],
            vec![a(), Named::tensor("b", Dtype::F32, &[4])],
            vec![a(), Named::tensor("b", Dtype::BF16, &[4]).with_layout(1)],
            vec![a(), Named::tensor("b", Dtype::F32, &[4, 1]).with_layout(1)],
            vec![a(), Named::tensor("c", Dtype::F32, &[4]).with_layout(1)],
            vec![a(), Named::object("b")],
            vec![a(), Named::alias("b", "a")],
            vec![a(), b().with_path(vec![PathStep::Key("b".into())])],
        ];
        let mut hashes: Vec<_> =
            others.map(|values| structure(values).unwrap().hash()).into_iter().collect();
        hashes.push(one.hash());
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 10);
    }

    /// From a few lines of Python that follow the documentation of `hash`. Structures are compared across versions, so
    /// it must not change.
    #[test]
    fn the_hash_is_what_it_was() {
        let values = vec![
            Named::tensor("a", Dtype::F32, &[4, 2]).with_layout(1),
            Named::alias("b", "a").with_path(vec![PathStep::Key("b".into()), PathStep::Index(3)]),
            Named::object("c"),
        ];
        let hash = structure(values).unwrap().hash();
        let text = forebay_format::hex(&hash);
        assert_eq!(text, "54646233f6d320ebd4cb905877fcea3427c5e7543b09c6d1e52013cba341b22a");
    }

    #[test]
    fn claims_that_cannot_be_leave_a_value_without_a_layout() {
        let mesh = Arc::new(Mesh::new(vec![4]).unwrap());
        let on =
            |mesh, placement| Layout { mesh, placements: vec![placement], right_to_left: true };
        let strided = |split_factor| Placement::StridedShard { dim: 0, split_factor };
        let layouts = vec![
            on(0, Placement::Shard(0)),
            on(0, Placement::Shard(1)),
            on(0, strided(3)),
            on(7, Placement::Shard(0)),
        ];
        let tensor = |name: &str, layout| Named::tensor(name, Dtype::F32, &[8]).with_layout(layout);
        let values = ["a", "b", "c", "d", "e"].into_iter().zip(0..);
        let values = values.map(|(name, layout)| tensor(name, layout)).collect();
        let structure = Structure::from_claims(vec![mesh], layouts, values).unwrap();
        let kept = structure.values().iter().map(|named| match &named.value {
            Value::Tensor(tensor) => tensor.layout,
            _ => None,
        });
        assert_eq!(kept.collect::<Vec<_>>(), [Some(0), None, None, None, None]);
        assert_eq!((structure.meshes().len(), structure.layouts().len()), (1, 1));
        assert_eq!(structure.boxes_of(1, 0).unwrap(), None);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for values in [
            vec![Named::object("a"), Named::object("a")],
            vec![Named::alias("a", "b")],
            vec![Named::alias("a", "b"), Named::alias("b", "c"), Named::object("c")],
            vec![Named::tensor("a", Dtype::F32, &[]).with_layout(0)],
            vec![Named::tensor("a", Dtype::F32, &[1]).with_layout(3)],
        ] {
            assert!(structure(values).is_err());
        }
        assert!(structure(vec![Named::alias("a", "a")]).is_err());
    }
}
