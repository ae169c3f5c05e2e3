//! The reader: opens a manifest and reads of it only what is asked for.
//!
//! Whatever is read is vouched for by the seal in `.metadata`. It is the SHA-256 of everything up to the index, which
//! is read and hashed as a whole when the manifest is opened. The index has the SHA-256 of each rank's part, which is
//! compared when the part is read. The lists of holders have a CRC-32 in the table: they say only where to look, and
//! [`Manifest::find`] sees to it that what was found is all of what was wanted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use forebay_engine::RangeSource;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_format::hex;
use forebay_tensor::{Dtype, Region, Tiling};
use sha2::{Digest, Sha256};

use super::head::{EAGER, Header, Id, MAX_HEADER_BYTES};
use super::holders::Held;
use super::index::{self, PartEntry};
use super::info::Info;
use super::loaded::Cache;
use super::lookup::{READ_BYTES, read};
use super::meshes;
use super::part::PartFile;
use super::rows::RowReader;
use super::structure::Structure;
use super::value::{Named, Value, shown};
use super::wire::Take;
use crate::model::{Chunk, DataFile, Entry, Kind};

/// Bytes that are read first: any header, and all that a small job's manifest has before its parts. Of a large one the
/// rest is read by what the header says of it, to the byte.
const FIRST_READ_BYTES: u64 = 4 << 10;

/// The tilings of tensors by layout and shape.
pub(super) type Tilings = HashMap<(u32, Vec<u64>), Arc<Tiling>>;

/// An open manifest. Can be used from many threads at once.
pub struct Manifest {
    pub(super) source: Arc<dyn RangeSource>,
    pub(super) name: String,
    pub(super) header: Header,
    pub(super) info: Info,
    pub(super) table: Structure,
    pub(super) held: Vec<Held>,
    /// Of each value of the ranks' common structure its place in the table.
    pub(super) shared: Vec<u32>,
    pub(super) parts: Vec<PartEntry>,
    pub(super) seal: [u8; 32],
    pub(super) cache: Mutex<Cache>,
    pub(super) tilings: Mutex<Tilings>,
}

impl Manifest {
    /// Reads header, info, meshes, tensor table and part index.
    ///
    /// `seal` is what `.metadata` says of the manifest; without it damage is found by checksums alone.
    ///
    /// Errors: `checksum`, `truncated`, `trailing_bytes`, `invalid_metadata`; `unsupported` for a later major version.
    pub fn open(source: Arc<dyn RangeSource>, seal: Option<&[u8; 32]>) -> Result<Self> {
        let name = format!("manifest {}", source.name());
        let total = source.len();
        let mut start = read(&*source, 0, total.min(FIRST_READ_BYTES.max(MAX_HEADER_BYTES)))?;
        let header = Header::decode(&start, total, &format!("{name}, header"))?;
        let (eager, have) = (header.eager_bytes(), start.len() as u64);
        if eager > have {
            start.extend(read(&*source, have, eager - have)?);
        }
        start.truncate(usize::try_from(eager).unwrap_or(usize::MAX));
        let found: [u8; 32] = Sha256::digest(&start).into();
        let place = |id: Id| format!("{name}, section {id:?}");
        let sections = EAGER.map(|id| header.section(id).of(&start, &place(id)));
        let [info, meshes, table, index] = sections;
        let (info, meshes, table, index) = (info?, meshes?, table?, index?);
        if let Some(expected) = seal.filter(|&expected| *expected != found) {
            let what = format!("its hash is {:.16}, not {:.16}", hex(&found), hex(expected));
            return Err(Error::new(Code::Checksum, what)
                .at(name)
                .hint("it is not the manifest that .metadata was written with: look for a copy"));
        }
        let info = Info::decode(info, &place(Id::Info))?;
        let (meshes, layouts) = meshes::decode(meshes, &place(Id::Meshes))?;
        let parts_bytes = header.section(Id::Parts).bytes;
        let parts = index::decode(index, parts_bytes.end - parts_bytes.start, &place(Id::Index))?;
        if parts.len() as u64 != u64::from(info.world_size) {
            let what = format!("{} parts for {} ranks", parts.len(), info.world_size);
            return Err(Error::new(Code::InvalidMetadata, what).at(name));
        }
        let lists = header.section(Id::Holders).bytes;
        let rows = take_table(table, lists.end - lists.start, &place(Id::Table))?;
        let table = Structure::from_parts(meshes, layouts, rows.values).map_err(|error| {
            Error::new(Code::InvalidMetadata, "the tables contradict each other")
                .at(&name)
                .with_source(error)
        })?;
        let (held, shared) = (rows.held, rows.shared);
        let (cache, tilings) = (Mutex::default(), Mutex::default());
        let seal = found;
        Ok(Self { source, name, header, info, table, held, shared, parts, seal, cache, tilings })
    }

    /// The save as a whole.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// SHA-256 of header, info, meshes, table and index.
    pub fn seal(&self) -> [u8; 32] {
        self.seal
    }

    /// Bytes of the manifest.
    pub fn bytes(&self) -> u64 {
        self.header.total()
    }

    /// Bytes of tensors and objects in the whole checkpoint, as stored.
    pub fn data_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(part.data_bytes))
    }

    /// All values by name, with meshes and layouts.
    pub fn table(&self) -> &Structure {
        &self.table
    }

    /// A value; `None` where there is none of that name.
    pub fn value(&self, name: &str) -> Option<&Named> {
        self.table.find(name).map(|(_, named)| named)
    }

    /// A tensor, under its own name or another that it was saved under: its dtype and shape.
    ///
    /// Errors: `no_such_tensor`, also where the name is that of an object.
    pub fn tensor(&self, name: &str) -> Result<(Dtype, &[u64])> {
        let (_, tensor) = self.find_tensor(name)?;
        Ok((tensor.dtype, &tensor.shape))
    }

    /// The chunks of a tensor that share elements with a region, by file and offset. Of a tensor without elements, and
    /// where the region has none, there are none. Reads the parts that hold them, if it has not yet.
    ///
    /// Errors: `no_such_tensor`, `bad_slice`; those of reading a part.
    pub fn chunks_for(&self, name: &str, wanted: &Region) -> Result<Vec<Chunk>> {
        let (number, tensor) = self.find_tensor(name)?;
        wanted.check_within(&tensor.shape).map_err(|error| error.at(shown(name)))?;
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut chunks = Vec::new();
        for rank in self.holders(number, tensor, Some(wanted))? {
            self.part(rank)?.chunks_of(number, Some(wanted), &mut chunks);
        }
        Ok(chunks)
    }

    /// One value with all of its chunks that have elements; under another name the chunks are those of the value that
    /// it is the same as.
    ///
    /// Errors: `no_such_tensor`; those of reading a part.
    pub fn entry(&self, name: &str) -> Result<Entry> {
        let (number, named) = self.table.find(name).ok_or_else(|| self.no_such(name))?;
        let (number, value) = self.resolve(number, named)?;
        let ranks = match &value.value {
            Value::Tensor(tensor) => self.holders(number, tensor, None)?,
            _ => self.one_holder(number)?,
        };
        let mut chunks = Vec::new();
        for rank in ranks {
            self.part(rank)?.chunks_of(number, None, &mut chunks);
        }
        self.entry_of(named, value, chunks)
    }

    /// All values with all of their chunks that have elements, by name: for export and listings. Takes memory for each
    /// chunk of the checkpoint; [`visit`](Self::visit) does not.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let mut chunks: Vec<Vec<Chunk>> = self.table.values().iter().map(|_| Vec::new()).collect();
        self.visit(|_, number, chunk| {
            if let Some(chunks) =
                chunks.get_mut(number as usize).filter(|_| !chunk.region.is_empty())
            {
                chunks.push(chunk);
            }
            Ok(())
        })?;
        let mut entries = Vec::with_capacity(chunks.len());
        for (named, number) in self.table.values().iter().zip(0..) {
            let (own, value) = self.resolve(number, named)?;
            let own = chunks.get(own as usize).cloned().unwrap_or_default();
            entries.push(self.entry_of(named, value, own)?);
        }
        Ok(entries)
    }

    /// Calls `each` with rank, number of the value in the table and chunk, for every chunk of the checkpoint, those
    /// without elements too, part by part. Memory does not grow with the number of ranks.
    pub fn visit(&self, mut each: impl FnMut(u32, u32, Chunk) -> Result<()>) -> Result<()> {
        for rank in 0..self.info.world_size {
            let part = self.part(rank)?;
            part.for_each(|number, chunk| each(rank, number, chunk))?;
        }
        Ok(())
    }

    /// The files of a rank: their names, bytes and checksums.
    pub fn part_files(&self, rank: u32) -> Result<Vec<PartFile>> {
        Ok(self.part(rank)?.part().files().to_vec())
    }

    /// One file of the checkpoint, by the number that chunks call it.
    ///
    /// Errors: `usage` for a number that no file has.
    pub fn file(&self, number: u32) -> Result<DataFile> {
        let after = self.parts.partition_point(|part| part.first_file <= u64::from(number));
        let rank = after.saturating_sub(1);
        let file = self.part(rank as u32)?.file(number);
        file.ok_or_else(|| Error::new(Code::Usage, format!("no file {number}")).at(&self.name))
    }

    /// All files, in the order of their numbers. Reads all parts.
    pub fn files(&self) -> Result<Vec<DataFile>> {
        let mut files = Vec::new();
        for rank in 0..self.info.world_size {
            let part = self.part(rank)?;
            files.extend(
                part.part()
                    .files()
                    .iter()
                    .map(|file| DataFile { name: file.name.clone(), bytes: Some(file.bytes) }),
            );
        }
        Ok(files)
    }

    /// Reads the whole manifest and checks the checksum of every section, those that only a later version knows too.
    pub fn check_sections(&self) -> Result<()> {
        self.header.sections().iter().try_for_each(|section| {
            let (start, end) = (section.bytes.start, section.bytes.end);
            let (mut at, mut crc) = (start, 0);
            while at < end {
                let bytes = read(&*self.source, at, (end - at).min(READ_BYTES))?;
                crc = crc32_join(crc, crc32(&bytes), bytes.len() as u64);
                at += bytes.len() as u64;
            }
            section.check(crc, &format!("{}, byte {start}", self.name))
        })
    }

    fn entry_of(&self, named: &Named, value: &Named, mut chunks: Vec<Chunk>) -> Result<Entry> {
        let kind = match &value.value {
            Value::Tensor(tensor) => {
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                Kind::Tensor { dtype, shape, chunks }
            }
            _ => match (chunks.pop(), chunks.is_empty()) {
                (Some(chunk), true) => Kind::Object { chunk },
                _ => return Err(self.bad("an object is not stored once").at(shown(&named.name))),
            },
        };
        Ok(Entry { name: named.name.clone(), path: named.path.clone(), kind })
    }
}

struct Rows {
    values: Vec<Named>,
    held: Vec<Held>,
    shared: Vec<u32>,
}

/// Reads the table; the lists of holders fill `lists` bytes.
fn take_table(bytes: &[u8], lists: u64, place: &str) -> Result<Rows> {
    let mut take = Take::new(bytes, place);
    let mut reader = RowReader::new(&mut take)?;
    let count = reader.count();
    let (mut values, mut held) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let (mut shared, mut offset) = (Vec::new(), 0);
    while let Some((named, in_structure)) = reader.next(&mut take)? {
        if in_structure {
            shared.push(values.len() as u32);
        }
        held.push(match &named.value {
            Value::Alias { .. } => Held::Nobody,
            value => take_held(&mut take, value, &mut offset)?,
        });
        values.push(named);
    }
    take.end()?;
    match offset == lists {
        true => Ok(Rows { values, held, shared }),
        false => Err(take.bad(format!("lists of {offset} bytes in a section of {lists}"))),
    }
}

fn take_held(take: &mut Take<'_>, value: &Value, offset: &mut u64) -> Result<Held> {
    let held = Held::take(take, offset)?;
    let fits = match (&held, value) {
        (Held::One(_), _) => true,
        (Held::Nobody, Value::Tensor(tensor)) => tensor.shape.contains(&0),
        (Held::Regions(_), Value::Tensor(_)) => true,
        (Held::Replica(_) | Held::Replicas(_), Value::Tensor(tensor)) => tensor.layout.is_some(),
        _ => false,
    };
    if fits { Ok(held) } else { Err(take.bad("holders that do not fit the value")) }
}
