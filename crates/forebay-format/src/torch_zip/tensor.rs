//! Tensors of a `data.pkl`: the calls that would rebuild them, read without making them.
//!
//! ```text
//! torch._utils._rebuild_tensor_v2(STORAGE, offset, size, stride, requires_grad, hooks[, metadata])
//! torch._utils._rebuild_tensor_v3(STORAGE, offset, size, stride, requires_grad, hooks, dtype[, metadata])
//! torch._utils._rebuild_tensor(STORAGE, offset, size, stride)                      before 0.4
//! torch._utils._rebuild_parameter(TENSOR, requires_grad, hooks)                    and .._with_state(.., state)
//! torch._tensor._rebuild_from_type_v2(FUNCTION, class, arguments, state)           tensors with attributes
//! STORAGE = persistent id ("storage", class, key, location, numel)
//! ```
//!
//! Offset, size and stride count elements. The class gives the data type and `numel` counts its elements, but for
//! `UntypedStorage` (always with `_v3`), where it counts bytes. Classes of tensors beyond these rebuild themselves in
//! ways of their own and are opaque here.

use super::dtype::{dtype_of, dtype_of_storage};
use super::{Archive, Record, invalid};
use crate::pickle::{Graph, Node, Value};
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, ShowShape, Strides, byte_len};

/// The most dimensions of a tensor. torch's own kernels stop at 64.
const MAX_DIMS: usize = 64;

/// How deep wrappers of a tensor (a parameter with attributes of a class) may go.
const MAX_WRAPPERS: usize = 8;

/// A tensor as `data.pkl` describes it: a view of a storage.
///
/// Sizes are in elements of its dtype. torch counts two elements of `float4_e2m1fn_x2` as one; here the last side is
/// twice as long, as in safetensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides.
    pub shape: Vec<u64>,
    /// Where its elements lie in the storage. A stride of 0: the dimension is expanded.
    pub memory: Strides,
    /// The record with the storage's bytes: `data/KEY`.
    pub record: String,
    /// Bytes that the record must have.
    pub storage_bytes: u64,
}

impl View {
    /// Bytes of its elements, row-major.
    pub fn bytes(&self) -> u64 {
        // It was checked that they have a number.
        byte_len(self.dtype, &self.shape).unwrap_or(u64::MAX)
    }

    /// Byte of the storage where it starts.
    pub fn start_bytes(&self) -> u64 {
        (self.memory.offset * self.dtype.bits()) / 8
    }

    /// Whether its elements lie row-major without gaps. Strides of sides of one element say nothing, nor do those of a
    /// tensor without elements.
    pub fn is_row_major(&self) -> bool {
        let plain = Strides::row_major(&self.shape).strides;
        let sides = self.shape.iter().zip(&self.memory.strides).zip(plain);
        self.shape.contains(&0)
            || sides.into_iter().all(|((&side, &stride), plain)| side == 1 || stride == plain)
    }

    /// The record of its storage, which must have the bytes that the storage is said to have.
    pub fn check_record(&self, record: Option<Record>) -> Result<Record> {
        let name = crate::text::quoted(&self.record);
        let record = record.ok_or_else(|| {
            invalid(format!("the storage is in record {name}, which the archive does not have"))
        })?;
        if record.bytes == self.storage_bytes {
            return Ok(record);
        }
        Err(invalid(format!(
            "the storage is said to have {} bytes, record {name} has {}",
            self.storage_bytes, record.bytes
        )))
    }

    /// Fails unless every element lies in the storage.
    fn check(&self) -> Result<()> {
        let shape = ShowShape(&self.shape);
        let bytes =
            byte_len(self.dtype, &self.shape).ok().filter(|&bytes| bytes <= i64::MAX as u64);
        if bytes.is_none() {
            return Err(invalid(format!("{} of shape {shape} leaves 64 bits", self.dtype)));
        }
        let span = self.memory.span_bytes(self.dtype, &self.shape);
        if span.is_ok_and(|span| span <= self.storage_bytes) {
            return Ok(());
        }
        Err(invalid(format!(
            "{} of shape {shape} with strides {:?} from element {} on reaches past the {} bytes of \
             the storage",
            self.dtype, self.memory.strides, self.memory.offset, self.storage_bytes
        )))
    }

    /// From torch's elements of `float4_e2m1fn_x2` to halves of them.
    fn split_pairs(&mut self) -> Result<()> {
        let doubled = |number: &mut u64| *number = number.saturating_mul(2);
        doubled(&mut self.memory.offset);
        self.memory.strides.iter_mut().for_each(doubled);
        match (self.shape.last_mut(), self.memory.strides.last_mut()) {
            (Some(side), Some(stride)) if *stride == 2 || *side <= 1 => {
                doubled(side);
                *stride = 1;
                Ok(())
            }
            (None, None) => {
                (self.shape, self.memory.strides) = (vec![2], vec![1]);
                Ok(())
            }
            _ => {
                let what = "float4_e2m1fn_x2 with strides in the last dimension is not read";
                Err(Error::new(Code::Unsupported, what).hint("save tensor.contiguous()"))
            }
        }
    }
}

/// The tensor that a value is; `None` where it is none. A tensor of a kind that is not read is an error that says so:
/// `unknown_dtype` or `unsupported`.
pub fn tensor(graph: &Graph<'_>, value: Value) -> Option<Result<View>> {
    let mut value = value;
    for _ in 0..MAX_WRAPPERS {
        let Node::Call(call) = graph.node(value) else { return None };
        let args = || graph.as_sequence(call.args);
        match graph.global_name(call.callable)? {
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => {
                let args: Vec<Value> = args()?.collect();
                return Some(rebuilt(graph, &args, None, args.get(6)));
            }
            ("torch._utils", "_rebuild_tensor_v3") => {
                let args: Vec<Value> = args()?.collect();
                return Some(rebuilt(graph, &args, args.get(6), args.get(7)));
            }
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                value = args()?.next()?;
            }
            ("torch._tensor", "_rebuild_from_type_v2") => match from_type(graph, args()?.collect())
            {
                Some(tensor) => return Some(tensor),
                None => return None,
            },
            ("torch._utils", name) if name.starts_with("_rebuild_") => {
                let what = format!("a tensor made by {} is not read", crate::text::quoted(name));
                return Some(Err(Error::new(Code::Unsupported, what)
                    .hint("sparse, quantized and wrapped tensors: save what they are made of")));
            }
            _ => return None,
        }
    }
    Some(Err(Error::new(Code::Unsupported, "a tensor is wrapped too many times")))
}

/// A tensor with attributes: of torch's own classes it is the tensor, of others who knows.
fn from_type(graph: &Graph<'_>, args: Vec<Value>) -> Option<Result<View>> {
    let [function, class, inner, ..] = args.as_slice() else { return None };
    let class = graph.global_name(*class)?;
    let plain = matches!(
        class,
        ("torch", "Tensor") | ("torch._tensor", "Tensor") | ("torch.nn.parameter", "Parameter")
    );
    if !plain {
        let what = format!("a tensor of class {}.{} is not read", class.0, class.1);
        return Some(Err(Error::new(Code::Unsupported, what)));
    }
    let inner: Vec<Value> = graph.as_sequence(*inner)?.collect();
    match graph.global_name(*function)? {
        ("torch._utils", "_rebuild_tensor_v2") => Some(rebuilt(graph, &inner, None, inner.get(6))),
        ("torch._utils", "_rebuild_tensor_v3") => {
            Some(rebuilt(graph, &inner, inner.get(6), inner.get(7)))
        }
        _ => None,
    }
}

/// The view that these arguments describe.
fn rebuilt(
    graph: &Graph<'_>,
    args: &[Value],
    dtype: Option<&Value>,
    metadata: Option<&Value>,
) -> Result<View> {
    let [storage, start, shape, strides, ..] = args else {
        return Err(invalid("a tensor is described by too few arguments"));
    };
    check_metadata(graph, metadata)?;
    let storage = self::storage(graph, *storage)?;
    let dtype = match dtype.map(|&dtype| torch_dtype(graph, dtype)) {
        Some(dtype) => dtype?,
        None => {
            storage.dtype.ok_or_else(|| invalid("a tensor of an untyped storage has no dtype"))?
        }
    };
    let count = |value: Value| {
        graph.as_u64(value).ok_or_else(|| invalid("a size, stride or offset is no count"))
    };
    let start = count(*start)?;
    let list = |value: Value| -> Result<Vec<u64>> {
        let items = sequence(graph, value).filter(|items| items.len() <= MAX_DIMS);
        items.ok_or_else(|| invalid("a size or stride is no tuple"))?.map(count).collect()
    };
    let (shape, strides) = (list(*shape)?, list(*strides)?);
    if shape.len() != strides.len() {
        let what = format!("{} strides for {} dimensions", strides.len(), shape.len());
        return Err(invalid(what));
    }
    let record = format!("data/{}", storage.key);
    let memory = Strides { offset: start, strides };
    let mut view = View { dtype, shape, memory, record, storage_bytes: storage.bytes };
    if dtype == Dtype::F4 {
        view.split_pairs()?;
    }
    view.check()?;
    Ok(view)
}

/// A tuple, a list, or a `torch.Size` of one.
fn sequence<'g>(graph: &'g Graph<'_>, value: Value) -> Option<crate::pickle::Items<'g>> {
    if let Node::Call(call) = graph.node(value)
        && graph.global_name(call.callable) == Some(("torch", "Size"))
    {
        return graph.as_sequence(graph.as_sequence(call.args)?.next()?);
    }
    graph.as_sequence(value)
}

/// Conjugate and negative views hold other numbers than their bytes say.
fn check_metadata(graph: &Graph<'_>, metadata: Option<&Value>) -> Result<()> {
    let Some(pairs) = metadata.and_then(|&value| graph.as_dict(value)) else { return Ok(()) };
    for (key, value) in pairs {
        let is_set = !matches!(graph.node(value), Node::Bool(false) | Node::None);
        if matches!(graph.as_str(key), Some("conj" | "neg")) && is_set {
            let what = "a conjugate or negative view is not read";
            return Err(Error::new(Code::Unsupported, what)
                .hint("save tensor.resolve_conj().resolve_neg()"));
        }
    }
    Ok(())
}

struct Storage {
    key: String,
    bytes: u64,
    /// `None` of an untyped one.
    dtype: Option<Dtype>,
}

fn storage(graph: &Graph<'_>, value: Value) -> Result<Storage> {
    let wrong = || invalid("a tensor's storage is not a persistent id of torch");
    let Node::Persistent(id) = graph.node(value) else { return Err(wrong()) };
    let parts: Vec<Value> = graph.as_sequence(id).ok_or_else(wrong)?.collect();
    let [kind, class, key, _location, numel, ..] = parts.as_slice() else { return Err(wrong()) };
    if graph.as_str(*kind) != Some("storage") {
        return Err(wrong());
    }
    let key = graph.as_str(*key).ok_or_else(wrong)?;
    if key.is_empty() || key.contains('/') {
        return Err(invalid(format!("a storage has the key {}", crate::text::quoted(key))));
    }
    let numel = graph.as_u64(*numel).ok_or_else(|| invalid("a storage's size is no count"))?;
    let (dtype, element) = match graph.global_name(*class).ok_or_else(wrong)? {
        ("torch.storage" | "torch", "UntypedStorage") => (None, 1),
        ("torch" | "torch.cuda" | "torch.storage", class) => {
            let dtype = dtype_of_storage(class).ok_or_else(|| unknown_dtype(class))?;
            (Some(dtype), dtype.bits() / 8)
        }
        (module, name) => return Err(unknown_dtype(&format!("{module}.{name}"))),
    };
    let bytes = numel.checked_mul(element).ok_or_else(|| invalid("a storage leaves 64 bits"))?;
    Ok(Storage { key: key.to_owned(), bytes, dtype })
}

/// The data type of a constant `torch.NAME`.
fn torch_dtype(graph: &Graph<'_>, value: Value) -> Result<Dtype> {
    match graph.global_name(value) {
        Some(("torch", name)) => dtype_of(name).ok_or_else(|| unknown_dtype(name)),
        _ => Err(invalid("a tensor's dtype is none of torch's")),
    }
}

fn unknown_dtype(name: &str) -> Error {
    let name = crate::text::quoted(name);
    Error::new(Code::UnknownDtype, format!("dtype or storage {name} of torch is not read"))
}

/// Fails unless the archive's numbers are little endian.
pub fn check_byteorder(archive: &Archive<'_>) -> Result<()> {
    // Before 1.13 there is no such record; whoever wrote big endian then cannot be told.
    let Some(record) = archive.record("byteorder")? else { return Ok(()) };
    match archive.read_checked(&record, 16)?.as_slice() {
        b"little" => Ok(()),
        b"big" => {
            let what = "the numbers are big endian, which is not read";
            Err(Error::new(Code::Unsupported, what).hint("load it with torch and save it again"))
        }
        other => {
            let other = String::from_utf8_lossy(other).into_owned();
            Err(invalid(format!("the byte order is {}", crate::text::quoted(&other))))
        }
    }
}
