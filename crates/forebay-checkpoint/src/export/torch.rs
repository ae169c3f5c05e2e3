//! Writing one file of `torch.save`, which `torch.load(weights_only=True)` reads.
//!
//! All places are known before a byte is written; the CRC-32 of the records, which their headers hold, are put
//! together from those of the pieces at the end. Each tensor is a storage of its own, those of two names one storage.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_format::dcp;
use forebay_format::dcp::TorchDtype;
use forebay_format::pickle::{Options as PickleOptions, parse};
use forebay_format::torch_zip::Archive;
use forebay_tensor::{Dtype, byte_len};

use super::safetensors::write_at;
use super::state::{MAX_PICKLE_BYTES, State};
use super::stream::{Sink, stream};
use super::zip::{Record, directory};
use super::{Exported, Item, Items, Options, is_selected, pickle};
use crate::model::{Chunk, Kind, PathStep};
use crate::open::Checkpoint;
use crate::progress::Progress;
use crate::save::torch_shape;
use crate::stream::Source;

pub(super) fn write(
    source: &Source,
    items: &Items,
    to: &Path,
    options: &Options<'_>,
    progress: &impl Progress,
) -> Result<Exported> {
    let mut exported = Exported::default();
    let pickle = pickle_of(source, items, options, &mut exported)?;
    let mut archive = Layout::new(&pickle);
    let mut of: HashMap<usize, usize> = HashMap::new();
    let stored = |item: &Item| item.same_as.is_none();
    for item in items.0.iter().filter(|item| stored(item)) {
        let bytes = byte_len(item.dtype, shape_of(source, item)?)?;
        exported.bytes += bytes;
        of.insert(item.tensor, archive.records.len());
        archive.add(format!("data/{}", of.len() - 1), bytes);
    }
    exported.tensors = items.0.len();
    archive.add("version".to_owned(), VERSION.len() as u64);
    if archive.records.len() as u64 > forebay_format::torch_zip::MAX_RECORDS {
        let what = format!("{} tensors are too many for one file", items.0.len());
        return Err(Error::new(Code::Unsupported, what));
    }
    let file = super::new_file(to)?;
    let dtypes = items.0.iter().map(|item| (item.tensor, item.dtype)).collect();
    let order = items.reading_order(source, stored);
    let parts = {
        let sink = Archiver {
            file: file.file(),
            to,
            archive: &archive,
            of,
            dtypes,
            parts: Mutex::default(),
        };
        file.preallocate(archive.end())?;
        stream(source, &order, &sink, progress)?;
        sink.parts.into_inner().unwrap_or_else(PoisonError::into_inner)
    };
    archive.finish(file.file(), to, &pickle, parts)?;
    progress.add(0)?;
    file.commit()?;
    let name = to.file_name().unwrap_or_default();
    exported.files.push(name.to_string_lossy().into_owned());
    Ok(exported)
}

const BYTEORDER: &[u8] = b"little";
const VERSION: &[u8] = b"3\n";

/// The records: pickle, byte order, storages, version.
struct Layout {
    records: Vec<Record>,
}

impl Layout {
    fn new(pickle: &[u8]) -> Self {
        let mut layout = Self { records: Vec::new() };
        layout.add("data.pkl".to_owned(), pickle.len() as u64);
        layout.add("byteorder".to_owned(), BYTEORDER.len() as u64);
        layout
    }

    fn add(&mut self, name: String, bytes: u64) {
        let record = Record::new(format!("archive/{name}"), bytes, self.end());
        self.records.push(record);
    }

    /// Where the next record's header would start.
    fn end(&self) -> u64 {
        self.records.last().map_or(0, Record::end)
    }

    /// Writes all that is no tensor. `parts` are the checksums of what was written of each record.
    fn finish(mut self, file: &File, to: &Path, pickle: &[u8], parts: Parts) -> Result<()> {
        let small = [(0, pickle), (1, BYTEORDER), (self.records.len() - 1, VERSION)];
        for (number, bytes) in small {
            if let Some(record) = self.records.get_mut(number) {
                record.crc = crc32(bytes);
                write_at(file, bytes, record.offset(), to)?;
            }
        }
        for (number, mut parts) in parts {
            parts.sort_unstable();
            let joined = parts.iter().fold(0, |crc, &(_, len, next)| crc32_join(crc, next, len));
            if let Some(record) = self.records.get_mut(number) {
                record.crc = joined;
            }
        }
        let mut header = Vec::new();
        for record in &self.records {
            header.clear();
            record.local(&mut header);
            write_at(file, &header, record.header_offset(), to)?;
        }
        let end = self.end();
        write_at(file, &directory(&self.records, end), end, to)
    }
}

/// Of each record: offset, bytes and CRC-32 of the pieces that were written.
type Parts = HashMap<usize, Vec<(u64, u64, u32)>>;

struct Archiver<'a> {
    file: &'a File,
    to: &'a Path,
    archive: &'a Layout,
    /// The record of each tensor of the source.
    of: HashMap<usize, usize>,
    dtypes: HashMap<usize, Dtype>,
    parts: Mutex<Parts>,
}

impl Sink for Archiver<'_> {
    fn dtype(&self, tensor: usize) -> Option<Dtype> {
        self.dtypes.get(&tensor).copied()
    }

    fn write(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let number = self.of.get(&tensor).copied();
        let record = number.and_then(|number| Some((number, self.archive.records.get(number)?)));
        let (number, record) =
            record.ok_or_else(|| Error::new(Code::Internal, "a tensor without a record"))?;
        write_at(self.file, bytes, record.offset() + offset, self.to)?;
        let part = (offset, bytes.len() as u64, crc32(bytes));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.entry(number).or_default().push(part);
        Ok(())
    }
}

fn shape_of<'s>(source: &'s Source, item: &Item) -> Result<&'s [u64]> {
    let info = source.tensors.get(item.tensor);
    info.map(|info| info.shape.as_slice())
        .ok_or_else(|| Error::new(Code::Internal, "an item without a tensor"))
}

/// `data.pkl`: the state with all tensors, and those objects that are plain data.
fn pickle_of(
    source: &Source,
    items: &Items,
    options: &Options<'_>,
    exported: &mut Exported,
) -> Result<Vec<u8>> {
    let mut state = State::default();
    let mut keys: Vec<usize> = Vec::with_capacity(items.0.len());
    let mut next = 0;
    for item in &items.0 {
        let key = match item.same_as.and_then(|same| keys.get(same)) {
            Some(&key) => key,
            None => {
                next += 1;
                next - 1
            }
        };
        keys.push(key);
        let dtype = TorchDtype::of(item.dtype).ok_or_else(|| {
            let what = format!("torch has no type for {} of {:?}", item.dtype, item.name);
            Error::new(Code::Unsupported, what)
        })?;
        let mut value = Vec::new();
        pickle::tensor(&mut value, dtype, &torch_shape(item.dtype, shape_of(source, item)?)?, key);
        let path = source.tensors.get(item.tensor).map(|info| info.path.as_slice());
        state.put(&way(&item.name, path.unwrap_or_default(), options), value)?;
    }
    if let Some(checkpoint) = source.checkpoint() {
        add_objects(&mut state, checkpoint, options, exported)?;
    } else {
        let why = "objects of a file of torch stay in it".to_owned();
        let objects = source.objects(|name| is_selected(options, name));
        exported.left_out.extend(objects.into_iter().map(|(name, _)| (name, why.clone())));
    }
    let mut pickle = pickle::PROTO_2.to_vec();
    state.write(&mut pickle)?;
    pickle.push(pickle::STOP);
    Ok(pickle)
}

/// Where a value goes in the state.
fn way(name: &str, path: &[PathStep], options: &Options<'_>) -> Vec<PathStep> {
    match options.flat || path.is_empty() || !options.renames.is_empty() {
        true => vec![PathStep::Key(name.to_owned())],
        false => path.to_vec(),
    }
}

fn add_objects(
    state: &mut State,
    checkpoint: &Checkpoint,
    options: &Options<'_>,
    exported: &mut Exported,
) -> Result<()> {
    for entry in &checkpoint.entries {
        let Kind::Object { chunk } = &entry.kind else { continue };
        if !is_selected(options, &entry.name) {
            continue;
        }
        checkpoint.verify_item(entry, chunk)?;
        match plain_object(checkpoint, chunk)? {
            Ok(value) => {
                let name = super::rename::rename(&options.renames, &entry.name);
                state.put(&way(&name, &entry.path, options), value)?;
                exported.objects += 1;
            }
            Err(why) => exported.left_out.push((entry.name.clone(), why)),
        }
    }
    Ok(())
}

/// The opcodes of an object, or why it is no plain data.
fn plain_object(checkpoint: &Checkpoint, chunk: &Chunk) -> Result<Result<Vec<u8>, String>> {
    if !chunk.transforms.is_empty() {
        return Ok(Err("it was saved compressed".to_owned()));
    }
    if chunk.length > dcp::MAX_OBJECT_BYTES {
        return Ok(Err(format!("it has {} bytes", chunk.length)));
    }
    let file = checkpoint.open_file(chunk.file)?;
    let archive = Archive::open(file.as_ref(), chunk.offset, chunk.length)?;
    let record = archive.record("data.pkl")?;
    let record =
        record.ok_or_else(|| Error::new(Code::InvalidItem, "the archive has no data.pkl"))?;
    let bytes = archive.read_checked(&record, MAX_PICKLE_BYTES as u64)?;
    let graph = parse(&bytes, &PickleOptions::ITEM)?;
    Ok(pickle::plain(&graph))
}
