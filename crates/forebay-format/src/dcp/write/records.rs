//! The objects in `.metadata`, one by one. What state they are in, and their order, is the writer's concern.

use std::collections::HashMap;
use std::io::Write;

use forebay_error::Result;

use super::pickle::{
    self, BUILD, EMPTY_DICT, EMPTY_TUPLE, MARK, NEWOBJ, NONE, REDUCE, TUPLE, TUPLE1,
};
use super::pickler::{Fixed, METADATA, Pickler};
use super::{PlainValue, StorageMeta, TensorProps};

/// Lists of sides and offsets remembered at most; later ones are written out each time.
const MAX_LISTS: usize = 1 << 16;

/// A pickler that knows the classes of `.metadata`.
pub(super) struct Records<W> {
    pickler: Pickler<W>,
    lists: HashMap<Box<[u64]>, u32>,
    props: Vec<(TensorProps, u32)>,
}

impl<W: Write> Records<W> {
    pub(super) fn new(out: W) -> Result<Self> {
        Ok(Self { pickler: Pickler::new(out)?, lists: HashMap::new(), props: Vec::new() })
    }

    /// `Metadata`, up to its first attribute's value.
    pub(super) fn start_metadata(&mut self) {
        self.pickler.global(METADATA, "Metadata");
        self.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK]);
        self.pickler.word("state_dict_metadata");
    }

    /// The last attributes of `Metadata`.
    pub(super) fn end_metadata(&mut self, meta: &StorageMeta, extra: &[(&str, PlainValue)]) {
        let pickler = &mut self.pickler;
        pickler.word("storage_meta");
        pickler.global(METADATA, "StorageMeta");
        pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
        let text = |text: &str| PlainValue::Text(text.to_owned());
        pickler.value(&PlainValue::Dict(vec![
            ("checkpoint_id".to_owned(), text(&meta.checkpoint_id)),
            ("save_id".to_owned(), text(&meta.save_id)),
            ("load_id".to_owned(), PlainValue::None),
            ("modules".to_owned(), PlainValue::List(Vec::new())),
        ]));
        pickler.bytes().push(BUILD);
        pickler.word("version");
        pickler.word("1.0.0");
        for (key, value) in extra {
            pickler.word(key);
            pickler.value(value);
        }
        pickler.end_object();
    }

    /// `TensorStorageMetadata`, up to its list of chunks.
    pub(super) fn start_tensor(&mut self, props: &TensorProps, shape: &[u64]) {
        self.pickler.object(Fixed::TensorStorageMetadata);
        self.pickler.fixed(Fixed::Properties);
        self.props(props);
        self.pickler.fixed(Fixed::SizeField);
        self.list(shape);
        self.pickler.fixed(Fixed::Chunks);
    }

    pub(super) fn end_tensor(&mut self) {
        self.pickler.end_object();
    }

    /// `ChunkStorageMetadata`; gives the number of its offsets.
    pub(super) fn chunk(&mut self, offsets: &[u64], sizes: &[u64]) -> u32 {
        self.pickler.object(Fixed::ChunkStorageMetadata);
        self.pickler.fixed(Fixed::Offsets);
        let id = self.kept_list(offsets);
        self.pickler.fixed(Fixed::Sizes);
        self.list(sizes);
        self.pickler.end_object();
        id
    }

    /// `BytesStorageMetadata`, which has no state at all.
    pub(super) fn bytes_entry(&mut self) {
        self.pickler.fixed(Fixed::BytesStorageMetadata);
        self.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
    }

    /// `MetadataIndex`: the number of a name; of a chunk also its place in the tensor's list, and its offsets' number.
    pub(super) fn index(&mut self, name: u32, chunk: Option<(u32, u32)>) {
        self.pickler.object(Fixed::MetadataIndex);
        self.pickler.fixed(Fixed::Fqn);
        pickle::get(self.bytes(), name);
        self.pickler.fixed(Fixed::Index);
        match chunk {
            Some((place, offsets)) => {
                pickle::int(self.bytes(), u64::from(place));
                self.pickler.fixed(Fixed::Offset);
                pickle::get(self.bytes(), offsets);
            }
            None => self.bytes().push(NONE),
        }
        self.pickler.end_object();
    }

    /// `_StorageInfo`.
    pub(super) fn storage_info(&mut self, file: &str, offset: u64, len: u64) {
        self.pickler.object(Fixed::StorageInfo);
        self.pickler.fixed(Fixed::RelativePath);
        self.pickler.word(file);
        self.pickler.fixed(Fixed::Offset);
        pickle::int(self.bytes(), offset);
        self.pickler.fixed(Fixed::Length);
        pickle::int(self.bytes(), len);
        self.pickler.end_object();
    }

    /// `TensorProperties`. The object is the tensor's own, its state is shared by all with the same.
    fn props(&mut self, props: &TensorProps) {
        let pickler = &mut self.pickler;
        pickler.fixed(Fixed::TensorProperties);
        pickler.bytes().extend_from_slice(&[EMPTY_TUPLE, NEWOBJ]);
        if let Some((_, id)) = self.props.iter().find(|(known, _)| known == props) {
            pickle::get(pickler.bytes(), *id);
        } else {
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
        self.bytes().push(BUILD);
    }

    /// A `torch.Size`.
    fn list(&mut self, values: &[u64]) {
        if let Some(&id) = self.lists.get(values) {
            pickle::get(self.bytes(), id);
        } else {
            self.new_list(values);
            if self.lists.len() < MAX_LISTS && !self.memo_full() {
                let id = self.memoize();
                self.lists.insert(values.into(), id);
            }
        }
    }

    /// A `torch.Size` that is referred to by its number later on.
    fn kept_list(&mut self, values: &[u64]) -> u32 {
        if let Some(&id) = self.lists.get(values) {
            pickle::get(self.bytes(), id);
            return id;
        }
        self.new_list(values);
        let id = self.memoize();
        if self.lists.len() < MAX_LISTS {
            self.lists.insert(values.into(), id);
        }
        id
    }

    fn new_list(&mut self, values: &[u64]) {
        self.pickler.fixed(Fixed::Size);
        pickle::int_tuple(self.bytes(), values.iter().copied());
        self.bytes().extend_from_slice(&[TUPLE1, REDUCE]);
    }

    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        self.pickler.bytes()
    }

    pub(super) fn word(&mut self, word: &str) {
        self.pickler.word(word);
    }

    pub(super) fn memoize(&mut self) -> u32 {
        self.pickler.memoize()
    }

    pub(super) fn memo_full(&self) -> bool {
        self.pickler.memo_full()
    }

    pub(super) fn pause(&mut self) -> Result<()> {
        self.pickler.pause()
    }

    pub(super) fn finish(self) -> Result<W> {
        self.pickler.finish()
    }
}
