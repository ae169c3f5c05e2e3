//! Plain data out of pickles: what has a form in JSON becomes JSON, all else is opaque and says why.
//!
//! `None`, bools, integers of any length, finite floats and texts are themselves, lists and tuples are arrays, dicts
//! with text keys are objects (of two equal keys the last counts, at the place of the first, as in Python).
//! Everything is bounded: nodes may be shared, so a short pickle can stand for an endless text.

use crate::pickle::{Graph, Items, Node, Value};
use crate::text::quoted;
use forebay_error::{Code, Error, Result};
use std::collections::HashMap;

/// An object that was saved: its type in Python, and its value where it is plain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainObject {
    /// Its type as Python names it: `int`, `dict`, or with the module for classes.
    pub python_type: String,
    /// What it is.
    pub value: PlainValue,
}

/// The value of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainValue {
    /// As JSON.
    Json(String),
    /// It has no JSON form: why not.
    Opaque(String),
    /// It would be made by calling what may not be called: by what. Nothing was called.
    Forbidden(String),
}

impl PlainObject {
    /// The JSON, or why there is none: `forbidden_global`, or `unsupported` for what is harmless but not plain.
    pub fn json(&self) -> Result<&str> {
        match &self.value {
            PlainValue::Json(json) => Ok(json),
            PlainValue::Opaque(why) => Err(Error::new(
                Code::Unsupported,
                format!("an object of type {} is not plain data: {why}", self.python_type),
            )),
            PlainValue::Forbidden(why) => Err(Error::new(
                Code::ForbiddenGlobal,
                format!("an object cannot be had without running code: {why}"),
            )
            .hint("pickles are never executed here; load it with torch if you trust its origin")),
        }
    }
}

/// How deep plain data may be nested.
const MAX_DEPTH: usize = 128;

/// The most nodes of one object.
const MAX_NODES: usize = 1 << 20;

/// The longest JSON of one object.
const MAX_JSON_BYTES: usize = 16 << 20;

/// The longest integer in bytes: its decimal digits take time that grows with the square of it.
const MAX_INT_BYTES: usize = 1 << 10;

/// What an object is.
pub fn plain(graph: &Graph<'_>, value: Value) -> PlainObject {
    let mut writer = Writer { graph, json: String::new(), nodes: 0 };
    let value_of = match writer.write(value, 0) {
        Ok(()) => PlainValue::Json(writer.json),
        Err(Stop::Opaque(why)) => PlainValue::Opaque(why),
        Err(Stop::Forbidden(why)) => PlainValue::Forbidden(why),
    };
    PlainObject { python_type: python_type(graph, value), value: value_of }
}

/// Keys and values of a dict or an OrderedDict; `None` for all else.
pub(super) fn pairs(graph: &Graph<'_>, value: Value) -> Option<Vec<(Value, Value)>> {
    match graph.node(value) {
        Node::Dict(pairs) => Some(pairs.collect()),
        Node::Call(call) if is_ordered_dict(graph, call.callable) => {
            let arguments = graph.as_sequence(call.args)?.len();
            // One filled by its call was made by Python 2; nobody has seen one.
            (arguments == 0)
                .then(|| graph.as_dict(call.pairs).map(Iterator::collect))?
                .or(Some(Vec::new()))
        }
        _ => None,
    }
}

fn is_ordered_dict(graph: &Graph<'_>, callable: Value) -> bool {
    graph.global_name(callable) == Some(("collections", "OrderedDict"))
}

fn python_type(graph: &Graph<'_>, value: Value) -> String {
    let name = match graph.node(value) {
        Node::None => "NoneType",
        Node::Bool(_) => "bool",
        Node::Int(_) | Node::BigInt(_) => "int",
        Node::Float(_) => "float",
        Node::Str(_) | Node::Surrogate(_) => "str",
        Node::Bytes(_) => "bytes",
        Node::List(_) => "list",
        Node::Tuple(_) => "tuple",
        Node::Dict(_) => "dict",
        Node::Set(_) => "set",
        Node::Global { .. } => "a global",
        Node::Persistent(_) => "a storage",
        Node::New(object) | Node::Call(object) => {
            return match graph.global_name(object.callable) {
                Some(("builtins" | "__builtin__", name)) => name.to_owned(),
                Some((module, name)) => format!("{module}.{name}"),
                None => "unknown".to_owned(),
            };
        }
    };
    name.to_owned()
}

enum Stop {
    Opaque(String),
    Forbidden(String),
}

struct Writer<'g, 'a> {
    graph: &'g Graph<'a>,
    json: String,
    nodes: usize,
}

impl Writer<'_, '_> {
    fn write(&mut self, value: Value, depth: usize) -> Result<(), Stop> {
        let opaque = |why: &str| Err(Stop::Opaque(why.to_owned()));
        self.nodes += 1;
        if depth > MAX_DEPTH {
            return opaque("it is nested too deep, or holds itself");
        }
        if self.nodes > MAX_NODES || self.json.len() > MAX_JSON_BYTES {
            return opaque("it is too long");
        }
        let graph = self.graph;
        match graph.node(value) {
            Node::None => self.json.push_str("null"),
            Node::Bool(flag) => self.json.push_str(if flag { "true" } else { "false" }),
            Node::Int(number) => self.json.push_str(&number.to_string()),
            Node::BigInt(bytes) if bytes.len() <= MAX_INT_BYTES => {
                self.json.push_str(&decimal(bytes));
            }
            Node::BigInt(_) => return opaque("it holds an integer of too many digits"),
            Node::Float(number) if number.is_finite() => self.push(&number)?,
            Node::Float(_) => return opaque("it holds an infinite float or NaN, which JSON lacks"),
            Node::Str(text) => self.push(text)?,
            Node::Surrogate(_) => return opaque("it holds text that is not UTF-8"),
            Node::List(items) | Node::Tuple(items) => self.array(items, depth)?,
            Node::Bytes(_) => return opaque("it holds bytes"),
            Node::Set(_) => return opaque("it holds a set"),
            Node::Global { module, name } => {
                return Err(Stop::Opaque(format!("it holds {}", shown(module, name))));
            }
            Node::Persistent(_) => return opaque("it holds a storage"),
            Node::Dict(_) => self.object(value, depth)?,
            Node::Call(call) if is_ordered_dict(graph, call.callable) => {
                self.object(value, depth)?;
            }
            Node::Call(call) => return self.call(value, call.callable, call.args, depth),
            Node::New(object) => {
                let (module, name) = graph.global_name(object.callable).unwrap_or_default();
                return Err(Stop::Opaque(format!("it holds a {}", shown(module, name))));
            }
        }
        Ok(())
    }

    /// A `torch.Size` is a tuple; all else is no plain data, whether its call is harmless or not.
    fn call(
        &mut self,
        value: Value,
        callable: Value,
        args: Value,
        depth: usize,
    ) -> Result<(), Stop> {
        if let Some(why) = self.graph.forbidden(value) {
            return Err(Stop::Forbidden(why));
        }
        let (module, name) = self.graph.global_name(callable).unwrap_or_default();
        let inner = self.graph.as_sequence(args).and_then(|mut args| args.next());
        match inner {
            Some(inner) if (module, name) == ("torch", "Size") => self.write(inner, depth + 1),
            _ if super::tensor::tensor(self.graph, value).is_some() => {
                Err(Stop::Opaque("it holds a tensor".to_owned()))
            }
            _ => Err(Stop::Opaque(format!("it holds a {}", shown(module, name)))),
        }
    }

    fn push<T: serde::Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Stop> {
        let text = serde_json::to_string(value);
        self.json.push_str(&text.map_err(|error| Stop::Opaque(error.to_string()))?);
        Ok(())
    }

    fn array(&mut self, items: Items<'_>, depth: usize) -> Result<(), Stop> {
        self.json.push('[');
        for (index, item) in items.enumerate() {
            if index > 0 {
                self.json.push(',');
            }
            self.write(item, depth + 1)?;
        }
        self.json.push(']');
        Ok(())
    }

    fn object(&mut self, value: Value, depth: usize) -> Result<(), Stop> {
        let pairs = pairs(self.graph, value)
            .ok_or_else(|| Stop::Opaque("it holds a dict made in an old way".to_owned()))?;
        let mut order: Vec<(&str, Value)> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for (key, value) in pairs {
            let Some(key) = self.graph.as_str(key) else {
                return Err(Stop::Opaque("it holds a dict with keys that are no texts".to_owned()));
            };
            let place = *places.entry(key).or_insert(order.len());
            match order.get_mut(place) {
                Some(pair) => pair.1 = value,
                None => order.push((key, value)),
            }
        }
        self.json.push('{');
        for (index, (key, value)) in order.into_iter().enumerate() {
            if index > 0 {
                self.json.push(',');
            }
            self.push(key)?;
            self.json.push(':');
            self.write(value, depth + 1)?;
        }
        self.json.push('}');
        Ok(())
    }
}

fn shown(module: &str, name: &str) -> String {
    quoted(&format!("{module}.{name}"))
}

/// The decimal digits of an integer in two's complement, little endian.
fn decimal(bytes: &[u8]) -> String {
    let is_negative = bytes.last().is_some_and(|&top| top >= 0x80);
    let mut carry = is_negative;
    let magnitude = bytes.iter().map(|&byte| match is_negative {
        false => byte,
        true => {
            let (byte, over) = (!byte).overflowing_add(u8::from(carry));
            carry = over;
            byte
        }
    });
    // Base 10^9, least first.
    let mut digits: Vec<u32> = vec![0];
    let magnitude: Vec<u8> = magnitude.collect();
    for byte in magnitude.into_iter().rev() {
        let mut over = u64::from(byte);
        for digit in &mut digits {
            over += u64::from(*digit) << 8;
            *digit = (over % 1_000_000_000) as u32;
            over /= 1_000_000_000;
        }
        if over > 0 {
            digits.push(over as u32);
        }
    }
    let mut text = if is_negative { "-".to_owned() } else { String::new() };
    for (index, digit) in digits.iter().rev().enumerate() {
        match index {
            0 => text.push_str(&digit.to_string()),
            _ => text.push_str(&format!("{digit:09}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::{Options, parse};

    fn of(pickle: &[u8]) -> PlainObject {
        let graph = parse(pickle, &Options::ITEM).unwrap();
        plain(&graph, graph.root())
    }

    fn json(pickle: &[u8]) -> String {
        of(pickle).json().unwrap().to_owned()
    }

    #[test]
    fn long_integers_keep_their_digits() {
        let mut power = vec![0; 9];
        power[8] = 0x40;
        assert_eq!(decimal(&power), "1180591620717411303424");
        let minus = [0, 0, 0, 0, 0, 0, 0, 0, 0xC0];
        assert_eq!(decimal(&minus), "-1180591620717411303424");
        // -(2^71): its own negation in nine bytes.
        assert_eq!(decimal(&[0, 0, 0, 0, 0, 0, 0, 0, 0x80]), "-2361183241434822606848");
        assert_eq!(decimal(&[0xFF]), "-1");
        assert_eq!(decimal(&[]), "0");
    }

    #[test]
    fn plain_data_is_json() {
        // ("é\n", None, True, 1.5, {"a": 1, "a": 2})
        let start = b"\x80\x04(X\x03\x00\x00\x00\xc3\xa9\nN\x88G\x3f\xf8\0\0\0\0\0\0";
        let pickle = [&start[..], b"}(\x8c\x01aK\x01\x8c\x01aK\x02ut."].concat();
        assert_eq!(json(&pickle), "[\"é\\n\",null,true,1.5,{\"a\":2}]");
        assert_eq!(of(&pickle).python_type, "tuple");
        let ordered = b"\x80\x02ccollections\nOrderedDict\n)R(X\x01\0\0\0kK\x05u.";
        assert_eq!(json(ordered), "{\"k\":5}");
        assert_eq!(json(b"\x80\x02ctorch\nSize\n(K\x02K\x03t\x85R."), "[2,3]");
    }

    #[test]
    fn what_is_not_plain_says_why() {
        let forbidden = of(b"\x80\x02cposix\ngetcwd\n)R.").json().unwrap_err();
        assert_eq!(forbidden.code(), Code::ForbiddenGlobal);
        assert!(forbidden.what().contains("posix.getcwd"), "{forbidden}");
        // A list that holds itself; a list of lists of lists that doubles each time; NaN; bytes; an instance.
        let twice = |depth: usize| {
            let mut pickle = b"\x80\x04]\x94".to_vec();
            for level in 0..depth {
                pickle.extend([b']', 0x94, b'h', level as u8, b'a', b'h', level as u8, b'a']);
            }
            pickle.push(b'.');
            pickle
        };
        assert!(json(&twice(2)).starts_with("[[[],[]]"));
        let opaque: [&[u8]; 5] = [
            b"\x80\x02]q\0h\0a.",
            &twice(100),
            b"\x80\x02G\x7f\xf8\0\0\0\0\0\0.",
            b"\x80\x04C\x01a.",
            b"\x80\x02cmodule\nClass\n)\x81.",
        ];
        for pickle in opaque {
            assert_eq!(of(pickle).json().unwrap_err().code(), Code::Unsupported, "{pickle:?}");
        }
    }
}
