//! A stream of pickle opcodes, protocol 4: cut into frames, with numbers for what is used again.
//!
//! What a pickle memoizes stays in the reader's memory until its end, so only that is memoized which comes again.

use std::collections::HashMap;
use std::io::Write;

use forebay_error::{Error, Result};

use super::pickle::{
    self, BUILD, EMPTY_DICT, EMPTY_TUPLE, FRAME, MARK, MEMOIZE, NEWOBJ, PROTO, SETITEMS,
    STACK_GLOBAL,
};

/// A frame is written when it has this many bytes, as by Python.
const FRAME_BYTES: usize = 64 << 10;
/// The opcode of a frame and its length.
const FRAME_HEADER: usize = 9;
/// Words remembered at most; later ones are written out each time. With [`MAX_WORD_BYTES`] 16 MiB at most.
const MAX_WORDS: usize = 1 << 16;
/// Longer words are not remembered.
const MAX_WORD_BYTES: usize = 256;

/// Classes, functions and field names that nearly every record has: found by number, not by their text.
#[derive(Clone, Copy)]
pub(super) enum Fixed {
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
    StorageInfo,
    Size,
    Properties,
    SizeField,
    Chunks,
    Offsets,
    Sizes,
    Fqn,
    Index,
    Offset,
    RelativePath,
    Length,
}

impl Fixed {
    const COUNT: usize = Fixed::Length as usize + 1;

    /// The module of a class; none for a field. And the name.
    fn names(self) -> (Option<&'static str>, &'static str) {
        match self {
            Fixed::TensorStorageMetadata => (Some(METADATA), "TensorStorageMetadata"),
            Fixed::BytesStorageMetadata => (Some(METADATA), "BytesStorageMetadata"),
            Fixed::ChunkStorageMetadata => (Some(METADATA), "ChunkStorageMetadata"),
            Fixed::TensorProperties => (Some(METADATA), "TensorProperties"),
            Fixed::MetadataIndex => (Some(METADATA), "MetadataIndex"),
            Fixed::StorageInfo => (Some("torch.distributed.checkpoint.filesystem"), "_StorageInfo"),
            Fixed::Size => (Some("torch"), "Size"),
            Fixed::Properties => (None, "properties"),
            Fixed::SizeField => (None, "size"),
            Fixed::Chunks => (None, "chunks"),
            Fixed::Offsets => (None, "offsets"),
            Fixed::Sizes => (None, "sizes"),
            Fixed::Fqn => (None, "fqn"),
            Fixed::Index => (None, "index"),
            Fixed::Offset => (None, "offset"),
            Fixed::RelativePath => (None, "relative_path"),
            Fixed::Length => (None, "length"),
        }
    }
}

/// The module of the classes in `.metadata`.
pub(super) const METADATA: &str = "torch.distributed.checkpoint.metadata";

pub(super) struct Pickler<W> {
    out: W,
    /// The frame so far, after room for its header.
    frame: Vec<u8>,
    /// How many values are memoized; 64 bits, since the limit is the caller's to check.
    memo: u64,
    words: HashMap<Box<str>, u32>,
    fixed: [Option<u32>; Fixed::COUNT],
}

impl<W: Write> Pickler<W> {
    pub(super) fn new(mut out: W) -> Result<Self> {
        out.write_all(&[PROTO, 4]).map_err(write_failed)?;
        let mut frame = Vec::with_capacity(FRAME_BYTES + (4 << 10));
        frame.resize(FRAME_HEADER, 0);
        Ok(Self { out, frame, memo: 0, words: HashMap::new(), fixed: [None; Fixed::COUNT] })
    }

    /// Where opcodes go.
    #[inline]
    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.frame
    }

    /// Memoizes the value on top of the stack; the number is how to [`pickle::get`] it. Past four thousand million the
    /// format has none: [`Pickler::memo_full`] tells before.
    #[inline]
    pub(super) fn memoize(&mut self) -> u32 {
        self.frame.push(MEMOIZE);
        let id = self.memo as u32;
        self.memo += 1;
        id
    }

    /// Whether numbers are about to run out.
    pub(super) fn memo_full(&self) -> bool {
        self.memo > u64::from(u32::MAX) - (1 << 20)
    }

    /// Text that comes again: short, and one of not too many.
    #[inline]
    pub(super) fn word(&mut self, word: &str) {
        if let Some(&id) = self.words.get(word) {
            return pickle::get(&mut self.frame, id);
        }
        pickle::text(&mut self.frame, word);
        if word.len() <= MAX_WORD_BYTES && self.words.len() < MAX_WORDS && !self.memo_full() {
            let id = self.memoize();
            self.words.insert(word.into(), id);
        }
    }

    /// A class, function or field name of the list.
    #[inline]
    pub(super) fn fixed(&mut self, which: Fixed) {
        if let Some(id) = self.fixed[which as usize] {
            return pickle::get(&mut self.frame, id);
        }
        let id = match which.names() {
            (Some(module), name) => {
                self.global(module, name);
                self.memoize()
            }
            (None, name) => {
                pickle::text(&mut self.frame, name);
                self.memoize()
            }
        };
        self.fixed[which as usize] = Some(id);
    }

    /// An object of a class, and the start of its fields.
    #[inline]
    pub(super) fn object(&mut self, class: Fixed) {
        self.fixed(class);
        self.frame.extend_from_slice(&[EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK]);
    }

    /// The end of the fields of an object.
    #[inline]
    pub(super) fn end_object(&mut self) {
        self.frame.extend_from_slice(&[SETITEMS, BUILD]);
    }

    /// Any other class or function.
    pub(super) fn global(&mut self, module: &str, name: &str) {
        self.word(module);
        self.word(name);
        self.frame.push(STACK_GLOBAL);
    }

    /// Writes the frame out when it is full; between opcodes only.
    #[inline]
    pub(super) fn pause(&mut self) -> Result<()> {
        if self.frame.len() < FRAME_BYTES { Ok(()) } else { self.flush_frame() }
    }

    fn flush_frame(&mut self) -> Result<()> {
        let len = (self.frame.len() - FRAME_HEADER) as u64;
        self.frame[0] = FRAME;
        self.frame[1..FRAME_HEADER].copy_from_slice(&len.to_le_bytes());
        self.out.write_all(&self.frame).map_err(write_failed)?;
        self.frame.truncate(FRAME_HEADER);
        Ok(())
    }

    /// Ends the pickle and gives back what it was written to.
    pub(super) fn finish(mut self) -> Result<W> {
        self.frame.push(pickle::STOP);
        self.flush_frame()?;
        self.out.flush().map_err(write_failed)?;
        Ok(self.out)
    }
}

fn write_failed(error: std::io::Error) -> Error {
    Error::io("cannot write the metadata of a checkpoint", error)
}
