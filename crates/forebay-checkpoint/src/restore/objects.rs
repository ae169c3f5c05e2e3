//! Many objects at once.
//!
//! A state of a hundred thousand small values is as many items of some hundred bytes. One by one each would open its
//! file anew, and hand over an archive that Python takes apart again; so what is small comes as the pickle in it, read
//! together with its neighbours ([`read_together`]) and compared with its checksum in one call for thousands. Where
//! the pickle is more than plain data, the archives come so too. What is large, compressed or odd is left to
//! [`Reader::object_bytes`], which also says what is wrong with it.

use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;
use forebay_format::dcp::{ItemSpan, check_pickle, pickle_of_item, verify_object};
use forebay_format::shown;

use super::together::{Place, read_together};
use super::{Found, Reader, wrong};
use crate::model::{BLOCK_BYTES, Chunk, Entry, Kind};
use crate::open::Checkpoint;

/// The most bytes of an item that is read with others.
const ITEM_BYTES_MAX: u64 = 64 << 10;

/// The most objects of one call: 256 MiB at the most, together with [`ITEM_BYTES_MAX`].
const OBJECTS_MAX: usize = 4096;

/// Makes of an item that was compared with its checksums what is wanted of it; `None` leaves it to who reads it alone.
type Take = fn(Vec<u8>, &Chunk) -> Option<Vec<u8>>;

impl Reader {
    /// The pickles of objects, by their numbers among the items, each as its archive has it, and looked through (see
    /// [`check_pickle`]); `None` where an item is to be read by itself.
    ///
    /// Errors: `usage` for a number of nothing or of a tensor, and for more than 4096; `checksum`; those of reading.
    pub fn pickles(&self, numbers: &[usize]) -> Result<Vec<Option<Vec<u8>>>> {
        self.small(numbers, |item, _| {
            pickle_of_item(&item).ok().filter(|pickle| check_pickle(pickle).is_ok())
        })
    }

    /// The items of objects, as `torch.save` makes them; `None` where one is to be read by itself. What is in them is
    /// not looked at.
    ///
    /// Errors: as [`Self::pickles`].
    pub fn archives(&self, numbers: &[usize]) -> Result<Vec<Option<Vec<u8>>>> {
        self.small(numbers, |item, chunk| {
            let checked = !crcs(chunk).is_empty();
            let whole = ItemSpan { offset: 0, length: item.len() as u64, transforms: &[] };
            (checked || verify_object(&item, whole).is_ok()).then_some(item)
        })
    }

    fn small(&self, numbers: &[usize], take: Take) -> Result<Vec<Option<Vec<u8>>>> {
        if numbers.len() > OBJECTS_MAX {
            let what = format!("{} objects at once, {OBJECTS_MAX} are the most", numbers.len());
            return Err(Error::new(Code::Usage, what));
        }
        let name = |&number: &usize| match self.items().get(number) {
            Some(item) => Ok(item.name.as_str()),
            None => Err(Error::new(Code::Usage, format!("there is no entry {number}"))),
        };
        let names: Vec<&str> = numbers.iter().map(name).collect::<Result<_>>()?;
        match &self.found {
            Found::Ours(ours) => {
                let some = ours.objects(&names)?;
                let find = |name: &&str| some.get(name).ok_or_else(|| ours.no_such(name));
                let entries: Vec<&Entry> = names.iter().map(find).collect::<Result<_>>()?;
                read(&some, &entries, take)
            }
            Found::Listed(listed) => {
                let find = |name: &&str| listed.entry(name);
                let entries: Vec<&Entry> = names.iter().map(find).collect::<Result<_>>()?;
                read(&listed.checkpoint, &entries, take)
            }
        }
    }
}

fn read(checkpoint: &Checkpoint, entries: &[&Entry], take: Take) -> Result<Vec<Option<Vec<u8>>>> {
    let mut chunks = Vec::with_capacity(entries.len());
    let mut places = Vec::with_capacity(entries.len());
    for (number, entry) in entries.iter().enumerate() {
        let Kind::Object { chunk } = &entry.kind else {
            return Err(Error::new(Code::Usage, format!("{:?} is a tensor", entry.name)));
        };
        chunks.push((&entry.name, chunk));
        if chunk.length <= ITEM_BYTES_MAX && chunk.transforms.is_empty() {
            let (file, offset, length) = (chunk.file, chunk.offset, chunk.length);
            places.push(Place { number, file, offset, length });
        }
    }
    let mut found: Vec<Option<Vec<u8>>> = entries.iter().map(|_| None).collect();
    let open = |file| checkpoint.open_file(file);
    read_together(places, open, |place, file, bytes| {
        let Some((name, chunk)) = chunks.get(place.number) else { return Ok(()) };
        let at = |error: Error| error.within(format!("object {name:?}"));
        let bytes = bytes.map_err(at)?;
        if !matches(bytes, crcs(chunk)) {
            return Err(at(wrong(shown(&file.path))));
        }
        if let Some(slot) = found.get_mut(place.number) {
            *slot = take(bytes.to_vec(), chunk);
        }
        Ok(())
    })?;
    Ok(found)
}

/// Whether each block has its checksum. Without any there is nothing to compare; some are as many as there are blocks,
/// else a part of the bytes would pass unseen.
fn matches(bytes: &[u8], crcs: &[u32]) -> bool {
    let blocks = bytes.chunks(BLOCK_BYTES as usize);
    crcs.is_empty()
        || crcs.len() == blocks.len() && blocks.zip(crcs).all(|(block, &crc)| crc32(block) == crc)
}

fn crcs(chunk: &Chunk) -> &[u32] {
    chunk.data.as_ref().map(|place| place.crcs.as_slice()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_all_blocks_or_do_not_match() {
        let bytes = vec![7; BLOCK_BYTES as usize + 1];
        let (first, second) = bytes.split_at(BLOCK_BYTES as usize);
        let (first, second) = (crc32(first), crc32(second));
        assert!(matches(&bytes, &[first, second]) && matches(&bytes, &[]) && matches(&[], &[]));
        for bad in [&[first][..], &[second], &[first, first], &[first, second, second]] {
            assert!(!matches(&bytes, bad), "{bad:?}");
        }
        assert!(!matches(&[], &[crc32(&[])]));
    }
}
