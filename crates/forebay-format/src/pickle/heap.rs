//! Where the nodes of a graph are: one pool of 32-bit words, and tables for what does not fit a word.
//!
//! ```text
//! tuple         length, items
//! list, set     first segment, last segment, number of items (dict: of keys and values together)
//! segment       next segment or NIL, length, items
//! new, call     callable, args, state, extra
//! extra         items (a list), pairs (a dict), keyword arguments; NONE where there are none
//! persistent    the id
//! ```
//!
//! Containers grow in segments because pickles fill them a thousand at a time, after they were handed out.

use super::graph::Graph;
use super::value::{Tag, Value};

/// No segment.
pub(super) const NIL: u32 = u32::MAX;

/// Bytes of the input, or of the side buffer for text that had to be decoded.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) start: u32,
    pub(super) len: u32,
}

/// A name that the pickle would import.
#[derive(Clone, Copy)]
pub(super) struct GlobalName {
    pub(super) module: Span,
    pub(super) name: Span,
    /// Whether calls of it are understood.
    pub(super) known: bool,
}

/// The reason why a node could not be made.
pub(super) struct Full;

type Made = Result<Value, Full>;

impl<'a> Graph<'a> {
    fn new_node(&mut self, tag: Tag, words: &[u32]) -> Made {
        let at = self.words.len();
        if at + words.len() > self.max_words {
            return Err(Full);
        }
        self.words.extend_from_slice(words);
        Value::new(tag, at).ok_or(Full)
    }

    pub(super) fn new_int(&mut self, number: i64) -> Made {
        match Value::small(number) {
            Some(value) => Ok(value),
            None => self.new_wide(Tag::WideInt, number as u64),
        }
    }

    pub(super) fn new_float(&mut self, number: f64) -> Made {
        self.new_wide(Tag::Float, number.to_bits())
    }

    fn new_wide(&mut self, tag: Tag, bits: u64) -> Made {
        let at = self.wides.len();
        self.wides.push(bits);
        Value::new(tag, at).ok_or(Full)
    }

    /// A node of bytes of the input that end at `end`.
    pub(super) fn new_span(&mut self, tag: Tag, end: usize, len: usize) -> Made {
        let span = span(end.checked_sub(len).ok_or(Full)?, len)?;
        self.push_span(tag, span)
    }

    /// A node of decoded bytes, kept in the side buffer.
    pub(super) fn new_side(&mut self, tag: Tag, bytes: &[u8]) -> Made {
        let span = self.side_span(bytes)?;
        self.push_span(tag, span)
    }

    pub(super) fn side_span(&mut self, bytes: &[u8]) -> Result<Span, Full> {
        let span = span(self.input.len() + self.side.len(), bytes.len())?;
        self.side.extend_from_slice(bytes);
        Ok(span)
    }

    fn push_span(&mut self, tag: Tag, span: Span) -> Made {
        let at = self.spans.len();
        self.spans.push(span);
        Value::new(tag, at).ok_or(Full)
    }

    pub(super) fn new_tuple(&mut self, items: &[Value]) -> Made {
        if items.is_empty() {
            return Ok(Value::EMPTY_TUPLE);
        }
        let value = self.new_node(Tag::Tuple, &[items.len() as u32])?;
        self.extend(items)?;
        Ok(value)
    }

    fn extend(&mut self, items: &[Value]) -> Result<(), Full> {
        if self.words.len() + items.len() > self.max_words {
            return Err(Full);
        }
        self.words.extend(items.iter().map(|item| item.word()));
        Ok(())
    }

    /// An empty list, set or dict.
    pub(super) fn new_container(&mut self, tag: Tag) -> Made {
        self.new_node(tag, &[NIL, NIL, 0])
    }

    /// Adds items to a list, set or dict (keys and values in turn).
    pub(super) fn grow(&mut self, container: Value, items: &[Value]) -> Result<(), Full> {
        if items.is_empty() {
            return Ok(());
        }
        let at = container.payload();
        let total = self.word(at + 2).checked_add(items.len() as u32).ok_or(Full)?;
        let last = self.word(at + 1);
        let last_len = if last == NIL { 0 } else { self.word(last as usize + 1) };
        if last != NIL && last as usize + 2 + last_len as usize == self.words.len() {
            // Nothing was made since: the segment grows in place.
            self.extend(items)?;
            self.set_word(last as usize + 1, last_len + items.len() as u32);
        } else {
            let segment = self.words.len() as u32;
            if self.words.len() + 2 > self.max_words {
                return Err(Full);
            }
            self.words.extend_from_slice(&[NIL, items.len() as u32]);
            self.extend(items)?;
            self.set_word(if last == NIL { at } else { last as usize }, segment);
            self.set_word(at + 1, segment);
        }
        self.set_word(at + 2, total);
        Ok(())
    }

    pub(super) fn new_object(&mut self, tag: Tag, callable: Value, args: Value) -> Made {
        let none = Value::NONE.word();
        self.new_node(tag, &[callable.word(), args.word(), none, none])
    }

    pub(super) fn new_persistent(&mut self, id: Value) -> Made {
        self.new_node(Tag::Persistent, &[id.word()])
    }

    pub(super) fn set_state(&mut self, object: Value, state: Value) {
        self.set_word(object.payload() + 2, state.word());
    }

    pub(super) fn set_kwargs(&mut self, object: Value, kwargs: Value) -> Result<(), Full> {
        let extra = self.extra(object)?;
        self.set_word(extra + 2, kwargs.word());
        Ok(())
    }

    /// The list (0) or dict (1) that an object of a class derived from one is filled through.
    pub(super) fn part(&mut self, object: Value, slot: usize, tag: Tag) -> Made {
        let extra = self.extra(object)?;
        let part = Value::from_word(self.word(extra + slot));
        if part != Value::NONE {
            return Ok(part);
        }
        let part = self.new_container(tag)?;
        self.set_word(extra + slot, part.word());
        Ok(part)
    }

    fn extra(&mut self, object: Value) -> Result<usize, Full> {
        let at = object.payload() + 3;
        let extra = Value::from_word(self.word(at));
        if extra != Value::NONE {
            return Ok(extra.payload());
        }
        let none = Value::NONE.word();
        let extra = self.new_node(Tag::Tuple, &[none; 3])?;
        self.set_word(at, extra.word());
        Ok(extra.payload())
    }

    pub(super) fn new_global(&mut self, global: GlobalName) -> Made {
        let at = self.globals.len();
        self.globals.push(global);
        Value::new(Tag::Global, at).ok_or(Full)
    }

    #[inline]
    pub(super) fn word(&self, at: usize) -> u32 {
        self.words.get(at).copied().unwrap_or(NIL)
    }

    #[inline]
    fn set_word(&mut self, at: usize, word: u32) {
        if let Some(slot) = self.words.get_mut(at) {
            *slot = word;
        }
    }
}

fn span(start: usize, len: usize) -> Result<Span, Full> {
    match (u32::try_from(start), u32::try_from(len)) {
        (Ok(start), Ok(len)) => Ok(Span { start, len }),
        _ => Err(Full),
    }
}
