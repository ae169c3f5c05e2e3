//! Reading a file past the page cache, as far as it is not in there.
//!
//! Checking a terabyte must not push out what others work with. What is in the page cache is read from it; the rest
//! is read directly where the file system is good at that, else through the cache, and dropped from it behind the
//! reader.

use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_engine::{DirectFile, LocalFile};
use forebay_error::{Code, Error, Result};
use forebay_format::OpenFile;
use forebay_topology::residency;
use forebay_topology::{DirectAdvice, Method, ResidencyMap, page_size};
use rustix::fs::Advice;

/// The grid on which the page cache is asked and dropped: the kernel drops no folio by halves, and they have up to 4
/// MiB.
const GRANULE_BYTES: u64 = 4 << 20;

/// A file to be read once.
pub(super) struct Reader {
    pub(super) open: Arc<OpenFile>,
    /// `None` of an object in a bucket: there is no cache to spare.
    file: Option<LocalFile>,
    /// What was in the page cache before; `None` where that is not known.
    cached: Option<ResidencyMap>,
}

/// Memory to read into, used again and again.
#[derive(Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    /// What was read last: where it starts, and its length.
    read: (usize, usize),
}

impl Buffer {
    /// What was read last.
    pub(super) fn read(&self) -> &[u8] {
        let (start, len) = self.read;
        self.bytes.get(start..start + len).unwrap_or_default()
    }
}

impl Reader {
    pub(super) fn new(open: OpenFile) -> Result<Self> {
        let open = Arc::new(open);
        let Some(handle) = open.local() else {
            return Ok(Self { open, file: None, cached: None });
        };
        let cached = residency::map(&handle.file, 0, open.size(), GRANULE_BYTES).ok();
        let cached = cached.filter(|map| map.method != Method::Unknown);
        Ok(Self { file: Some(LocalFile::new(open.clone())?), open, cached })
    }

    /// Reads a range.
    pub(super) fn read(&self, offset: u64, len: u64, buffer: &mut Buffer) -> Result<()> {
        let cold = self.cached.as_ref().is_some_and(|cached| !cached.is_resident_at(offset));
        let file = self.file.as_ref().filter(|_| cold);
        let direct = file.filter(|file| file.profile().direct == DirectAdvice::Good);
        let direct = direct.and_then(|file| file.direct().ok());
        if let Some(direct) = direct
            && read_direct(direct, offset, len, buffer).is_some()
        {
            return Ok(());
        }
        let room = usize::try_from(len).map_err(|_| too_long(len))?;
        buffer.bytes.resize(buffer.bytes.len().max(room), 0);
        buffer.read = (0, room);
        if cold {
            // On its own the kernel reads ahead in steps of 128 KiB.
            self.advise(offset, len, Advice::WillNeed);
        }
        let into = buffer.bytes.get_mut(..room).unwrap_or_default();
        self.open.read_exact_at(into, offset)?;
        self.forget(offset, len);
        Ok(())
    }

    /// Drops from the page cache what was not in it before.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        let Some(cached) = &self.cached else { return };
        for granule in offset / GRANULE_BYTES..(offset + len).div_ceil(GRANULE_BYTES) {
            let start = granule * GRANULE_BYTES;
            if !cached.is_resident_at(start) {
                self.advise(start, GRANULE_BYTES, Advice::DontNeed);
            }
        }
    }

    fn advise(&self, offset: u64, len: u64, advice: Advice) {
        let Some(file) = &self.file else { return };
        let advised = rustix::fs::fadvise(file.file(), offset, NonZeroU64::new(len), advice);
        if let Err(error) = advised {
            tracing::debug!(%error, "the kernel takes no advice on a file");
        }
    }

    /// Fails where the file was changed since it was opened.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        self.open.check_unchanged()
    }
}

/// Reads a range directly, widened to whole blocks; `None` where that does not work, whatever the reason: reading
/// through the page cache tells it better.
fn read_direct(direct: &DirectFile, offset: u64, len: u64, buffer: &mut Buffer) -> Option<()> {
    let block = u64::from(direct.align.offset_bytes).max(1);
    let start = offset / block * block;
    let end = offset.checked_add(len)?.checked_next_multiple_of(block)?;
    let total = usize::try_from(end - start).ok()?;
    let page = page_size().max(direct.align.memory_bytes as usize);
    buffer.bytes.resize(buffer.bytes.len().max(total + page), 0);
    let shift = buffer.bytes.as_ptr().align_offset(page);
    let into = buffer.bytes.get_mut(shift..shift + total)?;
    let needed = usize::try_from(offset + len - start).ok()?;
    let mut done = 0;
    // The last block of a file is short.
    while done < needed {
        match direct.file.read_at(into.get_mut(done..)?, start + done as u64) {
            Ok(0) => return None,
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::debug!(%error, "no direct read");
                return None;
            }
        }
        if done < needed && !(done as u64).is_multiple_of(block) {
            return None;
        }
    }
    buffer.read = (shift + usize::try_from(offset - start).ok()?, usize::try_from(len).ok()?);
    Some(())
}

fn too_long(len: u64) -> Error {
    Error::new(Code::OutOfMemory, format!("no memory for {len} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_any_place_are_read_cold_and_warm() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|at| ((at * 7) >> 3) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let open = || OpenFile::open(&path).unwrap();
        rustix::fs::fsync(&open().local().unwrap().file).unwrap();
        rustix::fs::fadvise(&open().local().unwrap().file, 0, None, Advice::DontNeed).unwrap();
        for _ in ["cold", "warm"] {
            let reader = Reader::new(open()).unwrap();
            let mut buffer = Buffer::default();
            for (offset, len) in
                [(0, 10), (5, 4096), (4095, 2), (123_457, 1 << 20), (2_999_000, 1001), (7, 0)]
            {
                reader.read(offset, len, &mut buffer).unwrap();
                assert!(
                    buffer.read() == &bytes[offset as usize..][..len as usize],
                    "{offset} {len}"
                );
            }
            assert!(reader.read(2_999_000, 2000, &mut buffer).is_err());
            std::fs::read(&path).unwrap();
        }
    }
}
