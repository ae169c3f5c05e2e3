//! The host's memory: what is registered, what is mapped, and reading it without faults. **unsafe**: system calls on
//! addresses that may be nobody's.
//!
//! Copies go through `process_vm_readv` and its twin on the process itself: where an address is not mapped any more,
//! or lies behind the end of a file that shrank, they give an error instead of a signal.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

use crate::check::violation;
use crate::config::config;
use crate::status::{
    ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};

/// `CU_MEMHOSTREGISTER_READ_ONLY`, and all flags that there are (portable, device map, I/O memory).
const READ_ONLY: u32 = 8;
const FLAGS: u32 = 1 | 2 | 4 | READ_ONLY;
const PAGE: usize = 4096;

/// Bytes of one system call: small, so that a copy takes its time and is not of one moment.
const STEP_BYTES: usize = 256 << 10;

/// Registered ranges by address.
#[derive(Default)]
pub(crate) struct Registrations {
    ranges: BTreeMap<usize, Registered>,
    writable_bytes: u64,
}

#[derive(Clone, Copy)]
struct Registered {
    len: usize,
    read_only: bool,
}

/// What a host range is to a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Pinned,
    PinnedReadOnly,
    Pageable,
}

impl Registrations {
    pub(crate) fn add(&mut self, address: usize, len: usize, flags: u32) -> Outcome {
        let end = address.checked_add(len).ok_or(INVALID_VALUE)?;
        if address == 0 || len == 0 || flags & !FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        let read_only = flags & READ_ONLY != 0;
        if read_only && !config().read_only {
            return Err(NOT_SUPPORTED);
        }
        if let (true, Some(code)) = (read_only, config().register_fail) {
            return Err(code);
        }
        // Pages are what is registered: two ranges cannot share one.
        let pages = address / PAGE * PAGE..end.next_multiple_of(PAGE);
        if let Some((other, _)) = self.overlapping(&pages).next() {
            let what = format!("{address:#x}..{end:#x} registered, as {other:#x} is already");
            return violation(ALREADY_REGISTERED, &what);
        }
        check_mappings(&pages, read_only)?;
        if !is_readable(&pages) {
            // Mapped, yet not there: the file is shorter. That happens to correct programs.
            return Err(INVALID_VALUE);
        }
        if !read_only {
            if self.writable_bytes.saturating_add(len as u64) > config().pin_limit {
                return Err(OUT_OF_MEMORY);
            }
            self.writable_bytes += len as u64;
        }
        take_time(len, config().register_gb_per_s);
        self.ranges.insert(address, Registered { len, read_only });
        Ok(())
    }

    /// The range that unregistering this address would give back.
    pub(crate) fn registered_at(&self, address: usize) -> Outcome<Range<usize>> {
        match self.ranges.get(&address) {
            Some(range) => Ok(address..address + range.len),
            None => violation(NOT_REGISTERED, &format!("unregister of {address:#x}")),
        }
    }

    pub(crate) fn remove(&mut self, address: usize) {
        let Some(range) = self.ranges.remove(&address) else { return };
        take_time(range.len, config().unregister_gb_per_s);
        if !range.read_only {
            self.writable_bytes -= range.len as u64;
        }
    }

    /// Classifies the range of a copy.
    pub(crate) fn classify(&self, range: &Range<usize>) -> Outcome<Host> {
        let mut found = self.overlapping(range);
        let Some((start, registered)) = found.next() else { return Ok(Host::Pageable) };
        if start <= range.start && range.end <= start + registered.len {
            return Ok(if registered.read_only { Host::PinnedReadOnly } else { Host::Pinned });
        }
        let (from, to) = (range.start, range.end);
        let end = start + registered.len;
        let what = format!("copy of host memory {from:#x}..{to:#x} leaves {start:#x}..{end:#x}");
        violation(INVALID_VALUE, &what)
    }

    /// Registered ranges that share bytes with this one, the first last.
    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Registered)> {
        let start = range.start;
        let before = self.ranges.range(..range.end).rev();
        before
            .map(|(&at, &registered)| (at, registered))
            .take_while(move |(at, registered)| at + registered.len > start)
    }
}

/// As long as these bytes take at a rate. The caller holds the lock of all calls, as the real driver does.
fn take_time(len: usize, gb_per_s: Option<f64>) {
    if let Some(rate) = gb_per_s {
        std::thread::sleep(std::time::Duration::from_secs_f64(len as f64 / rate / 1e9));
    }
}

/// Errors when part of the pages is not mapped, or is of a kind that the driver does not register so.
fn check_mappings(pages: &Range<usize>, read_only: bool) -> Outcome {
    let mut covered = pages.start;
    for mapping in mappings() {
        if mapping.range.end <= covered || mapping.range.start >= pages.end {
            continue;
        }
        if mapping.range.start > covered {
            break;
        }
        if !read_only && (!mapping.writable || mapping.shared_file) {
            let what = format!("{pages:#x?} registered for writing, the mapping does not allow it");
            return violation(INVALID_VALUE, &what);
        }
        covered = mapping.range.end;
    }
    if covered < pages.end {
        return violation(INVALID_VALUE, &format!("{pages:#x?} registered, not all is mapped"));
    }
    Ok(())
}

/// Whether every byte is mapped now.
pub(crate) fn is_mapped(range: &Range<usize>) -> bool {
    let mut covered = range.start;
    for mapping in mappings() {
        if mapping.range.start <= covered && covered < mapping.range.end {
            covered = mapping.range.end;
        }
    }
    covered >= range.end
}

struct Mapping {
    range: Range<usize>,
    writable: bool,
    shared_file: bool,
}

/// The process's mappings by address.
fn mappings() -> Vec<Mapping> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    text.lines().filter_map(parse_mapping).collect()
}

/// `start-end perms offset device inode path`, numbers in base 16 but the inode.
fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?;
    Some(Mapping {
        range: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
        writable: permissions.contains('w'),
        shared_file: permissions.ends_with('s') && inode != "0",
    })
}

/// Whether every page can be read; faults them in, as registering does.
fn is_readable(pages: &Range<usize>) -> bool {
    let mut bytes = [0_u8; 512];
    let starts: Vec<usize> = pages.clone().step_by(PAGE).collect();
    starts.chunks(bytes.len()).all(|starts| {
        let local = iovec(bytes.as_mut_ptr() as usize, starts.len());
        let remote: Vec<_> = starts.iter().map(|&start| iovec(start, 1)).collect();
        // SAFETY: the local buffer is that long; the remote ranges are checked by the kernel.
        let got = unsafe {
            libc::process_vm_readv(own_pid(), &local, 1, remote.as_ptr(), remote.len() as u64, 0)
        };
        got == starts.len() as isize
    })
}

/// Copies from memory of the process to `to`, which is ours. False where the source cannot be read.
pub(crate) fn read(to: usize, from: usize, len: usize) -> bool {
    // SAFETY: `to` is device memory, checked when the copy was queued; `from` is checked by the kernel.
    in_steps(to, from, len, |to, from| unsafe {
        libc::process_vm_readv(own_pid(), to, 1, from, 1, 0)
    })
}

/// Copies from `from`, which is ours, to memory of the process. False where that cannot be written.
pub(crate) fn write(from: usize, to: usize, len: usize) -> bool {
    // SAFETY: as in `read`, the other way round.
    in_steps(from, to, len, |from, to| unsafe {
        libc::process_vm_writev(own_pid(), from, 1, to, 1, 0)
    })
}

fn in_steps(
    ours: usize,
    theirs: usize,
    len: usize,
    copy: impl Fn(*const libc::iovec, *const libc::iovec) -> isize,
) -> bool {
    let mut done = 0;
    while done < len {
        let step = STEP_BYTES.min(len - done);
        let copied = copy(&iovec(ours + done, step), &iovec(theirs + done, step));
        if copied <= 0 {
            return false;
        }
        done += copied as usize;
    }
    true
}

fn iovec(address: usize, len: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut c_void, iov_len: len }
}

fn own_pid() -> libc::pid_t {
    std::process::id() as libc::pid_t
}
