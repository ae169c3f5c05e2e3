//! `forebay inspect`: what a model or a checkpoint holds. Reads headers; with `--digest` every byte of the tensors.
//!
//! JSON: `{"format", "metadata": {key: value}, "tensors": [{"name", "dtype", "shape", "file", "offset", "bytes",
//! "sha256"?}], "objects"?: [..]}`, tensors in the order of (file, offset). `file` is relative to the model's folder,
//! `offset` counts from the start of that file, `sha256` is over the tensor's row-major bytes. Of a checkpoint file and
//! offset are those of the tensor's first item; the digest is of the whole tensor, put together.
//!
//! `objects` is there for formats that hold more than tensors: `{"name", "type", "value"}` for plain data, in the
//! order of the format, `{"name", "type", "opaque": why}` for what has no JSON form or would have to be executed, and
//! `{"name", "error": code, "what"}` for what cannot be read.

use std::collections::HashSet;

use forebay_checkpoint::open::{Opened, open_model};
use forebay_error::Result;
use forebay_format::torch_zip::{PlainObject, PlainValue};
use forebay_format::{Catalog, Format, TensorEntry};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;

use crate::args::InspectArgs;
use crate::ckpt::place_of;
use crate::console::{Console, clean};
use crate::select::{compile, matching};
use crate::units::{count, decimal};
use crate::verify;

/// Characters of a metadata value that are shown to people; JSON has all.
const VALUE_CHARS: usize = 200;

#[derive(serde::Serialize)]
struct Inspection<'a> {
    format: &'a str,
    metadata: Metadata<'a>,
    tensors: Vec<Row<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    objects: Option<Vec<ObjectRow>>,
}

/// A value that is no tensor.
#[derive(serde::Serialize)]
struct ObjectRow {
    name: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    python_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    opaque: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    what: Option<String>,
}

/// Text metadata, in the order of the file.
struct Metadata<'a>(&'a [(String, String)]);

#[derive(serde::Serialize)]
struct Row<'a> {
    name: &'a str,
    dtype: &'a str,
    shape: &'a [u64],
    file: &'a str,
    offset: u64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

impl Serialize for Metadata<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, console: &Console) -> Result<()> {
    let opened = open_model(place_of(&args.model)?)?;
    let catalog = &opened.listing.catalog;
    for warning in &catalog.warnings {
        console.warning(warning);
    }
    let picked = match args.names.is_empty() {
        true => (0..catalog.tensors.len()).collect(),
        false => matching(catalog, &args.names)?,
    };
    let mut digests = match args.digest {
        true => digests(&opened, &picked, console)?,
        false => Vec::new(),
    }
    .into_iter();
    let entries = picked.iter().filter_map(|&index| catalog.tensors.get(index));
    let inspection = Inspection {
        format: catalog.format.name(),
        metadata: Metadata(&catalog.metadata),
        tensors: entries.map(|entry| row(catalog, entry, digests.next())).collect(),
        objects: objects(&opened, &args.names)?,
    };
    match console.is_json() {
        true => console.json(&inspection),
        false => console.print(|out| print(out, &inspection, catalog)),
    }
}

fn digests(opened: &Opened, picked: &[usize], console: &Console) -> Result<Vec<String>> {
    let tensors = picked.iter().filter_map(|&index| opened.listing.catalog.tensors.get(index));
    let names: HashSet<&str> = tensors.map(|entry| entry.name.as_str()).collect();
    let model = opened.resolve(|name| names.contains(name))?;
    verify::digests(&model, picked, console)
}

/// The values that are no tensors and whose names match; `None` for formats that have none.
fn objects(opened: &Opened, patterns: &[String]) -> Result<Option<Vec<ObjectRow>>> {
    if opened.listing.catalog.format == Format::Safetensors {
        return Ok(None);
    }
    let set = compile(patterns)?;
    let found = opened.objects(|name| patterns.is_empty() || set.is_match(name));
    Ok(Some(found.into_iter().map(|(name, object)| object_row(name, object)).collect()))
}

fn object_row(name: String, object: Result<PlainObject>) -> ObjectRow {
    let empty =
        ObjectRow { name, python_type: None, value: None, opaque: None, error: None, what: None };
    let object = match object {
        Ok(object) => object,
        Err(error) => {
            return ObjectRow {
                error: Some(error.code().as_str()),
                what: Some(error.to_string()),
                ..empty
            };
        }
    };
    let row = ObjectRow { python_type: Some(object.python_type), ..empty };
    match object.value {
        // As it is: numbers may be longer than 64 bits.
        PlainValue::Json(json) => match RawValue::from_string(json) {
            Ok(value) => ObjectRow { value: Some(value), ..row },
            Err(error) => ObjectRow { opaque: Some(error.to_string()), ..row },
        },
        PlainValue::Opaque(why) | PlainValue::Forbidden(why) => {
            ObjectRow { opaque: Some(why), ..row }
        }
    }
}

fn row<'a>(catalog: &'a Catalog, entry: &'a TensorEntry, sha256: Option<String>) -> Row<'a> {
    let file = catalog.files.get(entry.file).map(|file| file.name.as_str());
    Row {
        name: &entry.name,
        dtype: entry.dtype.name(),
        shape: &entry.shape,
        file: file.unwrap_or_default(),
        offset: entry.offset,
        bytes: entry.bytes,
        sha256,
    }
}

fn print(
    out: &mut dyn std::io::Write,
    inspection: &Inspection<'_>,
    catalog: &Catalog,
) -> std::io::Result<()> {
    let rows = &inspection.tensors;
    let bytes = rows.iter().fold(0_u64, |sum, row| sum.saturating_add(row.bytes));
    writeln!(
        out,
        "{}: {}, {} in {}",
        inspection.format,
        count(rows.len(), "tensor"),
        decimal(bytes),
        count(catalog.files.len(), "file"),
    )?;
    for (key, value) in inspection.metadata.0 {
        writeln!(out, "  {}: {}", clean(key), clean(&shortened(value)))?;
    }
    let cells: Vec<[String; 5]> = rows
        .iter()
        .map(|row| {
            [
                clean(row.name).into_owned(),
                row.dtype.to_owned(),
                format!("{:?}", row.shape),
                row.bytes.to_string(),
                format!("{}:{}", clean(row.file), row.offset),
            ]
        })
        .collect();
    let width = |column: usize| {
        let cells = cells.iter().filter_map(|cells| cells.get(column));
        // A column that one monstrous name widens helps nobody.
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0).min(100)
    };
    let (a, b, c, d) = (width(0), width(1), width(2), width(3));
    for ([name, dtype, shape, bytes, place], row) in cells.iter().zip(rows) {
        write!(out, "{name:a$}  {dtype:b$}  {shape:c$}  {bytes:>d$} B  {place}")?;
        match &row.sha256 {
            Some(digest) => writeln!(out, "  {digest}")?,
            None => writeln!(out)?,
        }
    }
    print_objects(out, inspection.objects.as_deref().unwrap_or_default())
}

fn print_objects(out: &mut dyn std::io::Write, objects: &[ObjectRow]) -> std::io::Result<()> {
    if !objects.is_empty() {
        writeln!(out, "{}", count(objects.len(), "object"))?;
    }
    for row in objects {
        let kind = row.python_type.as_deref().unwrap_or("?");
        let value = match (&row.value, &row.opaque, &row.what) {
            (Some(value), _, _) => shortened(value.get()),
            (_, Some(why), _) => format!("not shown: {}", shortened(why)),
            (_, _, what) => format!("not read: {}", what.as_deref().unwrap_or_default()),
        };
        writeln!(out, "{}  {}  {}", clean(&row.name), clean(kind), clean(&value))?;
    }
    Ok(())
}

/// The start of a text, and dots where there is more.
fn shortened(text: &str) -> String {
    let shown: String = text.chars().take(VALUE_CHARS).collect();
    let dots = if shown.len() < text.len() { "..." } else { "" };
    format!("{shown}{dots}")
}
