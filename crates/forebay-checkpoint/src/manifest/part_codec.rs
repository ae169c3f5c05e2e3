//! Parts as bytes.
//!
//! ```text
//! part      8 bytes magic, 89 "FBP" 0D 0A 1A 0A
//!           u16 major version, u16 minor version
//!           u32 CRC-32 of all that follows it
//!           u64 bytes of the part, magic included
//!           fields: varint tag, varint length, that many bytes; by ascending tag, each once, all of them there but 2
//!  1 who       text attempt, varint rank, varint ranks of the job
//!  2 shared    32 bytes structure hash, varint values of the structure
//!  3 files     varint count; each: text name, varint bytes, u8 1 and u32 CRC-32 or u8 0
//!  4 own       rows, see `rows`; layouts must be none
//!  5 chunks    varint count, then columns of one number a chunk, by (file, item offset):
//!              per file    varint chunks of each file
//!              value       difference to the one before (the first: to 0); own values count on after the shared
//!              gap         varint bytes from the end of the item before in its file, or from the file's start
//!              lead        varint bytes of the item before its elements
//!              bytes       varint bytes of the elements
//!              tail        difference to the one before, of the bytes of the item behind its elements
//!              places      runs of varint kind (0 implied, 1 whole, 2 box) and varint how many follow of it, until
//!                          every chunk has one
//!              boxes       for each of kind 2: varint dims; each: varint offset, varint size
//!  6 crcs      u32 each: CRC-32 of each block of 1 MiB of the elements of each chunk
//! ```
//!
//! A chunk of the usual kind takes some 9 bytes and 4 a block. Since items are stored by the gaps between them, no two
//! can share bytes. Minor versions add tags; readers skip those they do not know.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_tensor::Region;

use super::limits::{
    MAX_DIMS, MAX_ENTRIES, MAX_FILES, MAX_FILE_NAME_BYTES, MAX_PART_BYTES, MAX_RANKS,
};
use super::part::{Part, PartChunk, PartFile, Place, SharedStructure, ValueRef, blocks};
use super::rows::{RowReader, RowWriter};
use super::value::{Named, Value};
use super::version::{MAJOR, MINOR, check_version};
use super::wire::{Put, Take};

const MAGIC: &[u8; 8] = b"\x89FBP\r\n\x1a\n";
const HEAD_BYTES: usize = 24;
const CRC_END: usize = 16;

const WHO: u64 = 1;
const SHARED: u64 = 2;
const FILES: u64 = 3;
const OWN: u64 = 4;
const CHUNKS: u64 = 5;
const CRCS: u64 = 6;

/// The least that a chunk takes: a byte in each of five columns.
const MIN_CHUNK_BYTES: usize = 5;

impl Part {
    /// Its bytes.
    ///
    /// Errors: `unsupported` for more than 64 MiB.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(HEAD_BYTES + self.chunks.len() * 16 + self.crcs.len() * 4);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&MAJOR.to_le_bytes());
        out.extend_from_slice(&MINOR.to_le_bytes());
        out.extend_from_slice(&[0; 12]);
        let mut field = Vec::new();
        field.put_text(&self.attempt);
        field.put_varint(u64::from(self.rank));
        field.put_varint(u64::from(self.world));
        out.put_field(WHO, &field);
        if let Some(shared) = &self.structure {
            field.clear();
            field.extend_from_slice(&shared.hash);
            field.put_varint(u64::from(shared.values));
            out.put_field(SHARED, &field);
        }
        field.clear();
        self.put_files(&mut field);
        out.put_field(FILES, &field);
        field.clear();
        let mut rows = RowWriter::default();
        self.own.iter().for_each(|named| rows.push(named, false, &[]));
        rows.finish(&mut field);
        out.put_field(OWN, &field);
        field.clear();
        self.put_chunks(&mut field);
        out.put_field(CHUNKS, &field);
        field.clear();
        self.crcs.iter().for_each(|crc| field.extend_from_slice(&crc.to_le_bytes()));
        out.put_field(CRCS, &field);
        self.seal(out)
    }

    fn seal(&self, mut out: Vec<u8>) -> Result<Vec<u8>> {
        let bytes = out.len() as u64;
        if bytes > MAX_PART_BYTES {
            let what = format!("the part of rank {} has {bytes} bytes", self.rank);
            return Err(Error::new(Code::Unsupported, what)
                .hint(format!("at most {MAX_PART_BYTES} fit; store fewer or larger chunks")));
        }
        if let Some(place) = out.get_mut(CRC_END..HEAD_BYTES) {
            place.copy_from_slice(&bytes.to_le_bytes());
        }
        let crc = crc32(out.get(CRC_END..).unwrap_or_default());
        if let Some(place) = out.get_mut(CRC_END - 4..CRC_END) {
            place.copy_from_slice(&crc.to_le_bytes());
        }
        Ok(out)
    }

    fn put_files(&self, out: &mut Vec<u8>) {
        out.put_varint(self.files.len() as u64);
        for file in &self.files {
            out.put_text(&file.name);
            out.put_varint(file.bytes);
            out.push(u8::from(file.crc.is_some()));
            out.extend(file.crc.into_iter().flat_map(u32::to_le_bytes));
        }
    }

    fn put_chunks(&self, out: &mut Vec<u8>) {
        out.put_varint(self.chunks.len() as u64);
        let mut counts = vec![0u64; self.files.len()];
        for chunk in &self.chunks {
            if let Some(count) = counts.get_mut(chunk.file as usize) {
                *count += 1;
            }
        }
        counts.iter().for_each(|&count| out.put_varint(count));
        let shared = self.structure.map_or(0, |shared| u64::from(shared.values));
        let mut last = 0;
        for chunk in &self.chunks {
            let value = match chunk.value {
                ValueRef::Shared(number) => u64::from(number),
                ValueRef::Own(number) => shared + u64::from(number),
            };
            out.put_difference(last, value);
            last = value;
        }
        let (mut file, mut free) = (0, 0);
        for chunk in &self.chunks {
            if chunk.file != file {
                (file, free) = (chunk.file, 0);
            }
            // Checked when the part was made: no item starts before the end of the one before.
            out.put_varint(chunk.offset.saturating_sub(free));
            free = chunk.offset.saturating_add(chunk.length);
        }
        for chunk in &self.chunks {
            out.put_varint(chunk.data_offset.saturating_sub(chunk.offset));
        }
        self.chunks.iter().for_each(|chunk| out.put_varint(chunk.data_bytes));
        let mut last = 0;
        for chunk in &self.chunks {
            let front = chunk.data_offset.saturating_sub(chunk.offset) + chunk.data_bytes;
            let tail = chunk.length.saturating_sub(front);
            out.put_difference(last, tail);
            last = tail;
        }
        put_places(out, &self.chunks);
    }

    /// Reads a part from all of its bytes.
    ///
    /// Errors: `truncated`, `checksum`, `unsupported` for a later major version, and what [`PartBuilder::finish`] says.
    ///
    /// [`PartBuilder::finish`]: super::PartBuilder::finish
    pub fn decode(bytes: &[u8], place: &str) -> Result<Self> {
        let body = open(bytes, place)?;
        let mut take = Take::new(body, place);
        let mut fields: [Option<&[u8]>; 7] = [None; 7];
        let mut last = 0;
        while take.left() > 0 {
            let tag = take.varint()?;
            if tag <= last {
                return Err(take.bad("fields are not in order"));
            }
            last = tag;
            let len = take.varint()?;
            let field = take.take(len)?;
            if let Some(slot) = usize::try_from(tag).ok().and_then(|tag| fields.get_mut(tag)) {
                *slot = Some(field);
            }
        }
        let [_, Some(who), shared, Some(files), Some(own), Some(chunks), Some(crcs)] = fields else {
            return Err(take.bad("a field is missing"));
        };
        let (attempt, rank, world) = take_who(who, place)?;
        let structure = shared.map(|field| take_shared(field, place)).transpose()?;
        let files = take_files(files, place)?;
        let own = take_own(own, place)?;
        let shared = structure.map_or(0, |shared: SharedStructure| shared.values);
        let chunks = take_chunks(chunks, place, &files, shared)?;
        let crcs = take_crcs(crcs, place)?;
        let part = Self { attempt, rank, world, structure, files, own, chunks, crcs };
        part.check().map_err(|error| error.at(place))?;
        Ok(part)
    }
}

/// Checks all that surrounds the fields; gives them.
fn open<'a>(bytes: &'a [u8], place: &str) -> Result<&'a [u8]> {
    let short = |what: &str| Error::new(Code::Truncated, what.to_owned()).at(place);
    let head = bytes.get(..HEAD_BYTES).ok_or_else(|| short("a part ends inside its header"))?;
    let mut take = Take::new(head, place);
    if take.take(8)? != MAGIC {
        return Err(Error::new(Code::InvalidMetadata, "not a part of a manifest").at(place));
    }
    check_version(&mut take, "part")?;
    let crc = take.u32()?;
    let len = take.u64()?;
    if (bytes.len() as u64) < len {
        return Err(short("a part is shorter than its header says"));
    }
    if bytes.len() as u64 != len || len > MAX_PART_BYTES {
        let what = format!("a part of {} bytes says that it has {len}", bytes.len());
        return Err(Error::new(Code::InvalidMetadata, what).at(place));
    }
    if crc32(bytes.get(CRC_END..).unwrap_or_default()) != crc {
        let what = "a part does not have the checksum in its header";
        return Err(Error::new(Code::Checksum, what).at(place));
    }
    Ok(bytes.get(HEAD_BYTES..).unwrap_or_default())
}

fn take_who(field: &[u8], place: &str) -> Result<(String, u32, u32)> {
    let mut take = Take::new(field, place);
    let attempt = take.text(MAX_FILE_NAME_BYTES, "bytes of an attempt's name")?.to_owned();
    let who = (attempt, take.small(MAX_RANKS, "as a rank")?, take.small(MAX_RANKS, "ranks")?);
    take.end()?;
    Ok(who)
}

fn take_shared(field: &[u8], place: &str) -> Result<SharedStructure> {
    let mut take = Take::new(field, place);
    let hash = take.digest()?;
    let values = take.small(MAX_ENTRIES, "values of a structure")?;
    take.end()?;
    Ok(SharedStructure { hash, values })
}

fn take_files(field: &[u8], place: &str) -> Result<Vec<PartFile>> {
    let mut take = Take::new(field, place);
    // A name's length, bytes, a flag.
    let count = take.count(MAX_FILES, 3, "files")?;
    let mut files = Vec::with_capacity(count);
    for _ in 0..count {
        let name = take.text(MAX_FILE_NAME_BYTES, "bytes of a file's name")?.to_owned();
        let bytes = take.varint()?;
        let crc = match take.take(1)? {
            [0] => None,
            [1] => Some(take.u32()?),
            _ => return Err(take.bad("unknown kind of checksum")),
        };
        files.push(PartFile { name, bytes, crc });
    }
    take.end()?;
    Ok(files)
}

fn take_own(field: &[u8], place: &str) -> Result<Vec<Named>> {
    let mut take = Take::new(field, place);
    let mut rows = RowReader::new(&mut take)?;
    let mut own = Vec::with_capacity(rows.count());
    while let Some((named, shared)) = rows.next(&mut take)? {
        let layout = matches!(&named.value, Value::Tensor(tensor) if tensor.layout.is_some());
        if shared || layout {
            return Err(take.bad("a value of a rank's own refers to the structure"));
        }
        own.push(named);
    }
    take.end()?;
    Ok(own)
}

fn take_chunks(
    field: &[u8],
    place: &str,
    files: &[PartFile],
    shared: u32,
) -> Result<Vec<PartChunk>> {
    let mut take = Take::new(field, place);
    let count = take.count(MAX_PART_BYTES, MIN_CHUNK_BYTES, "chunks")?;
    let per_file = files
        .iter()
        .map(|_| take.at_most(count as u64, "chunks of a file"))
        .collect::<Result<Vec<_>>>()?;
    if per_file.iter().try_fold(0u64, |sum, &here| sum.checked_add(here)) != Some(count as u64) {
        return Err(take.bad("files have more or fewer chunks than there are"));
    }
    let values = differences(&mut take, count)?;
    let gaps = varints(&mut take, count)?;
    let leads = varints(&mut take, count)?;
    let bytes = varints(&mut take, count)?;
    let tails = differences(&mut take, count)?;
    let places = take_places(&mut take, count)?;
    take.end()?;
    let mut rows = values.into_iter().zip(gaps).zip(leads).zip(bytes).zip(tails).zip(places);
    let mut chunks = Vec::with_capacity(count);
    let mut first_crc = 0u64;
    for (file, &here) in (0u32..).zip(&per_file) {
        let mut free = 0u64;
        for _ in 0..here {
            let Some((((((value, gap), lead), bytes), tail), box_)) = rows.next() else { break };
            let offset = free.checked_add(gap);
            let data_offset = offset.and_then(|offset| offset.checked_add(lead));
            let length = lead.checked_add(bytes).and_then(|front| front.checked_add(tail));
            let end = offset.and_then(|offset| offset.checked_add(length?));
            let (Some(offset), Some(data_offset), Some(length), Some(end)) =
                (offset, data_offset, length, end)
            else {
                return Err(take.bad(format!("chunk {} ends past 2^64", chunks.len())));
            };
            free = end;
            chunks.push(PartChunk {
                value: value_ref(&take, value, shared)?,
                place: box_,
                file,
                offset,
                length,
                data_offset,
                data_bytes: bytes,
                first_crc: usize::try_from(first_crc).unwrap_or(usize::MAX),
            });
            first_crc = first_crc.saturating_add(blocks(bytes));
        }
    }
    Ok(chunks)
}

fn value_ref(take: &Take<'_>, value: u64, shared: u32) -> Result<ValueRef> {
    let number = |value: u64| {
        u32::try_from(value).map_err(|_| take.bad(format!("there is no value {value}")))
    };
    match value.checked_sub(u64::from(shared)) {
        None => Ok(ValueRef::Shared(number(value)?)),
        Some(own) => Ok(ValueRef::Own(number(own)?)),
    }
}

fn varints(take: &mut Take<'_>, count: usize) -> Result<Vec<u64>> {
    (0..count).map(|_| take.varint()).collect()
}

fn differences(take: &mut Take<'_>, count: usize) -> Result<Vec<u64>> {
    let mut last = 0;
    (0..count)
        .map(|_| {
            last = take.difference(last)?;
            Ok(last)
        })
        .collect()
}

fn kind_of(place: &Place) -> u64 {
    match place {
        Place::Implied => 0,
        Place::Whole => 1,
        Place::Box(_) => 2,
    }
}

fn put_places(out: &mut Vec<u8>, chunks: &[PartChunk]) {
    for run in chunks.chunk_by(|a, b| kind_of(&a.place) == kind_of(&b.place)) {
        out.put_varint(run.first().map_or(0, |chunk| kind_of(&chunk.place)));
        out.put_varint(run.len() as u64);
    }
    for chunk in chunks {
        if let Place::Box(region) = &chunk.place {
            out.put_varint(region.rank() as u64);
            for (&offset, &size) in region.offsets.iter().zip(&region.sizes) {
                out.put_varint(offset);
                out.put_varint(size);
            }
        }
    }
}

fn take_places(take: &mut Take<'_>, count: usize) -> Result<Vec<Place>> {
    let mut places = Vec::with_capacity(count);
    while places.len() < count {
        let kind = take.varint()?;
        let run = take.at_most((count - places.len()) as u64, "chunks of one kind")?;
        let place = match kind {
            0 => Place::Implied,
            1 => Place::Whole,
            2 => Place::Box(Region { offsets: Vec::new(), sizes: Vec::new() }),
            _ => return Err(take.bad("unknown kind of region")),
        };
        if run == 0 {
            return Err(take.bad("an empty run"));
        }
        places.extend((0..run).map(|_| place.clone()));
    }
    for place in &mut places {
        if let Place::Box(region) = place {
            let dims = take.count(MAX_DIMS, 2, "dimensions")?;
            region.offsets.reserve_exact(dims);
            region.sizes.reserve_exact(dims);
            for _ in 0..dims {
                region.offsets.push(take.varint()?);
                region.sizes.push(take.varint()?);
            }
        }
    }
    Ok(places)
}

fn take_crcs(field: &[u8], place: &str) -> Result<Vec<u32>> {
    let (words, rest) = field.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(Take::new(rest, place).bad("ends inside a checksum"));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
