//! Pickles, read without running them.
//!
//! **Why.** The metadata of a checkpoint and the description of each of its items are Python pickles: programs for a
//! small stack machine that, in Python, imports and calls whatever it names. Files come from strangers, so here the
//! machine only takes notes. It builds a [`Graph`] of what the program would build: texts, numbers, lists, and where
//! Python would import a class or call a function, a node that says which and with what. Nothing is ever called,
//! imported or looked up.
//!
//! **How.** [`parse`] goes once over the input, without recursion, and writes nodes into one flat pool of 32-bit words
//! (`heap`); a [`Value`] is a handle of 32 bits into it, small integers are inside the handle, texts are spans of the
//! input. So sharing and cycles cost nothing, dropping is flat, and the metadata of a million chunks (190 MB) fits in
//! some 500 MB. Every length is compared with what is left of the input before anything is kept, so that memory is at
//! most some 20 times the input, about 3 times in honest ones, and [`Limits`] caps it.
//!
//! **What may be called.** [`Allow`] lists the functions and classes whose calls the reader understands (the field's
//! own: sizes, layouts, paths, tensor builders). A call of anything else is the error `forbidden_global`, or, where the
//! caller wants to see the rest ([`Unknown::Opaque`]), a node that [`Graph::forbidden`] gives the reason for. Instances
//! of unknown *classes* (`NEWOBJ`, no call in Python's sense) are always opaque nodes: other tools add such things.
//!
//! Protocols 0 to 5 are read. Refused are extension codes (a registry of the process that wrote them), buffers out of
//! band, and persistent ids unless the caller expects them.

mod allow;
mod cursor;
mod graph;
mod hashing;
mod heap;
mod items;
mod machine;
mod objects;
mod old;
mod opcode;
mod stack;
mod value;

#[cfg(test)]
mod tests;

pub use allow::{Allow, DCP_METADATA, TORCH_ITEM, Unknown};
pub use graph::{Graph, Node, Object};
pub use items::{Items, Pairs};
pub use value::Value;

use forebay_error::{Code, Result};

/// How much a pickle may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest input, in bytes.
    pub input_bytes: usize,
    /// Most 32-bit words of nodes. A node takes 2 to 5; the handles end at 2^28.
    pub words: usize,
    /// Most containers open at once.
    pub depth: usize,
}

impl Limits {
    /// For `.metadata`: 1 GiB of input, as many nodes as handles reach (1 GiB of memory).
    pub const METADATA: Limits = Limits { input_bytes: 1 << 30, words: 1 << 28, depth: 1000 };
    /// For the pickle of one item: 256 MiB of input, 256 MiB of nodes.
    pub const ITEM: Limits = Limits { input_bytes: 256 << 20, words: 64 << 20, depth: 1000 };
}

/// How to read a pickle.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What may be called.
    pub allow: Allow,
    /// Whether persistent ids may occur: they do in `data.pkl` of an archive, never in `.metadata`.
    pub persistent: bool,
    /// The code of errors about a damaged pickle.
    pub code: Code,
    /// How much it may ask for.
    pub limits: Limits,
}

impl Options {
    /// For the `.metadata` of a checkpoint.
    pub const METADATA: Options = Options {
        allow: DCP_METADATA,
        persistent: false,
        code: Code::InvalidMetadata,
        limits: Limits::METADATA,
    };
    /// For `data.pkl` of a torch archive: what is forbidden becomes an opaque node.
    pub const ITEM: Options = Options {
        allow: TORCH_ITEM,
        persistent: true,
        code: Code::InvalidItem,
        limits: Limits::ITEM,
    };
}

/// Reads one pickle, up to its `STOP`; [`Graph::end`] says where that was.
///
/// Errors: `options.code` where the pickle is damaged or asks for too much, `forbidden_global` where it calls what is
/// not allowed; both name the byte.
pub fn parse<'a>(input: &'a [u8], options: &Options) -> Result<Graph<'a>> {
    machine::run(input, options)
}
