//! Plain values in `.metadata`: who saved, and attributes of our own.

use super::pickle;
use super::pickler::Pickler;

/// Which save it was, as stock torch records it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageMeta {
    /// Where the checkpoint was saved: an address for people. Plain text, since a path object of one Python is unknown
    /// to another.
    pub checkpoint_id: String,
    /// An identifier of the save, by convention a UUID.
    pub save_id: String,
}

/// A plain Python value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainValue {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<PlainValue>),
    /// A dict with keys of text.
    Dict(Vec<(String, PlainValue)>),
}

/// Values deeper than this are refused: they are for a handful of facts.
const MAX_DEPTH: usize = 16;

impl PlainValue {
    pub(super) fn too_deep(&self) -> bool {
        self.deeper_than(MAX_DEPTH)
    }

    fn deeper_than(&self, depth: usize) -> bool {
        let Some(left) = depth.checked_sub(1) else { return true };
        match self {
            PlainValue::List(values) => values.iter().any(|value| value.deeper_than(left)),
            PlainValue::Dict(pairs) => pairs.iter().any(|(_, value)| value.deeper_than(left)),
            _ => false,
        }
    }
}

impl<W: std::io::Write> Pickler<W> {
    pub(super) fn value(&mut self, value: &PlainValue) {
        let out = self.bytes();
        match value {
            PlainValue::None => out.push(pickle::NONE),
            PlainValue::Bool(value) => pickle::boolean(out, *value),
            PlainValue::Int(value) => pickle::signed(out, *value),
            PlainValue::Text(value) => pickle::text(out, value),
            PlainValue::List(values) => {
                self.bytes().extend_from_slice(&[pickle::EMPTY_LIST, pickle::MARK]);
                for value in values {
                    self.value(value);
                }
                self.bytes().push(pickle::APPENDS);
            }
            PlainValue::Dict(pairs) => {
                self.bytes().extend_from_slice(&[pickle::EMPTY_DICT, pickle::MARK]);
                for (key, value) in pairs {
                    self.word(key);
                    self.value(value);
                }
                self.bytes().push(pickle::SETITEMS);
            }
        }
    }
}
