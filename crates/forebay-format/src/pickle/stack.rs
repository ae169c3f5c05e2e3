//! What the opcodes do to stack, memo and nodes.

use super::allow::Unknown;
use super::heap::{Full, GlobalName};
use super::machine::Machine;
use super::value::{Tag, Value};
use forebay_error::{Code, Error, Result};

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
    fn top(&self) -> Result<Value> {
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
        self.stack.truncate(start);
        self.push(made)
    }

    /// Where the topmost `len` values start; they must lie above the innermost mark.
    #[inline]
    fn start_of(&self, len: usize) -> Result<usize> {
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
        let made = self.graph.new_container(tag);
        let container = self.made(made)?;
        self.grow_from_stack(container, items)?;
        self.stack.push(container);
        Ok(())
    }

    /// The node of a name; equal names are one node.
    pub(super) fn global(&mut self, module: &[u8], name: &[u8]) -> Result<Value> {
        let key = (module.to_vec(), name.to_vec());
        if let Some(&value) = self.globals.get(&key) {
            return Ok(value);
        }
        let (Ok(module_text), Ok(name_text)) = (str::from_utf8(module), str::from_utf8(name))
        else {
            return Err(self.cursor.fault("a module or class has a name that is not UTF-8"));
        };
        let known = self.options.allow.permits(module_text, name_text);
        let spans = self.graph.side_span(module).and_then(|module| {
            let name = self.graph.side_span(name)?;
            Ok(GlobalName { module, name, known })
        });
        let made = spans.and_then(|global| self.graph.new_global(global));
        let value = self.made(made)?;
        self.globals.insert(key, value);
        Ok(value)
    }

    pub(super) fn stack_global(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Some(module), Some(name)) = (self.graph.as_str(module), self.graph.as_str(name))
        else {
            return Err(self.cursor.fault("a class is not named by two texts"));
        };
        let (module, name) = (module.as_bytes().to_vec(), name.as_bytes().to_vec());
        let value = self.global(&module, &name)?;
        self.stack.push(value);
        Ok(())
    }

    pub(super) fn reduce(&mut self) -> Result<()> {
        let args = self.pop()?;
        let callable = self.pop()?;
        self.call(callable, args)
    }

    /// Notes a call, or refuses it.
    pub(super) fn call(&mut self, callable: Value, args: Value) -> Result<()> {
        self.check_args(args)?;
        let made = self.graph.new_object(Tag::Call, callable, args);
        let call = self.made(made)?;
        if self.options.allow.unknown() == Unknown::Refuse && !self.is_known(callable) {
            return Err(self.forbidden(self.graph.callable_shown(callable)));
        }
        self.stack.push(call);
        Ok(())
    }

    fn is_known(&self, callable: Value) -> bool {
        callable.tag() == Tag::Global
            && self.graph.globals.get(callable.payload()).is_some_and(|global| global.known)
    }

    pub(super) fn newobj(&mut self) -> Result<()> {
        let args = self.pop()?;
        let class = self.pop()?;
        self.instance(class, args).map(drop)
    }

    pub(super) fn newobj_ex(&mut self) -> Result<()> {
        let kwargs = self.pop()?;
        let args = self.pop()?;
        let class = self.pop()?;
        let object = self.instance(class, args)?;
        if kwargs.tag() != Tag::Dict {
            return Err(self.cursor.fault("keyword arguments are not a dict"));
        }
        self.graph.set_kwargs(object, kwargs).map_err(|Full| self.full())
    }

    fn instance(&mut self, class: Value, args: Value) -> Result<Value> {
        self.check_args(args)?;
        if class.tag() != Tag::Global {
            return Err(self.cursor.fault("an instance is made of what is no class"));
        }
        let made = self.graph.new_object(Tag::New, class, args);
        let object = self.made(made)?;
        self.stack.push(object);
        Ok(object)
    }

    fn check_args(&self, args: Value) -> Result<()> {
        match args.tag() == Tag::Tuple || args == Value::EMPTY_TUPLE {
            true => Ok(()),
            false => Err(self.cursor.fault("arguments are not a tuple")),
        }
    }

    pub(super) fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        let object = self.top()?;
        match self.graph.as_object(object) {
            Some(parts) if parts.state == Value::NONE => {
                self.graph.set_state(object, state);
                Ok(())
            }
            Some(_) => Err(self.cursor.fault("an object gets a state twice")),
            None => Err(self.cursor.fault("a state is given to what is no object")),
        }
    }

    pub(super) fn persistent(&mut self, id: Value) -> Result<()> {
        if !self.options.persistent {
            return Err(self.cursor.fault("a persistent id, which nothing here can resolve"));
        }
        let made = self.graph.new_persistent(id);
        self.push(made)
    }

    #[cold]
    pub(super) fn underflow(&self) -> Error {
        self.cursor.fault("it takes a value that was never put there")
    }

    #[cold]
    fn full(&self) -> Error {
        let words = self.options.limits.words;
        self.cursor.fault(format!("it has more values than fit in {} MiB", words >> 18))
    }

    #[cold]
    pub(super) fn forbidden(&self, what: impl std::fmt::Display) -> Error {
        let at = self.cursor.opcode_at;
        let what = format!("the pickle calls {what}, at byte {at}; it was not called");
        Error::new(Code::ForbiddenGlobal, what)
            .hint("only calls that this reader understands are accepted; do not load the file elsewhere unless you trust it")
    }
}

/// An object's sets are kept as lists.
fn part_tag(tag: Tag) -> Tag {
    if tag == Tag::Dict { Tag::Dict } else { Tag::List }
}
