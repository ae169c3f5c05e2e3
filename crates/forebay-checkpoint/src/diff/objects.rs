//! Objects compared.

use std::collections::BTreeMap;

use forebay_error::Result;
use forebay_format::torch_zip::{PlainObject, PlainValue};
use serde_json::value::RawValue;

use super::{Change, Diff};
use crate::model::Kind;
use crate::open::Checkpoint;
use crate::stream::Source;

/// Longer values are not shown.
const SHOWN_BYTES: usize = 200;

/// Compares the objects of both sides.
pub(super) fn compare(
    a: &Source,
    b: &Source,
    wanted: &impl Fn(&str) -> bool,
    diff: &mut Diff,
) -> Result<()> {
    let of = |source: &Source| -> Result<BTreeMap<String, PlainObject>> {
        let objects = source.objects(wanted).into_iter();
        objects.map(|(name, object)| Ok((name, object?))).collect()
    };
    let (ours, mut theirs) = (of(a)?, of(b)?);
    for (name, object) in ours {
        let Some(other) = theirs.remove(&name) else {
            // One that is a tensor on the other side was noted with the tensors.
            if !b.has_tensor(&name) {
                diff.changes.push((name, Change::OnlyInA));
            }
            continue;
        };
        match is_same(a, b, &name, &object, &other)? {
            true => diff.equal_objects += 1,
            false => diff.changes.push((name, Change::Object(shown(&object), shown(&other)))),
        }
    }
    let only = theirs.into_keys().filter(|name| !a.has_tensor(name));
    diff.changes.extend(only.map(|name| (name, Change::OnlyInB)));
    Ok(())
}

fn is_same(
    a: &Source,
    b: &Source,
    name: &str,
    ours: &PlainObject,
    theirs: &PlainObject,
) -> Result<bool> {
    match (&ours.value, &theirs.value) {
        (PlainValue::Json(ours), PlainValue::Json(theirs)) => {
            Ok(ours == theirs || canonical(ours) == canonical(theirs))
        }
        (PlainValue::Json(_), _) | (_, PlainValue::Json(_)) => Ok(false),
        _ => {
            let (ours, theirs) = (archive(a.checkpoint(), name)?, archive(b.checkpoint(), name)?);
            // What cannot be looked into is not called the same.
            Ok(ours.is_some() && ours == theirs)
        }
    }
}

/// The bytes of an object's archive, where it is in a checkpoint.
fn archive(checkpoint: Option<&Checkpoint>, name: &str) -> Result<Option<Vec<u8>>> {
    let Some((checkpoint, entry)) = checkpoint.zip(checkpoint.and_then(|own| own.get(name))) else {
        return Ok(None);
    };
    let Kind::Object { chunk } = &entry.kind else { return Ok(None) };
    if chunk.length > forebay_format::dcp::MAX_OBJECT_BYTES {
        return Ok(None);
    }
    checkpoint.verify_item(entry, chunk)?;
    let mut bytes = vec![0; usize::try_from(chunk.length).unwrap_or_default()];
    checkpoint.open_file(chunk.file)?.read_exact_at(&mut bytes, chunk.offset)?;
    Ok(Some(bytes))
}

/// JSON with the keys of objects in order and numbers as they are written; `None` for what is none.
fn canonical(json: &str) -> Option<String> {
    let mut out = String::new();
    write(serde_json::from_str(json).ok()?, &mut out)?;
    Some(out)
}

fn write(value: &RawValue, out: &mut String) -> Option<()> {
    let text = value.get();
    match text.as_bytes().first()? {
        b'{' => {
            let map: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
            out.push('{');
            for (key, value) in map {
                out.push_str(&serde_json::to_string(&key).ok()?);
                out.push(':');
                write(value, out)?;
                out.push(',');
            }
            out.push('}');
        }
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
            out.push('[');
            for value in items {
                write(value, out)?;
                out.push(',');
            }
            out.push(']');
        }
        _ => out.push_str(text),
    }
    Some(())
}

fn shown(object: &PlainObject) -> Option<String> {
    let json = object.json().ok()?;
    (json.len() <= SHOWN_BYTES).then(|| json.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_keys_says_nothing_and_every_digit_counts() {
        let same = |a: &str, b: &str| canonical(a).is_some() && canonical(a) == canonical(b);
        assert!(same(r#"{"a":1,"b":[2,{"d":3,"c":4}]}"#, r#"{"b":[2,{"c":4,"d":3}],"a":1}"#));
        assert!(!same("[1,2]", "[2,1]"));
        assert!(!same("123456789012345678901234567890", "123456789012345678901234567891"));
        assert!(!same("1", "1.0"));
        assert!(!same(r#"{"a":"{\"b\":1}"}"#, r#"{"a":{"b":1}}"#));
    }
}
