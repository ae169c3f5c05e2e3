//! Streams `.metadata`: what makes data files a checkpoint for `torch.distributed.checkpoint`.
//!
//! A pickle of one object, of protocol 4, with these attributes:
//!
//! ```text
//! Metadata
//!   state_dict_metadata  {name: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
//!   planner_data         {name: (key, ...)}, or None
//!   storage_data         {MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length)}
//!   storage_meta         StorageMeta(checkpoint_id, save_id, load_id, modules)
//!   version              "1.0.0"
//!   and attributes of the caller's
//! ```
//!
//! It is the form that all torch from 2.4 on read. Python sets attributes that a class does not know without a word, so
//! `version` (2.9), `modules` (2.7) and our own do no harm in an older one. What would: a sixth field in the properties
//! (2.15 alone knows it), and a path object for the place (each Python has its own).
//!
//! **Memory.** Nothing is kept but numbers: 12 bytes an entry, 4 a chunk, and tables of bounded size for what repeats.
//! Names and the offsets of chunks come twice; the second time is a reference to the first.
//!
//! **Order.** The three dicts come one after the other, so the caller goes over its entries up to three times:
//! [`tensor`](MetadataWriter::tensor) with its [`chunk`](MetadataWriter::chunk)s and
//! [`object`](MetadataWriter::object), then [`path`](MetadataWriter::path), then [`stored`](MetadataWriter::stored).
//! What comes out of order is refused.

use std::io::Write;

use forebay_error::{Code, Error, Result};

use super::pickle::{self, APPENDS, EMPTY_DICT, EMPTY_LIST, MARK, NONE, SETITEMS, TUPLE};
use super::records::Records;
use super::{PlainValue, StorageMeta, TorchDtype};

/// Pairs and values are handed to their dict or list in groups of this many, as by Python: the reader's stack stays
/// small.
const BATCH: usize = 1000;
/// Sides that a tensor of torch can have.
const MAX_RANK: usize = 64;

/// What `.metadata` says of a tensor beside its sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorProps {
    /// The type of its elements.
    pub dtype: TorchDtype,
    /// Whether it wanted gradients.
    pub requires_grad: bool,
    /// Whether it was in pinned memory.
    pub pin_memory: bool,
}

/// A step of the way to a value in the nested state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStep<'a> {
    /// A key of a dict.
    Key(&'a str),
    /// A place in a list.
    Index(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Entries,
    Paths,
    Storage,
}

/// What later parts refer to.
struct EntryIds {
    name: u32,
    /// Where its chunks start in the list of all; their offsets' numbers are there.
    first_chunk: u32,
    object: bool,
}

/// Writes `.metadata`, piece by piece, to any stream; see the opening of its module for the order.
pub struct MetadataWriter<W> {
    records: Records<W>,
    phase: Phase,
    /// Pairs since the last group of the open dict.
    pairs: usize,
    /// The tensor whose chunks are being written.
    open: Option<OpenTensor>,
    entries: Vec<EntryIds>,
    /// The numbers of all chunks' offsets.
    chunks: Vec<u32>,
    /// Items that [`MetadataWriter::stored`] must still name.
    missing: u64,
}

struct OpenTensor {
    rank: usize,
    chunks: usize,
}

impl<W: Write> MetadataWriter<W> {
    /// Starts the pickle.
    pub fn new(out: W) -> Result<Self> {
        let mut records = Records::new(out)?;
        records.start_metadata();
        records.bytes().push(EMPTY_DICT);
        Ok(Self {
            records,
            phase: Phase::Entries,
            pairs: 0,
            open: None,
            entries: Vec::new(),
            chunks: Vec::new(),
            missing: 0,
        })
    }

    /// Starts a tensor of the sides `shape`; its chunks follow. Entries are numbered from 0.
    pub fn tensor(&mut self, name: &str, props: &TensorProps, shape: &[u64]) -> Result<()> {
        if shape.len() > MAX_RANK {
            let what =
                format!("a tensor has {} sides, at most {MAX_RANK} are possible", shape.len());
            return Err(Error::new(Code::Unsupported, what).at(name));
        }
        self.entry(name, false)?;
        self.records.start_tensor(props, shape);
        self.records.bytes().push(EMPTY_LIST);
        self.open = Some(OpenTensor { rank: shape.len(), chunks: 0 });
        Ok(())
    }

    /// The next chunk of the tensor that was started last, numbered from 0 in it.
    pub fn chunk(&mut self, offsets: &[u64], sizes: &[u64]) -> Result<()> {
        let Some(open) = self.open.as_mut() else { return Err(misuse("a chunk without tensor")) };
        if (offsets.len(), sizes.len()) != (open.rank, open.rank) {
            return Err(misuse("a chunk has other dimensions than its tensor"));
        }
        if open.chunks % BATCH == 0 {
            self.records.bytes().push(MARK);
        }
        open.chunks += 1;
        let full = open.chunks % BATCH == 0;
        self.room()?;
        self.chunks.push(self.records.chunk(offsets, sizes));
        if full {
            self.records.bytes().push(APPENDS);
        }
        self.missing += 1;
        self.records.pause()
    }

    /// An entry that is an object. Entries are numbered from 0.
    pub fn object(&mut self, name: &str) -> Result<()> {
        self.entry(name, true)?;
        self.records.bytes_entry();
        self.missing += 1;
        self.end_pair()
    }

    /// The way to entry number `entry` in the nested state. Without any, `planner_data` is None.
    pub fn path(&mut self, entry: u32, steps: &[KeyStep<'_>]) -> Result<()> {
        self.enter(Phase::Paths)?;
        let name = self.ids(entry)?.name;
        self.start_pair();
        pickle::get(self.records.bytes(), name);
        // Up to three steps would need no mark: one form for all is simpler, at a byte each.
        self.records.bytes().push(MARK);
        for step in steps {
            match *step {
                KeyStep::Key(key) => self.records.word(key),
                KeyStep::Index(index) => pickle::int(self.records.bytes(), index),
            }
        }
        self.records.bytes().push(TUPLE);
        self.end_pair()
    }

    /// Where chunk number `chunk` of tensor number `entry` is, or the object of that number (`chunk` is 0): a file's
    /// name relative to the folder, the item's first byte in it, and its bytes. Each must be named once.
    pub fn stored(
        &mut self,
        entry: u32,
        chunk: u32,
        file: &str,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        self.enter(Phase::Storage)?;
        let name = self.ids(entry)?.name;
        let offsets = self.chunk_id(entry, chunk)?;
        self.start_pair();
        self.records.index(name, offsets.map(|id| (chunk, id)));
        self.records.storage_info(file, offset, len);
        self.missing = self.missing.checked_sub(1).ok_or_else(|| misuse("an item stored twice"))?;
        self.end_pair()
    }

    /// Ends the pickle, with further attributes of the object; gives back what it was written to, flushed.
    pub fn finish(mut self, meta: &StorageMeta, extra: &[(&str, PlainValue)]) -> Result<W> {
        self.enter(Phase::Storage)?;
        if self.missing > 0 {
            return Err(misuse("items that are stored nowhere"));
        }
        if extra.iter().any(|(_, value)| value.too_deep()) {
            return Err(misuse("an attribute nested too deeply"));
        }
        self.end_dict();
        self.records.end_metadata(meta, extra);
        self.records.finish()
    }

    /// Goes on to `phase`, closing what is open.
    fn enter(&mut self, phase: Phase) -> Result<()> {
        if phase < self.phase {
            return Err(misuse("parts out of order"));
        }
        if phase == self.phase {
            return Ok(());
        }
        self.end_tensor()?;
        self.end_dict();
        if self.phase == Phase::Entries {
            self.records.word("planner_data");
            let absent = phase == Phase::Storage;
            self.records.bytes().push(if absent { NONE } else { EMPTY_DICT });
        }
        if phase == Phase::Storage {
            self.records.word("storage_data");
            self.records.bytes().push(EMPTY_DICT);
        }
        self.phase = phase;
        Ok(())
    }

    /// The name of the next entry.
    fn entry(&mut self, name: &str, object: bool) -> Result<()> {
        if self.phase != Phase::Entries {
            return Err(misuse("parts out of order"));
        }
        self.end_tensor()?;
        self.room()?;
        self.start_pair();
        pickle::text(self.records.bytes(), name);
        let name = self.records.memoize();
        let first_chunk = self.chunks.len() as u32;
        self.entries.push(EntryIds { name, first_chunk, object });
        Ok(())
    }

    /// Entries and chunks are numbered by the memo, which has 32 bits.
    fn room(&self) -> Result<()> {
        if self.records.memo_full() {
            return Err(Error::new(Code::Overflow, "more than 4294967295 names and chunks"));
        }
        Ok(())
    }

    fn end_tensor(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.chunks % BATCH != 0 {
            self.records.bytes().push(APPENDS);
        }
        self.records.end_tensor();
        self.end_pair()
    }

    fn start_pair(&mut self) {
        if self.pairs == 0 {
            self.records.bytes().push(MARK);
        }
        self.pairs += 1;
    }

    fn end_pair(&mut self) -> Result<()> {
        if self.pairs == BATCH {
            self.end_dict();
        }
        self.records.pause()
    }

    fn end_dict(&mut self) {
        if self.pairs > 0 {
            self.records.bytes().push(SETITEMS);
        }
        self.pairs = 0;
    }

    fn ids(&self, entry: u32) -> Result<&EntryIds> {
        self.entries.get(entry as usize).ok_or_else(|| misuse("an entry that is not there"))
    }

    /// The number of a chunk's offsets; none for an object.
    fn chunk_id(&self, entry: u32, chunk: u32) -> Result<Option<u32>> {
        let ids = self.ids(entry)?;
        let next = self.entries.get(entry as usize + 1);
        let end = next.map_or(self.chunks.len(), |next| next.first_chunk as usize);
        let chunks = self.chunks.get(ids.first_chunk as usize..end).unwrap_or_default();
        match chunks.get(chunk as usize) {
            Some(&id) => Ok(Some(id)),
            None if ids.object && chunk == 0 => Ok(None),
            None => Err(misuse("a chunk that is not there")),
        }
    }
}

fn misuse(what: &str) -> Error {
    Error::new(Code::Internal, format!("the metadata encoder was given {what}"))
}
