//! Sorted lists of named values.

use super::cursor::{Check, Cursor};

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Tensor { dtype: String, shape: Vec<u64>, grad: bool, layout: Option<u64> },
    Object,
    Alias(String),
}

/// A row of a list. The way to a value is kept as the text of its steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) path: Vec<(bool, String)>,
    pub(super) what: What,
    pub(super) shared: bool,
}

/// Reads a list; `tail` reads what follows each row.
pub(super) fn read<T>(
    cursor: &mut Cursor<'_>,
    mut tail: impl FnMut(&mut Cursor<'_>, &Row) -> Check<T>,
) -> Check<Vec<(Row, T)>> {
    let mut dtypes = Vec::new();
    for _ in 0..cursor.count()? {
        dtypes.push(cursor.text()?);
    }
    let mut rows: Vec<(Row, T)> = Vec::new();
    for number in 0..cursor.count()? {
        let before = rows.last().map_or("", |(row, _)| row.name.as_str());
        let same = cursor.count_of(before.len())?;
        if number % 16 == 0 && same != 0 {
            return Err("a name that must be in full is not".into());
        }
        let head = before.get(..same).ok_or("a name cut inside a letter")?;
        let name = head.to_owned() + cursor.text()?;
        if number > 0 && name.as_bytes() <= before.as_bytes() {
            return Err(format!("{name:?} behind {before:?}"));
        }
        let path = path(cursor, &name)?;
        let flags = cursor.byte()?;
        let what = match flags & 3 {
            0 => tensor(cursor, &dtypes, flags & 4 != 0)?,
            1 if flags & 4 == 0 => What::Object,
            2 if flags & 4 == 0 => What::Alias(cursor.text()?.to_owned()),
            _ => return Err(format!("{name:?} has flags {flags}")),
        };
        if flags >= 16 {
            return Err(format!("{name:?} has flags {flags}"));
        }
        let row = Row { name, path, what, shared: flags & 8 != 0 };
        let tail = tail(cursor, &row)?;
        rows.push((row, tail));
    }
    Ok(rows)
}

impl Cursor<'_> {
    fn count_of(&mut self, limit: usize) -> Check<usize> {
        let value = self.varint()?;
        let fits = usize::try_from(value).ok().filter(|&value| value <= limit);
        fits.ok_or(format!("{value} bytes of a name of {limit}"))
    }
}

fn tensor(cursor: &mut Cursor<'_>, dtypes: &[&str], grad: bool) -> Check<What> {
    let dtype = usize::try_from(cursor.varint()?).ok().and_then(|at| dtypes.get(at));
    let dtype = (*dtype.ok_or("a dtype that is not listed")?).to_owned();
    bits(&dtype)?;
    let layout = cursor.varint()?.checked_sub(1);
    let mut shape = Vec::new();
    for _ in 0..cursor.count()? {
        shape.push(cursor.varint()?);
    }
    Ok(What::Tensor { dtype, shape, grad, layout })
}

/// Bits of an element of a dtype.
pub(super) fn bits(dtype: &str) -> Check<u64> {
    Ok(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        other => return Err(format!("unknown dtype {other:?}")),
    })
}

fn path(cursor: &mut Cursor<'_>, name: &str) -> Check<Vec<(bool, String)>> {
    let code = cursor.varint()?;
    if code == 1 || code > 4096 {
        return Err(format!("a path of code {code}"));
    }
    let mut steps = Vec::new();
    let mut rest = name;
    for number in 0..code / 2 {
        let head = cursor.varint()?;
        let (is_index, text) = match (code % 2, head) {
            (0, 0) => (false, cursor.text()?.to_owned()),
            (0, 1) => (true, cursor.varint()?.to_string()),
            (0, _) => return Err("an unknown step".into()),
            _ => {
                if number > 0 {
                    rest = rest.strip_prefix('.').ok_or("no dot between two steps")?;
                }
                let len = usize::try_from(head / 2).map_err(|_| "a step too long")?;
                let (text, after) = rest.split_at_checked(len).ok_or("a step past the name")?;
                rest = after;
                (head % 2 == 1, text.to_owned())
            }
        };
        if is_index && (text.parse::<u64>().map(|place| place.to_string()) != Ok(text.clone())) {
            return Err(format!("{text:?} is no place in a list"));
        }
        steps.push((is_index, text));
    }
    Ok(steps)
}
