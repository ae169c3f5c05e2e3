//! Named values: what the names of a checkpoint stand for.

use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;

use super::limits::{MAX_DIMS, MAX_NAME_BYTES, MAX_PATH_STEPS};
use crate::model::PathStep;

/// A tensor as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides, in elements.
    pub shape: Vec<u64>,
    /// Whether gradients are computed for it; carried, not used.
    pub requires_grad: bool,
    /// Which layout of the structure's list; `None` where each rank names its regions.
    pub layout: Option<u32>,
}

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// Anything else: bytes in the form of `torch.save`, stored by one rank.
    Object,
    /// The same tensor or object as another name, stored once, restored under both. The other name is not an alias
    /// itself.
    Alias {
        /// The other name.
        of: String,
    },
}

/// A name and what it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The flat name.
    pub name: String,
    /// The way to it in the nested state; empty where that is not known.
    pub path: Vec<PathStep>,
    /// What it stands for.
    pub value: Value,
}

impl Named {
    /// A tensor whose ranks name their regions.
    pub fn tensor(name: impl Into<String>, dtype: Dtype, shape: &[u64]) -> Self {
        let tensor = Tensor { dtype, shape: shape.to_vec(), requires_grad: false, layout: None };
        Self { name: name.into(), path: Vec::new(), value: Value::Tensor(tensor) }
    }

    /// An object.
    pub fn object(name: impl Into<String>) -> Self {
        Self { name: name.into(), path: Vec::new(), value: Value::Object }
    }

    /// Another name of `of`.
    pub fn alias(name: impl Into<String>, of: impl Into<String>) -> Self {
        Self { name: name.into(), path: Vec::new(), value: Value::Alias { of: of.into() } }
    }

    /// The same with its way in the nested state.
    #[must_use]
    pub fn with_path(mut self, path: Vec<PathStep>) -> Self {
        self.path = path;
        self
    }

    /// The same, if it is a tensor, with a layout.
    #[must_use]
    pub fn with_layout(mut self, index: u32) -> Self {
        if let Value::Tensor(tensor) = &mut self.value {
            tensor.layout = Some(index);
        }
        self
    }

    /// Fails where it breaks a limit of the format.
    pub(crate) fn check(&self) -> Result<()> {
        let bad = |what: String| Error::new(Code::InvalidMetadata, what);
        if self.name.len() as u64 > MAX_NAME_BYTES {
            return Err(bad(format!("a name of {} bytes", self.name.len())));
        }
        if self.path.len() as u64 > MAX_PATH_STEPS {
            return Err(bad(format!("a value {} levels deep", self.path.len())));
        }
        match &self.value {
            Value::Tensor(tensor) if tensor.shape.len() as u64 > MAX_DIMS => {
                Err(bad(format!("a tensor of {} dimensions", tensor.shape.len())))
            }
            Value::Tensor(tensor) => {
                forebay_tensor::byte_len(tensor.dtype, &tensor.shape).map(drop)
            }
            Value::Alias { of } if *of == self.name => Err(bad("an alias of itself".into())),
            Value::Alias { of } if of.len() as u64 > MAX_NAME_BYTES => {
                Err(bad("an alias of a name that is too long".into()))
            }
            Value::Object | Value::Alias { .. } => Ok(()),
        }
    }
}

/// A name as messages show it: quoted, without what terminals obey, long ones cut.
pub(crate) fn shown(name: &str) -> String {
    match name.char_indices().nth(200) {
        Some((cut, _)) => format!("{:?}...", name.get(..cut).unwrap_or_default()),
        None => format!("{name:?}"),
    }
}
