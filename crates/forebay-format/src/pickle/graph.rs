//! What a pickle would build, and how to look at it.

use super::heap::{GlobalName, NIL, Span};
use super::items::{Items, Pairs};
use super::value::{Tag, Value};

/// The values of one pickle. Nodes may be shared and may hold themselves, so a walk needs a limit of its own.
pub struct Graph<'a> {
    pub(super) input: &'a [u8],
    /// Decoded text of old protocols; spans count on from the end of the input.
    pub(super) side: Vec<u8>,
    pub(super) words: Vec<u32>,
    pub(super) max_words: usize,
    pub(super) spans: Vec<Span>,
    pub(super) wides: Vec<u64>,
    pub(super) globals: Vec<GlobalName>,
    pub(super) root: Value,
    pub(super) end: usize,
}

/// A value, seen from outside.
#[derive(Clone, Debug)]
pub enum Node<'g> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A longer one: two's complement, little endian.
    BigInt(&'g [u8]),
    /// A float.
    Float(f64),
    /// A text.
    Str(&'g str),
    /// A text with lone surrogates, which UTF-8 does not have; its bytes as Python writes them.
    Surrogate(&'g [u8]),
    /// Bytes or a bytearray.
    Bytes(&'g [u8]),
    /// A list.
    List(Items<'g>),
    /// A tuple.
    Tuple(Items<'g>),
    /// A dict, in the order in which it was filled; a key may occur again, then the last counts.
    Dict(Pairs<'g>),
    /// A set or a frozen set.
    Set(Items<'g>),
    /// The name of a class, function or constant.
    Global {
        /// Its module.
        module: &'g str,
        /// Its name in the module, with dots for nested ones.
        name: &'g str,
    },
    /// An instance of a class, made without calling anything (`NEWOBJ`).
    New(Object),
    /// What a call gives (`REDUCE`); see [`Graph::forbidden`].
    Call(Object),
    /// What a persistent id stands for.
    Persistent(Value),
}

/// The parts of an instance or a call.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// The class or function; of a refused call it may be any value.
    pub callable: Value,
    /// The arguments: a tuple.
    pub args: Value,
    /// The state given afterwards (`BUILD`); `None`'s node where there is none.
    pub state: Value,
    /// Items appended or added: a list; `None`'s node where there are none.
    pub items: Value,
    /// Keys and values set: a dict; `None`'s node where there are none.
    pub pairs: Value,
    /// Keyword arguments of `NEWOBJ_EX`: a dict; `None`'s node where there are none.
    pub kwargs: Value,
}

impl<'a> Graph<'a> {
    /// The value of the whole pickle.
    pub fn root(&self) -> Value {
        self.root
    }

    /// The byte after its `STOP`.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Bytes of memory that the nodes take.
    pub fn memory_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u32>()
            + self.spans.capacity() * size_of::<Span>()
            + self.wides.capacity() * size_of::<u64>()
            + self.side.capacity()
    }

    /// What a value is.
    pub fn node(&self, value: Value) -> Node<'_> {
        match value.tag() {
            Tag::Const if value == Value::EMPTY_TUPLE => Node::Tuple(Items::empty()),
            Tag::Const if value == Value::TRUE => Node::Bool(true),
            Tag::Const if value == Value::FALSE => Node::Bool(false),
            Tag::Const => Node::None,
            Tag::SmallInt => Node::Int(value.small_int()),
            Tag::WideInt => Node::Int(self.wide(value) as i64),
            Tag::BigInt => Node::BigInt(self.bytes(value)),
            Tag::Float => Node::Float(f64::from_bits(self.wide(value))),
            Tag::Text => Node::Str(self.text(value)),
            Tag::Surrogate => Node::Surrogate(self.bytes(value)),
            Tag::Bytes => Node::Bytes(self.bytes(value)),
            Tag::List => Node::List(self.items(value)),
            Tag::Tuple => Node::Tuple(self.items(value)),
            Tag::Set => Node::Set(self.items(value)),
            Tag::Dict => Node::Dict(Pairs(self.items(value))),
            Tag::Global => {
                let (module, name) = self.global_name(value).unwrap_or_default();
                Node::Global { module, name }
            }
            Tag::New => Node::New(self.object(value)),
            Tag::Call => Node::Call(self.object(value)),
            Tag::Persistent => Node::Persistent(self.value(value.payload())),
        }
    }

    fn value(&self, at: usize) -> Value {
        Value::from_word(self.word(at))
    }

    fn wide(&self, value: Value) -> u64 {
        self.wides.get(value.payload()).copied().unwrap_or_default()
    }

    fn bytes(&self, value: Value) -> &[u8] {
        self.spans.get(value.payload()).map(|span| self.span_bytes(*span)).unwrap_or_default()
    }

    pub(super) fn span_bytes(&self, span: Span) -> &[u8] {
        let (start, len) = (span.start as usize, span.len as usize);
        let bytes = match start.checked_sub(self.input.len()) {
            None => self.input.get(start..start + len),
            Some(start) => self.side.get(start..start + len),
        };
        bytes.unwrap_or_default()
    }

    /// Text nodes were checked when they were made.
    fn text(&self, value: Value) -> &str {
        std::str::from_utf8(self.bytes(value)).unwrap_or_default()
    }

    fn object(&self, value: Value) -> Object {
        let at = value.payload();
        let extra = self.value(at + 3);
        let part = |slot| match extra {
            Value::NONE => Value::NONE,
            extra => self.value(extra.payload() + slot),
        };
        Object {
            callable: self.value(at),
            args: self.value(at + 1),
            state: self.value(at + 2),
            items: part(0),
            pairs: part(1),
            kwargs: part(2),
        }
    }

    #[inline]
    fn items(&self, value: Value) -> Items<'_> {
        let at = value.payload();
        if value.tag() == Tag::Tuple {
            let len = self.word(at) as usize;
            let words = self.words.get(at + 1..at + 1 + len).unwrap_or_default();
            return Items { pool: &[], now: words.iter(), next: NIL, left: len };
        }
        let left = self.word(at + 2) as usize;
        Items { pool: &self.words, now: [].iter(), next: self.word(at), left }
    }

    /// Module and name of a global.
    pub fn global_name(&self, value: Value) -> Option<(&str, &str)> {
        let global = match value.tag() {
            Tag::Global => self.globals.get(value.payload())?,
            _ => return None,
        };
        let text = |span| std::str::from_utf8(self.span_bytes(span)).unwrap_or_default();
        Some((text(global.module), text(global.name)))
    }

    /// Whether a value is the global of this name, in this module where one is given.
    #[inline]
    pub fn is_global(&self, value: Value, module: Option<&str>, name: &str) -> bool {
        let global = (value.tag() == Tag::Global).then(|| self.globals.get(value.payload()));
        global.flatten().is_some_and(|global| {
            self.span_bytes(global.name) == name.as_bytes()
                && module.is_none_or(|module| self.span_bytes(global.module) == module.as_bytes())
        })
    }

    /// Why a value may not be had: it is what a call of something unlisted gives. `None` for all else.
    pub fn forbidden(&self, value: Value) -> Option<String> {
        if value.tag() != Tag::Call {
            return None;
        }
        let callable = self.object(value).callable;
        match (callable.tag(), self.globals.get(callable.payload())) {
            (Tag::Global, Some(global)) if global.known => None,
            _ => Some(format!("it is made by calling {}", self.callable_shown(callable))),
        }
    }

    /// The name of what is called, for messages.
    pub(super) fn callable_shown(&self, callable: Value) -> String {
        match self.global_name(callable) {
            Some((module, name)) => escaped(&format!("{module}.{name}")),
            None => "something that has no name".to_string(),
        }
    }

    /// How many texts, byte strings and long integers there are.
    pub(crate) fn texts(&self) -> usize {
        self.spans.len()
    }

    /// The number of a text among these; the same text written twice has two. For tables beside the graph.
    #[inline]
    pub(crate) fn text_number(&self, value: Value) -> Option<usize> {
        (value.tag() == Tag::Text).then(|| value.payload())
    }

    /// The text, where the value is one.
    pub fn as_str(&self, value: Value) -> Option<&str> {
        (value.tag() == Tag::Text).then(|| self.text(value))
    }

    /// The integer, where the value is one that 64 signed bits hold.
    #[inline]
    pub fn as_i64(&self, value: Value) -> Option<i64> {
        match value.tag() {
            Tag::SmallInt => Some(value.small_int()),
            Tag::WideInt => Some(self.wide(value) as i64),
            _ => None,
        }
    }

    /// The integer, where the value is one that is not negative. Stops at 2^63 - 1, as sizes in torch do.
    #[inline]
    pub fn as_u64(&self, value: Value) -> Option<u64> {
        self.as_i64(value).and_then(|number| u64::try_from(number).ok())
    }

    /// The items, where the value is a list or a tuple.
    pub fn as_sequence(&self, value: Value) -> Option<Items<'_>> {
        match value.tag() {
            Tag::List | Tag::Tuple => Some(self.items(value)),
            _ if value == Value::EMPTY_TUPLE => Some(Items::empty()),
            _ => None,
        }
    }

    /// The pairs, where the value is a dict.
    pub fn as_dict(&self, value: Value) -> Option<Pairs<'_>> {
        (value.tag() == Tag::Dict).then(|| Pairs(self.items(value)))
    }

    /// Whether the value is `None`.
    pub fn is_none(&self, value: Value) -> bool {
        value == Value::NONE
    }

    /// The parts, where the value is an instance or a call.
    pub fn as_object(&self, value: Value) -> Option<Object> {
        matches!(value.tag(), Tag::New | Tag::Call).then(|| self.object(value))
    }

    /// The last value of a text key of a dict; looks at each pair, so it is for small dicts.
    pub fn get(&self, dict: Value, key: &str) -> Option<Value> {
        self.as_dict(dict)?.filter(|(k, _)| self.as_str(*k) == Some(key)).last().map(|(_, v)| v)
    }
}

/// A dotted name as it is, but for control characters; long ones are cut.
fn escaped(name: &str) -> String {
    let quoted = crate::text::quoted(name);
    quoted.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(&quoted).to_string()
}
