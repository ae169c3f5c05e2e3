//! The safetensors format.
//!
//! ```text
//! byte 0        length of the header, eight bytes, little endian; at most 100,000,000
//! byte 8        header: one JSON object, padded with spaces as the writer likes
//!               {"__metadata__": {text: text}, NAME: {"dtype": D, "shape": [sides], "data_offsets": [begin, end]}}
//! byte 8 + len  the tensors, row-major, little endian; offsets count from here
//! ```
//!
//! The tensors fill the rest of the file without a hole, an overlap or a byte left over. What is accepted is exactly
//! what the safetensors library accepts (0.8.0 and 0.9.0rc1 agree); the tests compare with it. Some of that is
//! surprising and is followed all the same: an entry may be an array in place of an object, a dtype may be written
//! `{"F32": null}`, of two entries of one name the last counts, and text in an unknown field must still be JSON of
//! limited depth. One departure: where the end of the last tensor plus the header leaves 64 bits, the library wraps
//! around and may accept; here that is out of bounds.
//!
//! The library names few faults; the codes here name the true one.

mod check;
mod layout;
mod parse;

pub(crate) use layout::layout_of;
pub use layout::{SaveLayout, TensorSpec, layout};

use crate::open_file::OpenFile;
use crate::text::shown;
use forebay_error::{Code, Error, Result};
use forebay_tensor::Dtype;
use std::sync::Mutex;

/// The longest header that is read or written, as in the safetensors library.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length word.
const LENGTH_WORD: u64 = 8;

/// Sixteen threads with a header of the longest kind each would hold 1.6 GB; below this they hold 256 MiB.
const LARGE_HEADER: usize = 16 << 20;

/// The key of the text metadata; no tensor can have this name.
pub const METADATA_KEY: &str = "__metadata__";

/// A header that was found sound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The text metadata in the order of the file; `None` where there is none or it is null.
    pub metadata: Option<Vec<(String, String)>>,
    /// The tensors, in order of their place.
    pub tensors: Vec<HeaderTensor>,
    /// Byte of the file where the data starts.
    pub data_start: u64,
    /// What was accepted but is worth telling.
    pub warnings: Vec<String>,
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sides, in elements.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the data.
    pub begin: u64,
    /// Byte after the last.
    pub end: u64,
}

/// Parses a header and checks it against the `data_len` bytes that follow it in the file.
pub fn parse_header(json: &[u8], data_len: u64) -> Result<Header> {
    let text = std::str::from_utf8(json)
        .map_err(|error| Error::new(Code::InvalidUtf8, "header is not UTF-8").with_source(error))?;
    check::check(parse::parse(text)?, json.len() as u64, data_len)
}

/// Reads and checks the header of a file. Nothing is read or allocated that the length of the file does not back.
pub fn read_header(file: &OpenFile) -> Result<Header> {
    read_header_gated(file, &Mutex::new(()))
}

/// [`read_header`] for many threads: of headers above [`LARGE_HEADER`] those that share a gate hold one at a time.
pub(crate) fn read_header_gated(file: &OpenFile, gate: &Mutex<()>) -> Result<Header> {
    read(file, gate).map_err(|error| error.at(shown(&file.path)))
}

/// Bytes of the header, from the length word, checked against the length of the file.
fn header_len(file: &OpenFile) -> Result<usize> {
    let size = file.size();
    let truncated = |needed: u64, why: &str| {
        let what = format!("truncated, file has {size} bytes, needs {needed}{why}");
        Error::new(Code::Truncated, what).hint("download or copy the file again")
    };
    if size < LENGTH_WORD {
        return Err(truncated(LENGTH_WORD, " for the length of its header alone"));
    }
    let mut word = [0; 8];
    file.read_exact_at(&mut word, 0)?;
    let len = u64::from_le_bytes(word);
    if len > MAX_HEADER_BYTES {
        let what =
            format!("header is said to have {len} bytes, {MAX_HEADER_BYTES} is the most allowed");
        let hint = "this may not be a safetensors file, or its first bytes are damaged";
        return Err(Error::new(Code::HeaderTooLarge, what).hint(hint));
    }
    if len > size - LENGTH_WORD {
        return Err(truncated(LENGTH_WORD + len, " to hold its header"));
    }
    usize::try_from(len)
        .map_err(|_| Error::new(Code::OutOfMemory, "header exceeds the address space"))
}

fn read(file: &OpenFile, gate: &Mutex<()>) -> Result<Header> {
    let len = header_len(file)?;
    let _one_large_at_a_time = (len > LARGE_HEADER).then(|| gate.lock());
    let mut json = Vec::new();
    json.try_reserve_exact(len).map_err(|error| {
        Error::new(Code::OutOfMemory, "no memory for the header").with_source(error)
    })?;
    json.resize(len, 0);
    file.read_exact_at(&mut json, LENGTH_WORD)?;
    parse_header(&json, file.size() - LENGTH_WORD - len as u64)
}
