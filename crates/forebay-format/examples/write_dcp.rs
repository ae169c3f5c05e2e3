//! Writes a checkpoint of `torch.distributed.checkpoint` from a description, with the encoders and plain file I/O.
//!
//! `write_dcp SPEC.json FOLDER`, where the description is
//!
//! ```text
//! {"ranks": 2, "files": 1, "min_file_bytes": 0, "large_bytes": 65536, "data": "BYTES",
//!  "entries": [{"name": "model.w", "path": ["model", "w"], "dtype": "float32", "shape": [4, 6], "chunks":
//!     [{"rank": 0, "offsets": [0, 0], "sizes": [2, 6], "at": 0}]},
//!    {"name": "lr", "path": ["lr"], "chunks": [{"rank": 0, "at": 48, "len": 9}]}]}
//! ```
//!
//! `data` is a file; a chunk's row-major bytes, or an object's pickle (no `dtype`), start in it at `at`. A tensor chunk
//! without `at` is zeros, and a hole in the file. Tests (python/tests/interop) hand what comes out to stock torch.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_error::Result as ForebayResult;
use forebay_format::crc::{crc32, crc32_join};
use forebay_format::dcp::{
    FileLayout, GlueSource, ItemSpec, KeyStep, LayoutOptions, MetadataWriter, ObjectItem,
    PlainValue, Segment, StorageMeta, TensorProps, TorchDtype, plan_files,
};
use serde::Deserialize;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

#[derive(Deserialize)]
struct Spec {
    ranks: usize,
    files: usize,
    min_file_bytes: u64,
    large_bytes: u64,
    data: String,
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    path: Vec<Step>,
    dtype: Option<String>,
    #[serde(default)]
    shape: Vec<u64>,
    chunks: Vec<Chunk>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Step {
    Index(u64),
    Key(String),
}

#[derive(Deserialize)]
struct Chunk {
    rank: usize,
    #[serde(default)]
    offsets: Vec<u64>,
    #[serde(default)]
    sizes: Vec<u64>,
    at: Option<usize>,
    #[serde(default)]
    len: usize,
}

/// One item of a rank, and which chunk of which entry it is.
struct Item {
    chunk: (usize, usize),
    spec: ItemSpec,
    bytes: Bytes,
}

enum Bytes {
    Data(Vec<u8>),
    Zeros(u64),
}

struct Items(Vec<Item>);

impl GlueSource for Items {
    fn crc(&self, index: usize) -> u32 {
        match &self.0[index].bytes {
            Bytes::Data(bytes) => crc32(bytes),
            Bytes::Zeros(count) => crc32_of_zeros(*count),
        }
    }

    fn copy(&self, index: usize, from: u64, into: &mut [u8]) -> ForebayResult<()> {
        match &self.0[index].bytes {
            Bytes::Data(bytes) => into.copy_from_slice(&bytes[from as usize..][..into.len()]),
            Bytes::Zeros(_) => into.fill(0),
        }
        Ok(())
    }
}

/// Where a chunk went.
type Places = HashMap<(usize, usize), (String, u64, u64)>;

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [spec, folder] = arguments.as_slice() else { return Err("SPEC.json FOLDER".into()) };
    let spec: Spec = serde_json::from_slice(&fs::read(spec)?)?;
    let data = fs::read(&spec.data)?;
    let folder = Path::new(folder);
    fs::create_dir_all(folder)?;
    let mut places = Places::new();
    for rank in 0..spec.ranks {
        write_rank(&spec, &data, rank, folder, &mut places)?;
    }
    write_metadata(&spec, &places, folder)
}

fn write_rank(
    spec: &Spec,
    data: &[u8],
    rank: usize,
    folder: &Path,
    places: &mut Places,
) -> Result<()> {
    let items = items_of(spec, data, rank)?;
    let specs: Vec<_> = items.0.iter().map(|item| item.spec.clone()).collect();
    let options = LayoutOptions {
        files: spec.files,
        min_file_bytes: spec.min_file_bytes,
        large_bytes: spec.large_bytes,
        ..LayoutOptions::default()
    };
    for (number, layout) in plan_files(&specs, &options)?.iter().enumerate() {
        let name = format!("00c0ffee-1_{rank}_{number}.distcp");
        write_file(layout, &items, &folder.join(&name))?;
        for placed in &layout.items {
            let place = (name.clone(), placed.offset, placed.len);
            places.insert(items.0[placed.index].chunk, place);
        }
    }
    Ok(())
}

fn items_of(spec: &Spec, data: &[u8], rank: usize) -> Result<Items> {
    let mut items = Vec::new();
    for (number, entry) in spec.entries.iter().enumerate() {
        for (place, chunk) in entry.chunks.iter().enumerate() {
            if chunk.rank != rank {
                continue;
            }
            let stretch = |at: usize, len: usize| data.get(at..).and_then(|rest| rest.get(..len));
            let (spec, bytes) = if let Some(dtype) = &entry.dtype {
                let dtype = TorchDtype::parse(dtype).ok_or("unknown dtype")?;
                let (_, len) = dtype.size(&chunk.sizes)?;
                let bytes = match chunk.at {
                    Some(at) => Bytes::Data(stretch(at, len as usize).ok_or("no data")?.to_vec()),
                    None => Bytes::Zeros(len),
                };
                (ItemSpec::Tensor { dtype, shape: chunk.sizes.clone() }, bytes)
            } else {
                let at = chunk.at.ok_or("an object without data")?;
                let archive = ObjectItem::encode(stretch(at, chunk.len).ok_or("no data")?);
                (ItemSpec::Bytes(archive.len() as u64), Bytes::Data(archive))
            };
            items.push(Item { chunk: (number, place), spec, bytes });
        }
    }
    Ok(Items(items))
}

/// As direct I/O would: whole blocks, then the file is cut.
fn write_file(layout: &FileLayout, items: &Items, path: &Path) -> Result<()> {
    let file = File::create_new(path)?;
    let mut glue = Vec::new();
    for segment in &layout.segments {
        match *segment {
            Segment::Body { item, offset, len } => {
                if let Bytes::Data(bytes) = &items.0[layout.items[item].index].bytes {
                    file.write_all_at(&bytes[..len as usize], offset)?;
                }
            }
            Segment::Glue { offset, .. } => {
                glue.resize(segment.padded_len() as usize, 0);
                layout.glue(segment, items, &mut glue)?;
                file.write_all_at(&glue, offset)?;
            }
        }
    }
    file.set_len(layout.len)?;
    Ok(())
}

fn write_metadata(spec: &Spec, places: &Places, folder: &Path) -> Result<()> {
    let mut writer = MetadataWriter::new(File::create_new(folder.join(".metadata"))?)?;
    for entry in &spec.entries {
        let Some(dtype) = &entry.dtype else {
            writer.object(&entry.name)?;
            continue;
        };
        let dtype = TorchDtype::parse(dtype).ok_or("unknown dtype")?;
        let props = TensorProps { dtype, requires_grad: false, pin_memory: false };
        writer.tensor(&entry.name, &props, &entry.shape)?;
        for chunk in &entry.chunks {
            writer.chunk(&chunk.offsets, &chunk.sizes)?;
        }
    }
    for (number, entry) in spec.entries.iter().enumerate() {
        let step = |step| match step {
            &Step::Index(index) => KeyStep::Index(index),
            Step::Key(key) => KeyStep::Key(key),
        };
        let steps: Vec<_> = entry.path.iter().map(step).collect();
        writer.path(number as u32, &steps)?;
    }
    for (number, entry) in spec.entries.iter().enumerate() {
        for place in 0..entry.chunks.len() {
            let (file, offset, len) = &places[&(number, place)];
            writer.stored(number as u32, place as u32, file, *offset, *len)?;
        }
    }
    let meta = StorageMeta {
        checkpoint_id: folder.to_string_lossy().into_owned(),
        save_id: "b3a1c3a4-0000-4000-8000-00c0ffee0001".to_owned(),
    };
    let ours = PlainValue::Dict(vec![
        ("attempt".to_owned(), PlainValue::Text("00c0ffee-1".to_owned())),
        ("version".to_owned(), PlainValue::Int(1)),
    ]);
    writer.finish(&meta, &[("forebay", ours)])?.sync_all()?;
    Ok(())
}

/// Without the zeros: doubled and joined.
fn crc32_of_zeros(count: u64) -> u32 {
    let (mut sum, mut power, mut bytes) = (0, crc32(&[0]), 1u64);
    let mut left = count;
    while left > 0 {
        if left & 1 == 1 {
            sum = crc32_join(sum, power, bytes);
        }
        power = crc32_join(power, power, bytes);
        bytes = bytes.wrapping_mul(2);
        left >>= 1;
    }
    sum
}
