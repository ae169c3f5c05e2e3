//! Sorted lists of named values, as parts and the tensor table store them.
//!
//! ```text
//! list      varint dtypes, text each (names as in safetensors files)
//!           varint values, then that many rows, by strictly ascending bytes of the names
//! row       varint shared, text rest: the name is the first `shared` bytes of the one before and `rest`;
//!           `shared` is 0 in the first row and every sixteenth after it
//!           path
//!           u8 flags: bits 0-1 kind (0 tensor, 1 object, 2 alias), 2 requires_grad, 3 shared structure; others 0
//!           tensor: varint dtype (place in the list), varint layout + 1 (0: none), varint dims, varint each side
//!           alias:  text, the other name
//!           tensor table only: the holders, see `holders`
//! path      varint c: 0 no path; odd: (c - 1) / 2 steps cut from the name; even: c / 2 steps in full
//!           cut:     each a varint, length * 2 + (1 for a place in a list, in decimal digits); between two steps the
//!                    name has one more byte, a dot
//!           in full: each a varint, 0 and a text (a key) or 1 and a varint (a place in a list)
//! ```

use forebay_error::Result;
use forebay_tensor::Dtype;

use super::limits::{MAX_DIMS, MAX_ENTRIES, MAX_NAME_BYTES, MAX_PATH_STEPS, NAME_RESTART};
use super::value::{Named, Tensor, Value, shown};
use super::wire::{Put, Take};
use crate::model::PathStep;

const KIND_TENSOR: u8 = 0;
const KIND_OBJECT: u8 = 1;
const KIND_ALIAS: u8 = 2;
const KIND_MASK: u8 = 3;
const REQUIRES_GRAD: u8 = 1 << 2;
const SHARED: u8 = 1 << 3;

/// Writes rows; they come in the order of their names.
#[derive(Default)]
pub(crate) struct RowWriter {
    dtypes: Vec<Dtype>,
    rows: Vec<u8>,
    count: u64,
    last: String,
}

impl RowWriter {
    /// Adds a row; `tail` is what the kind of list adds to it.
    pub(crate) fn push(&mut self, named: &Named, in_structure: bool, tail: &[u8]) {
        let same = self.last.bytes().zip(named.name.bytes()).take_while(|(a, b)| a == b).count();
        // The rest must be text of its own.
        let cut = (0..=same).rev().find(|&at| named.name.is_char_boundary(at)).unwrap_or(0);
        let cut = if self.count.is_multiple_of(NAME_RESTART as u64) { 0 } else { cut };
        self.rows.put_varint(cut as u64);
        self.rows.put_text(named.name.get(cut..).unwrap_or_default());
        put_path(&mut self.rows, &named.name, &named.path);
        let shared = if in_structure { SHARED } else { 0 };
        match &named.value {
            Value::Tensor(tensor) => {
                let grad = if tensor.requires_grad { REQUIRES_GRAD } else { 0 };
                self.rows.push(KIND_TENSOR | grad | shared);
                self.put_tensor(tensor);
            }
            Value::Object => self.rows.push(KIND_OBJECT | shared),
            Value::Alias { of } => {
                self.rows.push(KIND_ALIAS | shared);
                self.rows.put_text(of);
            }
        }
        self.rows.extend_from_slice(tail);
        self.count += 1;
        self.last.clone_from(&named.name);
    }

    fn put_tensor(&mut self, tensor: &Tensor) {
        let known = self.dtypes.iter().position(|&dtype| dtype == tensor.dtype);
        let dtype = known.unwrap_or_else(|| {
            self.dtypes.push(tensor.dtype);
            self.dtypes.len() - 1
        });
        self.rows.put_varint(dtype as u64);
        self.rows.put_varint(tensor.layout.map_or(0, |layout| u64::from(layout) + 1));
        self.rows.put_varint(tensor.shape.len() as u64);
        for &side in &tensor.shape {
            self.rows.put_varint(side);
        }
    }

    /// Appends the list.
    pub(crate) fn finish(self, out: &mut Vec<u8>) {
        out.put_varint(self.dtypes.len() as u64);
        for dtype in &self.dtypes {
            out.put_text(dtype.name());
        }
        out.put_varint(self.count);
        out.extend_from_slice(&self.rows);
    }
}

/// Appends the way to a value of that name.
pub(crate) fn put_path(out: &mut Vec<u8>, name: &str, path: &[PathStep]) {
    let steps = path.len() as u64;
    let mut cut = Vec::new();
    let mut rest = name;
    for (number, step) in path.iter().enumerate() {
        let (text, is_index) = match step {
            PathStep::Key(key) => (key.clone(), 0),
            PathStep::Index(index) => (index.to_string(), 1),
        };
        let behind = match number {
            0 => Some(rest),
            _ => rest.strip_prefix('.'),
        };
        let Some(behind) = behind.and_then(|rest| rest.strip_prefix(text.as_str())) else {
            return put_path_in_full(out, path);
        };
        rest = behind;
        cut.put_varint(text.len() as u64 * 2 + is_index);
    }
    out.put_varint(if steps == 0 { 0 } else { steps * 2 + 1 });
    out.extend_from_slice(&cut);
}

fn put_path_in_full(out: &mut Vec<u8>, path: &[PathStep]) {
    out.put_varint(path.len() as u64 * 2);
    for step in path {
        match step {
            PathStep::Key(key) => {
                out.put_varint(0);
                out.put_text(key);
            }
            PathStep::Index(index) => {
                out.put_varint(1);
                out.put_varint(*index);
            }
        }
    }
}

/// Reads rows; checks each as it comes.
pub(crate) struct RowReader {
    dtypes: Vec<Dtype>,
    count: usize,
    read: usize,
    last: String,
}

impl RowReader {
    /// Reads the head of a list.
    pub(crate) fn new(take: &mut Take<'_>) -> Result<Self> {
        let known = take.count(Dtype::ALL.len() as u64, 1, "dtypes")?;
        let mut dtypes = Vec::with_capacity(known);
        for _ in 0..known {
            let name = take.text(64, "bytes of a dtype's name")?;
            let Some(dtype) = Dtype::parse(name) else {
                return Err(take.bad(format!("unknown dtype {name:?}")));
            };
            dtypes.push(dtype);
        }
        // A row has two lengths, a path and flags.
        let count = take.count(MAX_ENTRIES, 4, "named values")?;
        Ok(Self { dtypes, count, read: 0, last: String::new() })
    }

    /// Rows in all.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The next row but for its tail, and whether it belongs to the shared structure; `None` after the last.
    pub(crate) fn next(&mut self, take: &mut Take<'_>) -> Result<Option<(Named, bool)>> {
        if self.read == self.count {
            return Ok(None);
        }
        let name = self.name(take)?;
        let path = take_path(take, &name)?;
        let flags = take.take(1)?.first().copied().unwrap_or_default();
        let kind = flags & KIND_MASK;
        let known = KIND_MASK | SHARED | if kind == KIND_TENSOR { REQUIRES_GRAD } else { 0 };
        if flags & !known != 0 {
            return Err(take.bad(format!("unknown flags {flags:#x}")));
        }
        let value = match kind {
            KIND_TENSOR => Value::Tensor(self.tensor(take, flags & REQUIRES_GRAD != 0)?),
            KIND_OBJECT => Value::Object,
            KIND_ALIAS => {
                Value::Alias { of: take.text(MAX_NAME_BYTES, "bytes of a name")?.to_owned() }
            }
            _ => return Err(take.bad("unknown kind of value")),
        };
        self.read += 1;
        self.last.clone_from(&name);
        let named = Named { name, path, value };
        named
            .check()
            .map_err(|error| error.at(format!("{}, {}", take.place(), shown(&named.name))))?;
        Ok(Some((named, flags & SHARED != 0)))
    }

    fn name(&self, take: &mut Take<'_>) -> Result<String> {
        let same = take.at_most(MAX_NAME_BYTES, "bytes of a name")?;
        let rest = take.text(MAX_NAME_BYTES, "bytes of a name")?;
        let head = usize::try_from(same).ok().and_then(|same| self.last.get(..same));
        let restart = self.read.is_multiple_of(NAME_RESTART);
        let Some(head) = head.filter(|head| head.is_empty() || !restart) else {
            return Err(take.bad("a name continues one that it cannot"));
        };
        let name = format!("{head}{rest}");
        if self.read > 0 && name <= self.last {
            return Err(take.bad("names are not in order"));
        }
        Ok(name)
    }

    fn tensor(&self, take: &mut Take<'_>, requires_grad: bool) -> Result<Tensor> {
        let dtype = take.varint()?;
        let dtype = usize::try_from(dtype).ok().and_then(|at| self.dtypes.get(at).copied());
        let Some(dtype) = dtype else {
            return Err(take.bad("a dtype that is not in the list"));
        };
        let layout = take.small(u64::from(u32::MAX), "as a layout")?.checked_sub(1);
        let dims = take.count(MAX_DIMS, 1, "dimensions")?;
        let shape = (0..dims).map(|_| take.varint()).collect::<Result<_>>()?;
        Ok(Tensor { dtype, shape, requires_grad, layout })
    }
}

/// Takes the way to a value of that name.
pub(crate) fn take_path(take: &mut Take<'_>, name: &str) -> Result<Vec<PathStep>> {
    let code = take.at_most(MAX_PATH_STEPS * 2 + 1, "as the length of a path")?;
    if code == 1 {
        return Err(take.bad("a path without steps"));
    }
    let mut rest = name;
    let mut path = Vec::new();
    for number in 0..code / 2 {
        path.push(match code % 2 {
            0 => take_step(take)?,
            _ => cut_step(take, number, &mut rest)?,
        });
    }
    Ok(path)
}

fn take_step(take: &mut Take<'_>) -> Result<PathStep> {
    match take.varint()? {
        0 => Ok(PathStep::Key(take.text(MAX_NAME_BYTES, "bytes of a key")?.to_owned())),
        1 => Ok(PathStep::Index(take.varint()?)),
        _ => Err(take.bad("unknown kind of step in a path")),
    }
}

fn cut_step(take: &mut Take<'_>, number: u64, rest: &mut &str) -> Result<PathStep> {
    let code = take.varint()?;
    let behind = if number == 0 { Some(*rest) } else { rest.strip_prefix('.') };
    let len = usize::try_from(code / 2).ok();
    let cut = behind.and_then(|text| text.split_at_checked(len?));
    let Some((text, behind)) = cut else {
        return Err(take.bad("a path that is not in its name"));
    };
    *rest = behind;
    if code % 2 == 0 {
        return Ok(PathStep::Key(text.to_owned()));
    }
    match text.parse::<u64>() {
        Ok(index) if index.to_string() == text => Ok(PathStep::Index(index)),
        _ => Err(take.bad("a place in a list that is not a number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_round_trip() {
        let key = |text: &str| PathStep::Key(text.to_owned());
        let mut rows = vec![
            Named::object("").with_path(vec![key("")]),
            Named::alias("a.ä", "a.é.1").with_path(vec![key("a"), key("ä")]),
            Named::object("a.é.1").with_path(vec![key("a"), key("é"), PathStep::Index(1)]),
            Named::tensor("a.é.2", Dtype::BF16, &[3, 0, u64::from(u32::MAX)]).with_layout(4),
            Named::object("b").with_path(vec![PathStep::Index(7), key("other")]),
        ];
        rows.extend((0..40).map(|at| Named::tensor(format!("c.{at:02}"), Dtype::F4, &[2])));
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        let mut writer = RowWriter::default();
        for (at, row) in rows.iter().enumerate() {
            writer.push(row, at % 3 == 0, &[]);
        }
        let mut bytes = Vec::new();
        writer.finish(&mut bytes);
        let mut take = Take::new(&bytes, "rows");
        let mut reader = RowReader::new(&mut take).unwrap();
        let mut read = Vec::new();
        while let Some((named, shared)) = reader.next(&mut take).unwrap() {
            assert_eq!(shared, read.len() % 3 == 0);
            read.push(named);
        }
        take.end().unwrap();
        assert_eq!(read, rows);
    }

    #[test]
    fn a_few_bytes_do_not_unfold_to_many_names() {
        let mut bytes = vec![0];
        bytes.put_varint(17);
        let long = "n".repeat(60_000);
        for at in 0..17u8 {
            bytes.put_varint(if at == 0 { 0 } else { 60_000 });
            bytes.put_text(if at == 0 { &long } else { "x" });
            bytes.extend([0, KIND_OBJECT]);
        }
        let mut take = Take::new(&bytes, "rows");
        let mut reader = RowReader::new(&mut take).unwrap();
        let ended = (0..17).find_map(|_| reader.next(&mut take).err());
        assert!(ended.is_some());
    }
}
