//! Which parts of a file are in the page cache.
//!
//! The answer picks the path of each extent, so a wrong one costs: a cold extent that is taken for
//! resident is read at the speed of page faults, a resident one that is taken for cold is read from
//! disk again. Three ways to ask exist and each has a trap; the table is the order in which they
//! are tried.
//!
//! | way | who may ask | trap |
//! | --- | --- | --- |
//! | cachestat(2), Linux 6.5 | since early 2025: owner, `CAP_FOWNER`, who may write or has the file open for writing; others get `EPERM` | a stacked file system (overlayfs) has an inode of its own whose cache is always empty |
//! | mincore(2) on a mapping | the same people | **others are told that every page is resident**; the kernel lies so that nobody can watch what others read |
//! | `preadv2(RWF_NOWAIT)` of one byte | whoever may read | a read that misses starts readahead, so asking changes the answer; many file systems (NFS, overlayfs, 9P) refuse the flag |
//!
//! So cachestat is not asked on overlayfs, where a mapping is of the file beneath and tells the
//! truth. mincore is asked only by those whom it answers, and a claim that all is resident is
//! checked with a few reads where they are possible. Samples are taken through a second opening of
//! the file that is marked for random access, which keeps the readahead of a miss to one page, and
//! at positions that change from call to call, so that an earlier sample's page does not count as
//! evidence. Where nothing can be asked, [`Method::Unknown`] says so with no page counted as
//! resident.
//!
//! ZFS keeps files in a cache of its own and DAX files have none: unknown as well.

mod sample;
mod trust;

use std::fs::File;
use std::io;

use forebay_error::{Code, Error, Result};
use rustix::fs::FileType;

use crate::{direct, page_size, sys};
use sample::Sampler;

/// A granule counts as resident when at least this many in a hundred of its pages are. A tenth
/// missing costs some faults or small reads; reading nine tenths again would cost more.
const RESIDENT_PERCENT: u64 = 90;

/// Samples for one [`probe`] of 64 MiB or more: the share is then known to about 1/16 (one standard
/// deviation at one half is 1/32).
const PROBE_SAMPLES: u64 = 256;

/// Samples for a granule of a [`map`]: all of them must hit. A granule with a quarter missing
/// passes one time in ten.
const GRANULE_SAMPLES: u64 = 8;

/// Samples that check mincore's word.
const TRUST_SAMPLES: u64 = 32;

/// mincore's window: its answer is a byte a page, 256 KiB for 1 GiB.
const MINCORE_LEN: u64 = 1 << 30;

/// More granules than this in one map are refused: 4 MiB each, they cover 64 TiB.
const GRANULES_MAX: u64 = 16 << 20;

const OVERLAY_MAGIC: u64 = 0x794C_7630;
const ZFS_MAGIC: u64 = 0x2FC1_2FC1;

/// How an answer was come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// cachestat(2): exact.
    Cachestat,
    /// mincore(2) on a mapping: exact.
    Mincore,
    /// Reads that do not wait, at some pages: an estimate.
    Sampled,
    /// Nothing could be asked; no page is counted as resident.
    Unknown,
}

impl Method {
    /// The word for reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Method::Cachestat => "cachestat",
            Method::Mincore => "mincore",
            Method::Sampled => "sampled",
            Method::Unknown => "unknown",
        }
    }
}

/// Residency of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Pages that the range touches, up to the end of the file.
    pub pages: u64,
    /// Those in the page cache.
    pub resident_pages: u64,
    /// Those changed and not yet written; only cachestat knows.
    pub dirty_pages: Option<u64>,
    /// How the answer was come by.
    pub method: Method,
}

impl Resident {
    /// The resident share, 0 to 1. An empty range is fully resident.
    pub fn share(&self) -> f64 {
        if self.pages == 0 { 1.0 } else { self.resident_pages as f64 / self.pages as f64 }
    }

    /// Whether the range counts as resident: nine tenths of its pages are.
    pub fn is_resident(&self) -> bool {
        let needed = u128::from(self.pages) * u128::from(RESIDENT_PERCENT);
        u128::from(self.resident_pages) * 100 >= needed
    }
}

/// Residency of a range, granule by granule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidencyMap {
    /// Where the first granule starts.
    pub offset: u64,
    /// Bytes of a granule; the last may be shorter.
    pub granule_len: u64,
    /// For each granule, whether it counts as resident.
    pub resident: Vec<bool>,
    /// How the answer was come by.
    pub method: Method,
}

impl ResidencyMap {
    /// Whether the granule that holds a byte of the file counts as resident; outside of the map:
    /// no.
    pub fn is_resident_at(&self, offset: u64) -> bool {
        let granule = offset.checked_sub(self.offset).map(|inside| inside / self.granule_len);
        let granule = granule.and_then(|granule| usize::try_from(granule).ok());
        granule.and_then(|granule| self.resident.get(granule)).copied().unwrap_or(false)
    }

    /// How many granules count as resident.
    pub fn resident_count(&self) -> usize {
        self.resident.iter().filter(|resident| **resident).count()
    }
}

/// Counts the resident pages of a range. Bytes past the end of the file are left out.
pub fn probe(file: &File, offset: u64, len: u64) -> Result<Resident> {
    let mut prober = Prober::new(file)?;
    prober.count(offset, len, PROBE_SAMPLES)
}

/// Looks at a range in granules of `granule_len` bytes (not 0) from `offset` on. Granules past the
/// end of the file are left out, so the map may be shorter than asked for.
pub fn map(file: &File, offset: u64, len: u64, granule_len: u64) -> Result<ResidencyMap> {
    let mut prober = Prober::new(file)?;
    let end = offset.saturating_add(len).min(prober.file_len);
    let len = end.saturating_sub(offset);
    if granule_len == 0 || len.div_ceil(granule_len) > GRANULES_MAX {
        let what = format!("cannot map {len} bytes in granules of {granule_len}");
        return Err(Error::new(Code::Usage, what));
    }
    let count = len.div_ceil(granule_len);
    // Most files are all in or all out, which one question settles.
    let whole = prober.count(offset, len, PROBE_SAMPLES)?;
    let exact = whole.method == Method::Cachestat || whole.method == Method::Mincore;
    let settled = whole.method == Method::Unknown
        || exact && (whole.resident_pages == 0 || whole.resident_pages == whole.pages);
    let mut resident = Vec::new();
    if settled {
        resident.resize(count as usize, whole.method != Method::Unknown && whole.is_resident());
        return Ok(ResidencyMap { offset, granule_len, resident, method: whole.method });
    }
    for granule in 0..count {
        let start = offset + granule * granule_len;
        let granule = prober.count(start, granule_len.min(end - start), GRANULE_SAMPLES)?;
        resident.push(granule.method != Method::Unknown && granule.is_resident());
    }
    Ok(ResidencyMap { offset, granule_len, resident, method: prober.method })
}

/// One file, with the way to ask that works for it. A way that turns out not to work is left for
/// the next.
struct Prober<'a> {
    file: &'a File,
    file_len: u64,
    page_len: u64,
    method: Method,
    sampler: Option<Sampler>,
}

impl<'a> Prober<'a> {
    fn new(file: &'a File) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            Error::io("cannot ask for the state of a file", error.into())
        };
        let stat = rustix::fs::fstat(file).map_err(failed)?;
        let magic = rustix::fs::fstatfs(file).map_err(failed)?.f_type as u64;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let stacked = magic == OVERLAY_MAGIC;
        let page_len = page_size() as u64;
        let method = if !is_file || magic == ZFS_MAGIC || direct::is_dax(file) {
            Method::Unknown
        } else if !stacked && sys::cachestat(file, 0, page_len).is_ok() {
            Method::Cachestat
        } else if trust::mincore_answers(file, &stat, stacked) {
            Method::Mincore
        } else {
            Method::Sampled
        };
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        Ok(Self { file, file_len, page_len, method, sampler: None })
    }

    /// Counts the pages that a range touches.
    fn count(&mut self, offset: u64, len: u64, samples: u64) -> Result<Resident> {
        let end = offset.saturating_add(len).min(self.file_len);
        let (first, last) = (offset / self.page_len, end.div_ceil(self.page_len));
        if offset >= end {
            return Ok(self.answer(0, 0));
        }
        let pages = last - first;
        if self.method == Method::Cachestat {
            let counts = sys::cachestat(self.file, first * self.page_len, pages * self.page_len)
                .map_err(|error| Error::io("cannot count cached pages", error))?;
            // The kernel counts without a lock, so that a busy file can show a page too many.
            let dirty_pages = Some(counts.dirty.min(pages));
            let answer = self.answer(pages, counts.cached.min(pages));
            return Ok(Resident { dirty_pages, ..answer });
        }
        if self.method == Method::Mincore {
            match self.count_mincore(first, pages) {
                // Either way it was not the truth: a file that cannot be mapped, or all of a file
                // not ours.
                Err(_) => self.method = Method::Sampled,
                Ok(resident) if resident == pages && self.contradicts(first, pages) => {
                    self.method = Method::Sampled;
                }
                Ok(resident) => return Ok(self.answer(pages, resident)),
            }
        }
        if self.method == Method::Sampled {
            match self.sampler().and_then(|sampler| sampler.estimate(first, pages, samples)) {
                Ok(resident) => return Ok(self.answer(pages, resident)),
                Err(_) => self.method = Method::Unknown,
            }
        }
        Ok(self.answer(pages, 0))
    }

    fn answer(&self, pages: u64, resident_pages: u64) -> Resident {
        Resident { pages, resident_pages, dirty_pages: None, method: self.method }
    }

    fn count_mincore(&self, first: u64, pages: u64) -> io::Result<u64> {
        let window = (MINCORE_LEN / self.page_len).max(1);
        let mut resident = 0;
        let mut done = 0;
        while done < pages {
            let now = window.min(pages - done);
            let len = (now * self.page_len) as usize;
            let states = sys::mincore(self.file, (first + done) * self.page_len, len)?;
            resident += states.iter().filter(|state| **state & 1 == 1).count() as u64;
            done += now;
        }
        Ok(resident)
    }

    /// Whether some read that does not wait proves that not all pages are resident.
    fn contradicts(&mut self, first: u64, pages: u64) -> bool {
        let sampler = self.sampler();
        let estimate = sampler.and_then(|sampler| sampler.estimate(first, pages, TRUST_SAMPLES));
        estimate.is_ok_and(|resident| resident < pages)
    }

    fn sampler(&mut self) -> io::Result<&mut Sampler> {
        let sampler = match self.sampler.take() {
            Some(sampler) => sampler,
            None => Sampler::new(self.file, self.page_len)?,
        };
        Ok(self.sampler.insert(sampler))
    }
}

#[cfg(test)]
mod tests;
