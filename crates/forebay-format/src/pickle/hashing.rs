//! What the keys of dicts and sets cost Python.
//!
//! A key is hashed whenever it is put in, and Python walks a tuple for that each time it meets it: sixty tuples that
//! hold the one before twice are 2^60 steps, in 440 bytes, and nothing interrupts them. Here every tuple knows how many
//! values it has when written out, and what is hashed is added up: more than a pickle of this length can ask for in
//! earnest is an error.

use super::machine::Machine;
use super::value::{Tag, Value};
use forebay_error::Result;

/// Values that any pickle may have hashed: 20 ms of Python's time.
const HASHED_MIN: u64 = 1 << 20;

/// And so many more for each byte of it.
const HASHED_PER_BYTE: u64 = 16;

/// Tuples are remembered that have so many values more than they have items.
const NESTED_MIN: u64 = 8;

impl Machine<'_, '_> {
    /// Remembers how many values a new tuple of these items has, where that is not plain.
    #[inline]
    pub(super) fn weigh(&mut self, tuple: Value, start: usize) {
        let items = self.stack.get(start..).unwrap_or_default();
        if !items.iter().any(|item| item.tag() == Tag::Tuple) {
            return;
        }
        let weight = items.iter().fold(1u64, |sum, &item| sum.saturating_add(self.weight(item)));
        if weight > items.len() as u64 + NESTED_MIN {
            self.weights.insert(tuple, weight);
        }
    }

    /// Values that Python walks to hash this one, at most. A frozen set remembers its hash.
    fn weight(&self, value: Value) -> u64 {
        if value.tag() != Tag::Tuple {
            return 1;
        }
        let plain = || self.graph.word(value.payload()) as u64 + NESTED_MIN + 1;
        self.weights.get(&value).copied().unwrap_or_else(plain)
    }

    /// Counts a value that is hashed.
    #[inline]
    pub(super) fn hash(&mut self, value: Value) -> Result<()> {
        self.hashed = self.hashed.saturating_add(self.weight(value));
        let most = HASHED_MIN + HASHED_PER_BYTE * self.graph.input.len() as u64;
        if self.hashed > most {
            let what = format!("keys of more than {most} values in all are to be hashed");
            let hint = "no program writes such keys: the file was made to keep readers busy";
            return Err(self.cursor.fault(what).hint(hint));
        }
        Ok(())
    }

    /// Counts what goes into a dict or set: the topmost values of the stack.
    pub(super) fn hash_items(&mut self, tag: Tag, start: usize) -> Result<()> {
        let step = match tag {
            Tag::Dict => 2,
            Tag::Set => 1,
            _ => return Ok(()),
        };
        for at in (start..self.stack.len()).step_by(step) {
            if let Some(&key) = self.stack.get(at) {
                self.hash(key)?;
            }
        }
        Ok(())
    }

    /// Counts what a call may hash: sets and dicts are made by calls, of lists of keys or pairs.
    pub(super) fn hash_arguments(&mut self, args: Value) -> Result<()> {
        for value in self.keys_of(args) {
            self.hash(value)?;
            for inner in self.keys_of(value) {
                self.hash(inner)?;
                for key in self.keys_of(inner) {
                    self.hash(key)?;
                }
            }
        }
        Ok(())
    }

    /// The items of a list, tuple or set, as many as may be hashed at all.
    fn keys_of(&self, value: Value) -> Vec<Value> {
        let most = HASHED_MIN + HASHED_PER_BYTE * self.graph.input.len() as u64;
        let left = most.saturating_sub(self.hashed);
        let items = self.graph.as_sequence(value).into_iter().flatten();
        items.take(usize::try_from(left).unwrap_or(usize::MAX).saturating_add(1)).collect()
    }
}
