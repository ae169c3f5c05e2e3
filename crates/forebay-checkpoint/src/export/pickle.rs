//! Pickles of protocol 2, as `torch.save` writes them: what `torch.load(weights_only=True)` takes.
//!
//! [`plain`] copies plain values from one pickle to another: what is a tuple stays one. Anything that would have to be
//! called or imported is refused, but for the few classes that are plain data themselves.

use forebay_format::dcp::TorchDtype;
use forebay_format::pickle::{Graph, Node, Object, Value};

/// How deep values may be nested.
const MAX_DEPTH: usize = 128;
/// The most values of one object: nodes may be shared, so that a short pickle can stand for an endless one.
const MAX_VALUES: usize = 1 << 20;
/// The most bytes of one object.
const MAX_BYTES: usize = 64 << 20;

pub(super) const PROTO_2: [u8; 2] = [0x80, 2];
pub(super) const STOP: u8 = b'.';
pub(super) const NONE: u8 = b'N';
pub(super) const EMPTY_DICT: u8 = b'}';
pub(super) const EMPTY_LIST: u8 = b']';
pub(super) const MARK: u8 = b'(';
pub(super) const SETITEMS: u8 = b'u';
pub(super) const APPENDS: u8 = b'e';
const TUPLE: u8 = b't';
const REDUCE: u8 = b'R';

const BINPERSID: u8 = b'Q';
const NEWTRUE: u8 = 0x88;
const NEWFALSE: u8 = 0x89;
const ORDERED_DICT: &[u8] = b"ccollections\nOrderedDict\n)R";

/// Text.
pub(super) fn text(out: &mut Vec<u8>, value: &str) {
    raw_text(out, value.as_bytes());
}

/// Text by its bytes. Lengths are below 4 GiB: nothing longer is ever kept.
fn raw_text(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'X');
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// An integer.
pub(super) fn int(out: &mut Vec<u8>, value: i64) {
    if let Ok(byte) = u8::try_from(value) {
        out.extend_from_slice(&[b'K', byte]);
    } else if let Ok(word) = i32::try_from(value) {
        out.push(b'J');
        out.extend_from_slice(&word.to_le_bytes());
    } else {
        out.extend_from_slice(&[0x8a, 8]);
        out.extend_from_slice(&value.to_le_bytes());
    }
}

fn int_tuple(out: &mut Vec<u8>, values: &[u64]) {
    out.push(MARK);
    values.iter().for_each(|&value| int(out, value.min(i64::MAX as u64) as i64));
    out.push(TUPLE);
}

/// A tensor of sides `shape`, row-major, at the start of storage `key`: what `torch._utils._rebuild_tensor_v2` is
/// called with; types without a class of storages have bytes as storage and go to `_rebuild_tensor_v3`.
pub(super) fn tensor(out: &mut Vec<u8>, dtype: TorchDtype, shape: &[u64], key: usize) {
    let elements = shape.iter().fold(1_u64, |product, &side| product.saturating_mul(side));
    let class = storage_class(dtype);
    let unit = if class.is_some() { 1 } else { dtype.item_bytes() };
    let rebuild: &[u8] = match class {
        Some(_) => b"ctorch._utils\n_rebuild_tensor_v2\n((",
        None => b"ctorch._utils\n_rebuild_tensor_v3\n((",
    };
    out.extend_from_slice(rebuild);
    text(out, "storage");
    match class {
        Some(class) => global(out, "torch", class),
        None => global(out, "torch.storage", "UntypedStorage"),
    }
    text(out, &key.to_string());
    text(out, "cpu");
    int(out, elements.saturating_mul(unit).min(i64::MAX as u64) as i64);
    out.extend_from_slice(&[TUPLE, BINPERSID]);
    int(out, 0);
    int_tuple(out, shape);
    int_tuple(out, &strides(shape));
    out.push(NEWFALSE);
    out.extend_from_slice(ORDERED_DICT);
    if class.is_none() {
        global(out, "torch", dtype.name());
    }
    out.extend_from_slice(&[TUPLE, REDUCE]);
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.extend_from_slice(format!("c{module}\n{name}\n").as_bytes());
}

/// Row-major strides; sides of zero count as one, as in torch.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1_u64;
    for (own, &side) in strides.iter_mut().zip(shape).rev() {
        *own = stride;
        stride = stride.saturating_mul(side.max(1));
    }
    strides
}

/// The class of torch for a storage of old types.
fn storage_class(dtype: TorchDtype) -> Option<&'static str> {
    Some(match dtype {
        TorchDtype::Bool => "BoolStorage",
        TorchDtype::Uint8 => "ByteStorage",
        TorchDtype::Int8 => "CharStorage",
        TorchDtype::Int16 => "ShortStorage",
        TorchDtype::Int32 => "IntStorage",
        TorchDtype::Int64 => "LongStorage",
        TorchDtype::Float16 => "HalfStorage",
        TorchDtype::BFloat16 => "BFloat16Storage",
        TorchDtype::Float32 => "FloatStorage",
        TorchDtype::Float64 => "DoubleStorage",
        TorchDtype::Complex64 => "ComplexFloatStorage",
        TorchDtype::Complex128 => "ComplexDoubleStorage",
        _ => return None,
    })
}

/// The opcodes of a value that is plain data, or why it is none.
pub(super) fn plain(graph: &Graph<'_>) -> Result<Vec<u8>, String> {
    let mut copy = Copy { graph, out: Vec::new(), values: 0 };
    copy.value(graph.root(), 0)?;
    Ok(copy.out)
}

struct Copy<'g, 'a> {
    graph: &'g Graph<'a>,
    out: Vec<u8>,
    values: usize,
}

impl Copy<'_, '_> {
    fn value(&mut self, value: Value, depth: usize) -> Result<(), String> {
        self.values += 1;
        if depth > MAX_DEPTH {
            return Err("it is nested too deep, or holds itself".to_owned());
        }
        if self.values > MAX_VALUES || self.out.len() > MAX_BYTES {
            return Err("it is too long".to_owned());
        }
        let graph = self.graph;
        match graph.node(value) {
            Node::None => self.out.push(NONE),
            Node::Bool(flag) => self.out.push(if flag { NEWTRUE } else { NEWFALSE }),
            Node::Int(number) => int(&mut self.out, number),
            Node::BigInt(bytes) => self.big(bytes)?,
            Node::Float(number) => {
                self.out.push(b'G');
                self.out.extend_from_slice(&number.to_be_bytes());
            }
            Node::Str(value) => text(&mut self.out, value),
            Node::Surrogate(bytes) => raw_text(&mut self.out, bytes),
            Node::Bytes(bytes) => self.bytes(bytes),
            Node::List(items) => {
                self.out.extend_from_slice(&[EMPTY_LIST, MARK]);
                self.all(items, depth)?;
                self.out.push(APPENDS);
            }
            Node::Tuple(items) => {
                self.out.push(MARK);
                self.all(items, depth)?;
                self.out.push(TUPLE);
            }
            Node::Dict(pairs) => {
                self.out.push(EMPTY_DICT);
                self.pairs(pairs, depth)?;
            }
            Node::Call(call) => return self.call(value, &call, depth),
            Node::Set(_) => return Err("it holds a set".to_owned()),
            Node::Persistent(_) => return Err("it holds a tensor".to_owned()),
            Node::Global { module, name } => return Err(format!("it holds {module}.{name}")),
            Node::New(object) => {
                let (module, name) = graph.global_name(object.callable).unwrap_or_default();
                return Err(format!("it holds a {module}.{name}"));
            }
        }
        Ok(())
    }

    fn all(&mut self, mut items: impl Iterator<Item = Value>, depth: usize) -> Result<(), String> {
        items.try_for_each(|item| self.value(item, depth + 1))
    }

    fn pairs(
        &mut self,
        mut pairs: impl Iterator<Item = (Value, Value)>,
        depth: usize,
    ) -> Result<(), String> {
        self.out.push(MARK);
        pairs.try_for_each(|(key, value)| {
            self.value(key, depth + 1)?;
            self.value(value, depth + 1)
        })?;
        self.out.push(SETITEMS);
        Ok(())
    }

    fn big(&mut self, bytes: &[u8]) -> Result<(), String> {
        let len = u8::try_from(bytes.len());
        let len = len.map_err(|_| "it holds an integer of too many digits".to_owned())?;
        self.out.extend_from_slice(&[0x8a, len]);
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    /// Protocol 2 has no bytes: they go as the text of the same codes, as Python itself writes them.
    fn bytes(&mut self, bytes: &[u8]) {
        let latin: String = bytes.iter().map(|&byte| char::from(byte)).collect();
        global(&mut self.out, "_codecs", "encode");
        self.out.push(MARK);
        text(&mut self.out, &latin);
        text(&mut self.out, "latin1");
        self.out.extend_from_slice(&[TUPLE, REDUCE]);
    }

    /// Whether a value is a tuple of texts.
    fn is_text(&self, value: Value) -> bool {
        match self.graph.node(value) {
            Node::Tuple(mut items) => {
                items.all(|item| matches!(self.graph.node(item), Node::Str(_)))
            }
            _ => false,
        }
    }

    /// An OrderedDict, a `torch.Size` or bytes; all else is refused, whether its call is harmless or not.
    fn call(&mut self, value: Value, call: &Object, depth: usize) -> Result<(), String> {
        let graph = self.graph;
        if let Some(why) = graph.forbidden(value) {
            return Err(why);
        }
        match graph.global_name(call.callable) {
            Some(("collections", "OrderedDict")) => {
                self.out.extend_from_slice(ORDERED_DICT);
                match graph.node(call.pairs) {
                    Node::Dict(pairs) => self.pairs(pairs, depth),
                    _ => Ok(()),
                }
            }
            Some(("torch", "Size")) => {
                global(&mut self.out, "torch", "Size");
                self.value(call.args, depth + 1)?;
                self.out.push(REDUCE);
                Ok(())
            }
            // Bytes, as protocol 2 has them.
            Some(("_codecs", "encode")) if self.is_text(call.args) => {
                global(&mut self.out, "_codecs", "encode");
                self.value(call.args, depth + 1)?;
                self.out.push(REDUCE);
                Ok(())
            }
            Some((module, name)) => Err(format!("it holds a {module}.{name}")),
            None => Err("it is made by a call".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::pickle::{Options, parse};

    fn copied(opcodes: &[u8]) -> Result<Vec<u8>, String> {
        let mut pickle = PROTO_2.to_vec();
        pickle.extend_from_slice(opcodes);
        pickle.push(STOP);
        let graph = parse(&pickle, &Options::ITEM).unwrap();
        plain(&graph)
    }

    #[test]
    fn plain_values_are_copied_as_they_are() {
        let mut value = vec![EMPTY_DICT, MARK];
        text(&mut value, "betas");
        value.extend_from_slice(b"(G?\xec\xcc\xcc\xcc\xcc\xcc\xcdK\x02t");
        text(&mut value, "big");
        value.extend_from_slice(b"\x8a\x09\0\0\0\0\0\0\0\0\x01");
        text(&mut value, "rest");
        value.extend_from_slice(&[EMPTY_LIST, MARK, NONE, NEWTRUE, NEWFALSE]);
        value.extend_from_slice(b"J\xff\xff\xff\xff");
        value.extend_from_slice(b"c_codecs\nencode\n(X\x02\0\0\0a\x00X\x06\0\0\0latin1tR");
        value.extend_from_slice(ORDERED_DICT);
        value.extend_from_slice(&[MARK, b'K', 1, b'K', 2, SETITEMS, APPENDS, SETITEMS]);
        assert_eq!(copied(&value).unwrap(), value);
    }

    #[test]
    fn what_is_no_plain_data_is_refused() {
        let why = |opcodes: &[u8]| copied(opcodes).unwrap_err();
        assert!(why(b"cposix\nsystem\n(X\x02\0\0\0lstR").contains("posix.system"));
        assert!(why(b"cposix\nsystem\n").contains("posix.system"));
        let deep = [vec![b'('; 200], vec![TUPLE; 200]].concat();
        assert!(why(&deep).contains("deep"));
        assert!(why(b"c_codecs\nencode\n(K\x01tR").contains("_codecs.encode"));
        assert_eq!(copied(b")").unwrap(), [MARK, TUPLE]);
    }
}
