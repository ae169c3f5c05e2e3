//! The stack machine. One loop over the opcodes, no recursion; what Python would import or call becomes a node.

use super::cursor::Cursor;
use super::graph::Graph;
use super::opcode as op;
use super::value::{Tag, Value};
use super::{Options, old};
use forebay_error::{Error, Result};
use std::collections::HashMap;

/// The newest protocol there is.
const NEWEST_PROTOCOL: u8 = 5;

pub(super) fn run<'a>(input: &'a [u8], options: &Options) -> Result<Graph<'a>> {
    let limit = options.limits.input_bytes;
    if input.len() > limit {
        let what = format!("a pickle of {} bytes; up to {limit} are read", input.len());
        return Err(Error::new(options.code, what));
    }
    let mut machine = Machine::new(input, options);
    while machine.step()? {}
    Ok(machine.graph)
}

pub(super) struct Machine<'a, 'o> {
    pub(super) cursor: Cursor<'a>,
    pub(super) graph: Graph<'a>,
    pub(super) options: &'o Options,
    pub(super) stack: Vec<Value>,
    /// Heights of the stack where containers were opened.
    pub(super) marks: Vec<usize>,
    pub(super) memo: Vec<Value>,
    /// Entries of the memo that are set: what `MEMOIZE` counts on from.
    pub(super) memoized: usize,
    /// Globals by the nodes of their texts: what a pickle may name again and again at little cost.
    pub(super) named: HashMap<(Value, Value), Value>,
    /// Globals by name, so that equal names are one node.
    pub(super) globals: HashMap<(Vec<u8>, Vec<u8>), Value>,
    /// Values in tuples that hold tuples, written out.
    pub(super) weights: HashMap<Value, u64>,
    /// Values that Python would walk to hash keys, so far.
    pub(super) hashed: u64,
}

impl<'a, 'o> Machine<'a, 'o> {
    fn new(input: &'a [u8], options: &'o Options) -> Self {
        let graph = Graph {
            input,
            side: Vec::new(),
            words: Vec::new(),
            max_words: options.limits.words,
            spans: Vec::new(),
            wides: Vec::new(),
            globals: Vec::new(),
            root: Value::NONE,
            end: 0,
        };
        let cursor = Cursor::new(input, options.code);
        let (stack, marks, memo) = (Vec::new(), Vec::new(), Vec::new());
        let (named, globals, weights) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (memoized, hashed) = (0, 0);
        Self {
            cursor,
            graph,
            options,
            stack,
            marks,
            memo,
            memoized,
            named,
            globals,
            weights,
            hashed,
        }
    }

    /// Carries out one opcode; false after `STOP`.
    #[inline]
    fn step(&mut self) -> Result<bool> {
        match self.cursor.opcode()? {
            op::MEMOIZE => self.put(self.memoized)?,
            op::BINGET => {
                let index = self.cursor.u8()?;
                self.get(usize::from(index))?;
            }
            op::LONG_BINGET => {
                let index = self.cursor.u32()?;
                self.get(index as usize)?;
            }
            op::BINPUT => {
                let index = self.cursor.u8()?;
                self.put(usize::from(index))?;
            }
            op::LONG_BINPUT => {
                let index = self.cursor.u32()?;
                self.put(index as usize)?;
            }
            op::BININT1 => {
                let number = self.cursor.u8()?;
                self.push_int(i64::from(number))?;
            }
            op::BININT2 => {
                let number = self.cursor.u16()?;
                self.push_int(i64::from(number))?;
            }
            op::BININT => {
                let number = self.cursor.u32()? as i32;
                self.push_int(i64::from(number))?;
            }
            op::TUPLE1 => self.tuple(1)?,
            op::TUPLE2 => self.tuple(2)?,
            op::TUPLE3 => self.tuple(3)?,
            op::TUPLE => {
                let items = self.since_mark()?;
                self.tuple(items)?;
            }
            op::EMPTY_TUPLE => self.stack.push(Value::EMPTY_TUPLE),
            op::EMPTY_DICT => self.container(Tag::Dict)?,
            op::EMPTY_LIST => self.container(Tag::List)?,
            op::EMPTY_SET => self.container(Tag::Set)?,
            op::MARK => self.mark()?,
            op::SETITEM => self.fill(Tag::Dict, 2)?,
            op::APPEND => self.fill(Tag::List, 1)?,
            op::SETITEMS => self.fill_since_mark(Tag::Dict)?,
            op::APPENDS => self.fill_since_mark(Tag::List)?,
            op::ADDITEMS => self.fill_since_mark(Tag::Set)?,
            op::NEWOBJ => self.newobj()?,
            op::BUILD => self.build()?,
            op::REDUCE => self.reduce()?,
            op::STACK_GLOBAL => self.stack_global()?,
            op::NONE => self.stack.push(Value::NONE),
            op::NEWTRUE => self.stack.push(Value::TRUE),
            op::NEWFALSE => self.stack.push(Value::FALSE),
            op::STOP => {
                self.graph.root = self.pop()?;
                self.graph.end = self.cursor.pos();
                return Ok(false);
            }
            other => self.step_sized(other)?,
        }
        Ok(true)
    }

    /// Opcodes that carry a length, and the rest of protocols 2 to 5.
    fn step_sized(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            op::SHORT_BINUNICODE | op::SHORT_BINBYTES | op::LONG1 | op::SHORT_BINSTRING => {
                let len = self.cursor.u8()?;
                self.sized(opcode, u64::from(len))
            }
            op::BINUNICODE | op::BINBYTES | op::LONG4 | op::BINSTRING => {
                let len = self.cursor.u32()?;
                self.sized(opcode, u64::from(len))
            }
            op::BINUNICODE8 | op::BINBYTES8 | op::BYTEARRAY8 => {
                let len = self.cursor.u64()?;
                self.sized(opcode, len)
            }
            op::BINFLOAT => {
                let number = self.cursor.f64()?;
                let made = self.graph.new_float(number);
                self.push(made)
            }
            op::FRAME => {
                let len = self.cursor.u64()?;
                self.cursor.check_left(len)
            }
            op::PROTO => match self.cursor.u8()? {
                0..=NEWEST_PROTOCOL => Ok(()),
                newer => Err(self.cursor.fault(format!("protocol {newer} is not known"))),
            },
            op::FROZENSET => {
                let items = self.since_mark()?;
                self.hash_items(Tag::Set, self.start_of(items)?)?;
                self.container(Tag::Set)?;
                let set = self.pop()?;
                self.grow_from_stack(set, items)?;
                self.stack.push(set);
                Ok(())
            }
            op::NEWOBJ_EX => self.newobj_ex(),
            op::BINPERSID => {
                let id = self.pop()?;
                self.persistent(id)
            }
            op::EXT1 | op::EXT2 | op::EXT4 => {
                Err(self.forbidden("an extension code, which only the writing process knows"))
            }
            op::NEXT_BUFFER | op::READONLY_BUFFER => {
                Err(self.cursor.fault("buffers outside of the pickle are not read"))
            }
            other => self.step_old(other),
        }
    }

    fn sized(&mut self, opcode: u8, len: u64) -> Result<()> {
        let bytes = self.cursor.take(len)?;
        let tag = match opcode {
            op::SHORT_BINUNICODE | op::BINUNICODE | op::BINUNICODE8 => {
                if std::str::from_utf8(bytes).is_ok() { Tag::Text } else { Tag::Surrogate }
            }
            // Strings of Python 2: text where they can be.
            op::SHORT_BINSTRING | op::BINSTRING if std::str::from_utf8(bytes).is_ok() => Tag::Text,
            op::LONG1 | op::LONG4 if bytes.len() <= 8 => return self.push_int(short_long(bytes)),
            op::LONG1 | op::LONG4 => Tag::BigInt,
            _ => Tag::Bytes,
        };
        let made = self.graph.new_span(tag, self.cursor.pos(), bytes.len());
        self.push(made)
    }

    /// What only protocols 0 and 1 write.
    fn step_old(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            op::GLOBAL => {
                let (module, name) = (self.cursor.line()?, self.cursor.line()?);
                let global = self.global(module, name)?;
                self.stack.push(global);
            }
            op::POP => drop(self.pop_or_mark()?),
            op::POP_MARK => {
                let items = self.since_mark()?;
                self.stack.truncate(self.stack.len() - items);
            }
            op::DUP => {
                let top = self.pop()?;
                self.stack.extend([top, top]);
            }
            op::DICT => self.collect(Tag::Dict)?,
            op::LIST => self.collect(Tag::List)?,
            op::INST => {
                let (module, name) = (self.cursor.line()?, self.cursor.line()?);
                let class = self.global(module, name)?;
                let items = self.since_mark()?;
                self.tuple(items)?;
                let args = self.pop()?;
                self.call(class, args)?;
            }
            op::OBJ => {
                let items = self.since_mark()?.checked_sub(1);
                let items = items.ok_or_else(|| self.underflow())?;
                self.tuple(items)?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.call(class, args)?;
            }
            op::PERSID => {
                let line = self.cursor.line()?;
                let made = self.graph.new_side(Tag::Bytes, line);
                let id = self.made(made)?;
                self.persistent(id)?;
            }
            op::INT | op::LONG | op::FLOAT | op::STRING | op::UNICODE | op::GET | op::PUT => {
                let line = self.cursor.line()?;
                self.step_line(opcode, line)?
                    .ok_or_else(|| self.cursor.fault("a number or text is misspelt"))?;
            }
            other => return Err(self.cursor.fault(format!("byte 0x{other:02x} is no opcode"))),
        }
        Ok(())
    }

    /// `None` where the line is not what the opcode says.
    fn step_line(&mut self, opcode: u8, line: &[u8]) -> Result<Option<()>> {
        let made = match opcode {
            op::INT => match old::int(line) {
                Some(old::OldInt::Bool(truth)) => {
                    Some(Ok(if truth { Value::TRUE } else { Value::FALSE }))
                }
                Some(old::OldInt::Int(number)) => Some(self.graph.new_int(number)),
                None => None,
            },
            op::LONG => old::long(line).map(|number| self.graph.new_int(number)),
            op::FLOAT => old::float(line).map(|number| self.graph.new_float(number)),
            op::UNICODE => {
                old::unicode(line).map(|text| self.graph.new_side(Tag::Text, text.as_bytes()))
            }
            op::STRING => old::string(line).map(|bytes| {
                let text = std::str::from_utf8(&bytes).is_ok();
                self.graph.new_side(if text { Tag::Text } else { Tag::Bytes }, &bytes)
            }),
            op::GET => return old::index(line).map(|index| self.get(index)).transpose(),
            _ => return old::index(line).map(|index| self.put(index)).transpose(),
        };
        made.map(|made| self.push(made)).transpose()
    }
}

/// Two's complement, little endian, of up to eight bytes; none are 0.
fn short_long(bytes: &[u8]) -> i64 {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut wide = [if negative { 0xff } else { 0 }; 8];
    for (wide, byte) in wide.iter_mut().zip(bytes) {
        *wide = *byte;
    }
    i64::from_le_bytes(wide)
}
