//! Names, calls and instances: what Python would import and run, and what becomes a note here.

use super::allow::Unknown;
use super::heap::{Full, GlobalName};
use super::machine::Machine;
use super::value::{Tag, Value};
use forebay_error::{Code, Error, Result};

impl Machine<'_, '_> {
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
        if let Some(&known) = self.named.get(&(module, name)) {
            self.stack.push(known);
            return Ok(());
        }
        let nodes = (module, name);
        let (Some(module), Some(name)) = (self.graph.as_str(module), self.graph.as_str(name))
        else {
            return Err(self.cursor.fault("a class is not named by two texts"));
        };
        let (module, name) = (module.as_bytes().to_vec(), name.as_bytes().to_vec());
        let value = self.global(&module, &name)?;
        self.named.insert(nodes, value);
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
        self.hash_arguments(args)?;
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
    pub(super) fn forbidden(&self, what: impl std::fmt::Display) -> Error {
        let at = self.cursor.opcode_at;
        let what = format!("the pickle calls {what}, at byte {at}; it was not called");
        Error::new(Code::ForbiddenGlobal, what).hint(
            "do not open the file with a reader that runs pickles unless you trust its origin",
        )
    }
}
