//! `forebay ckpt show`: what a checkpoint holds, from its metadata alone. No data file is opened but for the objects,
//! which are small; `forebay inspect` lists every tensor.
//!
//! JSON: `{"path", "step", "origin", "info", "files": [{"name", "bytes"}], "tensors": {"count", "bytes", "chunks",
//! "dtypes": {dtype: {"count", "bytes"}}, "largest": [name], "all": [{"name", "dtype", "shape", "bytes", "chunks"}]},
//! "objects": [{"name", "type", "value" | "opaque" | "error"}], "side_files", "attributes", "warnings"}`. `info` is
//! what the writer said of the save: of Forebay the attempt, run, epoch, step, parent step, ranks, versions, and when
//! it was committed (`created`, in seconds; people get a date); of torch `version` and `save_id`. `all` has the tensors
//! in the order of the metadata, `largest` five names of them. `bytes` of a file is null where the format does not say
//! and the file is not there.

use std::collections::BTreeMap;

use forebay_checkpoint::model::{Entry, Kind};
use forebay_checkpoint::open::{Checkpoint, Origin};
use forebay_checkpoint::restore::Reader;
use forebay_error::Result;
use forebay_format::Folder;
use forebay_format::torch_zip::{PlainObject, PlainValue};
use forebay_tensor::byte_len;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::args::StepArgs;
use super::verify::origin_name;
use super::{Outcome, place};
use crate::console::{Console, clean};
use crate::units::{count, decimal, utc};

/// Tensors that are named.
const LARGEST: usize = 5;
/// Objects and files that are shown to people; JSON has all.
const SHOWN: usize = 20;
/// Characters of a value that are shown to people.
const VALUE_CHARS: usize = 100;

#[derive(Serialize)]
struct Report {
    path: String,
    step: Option<u64>,
    origin: &'static str,
    info: Value,
    files: Vec<FileRow>,
    tensors: Tensors,
    objects: Vec<ObjectRow>,
    side_files: Vec<String>,
    attributes: BTreeMap<String, ObjectRow>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct FileRow {
    name: String,
    bytes: Option<u64>,
}

#[derive(Default, Serialize)]
struct Tensors {
    count: usize,
    bytes: u64,
    chunks: usize,
    dtypes: BTreeMap<&'static str, Sum>,
    largest: Vec<String>,
    all: Vec<TensorRow>,
}

#[derive(Default, Serialize)]
struct Sum {
    count: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorRow {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    chunks: usize,
}

#[derive(Default, Serialize)]
struct ObjectRow {
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    python_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    opaque: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Runs the command.
pub(super) fn run(args: &StepArgs, console: &Console) -> Result<Outcome> {
    let step = place::step(&args.path, args.step)?;
    let folder = step.folder();
    let checkpoint = Checkpoint::open(&folder)?;
    let side_files = match checkpoint.origin {
        Origin::Forebay(_) => Reader::open(&folder)?.side_files()?,
        _ => Vec::new(),
    };
    let warnings = checkpoint.warnings.iter().map(|warning| warning.text.clone());
    let report = Report {
        path: step.shown(),
        step: step.step,
        origin: origin_name(&checkpoint.origin),
        info: info(&checkpoint.origin),
        files: files(&checkpoint, &folder)?,
        tensors: tensors(&checkpoint.entries)?,
        objects: objects(&checkpoint),
        side_files,
        attributes: attributes(&checkpoint),
        warnings: warnings.collect(),
    };
    for warning in &report.warnings {
        console.warning(warning);
    }
    match console.is_json() {
        true => console.json(&report)?,
        false => console.print(|out| print(out, &report))?,
    }
    Ok(Outcome::Good)
}

fn info(origin: &Origin) -> Value {
    match origin {
        Origin::Dcp { version, save_id } => json!({"version": version, "save_id": save_id}),
        Origin::HfShards => json!({}),
        Origin::Forebay(info) => serde_json::to_value(info).unwrap_or_default(),
    }
}

fn files(checkpoint: &Checkpoint, folder: &Folder) -> Result<Vec<FileRow>> {
    let unknown = checkpoint.files.iter().filter(|file| file.bytes.is_none());
    let unknown: Vec<&str> = unknown.map(|file| file.name.as_str()).collect();
    let sizes = folder.sizes(&unknown)?;
    let there: BTreeMap<&str, Option<u64>> = unknown.into_iter().zip(sizes).collect();
    let row = |file: &forebay_checkpoint::model::DataFile| {
        let there = there.get(file.name.as_str()).copied().flatten();
        FileRow { name: file.name.clone(), bytes: file.bytes.or(there) }
    };
    Ok(checkpoint.files.iter().map(row).collect())
}

fn tensors(entries: &[Entry]) -> Result<Tensors> {
    let mut tensors = Tensors::default();
    for entry in entries {
        let Kind::Tensor { dtype, shape, chunks } = &entry.kind else { continue };
        let bytes = byte_len(*dtype, shape)?;
        tensors.count += 1;
        tensors.bytes = tensors.bytes.saturating_add(bytes);
        tensors.chunks += chunks.len();
        let sum = tensors.dtypes.entry(dtype.name()).or_default();
        sum.count += 1;
        sum.bytes = sum.bytes.saturating_add(bytes);
        let (name, dtype, shape) = (entry.name.clone(), dtype.name(), shape.clone());
        tensors.all.push(TensorRow { name, dtype, shape, bytes, chunks: chunks.len() });
    }
    tensors.largest = largest(&tensors.all).iter().map(|row| row.name.clone()).collect();
    Ok(tensors)
}

/// The largest few, the largest first.
fn largest(all: &[TensorRow]) -> Vec<&TensorRow> {
    let mut rows: Vec<&TensorRow> = all.iter().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    rows.truncate(LARGEST);
    rows
}

/// A time as it is stored, `SECONDS s after 1970-01-01 UTC`, as a date; anything else as it is.
fn date(stored: &str) -> String {
    let seconds = stored.split_once(' ').filter(|(_, unit)| *unit == "s after 1970-01-01 UTC");
    let seconds = seconds.and_then(|(seconds, _)| seconds.parse().ok());
    seconds.and_then(utc).unwrap_or_else(|| stored.to_owned())
}

fn objects(checkpoint: &Checkpoint) -> Vec<ObjectRow> {
    let objects = checkpoint.objects(|_| true).into_iter();
    let row = |(name, object): (String, Result<PlainObject>)| match object {
        Ok(object) => ObjectRow { name, ..object_row(object) },
        Err(error) => ObjectRow { name, error: Some(error.to_string()), ..ObjectRow::default() },
    };
    objects.map(row).collect()
}

fn attributes(checkpoint: &Checkpoint) -> BTreeMap<String, ObjectRow> {
    let attributes = checkpoint.attributes.iter();
    attributes.map(|(name, object)| (name.clone(), object_row(object.clone()))).collect()
}

fn object_row(object: PlainObject) -> ObjectRow {
    let row = ObjectRow { python_type: Some(object.python_type), ..ObjectRow::default() };
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

fn print(out: &mut dyn std::io::Write, report: &Report) -> std::io::Result<()> {
    let writer = match report.origin {
        "forebay" => "a checkpoint of Forebay",
        "hf_shards" => "shards of torch's Hugging Face writer",
        _ => "a checkpoint of torch.distributed",
    };
    writeln!(out, "{}: {writer}", clean(&report.path))?;
    for (key, value) in report.info.as_object().into_iter().flatten() {
        match value {
            Value::Null => {}
            Value::String(text) if key == "created" => {
                writeln!(out, "  created: {}", clean(&date(text)))?;
            }
            Value::String(text) => writeln!(out, "  {}: {}", clean(key), clean(text))?,
            other => writeln!(out, "  {}: {other}", clean(key))?,
        }
    }
    let tensors = &report.tensors;
    writeln!(
        out,
        "{}, {} in {}",
        count(tensors.count, "tensor"),
        decimal(tensors.bytes),
        count(tensors.chunks, "piece")
    )?;
    for (dtype, sum) in &tensors.dtypes {
        writeln!(out, "  {dtype}: {}, {}", count(sum.count, "tensor"), decimal(sum.bytes))?;
    }
    if tensors.count > tensors.largest.len() {
        writeln!(out, "the largest of them (--json has all):")?;
    }
    for row in largest(&tensors.all) {
        let (name, dtype, bytes) = (clean(&row.name), row.dtype, decimal(row.bytes));
        writeln!(out, "  {name}  {dtype}  {:?}  {bytes}", row.shape)?;
    }
    print_objects(out, &report.objects)?;
    print_files(out, report)
}

fn print_objects(out: &mut dyn std::io::Write, objects: &[ObjectRow]) -> std::io::Result<()> {
    writeln!(out, "{}", count(objects.len(), "object"))?;
    for row in objects.iter().take(SHOWN) {
        let value = match (&row.value, &row.opaque, &row.error) {
            (Some(value), ..) => shortened(value.get()),
            (_, Some(why), _) => format!("not shown: {}", shortened(why)),
            (.., why) => format!("not read: {}", shortened(why.as_deref().unwrap_or_default())),
        };
        let kind = row.python_type.as_deref().unwrap_or("?");
        writeln!(out, "  {}  {}  {}", clean(&row.name), clean(kind), clean(&value))?;
    }
    more(out, objects.len())
}

fn print_files(out: &mut dyn std::io::Write, report: &Report) -> std::io::Result<()> {
    let bytes = report.files.iter().filter_map(|file| file.bytes).fold(0, u64::saturating_add);
    writeln!(out, "{}, {}", count(report.files.len(), "file"), decimal(bytes))?;
    for file in report.files.iter().take(SHOWN) {
        let bytes = file.bytes.map_or("not there".to_owned(), decimal);
        writeln!(out, "  {}  {bytes}", clean(&file.name))?;
    }
    more(out, report.files.len())?;
    if !report.side_files.is_empty() {
        let names: Vec<_> = report.side_files.iter().map(|name| clean(name)).collect();
        writeln!(out, "committed with it: {}", names.join(", "))?;
    }
    Ok(())
}

fn more(out: &mut dyn std::io::Write, number: usize) -> std::io::Result<()> {
    match number.checked_sub(SHOWN + 1) {
        Some(more) => writeln!(out, "  and {} more (--json has all)", more + 1),
        None => Ok(()),
    }
}

/// The start of a text, and dots where there is more.
fn shortened(text: &str) -> String {
    let shown: String = text.chars().take(VALUE_CHARS).collect();
    let dots = if shown.len() < text.len() { "..." } else { "" };
    format!("{shown}{dots}")
}
