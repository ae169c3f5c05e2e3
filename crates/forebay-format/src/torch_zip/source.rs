//! Where an archive is read from: a file, memory, or an object of a store behind the caller's own type.

use crate::open_file::OpenFile;
use crate::text::shown;
use forebay_error::{Code, Error, Result};

/// Bytes that can be read from any place. May be called from several threads at once.
pub trait ReadAt: Sync {
    /// What errors call it.
    fn name(&self) -> String;

    /// Its bytes.
    fn size(&self) -> u64;

    /// Fills `buffer` from byte `offset` on, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;
}

impl ReadAt for OpenFile {
    fn name(&self) -> String {
        shown(&self.path)
    }

    fn size(&self) -> u64 {
        OpenFile::size(self)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        OpenFile::read_exact_at(self, buffer, offset)
    }
}

/// Bytes in memory.
impl ReadAt for Vec<u8> {
    fn name(&self) -> String {
        "bytes in memory".to_owned()
    }

    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(buffer.len()));
        let part =
            start.zip(end).and_then(|(start, end)| self.get(start..end)).ok_or_else(|| {
                let what = format!("ends at byte {}, byte {offset} on is needed", self.len());
                Error::new(Code::Truncated, what).at(ReadAt::name(self))
            })?;
        buffer.copy_from_slice(part);
        Ok(())
    }
}

/// A buffer of `len` bytes that are known to exist; fails with `out_of_memory` where it cannot be had.
pub(crate) fn buffer(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let room = usize::try_from(len).ok().filter(|&len| bytes.try_reserve_exact(len).is_ok());
    let Some(len) = room else {
        return Err(Error::new(Code::OutOfMemory, format!("no memory for {len} bytes")));
    };
    bytes.resize(len, 0);
    Ok(bytes)
}
