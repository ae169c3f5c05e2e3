//! Many objects at once.
//!
//! A state of twenty thousand small values is twenty thousand items of some hundred bytes. One by one each would open
//! its file anew, and hand over an archive that Python takes apart again; so what is small comes as the pickle in it,
//! read and compared with its checksum in one call for thousands. What is large, compressed or odd is left to
//! [`Reader::object_bytes`], which also says what is wrong with it.

use forebay_error::{Code, Error, Result};
use forebay_format::dcp::{check_pickle, pickle_of_item};

use super::{Found, Reader, read_item};
use crate::model::{Entry, Kind};
use crate::open::Checkpoint;

/// The most bytes of an item whose pickle is read with others.
const ITEM_BYTES_MAX: u64 = 64 << 10;

/// The most objects of one call: 256 MiB at the most, together with [`ITEM_BYTES_MAX`].
const OBJECTS_MAX: usize = 4096;

impl Reader {
    /// The pickles of objects, by their numbers among the items, each as its archive has it, and looked through (see
    /// [`check_pickle`]); `None` where an item is to be read by itself.
    ///
    /// Errors: `usage` for a number of nothing or of a tensor, and for more than 4096; `checksum`; those of reading.
    pub fn pickles(&self, numbers: &[usize]) -> Result<Vec<Option<Vec<u8>>>> {
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
                let find =
                    |name: &&str| pickle(&some, some.get(name).ok_or_else(|| ours.no_such(name))?);
                names.iter().map(find).collect()
            }
            Found::Listed(listed) => {
                let find = |name: &&str| pickle(&listed.checkpoint, listed.entry(name)?);
                names.iter().map(find).collect()
            }
        }
    }
}

fn pickle(checkpoint: &Checkpoint, entry: &Entry) -> Result<Option<Vec<u8>>> {
    let Kind::Object { chunk } = &entry.kind else {
        return Err(Error::new(Code::Usage, format!("{:?} is a tensor", entry.name)));
    };
    if chunk.length > ITEM_BYTES_MAX || !chunk.transforms.is_empty() {
        return Ok(None);
    }
    let item = read_item(checkpoint, chunk)?;
    // Whoever reads it by itself is told what is wrong.
    Ok(pickle_of_item(&item).ok().filter(|pickle| check_pickle(pickle).is_ok()))
}
