//! One file of `torch.save`: its state dict as tensors and objects with names.
//!
//! What cannot be read as a tensor here (sparse, quantized, complex128) is left out with a warning; damage is an error.
//! Two names of one storage are two tensors with the same bytes.

use crate::catalog::{Check, ObjectEntry, Piece, Stored, TensorEntry};
use crate::open_file::OpenFile;
use crate::pickle::{Options, parse};
use crate::text::{quoted, shown};
use crate::torch_zip::{
    Archive, Leaf, MAX_PICKLE_BYTES, Record, View, check_byteorder, leaves, legacy,
};
use forebay_error::{Code, Error, Result};
use forebay_tensor::Region;
use std::collections::{HashMap, HashSet};

/// What a file holds. `file` of everything in it is 0.
#[derive(Debug, Default)]
pub(crate) struct TorchFile {
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) objects: Vec<ObjectEntry>,
    pub(crate) checks: Vec<Check>,
    pub(crate) warnings: Vec<String>,
}

/// How many warnings about left out tensors are spelled out.
const WARNINGS: usize = 20;

/// Whether a file is, by its first bytes, a zip archive.
pub(crate) fn is_archive(file: &OpenFile) -> Result<bool> {
    Ok(legacy::is_zip(&start_of(file)?))
}

/// Reads the state dict of a file.
pub(crate) fn read(file: &OpenFile) -> Result<TorchFile> {
    read_archive(file).map_err(|error| error.at(shown(&file.path)))
}

fn start_of(file: &OpenFile) -> Result<Vec<u8>> {
    let mut start = vec![0; file.size().min(legacy::START_BYTES as u64) as usize];
    file.read_exact_at(&mut start, 0)?;
    Ok(start)
}

fn read_archive(file: &OpenFile) -> Result<TorchFile> {
    let start = start_of(file)?;
    if !legacy::is_zip(&start) {
        return Err(legacy::refusal(&start));
    }
    let archive = Archive::open(file, 0, file.size()).map_err(cut_short)?;
    check_byteorder(&archive)?;
    let record = archive.record("data.pkl")?;
    let record = record.ok_or_else(|| Error::new(Code::Internal, "an archive without data.pkl"))?;
    let pickle = archive.read_checked(&record, MAX_PICKLE_BYTES)?;
    let graph = parse(&pickle, &Options::ITEM)?;
    let mut found = TorchFile::default();
    let mut views = Vec::new();
    let mut refused = 0;
    for (name, leaf) in leaves(&graph)? {
        match leaf {
            Leaf::Tensor(Ok(view)) => views.push((name, view)),
            Leaf::Tensor(Err(why)) => {
                refused += 1;
                if refused <= WARNINGS {
                    let name = quoted(&name);
                    found.warnings.push(format!("tensor {name} is left out: {}", why.what));
                }
            }
            Leaf::Object(object) => found.objects.push(ObjectEntry { name, object }),
        }
    }
    if refused > WARNINGS {
        found.warnings.push(format!("{} more tensors are left out", refused - WARNINGS));
    }
    let names: Vec<String> = storages(&views);
    let records = archive.records(&names)?;
    let records: HashMap<&str, Option<Record>> =
        names.iter().map(String::as_str).zip(records).collect();
    found.checks.extend(records.values().flatten().map(check));
    found.checks.sort_by_key(|check| check.offset);
    for (name, view) in views {
        let record = records.get(view.record.as_str()).copied().flatten();
        let place = format!("{}, tensor {}", shown(&file.path), quoted(&name));
        let entry = entry(name, &view, record).map_err(|error| error.at(place))?;
        found.tensors.push(entry);
    }
    check_names(&found.tensors)?;
    Ok(found)
}

/// What starts as an archive and has no end was cut, as a rule.
fn cut_short(error: Error) -> Error {
    if error.code() != Code::InvalidItem || !error.what().contains("no end record") {
        return error;
    }
    Error::new(Code::Truncated, "the file starts as an archive of torch.save but has no end")
        .hint("it was cut short: download or copy it again")
}

fn check(record: &Record) -> Check {
    Check { file: 0, offset: record.offset, bytes: record.bytes, crc: record.crc }
}

/// The records that the views need, each once, in the order of their first use.
fn storages(views: &[(String, View)]) -> Vec<String> {
    let mut seen = HashSet::new();
    let first = views.iter().filter(|(_, view)| seen.insert(view.record.as_str()));
    first.map(|(_, view)| view.record.clone()).collect()
}

/// The tensor of a view of a record.
fn entry(name: String, view: &View, record: Option<Record>) -> Result<TensorEntry> {
    let record = view.check_record(record)?;
    let bytes = view.bytes();
    // A tensor without elements may start anywhere.
    let offset = if bytes == 0 { record.offset } else { record.offset + view.start_bytes() };
    let stored = match view.is_row_major() {
        true => Stored::Run,
        false => {
            let region = Region::whole(&view.shape);
            let strides = Some(view.memory.strides.clone());
            Stored::Pieces(vec![Piece { region, file: 0, offset, strides }])
        }
    };
    Ok(TensorEntry {
        name,
        dtype: view.dtype,
        shape: view.shape.clone(),
        file: 0,
        offset,
        bytes,
        stored,
    })
}

/// Keys with dots can make one name of two: no name may stand for two tensors.
fn check_names(tensors: &[TensorEntry]) -> Result<()> {
    let mut seen = HashSet::new();
    match tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
        None => Ok(()),
        Some(tensor) => {
            let name = quoted(&tensor.name);
            let what = format!("two tensors of the saved state are called {name} once it is flat");
            Err(Error::new(Code::DuplicateTensor, what)
                .hint("keys with dots: rename one of them and save again"))
        }
    }
}
