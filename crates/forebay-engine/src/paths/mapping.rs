//! Shared read-only mappings of files, for the GPU alone. **unsafe**: it maps files.
//!
//! The CPU never reads through such a mapping, so a file that shrinks cannot raise SIGBUS; the load finds the change by
//! the file's size and times afterwards.

use std::ffi::c_void;
use std::fs::File;
use std::ptr;

use forebay_error::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Whole pages of a file, mapped.
pub(crate) struct Mapping {
    base: usize,
    len: usize,
    offset: u64,
}

impl Mapping {
    /// Maps the pages that hold `[offset, offset + len)`.
    pub(crate) fn new(file: &File, offset: u64, len: u64) -> Result<Self> {
        let page = rustix::param::page_size() as u64;
        let start = offset / page * page;
        let len = (offset + len - start).next_multiple_of(page) as usize;
        // SAFETY: a fresh read-only mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, start)
        }
        .map_err(|errno| Error::io(format!("cannot map {len} bytes"), errno.into()))?;
        // SAFETY: the mapping is ours; the advice keeps it from children, whose pages a GPU must not pin.
        if let Err(error) = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontFork) } {
            tracing::debug!(%error, "mapping stays visible to children");
        }
        Ok(Self { base: base as usize, len, offset: start })
    }

    /// The first mapped byte, page-aligned.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Mapped bytes, whole pages.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where a byte of the file lies; it must be inside.
    pub(crate) fn address_of(&self, offset: u64) -> usize {
        debug_assert!(offset >= self.offset && offset - self.offset <= self.len as u64);
        self.base + (offset - self.offset) as usize
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; registrations of it are dropped first (field order of their owner).
        if let Err(error) = unsafe { rustix::mm::munmap(self.base as *mut c_void, self.len) } {
            tracing::warn!(%error, "file not unmapped");
        }
    }
}
