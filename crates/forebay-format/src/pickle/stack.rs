//! What the opcodes do to stack, memo and containers.

use super::heap::Full;
use super::machine::Machine;
use super::value::{Tag, Value};
use forebay_error::{Error, Result};

type Made = Result<Value, Full>;

impl Machine<'_, '_> {
    #[inline]
    pub(super) fn pop(&mut self) -> Result<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| self.underflow()),
            false => Err(self.underflow()),
        }
    }

    /// `POP` takes a mark where one is on top.
    pub(super) fn pop_or_mark(&mut self) -> Result<()> {
        match self.marks.last() {
            Some(&mark) if mark == self.stack.len() => {
                self.marks.pop();
                Ok(())
            }
            _ => self.pop().map(drop),
        }
    }

    /// The value on top, which stays.
    pub(super) fn top(&self) -> Result<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(top) if self.stack.len() > floor => Ok(*top),
            _ => Err(self.underflow()),
        }
    }

    pub(super) fn made(&self, made: Made) -> Result<Value> {
        made.map_err(|Full| self.full())
    }

    #[inline]
    pub(super) fn push(&mut self, made: Made) -> Result<()> {
        match made {
            Ok(value) => {
                self.stack.push(value);
                Ok(())
            }
            Err(Full) => Err(self.full()),
        }
    }

    #[inline]
    pub(super) fn push_int(&mut self, number: i64) -> Result<()> {
        let made = self.graph.new_int(number);
        self.push(made)
    }

    pub(super) fn mark(&mut self) -> Result<()> {
        let depth = self.options.limits.depth;
        if self.marks.len() >= depth {
            return Err(self.cursor.fault(format!("more than {depth} containers are open")));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Closes the innermost mark; how many values lie above it.
    #[inline]
    pub(super) fn since_mark(&mut self) -> Result<usize> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.len() - mark),
            None => Err(self.cursor.fault("a container ends that was not opened")),
        }
    }

    #[inline]
    pub(super) fn get(&mut self, index: usize) -> Result<()> {
        match self.memo.get(index) {
            Some(&value) if value != Value::UNSET => {
                self.stack.push(value);
                Ok(())
            }
            _ => Err(self.cursor.fault(format!("nothing was kept as number {index}"))),
        }
    }

    /// An honest pickle keeps no more values than it has bytes, so the memo is never longer than that.
    #[inline]
    pub(super) fn put(&mut self, index: usize) -> Result<()> {
        let value = self.top()?;
        if index == self.memo.len() {
            self.memo.push(value);
            self.memoized += 1;
            return Ok(());
        }
        if index >= self.graph.input.len() {
            return Err(self.cursor.fault(format!("a value is to be kept as number {index}")));
        }
        if index >= self.memo.len() {
            self.memo.resize(index + 1, Value::UNSET);
        }
        if let Some(slot) = self.memo.get_mut(index) {
            self.memoized += usize::from(*slot == Value::UNSET);
            *slot = value;
        }
        Ok(())
    }

    /// Makes a tuple of the topmost values.
    #[inline]
    pub(super) fn tuple(&mut self, len: usize) -> Result<()> {
        let start = self.start_of(len)?;
        let made = self.graph.new_tuple(self.stack.get(start..).unwrap_or_default());
        if let Ok(tuple) = made {
            self.weigh(tuple, start);
        }
        self.stack.truncate(start);
        self.push(made)
    }

    /// Where the topmost `len` values start; they must lie above the innermost mark.
    #[inline]
    pub(super) fn start_of(&self, len: usize) -> Result<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(len).filter(|start| *start >= floor);
        start.ok_or_else(|| self.underflow())
    }

    #[inline]
    pub(super) fn container(&mut self, tag: Tag) -> Result<()> {
        let made = self.graph.new_container(tag);
        self.push(made)
    }

    pub(super) fn fill_since_mark(&mut self, tag: Tag) -> Result<()> {
        let items = self.since_mark()?;
        self.fill(tag, items)
    }

    /// Puts the topmost values into the container below them, or into the list or dict part of an object.
    #[inline]
    pub(super) fn fill(&mut self, tag: Tag, items: usize) -> Result<()> {
        let start = self.start_of(items)?;
        let floor = self.marks.last().copied().unwrap_or(0);
        let below = start.checked_sub(1).filter(|below| *below >= floor);
        let Some(&target) = below.and_then(|below| self.stack.get(below)) else {
            return Err(self.underflow());
        };
        if tag == Tag::Dict && items % 2 == 1 {
            return Err(self.cursor.fault("a key has no value"));
        }
        self.hash_items(tag, start)?;
        let container = match target.tag() {
            found if found == tag => Ok(target),
            Tag::New | Tag::Call => {
                self.graph.part(target, usize::from(tag == Tag::Dict), part_tag(tag))
            }
            _ => return Err(self.cursor.fault("items are added to what holds none of their kind")),
        };
        let container = self.made(container)?;
        self.grow_from_stack(container, items)
    }

    pub(super) fn grow_from_stack(&mut self, container: Value, items: usize) -> Result<()> {
        let start = self.start_of(items)?;
        let grown = self.graph.grow(container, self.stack.get(start..).unwrap_or_default());
        self.stack.truncate(start);
        grown.map_err(|Full| self.full())
    }

    /// `DICT` and `LIST`: a new container of everything since the mark.
    pub(super) fn collect(&mut self, tag: Tag) -> Result<()> {
        let items = self.since_mark()?;
        if tag == Tag::Dict && items % 2 == 1 {
            return Err(self.cursor.fault("a key has no value"));
        }
        self.hash_items(tag, self.start_of(items)?)?;
        let made = self.graph.new_container(tag);
        let container = self.made(made)?;
        self.grow_from_stack(container, items)?;
        self.stack.push(container);
        Ok(())
    }

    #[cold]
    pub(super) fn underflow(&self) -> Error {
        self.cursor.fault("it takes a value that was never put there")
    }

    #[cold]
    pub(super) fn full(&self) -> Error {
        let words = self.options.limits.words;
        self.cursor.fault(format!("it has more values than fit in {} MiB", words >> 18))
    }
}

/// An object's sets are kept as lists.
fn part_tag(tag: Tag) -> Tag {
    if tag == Tag::Dict { Tag::Dict } else { Tag::List }
}
