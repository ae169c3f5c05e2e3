//! Parts from bytes; the layout is in `part_codec`.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_tensor::Region;

use super::limits::{
    MAX_DIMS, MAX_ENTRIES, MAX_FILE_NAME_BYTES, MAX_FILES, MAX_PART_BYTES, MAX_RANKS,
};
use super::part::{Part, PartChunk, PartFile, Place, SharedStructure, ValueRef, blocks};
use super::part_codec::MAGIC;
use super::rows::RowReader;
use super::value::{Named, Value};
use super::version::check_version;
use super::wire::Take;
use super::wire::{CRC_END, HEAD_BYTES};

/// The least that a chunk takes: a byte in each of five columns.
const MIN_CHUNK_BYTES: usize = 5;

impl Part {
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
        let [_, Some(who), shared, Some(files), Some(own), Some(chunks), Some(crcs)] = fields
        else {
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
        part.check(place)?;
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
