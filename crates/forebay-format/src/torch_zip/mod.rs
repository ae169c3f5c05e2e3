//! Archives of `torch.save`, in a range of a file or of memory.
//!
//! ```text
//! ROOT/data.pkl       a pickle (protocol 2 as a rule): the saved object, tensors as references to records
//! ROOT/data/KEY       the bytes of one storage
//! ROOT/byteorder      "little" or "big"; absent in old ones, which are little endian
//! ROOT/version        and others that say nothing about the data
//! ```
//!
//! It is a zip archive whose records are stored as they are: a local header (30 bytes, then name and extra, which pads
//! the data to a multiple of 64 bytes) and the bytes. ROOT is the file's name at the time, or `archive`. Torch puts no
//! sizes into local headers, so the archive is read from its end: `directory` has the layout.
//!
//! **How little is read.** Of up to 64 KiB the whole in one read, which is most items of a checkpoint. Of a longer one
//! its end and its start, in which the directory, `data.pkl` and the header of the first storage lie; then one read for
//! each local header beyond.
//!
//! **What is checked.** All of it: that records lie inside the archive and do not overlap, that a local header belongs
//! to its entry, that there is one `data.pkl`. CRC-32 only when asked for ([`Archive::check_crc`]), as it reads all.

mod directory;
mod dtype;
pub(crate) mod legacy;
mod plain;
mod source;
mod state;
mod tensor;

pub use dtype::dtype_of;
pub use plain::{PlainObject, PlainValue, plain};
pub use source::ReadAt;
pub(crate) use source::buffer;
pub use state::{Leaf, leaves};
pub use tensor::{View, check_byteorder, tensor};

use crate::text::quoted;
use directory::number;
use forebay_error::{Code, Error, Result};

/// The most records of an archive; one storage each. A model of a million tensors in one file has not been seen.
pub const MAX_RECORDS: u64 = 1 << 20;

/// The longest name of a record.
pub const MAX_NAME_BYTES: usize = 4096;

/// The longest `data.pkl`. 200 bytes a tensor are usual.
pub const MAX_PICKLE_BYTES: u64 = 256 << 20;

/// Bytes of a local header, before name and extra.
const LOCAL_BYTES: u64 = 30;

const LOCAL: u64 = 0x0403_4B50;

/// Archives up to this size are read whole; the end of a longer one in a read of [`BLOCK`].
const SMALL: u64 = 64 << 10;

/// Bytes that are read where a few hundred are needed.
const BLOCK: u64 = 4 << 10;

/// Bytes checked at a time.
const CRC_PIECE: u64 = 1 << 20;

/// One entry of the directory; places count from the start of the archive.
#[derive(Clone, Debug)]
struct Entry {
    name: String,
    header: u64,
    bytes: u64,
    crc: u32,
    /// Why it cannot be read. Archives of TorchScript have such records, and are to be called that.
    refused: Option<&'static str>,
}

/// The bytes of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// First byte in the source, not in the archive.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// Their CRC-32 as the directory has it.
    pub crc: u32,
}

impl Record {
    /// Fails with `checksum` unless its bytes have this CRC-32.
    pub fn check(&self, found: u32) -> Result<()> {
        if found == self.crc {
            return Ok(());
        }
        let what = format!(
            "the {} bytes from byte {} on have the CRC-32 {found:08x}, the archive says {:08x}",
            self.bytes, self.offset, self.crc
        );
        Err(Error::new(Code::Checksum, what))
    }
}

/// An archive that was found sound, but for the bytes of its records.
pub struct Archive<'s> {
    source: &'s dyn ReadAt,
    /// Where it starts in the source.
    base: u64,
    root: String,
    /// In order of their names.
    entries: Vec<Entry>,
    /// Place of each local header in order, and of the directory: where the data of the record before must end.
    bounds: Vec<u64>,
    blocks: Blocks,
}

/// Parts of the archive that were read already: (place in the archive, bytes).
struct Blocks([(u64, Vec<u8>); 2]);

impl Blocks {
    fn get(&self, at: u64, len: u64) -> Option<&[u8]> {
        self.0.iter().find_map(|(start, bytes)| {
            let from = usize::try_from(at.checked_sub(*start)?).ok()?;
            bytes.get(from..from.checked_add(usize::try_from(len).ok()?)?)
        })
    }
}

pub(crate) fn invalid(what: impl Into<String>) -> Error {
    Error::new(Code::InvalidItem, what)
}

impl<'s> Archive<'s> {
    /// Reads the directory of the archive in `length` bytes from `offset` on.
    ///
    /// Errors: `out_of_bounds` where the source is shorter; `invalid_item` where that is no archive, or a damaged one;
    /// `unsupported` for what torch.load would not take as data either (TorchScript, encryption).
    pub fn open(source: &'s dyn ReadAt, offset: u64, length: u64) -> Result<Self> {
        if offset.checked_add(length).is_none_or(|end| end > source.size()) {
            let size = source.size();
            let what = format!("{length} bytes from byte {offset} on, of {size} bytes");
            return Err(Error::new(Code::OutOfBounds, what).at(source.name()));
        }
        let read = |at: u64, len: u64| -> Result<Vec<u8>> {
            let mut bytes = buffer(len)?;
            source.read_exact_at(&mut bytes, offset + at)?;
            Ok(bytes)
        };
        let tail_len = if length <= SMALL { length } else { BLOCK };
        let mut tail = read(length - tail_len, tail_len)?;
        let mut found = directory::locate(&tail, length)?;
        if found.is_none() && tail_len < length {
            // A comment hides the end record; torch writes none, but others may.
            let reach = length.min(directory::END_REACH);
            tail = read(length - reach, reach)?;
            found = directory::locate(&tail, length)?;
        }
        let place = found.ok_or_else(|| no_archive(&tail, length))?;
        directory::check_size(&place)?;
        let tail_at = length - tail.len() as u64;
        let blocks = Blocks([(tail_at, tail), (0, Vec::new())]);
        let entries = directory::entries(&place, |at, len| match blocks.get(at, len) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => read(at, len),
        })?;
        let Blocks([tail, _]) = blocks;
        let head = if tail.0 == 0 { Vec::new() } else { read(0, BLOCK.min(length))? };
        let blocks = Blocks([tail, (0, head)]);
        let (entries, bounds) = in_order(entries, place.at)?;
        let root = root_of(&entries)?;
        Ok(Self { source, base: offset, root, entries, bounds, blocks })
    }

    /// Whether there is a record `ROOT/name`.
    pub fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// The record `ROOT/name`; `None` where there is none. Reads its local header.
    pub fn record(&self, name: &str) -> Result<Option<Record>> {
        self.entry(name).map(|entry| self.locate(entry)).transpose()
    }

    /// The records of these names together, in order; on several threads where they are many, since each costs a read.
    pub(crate) fn records(&self, names: &[String]) -> Result<Vec<Option<Record>>> {
        const WORTH_THREADS: usize = 32;
        if names.len() < WORTH_THREADS {
            return names.iter().map(|name| self.record(name)).collect();
        }
        crate::parallel::map(names, |name| self.record(name)).into_iter().collect()
    }

    /// The bytes of a record, of `most` at the most.
    pub fn read(&self, record: &Record, most: u64) -> Result<Vec<u8>> {
        if record.bytes > most {
            let what = format!("a record has {} bytes, {most} is the most", record.bytes);
            return Err(Error::new(Code::Unsupported, what));
        }
        if let Some(bytes) = self.blocks.get(record.offset - self.base, record.bytes) {
            return Ok(bytes.to_vec());
        }
        let mut bytes = buffer(record.bytes)?;
        self.source.read_exact_at(&mut bytes, record.offset)?;
        Ok(bytes)
    }

    /// [`read`](Self::read), and compares the CRC-32.
    pub fn read_checked(&self, record: &Record, most: u64) -> Result<Vec<u8>> {
        let bytes = self.read(record, most)?;
        record.check(crate::crc::crc32(&bytes))?;
        Ok(bytes)
    }

    /// Reads a record and compares its CRC-32; `checksum` where that differs.
    pub fn check_crc(&self, record: &Record) -> Result<()> {
        record.check(crc_of(self.source, record.offset, record.bytes, |_| Ok(()))?)
    }

    /// Checks the CRC-32 of every record.
    pub fn check_all_crcs(&self) -> Result<()> {
        self.entries.iter().try_for_each(|entry| self.check_crc(&self.locate(entry)?))
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        let full = format!("{}{name}", self.root);
        let found = self.entries.binary_search_by(|entry| entry.name.as_str().cmp(&full)).ok()?;
        self.entries.get(found)
    }

    /// Where the bytes of an entry start: behind its local header, whose extra has any length.
    fn locate(&self, entry: &Entry) -> Result<Record> {
        let fixed = LOCAL_BYTES + entry.name.len() as u64;
        let mut fresh;
        let header = match self.blocks.get(entry.header, fixed) {
            Some(header) => header,
            None => {
                // Inside the archive: the directory was checked.
                fresh = buffer(fixed)?;
                self.source.read_exact_at(&mut fresh, self.base + entry.header)?;
                &fresh
            }
        };
        let wrong = |why: &str| invalid(format!("record {} {why}", quoted(&entry.name)));
        if let Some(why) = entry.refused {
            return Err(wrong(why));
        }
        if number(header, 0, 4) != Some(LOCAL) {
            return Err(wrong("has no local header at its place"));
        }
        let name = header.get(LOCAL_BYTES as usize..);
        let len = number(header, 26, 2);
        if name != Some(entry.name.as_bytes()) || len != Some(entry.name.len() as u64) {
            return Err(wrong("has another name in its local header"));
        }
        let start = entry.header + fixed + number(header, 28, 2).unwrap_or(0);
        let bound = self.bounds.partition_point(|&bound| bound <= entry.header);
        let bound = self.bounds.get(bound).copied().unwrap_or(0);
        if start.checked_add(entry.bytes).is_none_or(|end| end > bound) {
            return Err(wrong("runs into the next one"));
        }
        Ok(Record { offset: self.base + start, bytes: entry.bytes, crc: entry.crc })
    }
}

/// CRC-32 of bytes of a source, in bounded memory. `each` is called with the bytes of each piece; its error ends it.
pub(crate) fn crc_of(
    source: &dyn ReadAt,
    offset: u64,
    bytes: u64,
    each: impl Fn(u64) -> Result<()>,
) -> Result<u32> {
    let mut piece = buffer(bytes.min(CRC_PIECE))?;
    let mut crc = crc32fast::Hasher::new();
    let mut done = 0;
    while done < bytes {
        let len = (bytes - done).min(piece.len() as u64);
        let Some(part) = piece.get_mut(..len as usize) else { break };
        source.read_exact_at(part, offset.saturating_add(done))?;
        crc.update(part);
        each(len)?;
        done += len;
    }
    Ok(crc.finalize())
}

/// Sorts entries by name and returns where each record must end at the latest. Two of one name, or two that share
/// bytes, are `invalid_item`.
fn in_order(mut entries: Vec<Entry>, directory: u64) -> Result<(Vec<Entry>, Vec<u64>)> {
    entries.sort_by_key(|entry| entry.header);
    for pair in entries.windows(2) {
        let [a, b] = pair else { continue };
        // The least that the first can take; the exact end is known with its local header.
        if a.header + LOCAL_BYTES + a.name.len() as u64 + a.bytes > b.header {
            let (a, b) = (quoted(&a.name), quoted(&b.name));
            return Err(invalid(format!("records {a} and {b} share bytes")));
        }
    }
    let mut bounds: Vec<u64> = entries.iter().map(|entry| entry.header).collect();
    bounds.push(directory);
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    match entries.windows(2).find(|pair| matches!(pair, [a, b] if a.name == b.name)) {
        Some(pair) => {
            let name = pair.first().map(|entry| quoted(&entry.name)).unwrap_or_default();
            Err(invalid(format!("record {name} is in the archive twice")))
        }
        None => Ok((entries, bounds)),
    }
}

/// What stands before `data.pkl`, with the slash.
fn root_of(entries: &[Entry]) -> Result<String> {
    let roots = entries.iter().filter_map(|entry| {
        let root = entry.name.strip_suffix("data.pkl")?;
        (root.ends_with('/') && !root.starts_with('/')).then_some(root)
    });
    let roots: Vec<&str> = roots.collect();
    let [root] = roots.as_slice() else {
        let what = match roots.len() {
            0 => "the archive holds no data.pkl: it is not one of torch.save",
            _ => "the archive holds more than one data.pkl",
        };
        return Err(invalid(what));
    };
    if entries.iter().any(|entry| entry.name.strip_prefix(root) == Some("constants.pkl")) {
        let what = "is a TorchScript archive, which holds code";
        return Err(Error::new(Code::Unsupported, what)
            .hint("save the state_dict() of the module with torch.save"));
    }
    Ok((*root).to_owned())
}

/// Why there is no end record.
fn no_archive(tail: &[u8], length: u64) -> Error {
    let starts_as_zip = number(tail, 0, 4) == Some(LOCAL) && tail.len() as u64 == length;
    let what = match starts_as_zip {
        true => format!("{length} bytes start as an archive but have no end record"),
        false => format!("{length} bytes are no archive of torch.save: there is no end record"),
    };
    invalid(what)
}
