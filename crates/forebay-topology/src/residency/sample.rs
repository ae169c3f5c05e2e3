//! Samples of the page cache by reads that do not wait.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

/// A sample that misses pulls its page in, so small ranges get fewer: one page in 64 is 1.6 % more
/// in the cache.
const PAGES_PER_SAMPLE: u64 = 64;

/// Fewer samples than this say nothing. A range of 8 pages is asked for page by page.
const SAMPLES_MIN: u64 = 8;

/// Asks for single pages of one file.
pub(super) struct Sampler {
    file: OwnedFd,
    page_len: u64,
    /// State of a small random number generator.
    state: u64,
}

impl Sampler {
    /// Opens the file a second time, so that neither the advice nor the position of the caller's
    /// own is touched, and so that `O_DIRECT` of the caller's does not matter.
    pub(super) fn new(file: &File, page_len: u64) -> io::Result<Self> {
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::open(own, flags, Mode::empty()) {
            Ok(file) => file,
            // A descriptor that was passed to a process that may not open the file itself.
            Err(error) if is_direct(file) => return Err(error.into()),
            Err(_) => return Self::of(file.try_clone()?.into(), page_len),
        };
        // Keeps the readahead of a miss to the page asked for.
        rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
        Self::of(file, page_len)
    }

    fn of(file: OwnedFd, page_len: u64) -> io::Result<Self> {
        let state = RandomState::new().hash_one(0_u8) | 1;
        Ok(Self { file, page_len, state })
    }

    /// About how many of `pages` pages from `first` on are resident, by at most `samples` samples,
    /// one at a random place in each of as many parts of equal size.
    pub(super) fn estimate(&mut self, first: u64, pages: u64, samples: u64) -> io::Result<u64> {
        let sparse = (pages / PAGES_PER_SAMPLE).max(SAMPLES_MIN);
        let samples = samples.min(sparse).min(pages);
        let mut hits = 0;
        for sample in 0..samples {
            let (start, end) = (part(pages, sample, samples), part(pages, sample + 1, samples));
            let page = first + start + self.random() % (end - start).max(1);
            hits += u64::from(self.is_resident(page)?);
        }
        if hits == samples {
            return Ok(pages);
        }
        Ok(part(pages, hits, samples))
    }

    fn is_resident(&self, page: u64) -> io::Result<bool> {
        let mut byte = [0_u8; 1];
        let offset = page * self.page_len;
        loop {
            let mut into = [IoSliceMut::new(&mut byte)];
            match rustix::io::preadv2(&self.file, &mut into, offset, ReadWriteFlags::NOWAIT) {
                // Nothing read is the end of a file that has shrunk: there is no such page.
                Ok(len) => return Ok(len > 0),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// xorshift64: fast, and good enough to not meet the same pages again.
    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }
}

fn is_direct(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

/// `whole * share / of`, rounded down, without overflow.
fn part(whole: u64, share: u64, of: u64) -> u64 {
    let part = u128::from(whole) * u128::from(share) / u128::from(of.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}
