//! A whole `data.pkl` as a flat list: tensors and objects with dotted names.
//!
//! Dicts are always gone into; a list where it holds a tensor or a dict at any depth, else it is one object; a tuple
//! where it holds a tensor. That is how distributed checkpoints flatten, but for tuples, whose tensors they leave to
//! pickle. Keys are joined by dots: `{"model": {"w": t}, "groups": [{"lr": 0.1}]}` gives `model.w` and `groups.0.lr`.
//! A tensor alone is called `tensor`.

use super::plain::{PlainObject, pairs, plain};
use super::tensor::{View, tensor};
use crate::catalog::Fault;
use crate::pickle::{Graph, Node, Value};
use crate::text::quoted;
use forebay_error::{Code, Error, Result};

/// A leaf of the state.
#[derive(Clone, Debug)]
pub enum Leaf {
    /// A tensor, or why it is not read.
    Tensor(Result<View, Fault>),
    /// Anything else.
    Object(PlainObject),
}

/// How deep the state may be nested.
const MAX_DEPTH: usize = 128;

/// The most nodes that a walk looks at; shared ones count each time.
const MAX_NODES: usize = 16 << 20;

/// The most bytes of all names; each level repeats its parents'.
const MAX_NAME_BYTES: usize = 1 << 30;

/// The name of a tensor that is not in a dict.
const ALONE: &str = "tensor";

/// The leaves of a state, in its order.
///
/// Errors: `unsupported` where it is nested too deep (it may hold itself) or has too many leaves, `forbidden_global`
/// where the whole of it is one object that only a call could make; `invalid_item` for a damaged tensor.
pub fn leaves(graph: &Graph<'_>) -> Result<Vec<(String, Leaf)>> {
    let mut walk = Walk { graph, nodes: 0, name_bytes: 0, leaves: Vec::new() };
    let root = graph.root();
    if let Some(view) = tensor(graph, root) {
        walk.add(ALONE, Leaf::Tensor(Ok(view?)))?;
        return Ok(walk.leaves);
    }
    match graph.node(root) {
        Node::New(_) | Node::Call(_) if pairs(graph, root).is_none() => {
            plain(graph, root).json().map_err(|error| {
                error.hint("whole modules are code: save module.state_dict() with torch.save")
            })?;
            walk.add("", Leaf::Object(plain(graph, root)))?;
        }
        _ => walk.visit(root, "", 0)?,
    }
    Ok(walk.leaves)
}

struct Walk<'g, 'a> {
    graph: &'g Graph<'a>,
    nodes: usize,
    name_bytes: usize,
    leaves: Vec<(String, Leaf)>,
}

impl Walk<'_, '_> {
    fn count(&mut self, depth: usize) -> Result<()> {
        self.nodes += 1;
        match depth <= MAX_DEPTH && self.nodes <= MAX_NODES {
            true => Ok(()),
            false => Err(Error::new(
                Code::Unsupported,
                "the saved state is nested too deep, holds itself, or has too many values",
            )),
        }
    }

    fn add(&mut self, name: &str, leaf: Leaf) -> Result<()> {
        self.name_bytes += name.len();
        if self.name_bytes > MAX_NAME_BYTES {
            return Err(Error::new(Code::Unsupported, "the names of the saved state are too long"));
        }
        self.leaves.push((name.to_owned(), leaf));
        Ok(())
    }

    fn visit(&mut self, value: Value, name: &str, depth: usize) -> Result<()> {
        self.count(depth)?;
        let graph = self.graph;
        if let Some(view) = tensor(graph, value) {
            let view = match view {
                Ok(view) => Ok(view),
                // Damage is never passed over; what is only not supported is left out with a word.
                Err(error) if error.code() == Code::InvalidItem => {
                    return Err(error.at(format!("tensor {}", quoted(name))));
                }
                Err(error) => Err(Fault::from(&error)),
            };
            return self.add(name, Leaf::Tensor(view));
        }
        let join =
            |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        if let Some(pairs) = pairs(graph, value)
            && let Some(keys) = keys(graph, &pairs)
        {
            for (key, (_, value)) in keys.iter().zip(pairs) {
                self.visit(value, &join(key), depth + 1)?;
            }
            return Ok(());
        }
        let items: Vec<Value> = match graph.node(value) {
            Node::List(items) if self.holds(value, true, depth)? => items.collect(),
            Node::Tuple(items) if self.holds(value, false, depth)? => items.collect(),
            _ => return self.add(name, Leaf::Object(plain(graph, value))),
        };
        for (index, item) in items.into_iter().enumerate() {
            self.visit(item, &join(&index.to_string()), depth + 1)?;
        }
        Ok(())
    }

    /// Whether a list or tuple holds a tensor at any depth, or, if that counts, a dict.
    fn holds(&mut self, value: Value, dicts: bool, depth: usize) -> Result<bool> {
        self.count(depth)?;
        let graph = self.graph;
        let items: Vec<Value> = match graph.node(value) {
            Node::List(items) | Node::Tuple(items) => items.collect(),
            _ => match pairs(graph, value) {
                Some(_) if dicts => return Ok(true),
                Some(pairs) => pairs.into_iter().map(|(_, value)| value).collect(),
                None => return Ok(tensor(graph, value).is_some()),
            },
        };
        for item in items {
            if self.holds(item, dicts, depth + 1)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The keys of a dict as parts of names; `None` where one has no such form, then the dict is one object.
fn keys(graph: &Graph<'_>, pairs: &[(Value, Value)]) -> Option<Vec<String>> {
    let key = |&(key, _): &(Value, Value)| match graph.node(key) {
        Node::Str(text) => Some(text.to_owned()),
        Node::Int(number) => Some(number.to_string()),
        Node::Bool(true) => Some("True".to_owned()),
        Node::Bool(false) => Some("False".to_owned()),
        _ => None,
    };
    pairs.iter().map(key).collect()
}
