//! `state_dict_metadata`: names, dtypes, shapes and pieces.

use super::names::Field;
use super::read::{Reader, bad, within};
use super::table::{ElementType, NONE, PlaceRow, Row};
use crate::pickle::{Node, Value};
use crate::text::quoted;
use crate::torch_zip::dtype_of;
use forebay_error::{Code, Error, Result};
use forebay_tensor::{Dtype, byte_len, element_count};

/// The most dimensions of a tensor, as torch has it.
const MAX_DIMS: usize = 64;

impl<'g> Reader<'g, '_> {
    pub(super) fn entries(&mut self, state: Value) -> Result<()> {
        let graph = self.graph();
        let pairs = graph.as_dict(state).ok_or_else(|| bad("state_dict_metadata is no dict"))?;
        self.out.rows.reserve(pairs.len());
        self.rows.reserve(pairs.len());
        for (key, value) in pairs {
            let name =
                graph.as_str(key).ok_or_else(|| bad("an entry has a name that is no text"))?;
            let number = self.out.rows.len() as u32;
            if self.rows.insert(name, number).is_some() {
                return Err(bad(format!("entry {} is there twice", quoted(name))));
            }
            self.names.set_number(key, number);
            let start = self.out.names.len() as u32;
            self.out.names.push_str(name);
            let row = self.entry(value).map_err(|error| within("entry", name, error))?;
            self.out.rows.push(Row { name: (start, name.len() as u32), ..row });
        }
        Ok(())
    }

    /// The row of one entry, but for its name; its numbers and places are put into the tables.
    fn entry(&mut self, value: Value) -> Result<Row> {
        let (numbers, places) = (self.out.numbers.len(), self.out.places.len());
        let row = Row {
            name: (0, 0),
            path: (NONE, 0),
            element: NONE,
            dims: 0,
            numbers,
            places,
            count: 1,
        };
        if self.names.is_instance(value, "BytesStorageMetadata") {
            self.out.places.push(PlaceRow::NOWHERE);
            return Ok(row);
        }
        let wanted = [Field::Properties, Field::Size, Field::Chunks];
        let Some([Some(properties), Some(size), Some(chunks)]) = self.names.fields(value, wanted)
        else {
            return Err(self.unknown_entry(value));
        };
        let mut element = self.element(properties)?;
        let dims = self.sides(size)?;
        let count = self.chunks(chunks, dims)?;
        if self.dtype(element) == Some(Dtype::F4) {
            element = self.double_last_side(element, numbers, dims)?;
        }
        let shape = self.out.numbers.get(numbers..numbers + dims).unwrap_or_default();
        match self.dtype(element) {
            Some(dtype) => byte_len(dtype, shape)?,
            None => element_count(shape)?,
        };
        Ok(Row { element, dims: dims as u32, count, ..row })
    }

    fn unknown_entry(&self, value: Value) -> Error {
        match self.names.class_name(value) {
            Some((module, name)) => bad(format!(
                "it is described by {}, which is neither tensor nor object",
                quoted(&format!("{module}.{name}"))
            )),
            None => bad("it is described by what is no object of torch"),
        }
    }

    fn dtype(&self, element: u32) -> Option<Dtype> {
        self.out.elements.get(element as usize).and_then(|element| element.dtype)
    }

    /// Appends the chunks' numbers, and a place for each; gives their number.
    fn chunks(&mut self, chunks: Value, dims: usize) -> Result<usize> {
        let graph = self.graph();
        let items = graph.as_sequence(chunks).ok_or_else(|| bad("its chunks are no list"))?;
        let count = items.len();
        // Entries may share one list, so the tables could outgrow the file. In an honest file each piece has texts and
        // numbers of its own: some 50 bytes, of which a table entry for every fourth is far from true.
        let pieces = self.out.places.len().saturating_add(count);
        let numbers = count.saturating_mul(2 * dims).saturating_add(self.out.numbers.len());
        if pieces > self.input_bytes / 4 || numbers > 2 * self.input_bytes {
            return Err(bad("there are more pieces than a file of this length describes"));
        }
        self.out.numbers.reserve(count.saturating_mul(2 * dims));
        for (index, chunk) in items.enumerate() {
            let wanted = [Field::Offsets, Field::Sizes];
            let Some([Some(offsets), Some(sizes)]) = self.names.fields(chunk, wanted) else {
                return Err(bad(format!("chunk {index} has no offsets or no sizes")));
            };
            for (what, value) in [("offsets", offsets), ("sizes", sizes)] {
                let found = self.sides(value)?;
                if found != dims {
                    return Err(bad(format!(
                        "chunk {index} has {found} {what}, the tensor has {dims} dimensions"
                    )));
                }
            }
        }
        self.out.places.resize(self.out.places.len() + count, PlaceRow::NOWHERE);
        Ok(count)
    }

    /// Appends the numbers of a `torch.Size`, tuple or list; gives how many they are.
    pub(super) fn sides(&mut self, value: Value) -> Result<usize> {
        let start = self.out.numbers.len();
        let graph = self.graph();
        let sequence = match graph.node(value) {
            Node::Call(call) if self.is_size(call.callable) => {
                graph.as_sequence(call.args).and_then(|mut args| args.next())
            }
            _ => Some(value),
        };
        let Some(items) = sequence.and_then(|sequence| graph.as_sequence(sequence)) else {
            return Err(bad("a size or offset is no list of numbers"));
        };
        if items.len() > MAX_DIMS {
            return Err(bad(format!("{} dimensions; torch has up to {MAX_DIMS}", items.len())));
        }
        for item in items {
            let number =
                graph.as_u64(item).ok_or_else(|| self.no_count("a size or offset", item))?;
            self.out.numbers.push(number);
        }
        Ok(self.out.numbers.len() - start)
    }

    fn is_size(&mut self, callable: Value) -> bool {
        if self.size_class == Some(callable) {
            return true;
        }
        let is_size = self.graph().is_global(callable, Some("torch"), "Size");
        if is_size {
            self.size_class = Some(callable);
        }
        is_size
    }

    pub(super) fn no_count(&self, what: &str, value: Value) -> Error {
        match self.graph().as_i64(value) {
            Some(number) => bad(format!("{what} is {number}; it must be a count")),
            None => bad(format!("{what} is no integer of 64 bits")),
        }
    }

    /// The element type that a `TensorProperties` names, in its tuple (torch 2.0 and newer) or as a field.
    fn element(&mut self, properties: Value) -> Result<u32> {
        let graph = self.graph();
        let state = graph.as_object(properties).map(|object| object.state);
        let dtype = match state.and_then(|state| graph.as_sequence(state)) {
            Some(mut items) => items.next(),
            None => self.names.fields(properties, [Field::Dtype]).and_then(|[dtype]| dtype),
        };
        let dtype = dtype.ok_or_else(|| bad("its properties name no dtype"))?;
        if let Some(&element) = self.elements.get(&dtype) {
            return Ok(element);
        }
        let element = match graph.global_name(dtype) {
            Some(("torch", name)) => ElementType { torch: name.into(), dtype: dtype_of(name) },
            Some((module, name)) => ElementType { torch: format!("{module}.{name}"), dtype: None },
            None => return Err(bad("its dtype is no name")),
        };
        let number = self.push_element(element);
        self.elements.insert(dtype, number);
        Ok(number)
    }

    fn push_element(&mut self, element: ElementType) -> u32 {
        self.out.elements.push(element);
        (self.out.elements.len() - 1) as u32
    }

    /// Torch counts two values of four bits as one element, [`Dtype::F4`] counts each; without a side to double there
    /// is no way to say it.
    fn double_last_side(&mut self, element: u32, numbers: usize, dims: usize) -> Result<u32> {
        if dims == 0 {
            let torch =
                self.out.elements.get(element as usize).map(|element| element.torch.clone());
            let unreadable = ElementType { torch: torch.unwrap_or_default(), dtype: None };
            return Ok(self.push_element(unreadable));
        }
        double_last(self.out.numbers.get_mut(numbers..).unwrap_or_default(), dims)?;
        Ok(element)
    }

    pub(super) fn is_f4(&self, row: u32) -> bool {
        let row = self.out.rows.get(row as usize);
        row.is_some_and(|row| self.dtype(row.element) == Some(Dtype::F4))
    }
}

/// Doubles the last of every `dims` numbers.
pub(super) fn double_last(numbers: &mut [u64], dims: usize) -> Result<()> {
    for number in numbers.iter_mut().skip(dims.saturating_sub(1)).step_by(dims.max(1)) {
        *number = number
            .checked_mul(2)
            .ok_or_else(|| Error::new(Code::Overflow, "the last side does not fit 64 bits"))?;
    }
    Ok(())
}
