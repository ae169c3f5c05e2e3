//! `forebay inspect`: what a model holds. Reads headers; with `--digest` every byte of the tensors, once.
//!
//! JSON: `{"format", "metadata": {key: value}, "tensors": [{"name", "dtype", "shape", "file", "offset", "bytes",
//! "sha256"?}]}`, tensors in the order of (file, offset). `file` is relative to the model's folder, `offset` counts
//! from the start of that file, `sha256` is over the tensor's row-major bytes as stored.

use forebay_error::Result;
use forebay_format::{Catalog, TensorEntry, open_model};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::args::InspectArgs;
use crate::console::{Console, clean};
use crate::select::matching;
use crate::units::{count, decimal};
use crate::verify;

/// Characters of a metadata value that are shown to people; JSON has all.
const VALUE_CHARS: usize = 200;

#[derive(serde::Serialize)]
struct Inspection<'a> {
    format: &'a str,
    metadata: Metadata<'a>,
    tensors: Vec<Row<'a>>,
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
    let model = open_model(&args.model)?;
    for warning in &model.catalog.warnings {
        console.warning(warning);
    }
    let picked = match args.names.is_empty() {
        true => (0..model.catalog.tensors.len()).collect(),
        false => matching(&model.catalog, &args.names)?,
    };
    let mut digests = match args.digest {
        true => verify::digests(&model, &picked, console)?,
        false => Vec::new(),
    }
    .into_iter();
    let catalog = &model.catalog;
    let entries = picked.iter().filter_map(|&index| catalog.tensors.get(index));
    let inspection = Inspection {
        format: catalog.format.name(),
        metadata: Metadata(&catalog.metadata),
        tensors: entries.map(|entry| row(catalog, entry, digests.next())).collect(),
    };
    match console.is_json() {
        true => console.json(&inspection),
        false => console.print(|out| print(out, &inspection, catalog)),
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
        let shown: String = value.chars().take(VALUE_CHARS).collect();
        let dots = if shown.len() < value.len() { "..." } else { "" };
        writeln!(out, "  {}: {}{dots}", clean(key), clean(&shown))?;
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
    Ok(())
}
