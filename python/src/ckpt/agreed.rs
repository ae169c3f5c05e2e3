//! What all ranks agreed on before a save.

use std::sync::Arc;

use forebay_checkpoint::manifest::{Layout, Named, Structure};
use forebay_checkpoint::model::PathStep;
use forebay_error::Result;
use forebay_tensor::{Mesh, Placement};
use pyo3::prelude::*;

use super::structure::{Step, dtype_of, elements};
use super::usage;

/// `(sides, ranks in row-major order)`.
type MeshArg = (Vec<u64>, Vec<u32>);
/// `(mesh, placements, read from right to left)`; a placement is `("R" | "S" | "_S", dimension, split factor)`.
type LayoutArg = (u32, Vec<(String, usize, u64)>, bool);
/// `(name, path, kind, dtype, shape, layout)`; see [`SharedStructure::new`].
type ValueArg = (String, Vec<Step>, u8, Option<String>, Vec<u64>, Option<u32>);

/// Names, kinds, shapes, and how tensors are cut over ranks: the same on all ranks. It goes into a manifest once, and
/// the parts of ranks leave out what follows from it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct SharedStructure {
    pub(super) inner: Arc<Structure>,
}

#[pymethods]
impl SharedStructure {
    /// `values` are tuples `(name, path, kind, dtype, shape, layout)`: kind 0 is a tensor (dtype by torch's name,
    /// global shape, its place in `layouts` or `None`), 1 an object, 2 another name of the value whose name is in
    /// `dtype`. Layouts are claims: one that cannot be is left out, and what ranks really hold is compared with it
    /// (`Structure`).
    #[new]
    fn new(
        py: Python<'_>,
        meshes: Vec<MeshArg>,
        layouts: Vec<LayoutArg>,
        values: Vec<ValueArg>,
    ) -> crate::error::Result<Self> {
        let made = py.detach(|| {
            let values = values.into_iter().map(value).collect::<Result<Vec<_>>>()?;
            let (meshes, layouts) = claims(meshes, layouts);
            Structure::from_claims(meshes, layouts, values)
        });
        Ok(Self { inner: Arc::new(made?) })
    }

    /// The structure hash of a manifest, in hexadecimal digits.
    #[getter]
    fn hash(&self) -> String {
        forebay_format::hex(&self.inner.hash())
    }
}

/// Meshes and layouts; those that cannot be are on no mesh.
fn claims(meshes: Vec<MeshArg>, layouts: Vec<LayoutArg>) -> (Vec<Arc<Mesh>>, Vec<Layout>) {
    let mut made = Vec::with_capacity(meshes.len());
    let mut numbers = Vec::with_capacity(meshes.len());
    for (sides, ranks) in meshes {
        let mesh = Mesh::with_ranks(sides, ranks);
        numbers.push(mesh.is_ok().then_some(made.len() as u32));
        made.extend(mesh.ok().map(Arc::new));
    }
    let layout = |(mesh, placements, right_to_left): LayoutArg| {
        let known = numbers.get(mesh as usize).copied().flatten();
        let placements: Option<Vec<_>> = placements.iter().map(placement).collect();
        Layout {
            mesh: placements.is_some().then_some(known).flatten().unwrap_or(u32::MAX),
            placements: placements.unwrap_or_default(),
            right_to_left,
        }
    };
    (made, layouts.into_iter().map(layout).collect())
}

fn placement((kind, dim, split): &(String, usize, u64)) -> Option<Placement> {
    match kind.as_str() {
        "R" => Some(Placement::Replicate),
        "S" => Some(Placement::Shard(*dim)),
        "_S" => Some(Placement::StridedShard { dim: *dim, split_factor: *split }),
        _ => None,
    }
}

fn value((name, path, kind, dtype, shape, layout): ValueArg) -> Result<Named> {
    let named = match (kind, dtype) {
        (0, Some(dtype)) => {
            let dtype = dtype_of(&dtype).map_err(|error| error.at(&name))?;
            let tensor = Named::tensor(name, dtype, &elements(dtype, shape));
            match layout {
                Some(layout) => tensor.with_layout(layout),
                None => tensor,
            }
        }
        (1, _) => Named::object(name),
        (2, Some(of)) => Named::alias(name, of),
        _ => return Err(usage(format!("a value of kind {kind}")).at(name)),
    };
    Ok(named.with_path(path.into_iter().map(PathStep::from).collect()))
}
