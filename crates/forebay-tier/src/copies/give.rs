//! What of a step is to be copied from here, and its bytes, checked as they are read.

use forebay_checkpoint::commit::{Adoption, AttemptId, FileRef, Root};
use forebay_engine::read_exact_at;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::{crc32, crc32_join};
use forebay_store::is_data;

use super::damaged::note;
use super::marks::here;
use super::receive::expected;
use crate::hop::{Expected, Side};
use crate::limits::{Direction, Priority};

/// A step of which a node has files of its own.
pub struct Giving {
    adoption: Adoption,
    expected: Expected,
    own: Vec<FileRef>,
}

impl Giving {
    /// Looks at a step. Errors: `not_committed`; those of a damaged commit; I/O.
    pub fn of(root: &Root, step: u64) -> Result<Self> {
        let adoption = Adoption::read(root, step)?;
        let (missing, copies) = here(root, &adoption)?;
        let is_own = |file: &&FileRef| {
            is_data(&file.name) && !missing.contains(file) && !copies.contains_key(&file.name)
        };
        let own = adoption.files().iter().filter(is_own).cloned().collect();
        let expected = expected(root, &adoption)?;
        Ok(Self { adoption, expected, own })
    }

    /// Whose commit it is.
    pub fn attempt(&self) -> AttemptId {
        self.adoption.attempt()
    }

    /// The data files that are this node's own.
    pub fn own(&self) -> &[FileRef] {
        &self.own
    }

    /// Reads a file part by part, within the limits of its tier. `each` gets every part in order; the last one once the
    /// checksum of all is the manifest's, so that nobody ever gets the whole of a damaged file.
    ///
    /// Errors: `checksum`; `truncated`; I/O; `cancelled`; those of `each`.
    pub fn read(
        &self,
        from: &Side,
        file: &FileRef,
        part_bytes: u64,
        priority: Priority,
        each: &mut dyn FnMut(Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let source = from.root.store.open_data(&self.adoption.layout().file(&file.name))?;
        if source.len() != file.bytes {
            let what = format!("file has {} bytes, {} were committed", source.len(), file.bytes);
            return Err(Error::new(Code::Truncated, what).at(source.name()));
        }
        let (mut at, mut crc) = (0, 0);
        while at < file.bytes {
            let count = (file.bytes - at).min(part_bytes);
            from.limits.take(Direction::Read, priority, count)?;
            let len = usize::try_from(count).unwrap_or_default();
            let mut part = vec![0; len];
            let noted = |_: &Error| note(&from.root, self.adoption.step(), &file.name);
            read_exact_at(&*source, &mut part, at).inspect_err(noted)?;
            crc = crc32_join(crc, crc32(&part), count);
            at += count;
            let is_bad = self.expected.of(file).is_some_and(|expected| expected != crc);
            if at == file.bytes && is_bad {
                let what = "its bytes are not those that were saved";
                return Err(Error::new(Code::Checksum, what).at(source.name())).inspect_err(noted);
            }
            each(part)?;
        }
        Ok(())
    }
}
