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
//! [`tensor`](MetadataWriter::tensor) with its [`chunk`](MetadataWriter::chunk)s and [`object`](MetadataWriter::object),
//! then [`path`](MetadataWriter::path), then [`stored`](MetadataWriter::stored). What comes out of order is refused.

use std::collections::HashMap;
use std::io::Write;

use forebay_error::{Code, Error, Result};

use super::pickle::{
    self, APPENDS, BUILD, EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, MARK, NEWOBJ, NONE, REDUCE,
    SETITEMS, TUPLE, TUPLE1,
};
use super::pickler::{Fixed, METADATA, Pickler};
use super::{StorageMeta, TorchDtype, Value};

/// Pairs and values are handed to their dict or list in groups of this many, as by Python: the reader's stack stays small.
const BATCH: usize = 1000;
/// Lists of sides and offsets remembered at most; later ones are written out.
const MAX_LISTS: usize = 1 << 16;
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
    pickler: Pickler<W>,
    phase: Phase,
    /// Pairs since the last group of the open dict.
    pairs: usize,
    /// Chunks since the last group of the open tensor; none when no tensor is open.
    open: Option<OpenTensor>,
    entries: Vec<EntryIds>,
    chunks: Vec<u32>,
    lists: HashMap<Box<[u64]>, u32>,
    props: Vec<(TensorProps, u32)>,
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
        let mut pickler = Pickler::new(out)?;
        pickler.global(METADATA, "Metadata");
        pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK]);
        pickler.word("state_dict_metadata");
        pickler.bytes().push(EMPTY_DICT);
        Ok(Self {
            pickler,
            phase: Phase::Entries,
            pairs: 0,
            open: None,
            entries: Vec::new(),
            chunks: Vec::new(),
            lists: HashMap::new(),
            props: Vec::new(),
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
        self.pickler.object(Fixed::TensorStorageMetadata);
        self.pickler.fixed(Fixed::Properties);
        self.props(props);
        self.pickler.fixed(Fixed::SizeField);
        self.list(shape);
        self.pickler.fixed(Fixed::Chunks);
        self.pickler.bytes().push(EMPTY_LIST);
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
            self.pickler.bytes().push(MARK);
        }
        open.chunks += 1;
        let full = open.chunks % BATCH == 0;
        self.room()?;
        self.pickler.object(Fixed::ChunkStorageMetadata);
        self.pickler.fixed(Fixed::Offsets);
        let id = self.kept_list(offsets);
        self.chunks.push(id);
        self.pickler.fixed(Fixed::Sizes);
        self.list(sizes);
        self.pickler.end_object();
        if full {
            self.pickler.bytes().push(APPENDS);
        }
        self.missing += 1;
        self.pickler.pause()
    }

    /// An entry that is an object. Entries are numbered from 0.
    pub fn object(&mut self, name: &str) -> Result<()> {
        self.entry(name, true)?;
        self.pickler.fixed(Fixed::BytesStorageMetadata);
        self.pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
        self.missing += 1;
        self.end_pair()
    }

    /// The way to entry number `entry` in the nested state. Without any, `planner_data` is None.
    pub fn path(&mut self, entry: u32, steps: &[KeyStep<'_>]) -> Result<()> {
        self.enter(Phase::Paths)?;
        let name = self.ids(entry)?.name;
        self.start_pair();
        pickle::get(self.pickler.bytes(), name);
        // Three steps at most need no mark, but one form for all is simpler, and a byte.
        self.pickler.bytes().push(MARK);
        for step in steps {
            match *step {
                KeyStep::Key(key) => self.pickler.word(key),
                KeyStep::Index(index) => pickle::int(self.pickler.bytes(), index),
            }
        }
        self.pickler.bytes().push(TUPLE);
        self.end_pair()
    }

    /// Where chunk number `chunk` of tensor number `entry` is, or the object of that number (`chunk` is 0): a file's name
    /// relative to the folder, the item's first byte in it, and its bytes. Each must be named once.
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
        self.pickler.object(Fixed::MetadataIndex);
        self.pickler.fixed(Fixed::Fqn);
        pickle::get(self.pickler.bytes(), name);
        self.pickler.fixed(Fixed::Index);
        match offsets {
            Some(id) => {
                pickle::int(self.pickler.bytes(), u64::from(chunk));
                self.pickler.fixed(Fixed::Offset);
                pickle::get(self.pickler.bytes(), id);
            }
            None => self.pickler.bytes().push(NONE),
        }
        self.pickler.end_object();
        self.pickler.object(Fixed::StorageInfo);
        self.pickler.fixed(Fixed::RelativePath);
        self.pickler.word(file);
        self.pickler.fixed(Fixed::Offset);
        pickle::int(self.pickler.bytes(), offset);
        self.pickler.fixed(Fixed::Length);
        pickle::int(self.pickler.bytes(), len);
        self.pickler.end_object();
        self.missing = self.missing.checked_sub(1).ok_or_else(|| misuse("an item stored twice"))?;
        self.end_pair()
    }

    /// Ends the pickle, with further attributes of the object; gives back what it was written to, flushed.
    pub fn finish(mut self, meta: &StorageMeta, extra: &[(&str, Value)]) -> Result<W> {
        self.enter(Phase::Storage)?;
        if self.missing > 0 {
            return Err(misuse("items that are stored nowhere"));
        }
        if extra.iter().any(|(_, value)| value.too_deep()) {
            return Err(misuse("an attribute nested too deeply"));
        }
        self.end_dict();
        self.pickler.word("storage_meta");
        self.pickler.global(METADATA, "StorageMeta");
        self.pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
        let text = |text: &str| Value::Text(text.to_owned());
        self.pickler.value(&Value::Dict(vec![
            ("checkpoint_id".to_owned(), text(&meta.checkpoint_id)),
            ("save_id".to_owned(), text(&meta.save_id)),
            ("load_id".to_owned(), Value::None),
            ("modules".to_owned(), Value::List(Vec::new())),
        ]));
        self.pickler.bytes().push(BUILD);
        self.pickler.word("version");
        self.pickler.word("1.0.0");
        for (key, value) in extra {
            self.pickler.word(key);
            self.pickler.value(value);
        }
        self.pickler.end_object();
        self.pickler.finish()
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
            self.pickler.word("planner_data");
            let absent = phase == Phase::Storage;
            self.pickler.bytes().push(if absent { NONE } else { EMPTY_DICT });
        }
        if phase == Phase::Storage {
            self.pickler.word("storage_data");
            self.pickler.bytes().push(EMPTY_DICT);
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
        pickle::text(self.pickler.bytes(), name);
        let name = self.pickler.memoize();
        let first_chunk = self.chunks.len() as u32;
        self.entries.push(EntryIds { name, first_chunk, object });
        Ok(())
    }

    /// Entries and chunks are numbered by the memo, which has 32 bits.
    fn room(&self) -> Result<()> {
        if self.pickler.memo_full() {
            return Err(Error::new(Code::Overflow, "more than 4294967295 names and chunks"));
        }
        Ok(())
    }

    fn end_tensor(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.chunks % BATCH != 0 {
            self.pickler.bytes().push(APPENDS);
        }
        self.pickler.end_object();
        self.end_pair()
    }

    fn start_pair(&mut self) {
        if self.pairs == 0 {
            self.pickler.bytes().push(MARK);
        }
        self.pairs += 1;
    }

    fn end_pair(&mut self) -> Result<()> {
        if self.pairs == BATCH {
            self.end_dict();
        }
        self.pickler.pause()
    }

    fn end_dict(&mut self) {
        if self.pairs > 0 {
            self.pickler.bytes().push(SETITEMS);
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

    /// `TensorProperties`. The object is the tensor's own, its state is shared by all with the same.
    fn props(&mut self, props: &TensorProps) {
        self.pickler.fixed(Fixed::TensorProperties);
        self.pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
        if let Some((_, id)) = self.props.iter().find(|(known, _)| known == props) {
            pickle::get(self.pickler.bytes(), *id);
        } else {
            let pickler = &mut self.pickler;
            pickler.bytes().push(MARK);
            pickler.global("torch", props.dtype.name());
            pickler.global("torch.serialization", "_get_layout");
            pickler.word("torch.strided");
            pickler.bytes().extend_from_slice(&[TUPLE1, REDUCE]);
            pickle::boolean(pickler.bytes(), props.requires_grad);
            // Contiguous; stock writes no other either.
            pickler.global(METADATA, "_MEM_FORMAT_ENCODING");
            pickle::int(pickler.bytes(), 0);
            pickler.bytes().extend_from_slice(&[TUPLE1, REDUCE]);
            pickle::boolean(pickler.bytes(), props.pin_memory);
            pickler.bytes().push(TUPLE);
            let id = pickler.memoize();
            self.props.push((*props, id));
        }
        self.pickler.bytes().push(BUILD);
    }

    /// A `torch.Size`.
    fn list(&mut self, values: &[u64]) {
        if let Some(&id) = self.lists.get(values) {
            pickle::get(self.pickler.bytes(), id);
        } else {
            self.new_list(values);
            if self.lists.len() < MAX_LISTS && !self.pickler.memo_full() {
                let id = self.pickler.memoize();
                self.lists.insert(values.into(), id);
            }
        }
    }

    /// A `torch.Size` that is referred to by its number later on.
    fn kept_list(&mut self, values: &[u64]) -> u32 {
        if let Some(&id) = self.lists.get(values) {
            pickle::get(self.pickler.bytes(), id);
            return id;
        }
        self.new_list(values);
        let id = self.pickler.memoize();
        if self.lists.len() < MAX_LISTS {
            self.lists.insert(values.into(), id);
        }
        id
    }

    fn new_list(&mut self, values: &[u64]) {
        self.pickler.fixed(Fixed::Size);
        pickle::int_tuple(self.pickler.bytes(), values.iter().copied());
        self.pickler.bytes().extend_from_slice(&[TUPLE1, REDUCE]);
    }
}

fn misuse(what: &str) -> Error {
    Error::new(Code::Internal, format!("the metadata encoder was given {what}"))
}
