//! Walks over containers, segment by segment.

use super::heap::NIL;
use super::value::Value;

/// The items of a list, tuple or set.
#[derive(Clone, Debug)]
pub struct Items<'g> {
    pub(super) pool: &'g [u32],
    pub(super) now: std::slice::Iter<'g, u32>,
    pub(super) next: u32,
    pub(super) left: usize,
}

impl Items<'_> {
    pub(super) fn empty() -> Self {
        Items { pool: &[], now: [].iter(), next: NIL, left: 0 }
    }
}

impl Iterator for Items<'_> {
    type Item = Value;

    #[inline]
    fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(word) = self.now.next() {
                self.left = self.left.saturating_sub(1);
                return Some(Value::from_word(*word));
            }
            // Segments are never empty, so this ends; past the last, `get` finds nothing.
            let at = self.next as usize;
            let len = *self.pool.get(at + 1)? as usize;
            self.next = *self.pool.get(at)?;
            self.now = self.pool.get(at + 2..at + 2 + len)?.iter();
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Items<'_> {}

/// The keys and values of a dict.
#[derive(Clone, Debug)]
pub struct Pairs<'g>(pub(super) Items<'g>);

impl Iterator for Pairs<'_> {
    type Item = (Value, Value);

    #[inline]
    fn next(&mut self) -> Option<(Value, Value)> {
        Some((self.0.next()?, self.0.next()?))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.left / 2, Some(self.0.left / 2))
    }
}

impl ExactSizeIterator for Pairs<'_> {}
