//! What one rank holds and writes.

use std::sync::Arc;

use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{SaveItem, SavePlan, What};
use forebay_error::{Error, Result};
use forebay_format::dcp::TorchDtype;
use forebay_format::hex;
use forebay_tensor::{Dtype, Region};
use pyo3::prelude::*;
use sha2::{Digest, Sha256};

use super::agreed::SharedStructure;
use super::usage;

/// A step of a path: a text or a number.
#[derive(FromPyObject)]
pub(super) enum Step {
    Index(u64),
    Key(String),
}

impl From<Step> for PathStep {
    fn from(step: Step) -> Self {
        match step {
            Step::Index(index) => PathStep::Index(index),
            Step::Key(key) => PathStep::Key(key),
        }
    }
}

/// `(name, path, kind, dtype, shape, offsets, sizes, writes)`; see [`Structure::new`].
type Item = (String, Vec<Step>, u8, Option<String>, Vec<u64>, Vec<u64>, Vec<u64>, bool);

/// What one rank holds and writes, made once for a structure of the state. It may be used in any process.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Structure {
    pub(super) plan: Arc<SavePlan>,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) files: Option<usize>,
    hash: String,
}

#[pymethods]
impl Structure {
    /// `items` are tuples `(name, path, kind, dtype, shape, offsets, sizes, writes)`: kind 0 is a region of a tensor
    /// (dtype by torch's name, global shape, the region that this rank holds), 1 an object, 2 another name of the
    /// value whose name is in `dtype`. `writes` says whether this rank writes it. `shared` is what all ranks agreed on.
    #[new]
    #[pyo3(signature = (items, *, rank, world, files_per_rank=None, shared=None))]
    fn new(
        py: Python<'_>,
        items: Vec<Item>,
        rank: u32,
        world: u32,
        files_per_rank: Option<usize>,
        shared: Option<&SharedStructure>,
    ) -> crate::error::Result<Self> {
        let shared = shared.map(|shared| shared.inner.clone()).unwrap_or_default();
        let made = py.detach(|| {
            let mut hasher = Sha256::new();
            let items: Result<Vec<SaveItem>> =
                items.into_iter().map(|item| convert(item, &mut hasher)).collect();
            let plan = SavePlan::new(items?)?.with_structure(shared, rank)?;
            Ok::<_, Error>((plan, hex(&hasher.finalize())))
        });
        let (plan, hash) = made?;
        Ok(Self { plan: Arc::new(plan), rank, world, files: files_per_rank, hash })
    }

    /// SHA-256 over names, kinds, dtypes and shapes, in hexadecimal digits.
    #[getter]
    fn hash(&self) -> &str {
        &self.hash
    }

    /// Bytes of tensors that this rank writes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// How many tensor regions and objects this rank writes: as many addresses and objects a save takes.
    #[getter]
    fn counts(&self) -> (usize, usize) {
        (self.plan.tensor_count(), self.plan.object_count())
    }
}

fn convert(item: Item, hasher: &mut Sha256) -> Result<SaveItem> {
    let (name, path, kind, dtype, shape, offsets, sizes, writes) = item;
    // Lengths go in too, so that no two structures give one text.
    hasher.update((name.len() as u64).to_le_bytes());
    hasher.update(&name);
    hasher.update([kind]);
    let text = dtype.as_deref().unwrap_or_default();
    hasher.update((text.len() as u64).to_le_bytes());
    hasher.update(text);
    hasher.update((shape.len() as u64).to_le_bytes());
    shape.iter().for_each(|side| hasher.update(side.to_le_bytes()));
    let what = match (kind, dtype) {
        (0, Some(dtype)) => {
            tensor(&dtype, shape, offsets, sizes).map_err(|error| error.at(&name))?
        }
        (1, _) => What::Object,
        (2, Some(of)) => What::Alias { of },
        _ => return Err(usage(format!("an item of kind {kind}")).at(name)),
    };
    let path = path.into_iter().map(PathStep::from).collect();
    Ok(SaveItem { name, path, what, writes })
}

fn tensor(dtype: &str, shape: Vec<u64>, offsets: Vec<u64>, sizes: Vec<u64>) -> Result<What> {
    let dtype = dtype_of(dtype)?;
    let (shape, offsets, sizes) =
        (elements(dtype, shape), elements(dtype, offsets), elements(dtype, sizes));
    let region = Region::new(offsets, sizes)?;
    Ok(What::Tensor { dtype, shape, region, requires_grad: false })
}

/// The dtype of a name of torch's. Errors: `unsupported`, with what to do.
pub(super) fn dtype_of(name: &str) -> Result<Dtype> {
    let known = TorchDtype::parse(name).and_then(|dtype| dtype.dtype());
    known.ok_or_else(|| {
        let what = format!("tensors of torch.{name} have no form in a checkpoint");
        Error::new(forebay_error::Code::Unsupported, what)
            .hint("save it as an object, or view it as another dtype")
    })
}

/// The name that torch has for a dtype.
pub(super) fn torch_name(dtype: Dtype) -> &'static str {
    TorchDtype::of(dtype).map_or(dtype.name(), |dtype| dtype.name())
}

/// Sides in elements: torch counts pairs of F4.
pub(super) fn elements(dtype: Dtype, mut sides: Vec<u64>) -> Vec<u64> {
    if dtype == Dtype::F4
        && let Some(last) = sides.last_mut()
    {
        *last = last.saturating_mul(2);
    }
    sides
}

/// Sides as torch counts them.
pub(super) fn torch_sides(dtype: Dtype, sides: &[u64]) -> Vec<u64> {
    let mut sides = sides.to_vec();
    if dtype == Dtype::F4
        && let Some(last) = sides.last_mut()
    {
        *last /= 2;
    }
    sides
}
