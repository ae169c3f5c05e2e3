//! System calls that have no safe wrapper: the one module of this crate with `unsafe` code.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::mm::{MapFlags, ProtFlags};

/// Number of cachestat(2), the same on every architecture (Linux 6.5).
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of the kernel.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// `struct cachestat` of the kernel: counts of pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cachestat {
    pub(crate) cached: u64,
    pub(crate) dirty: u64,
    pub(crate) writeback: u64,
    pub(crate) evicted: u64,
    pub(crate) recently_evicted: u64,
}

/// Counts the pages of a range of a file that are in the page cache. `len` is not 0: that would
/// mean the whole rest.
pub(crate) fn cachestat(file: impl AsFd, offset: u64, len: u64) -> io::Result<Cachestat> {
    debug_assert!(len > 0);
    let range = CachestatRange { offset, len };
    let mut counts = Cachestat::default();
    let flags: libc::c_uint = 0;
    // SAFETY: both structs are laid out as the kernel's, live during the call, and the kernel
    // writes only `counts`, in its size; the descriptor is borrowed for the call.
    let status = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_fd().as_raw_fd(),
            &raw const range,
            &raw mut counts,
            flags,
        )
    };
    if status == 0 { Ok(counts) } else { Err(io::Error::last_os_error()) }
}

/// Asks mincore(2) for every page of a range of a file: one byte a page, lowest bit set when
/// resident. Offset is a multiple of the page size, `len` is not 0. The mapping is never touched,
/// so a shrinking file cannot raise SIGBUS.
pub(crate) fn mincore(file: impl AsFd, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut states = vec![0_u8; len.div_ceil(rustix::param::page_size())];
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that exists.
    let address = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, offset)
    }?;
    // SAFETY: the range is the mapping just made, and `states` has a byte for each of its pages.
    let status = unsafe { libc::mincore(address, len, states.as_mut_ptr()) };
    let result = if status == 0 { Ok(states) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the mapping was made above and nothing refers to it.
    let _ = unsafe { rustix::mm::munmap(address, len) };
    result
}
