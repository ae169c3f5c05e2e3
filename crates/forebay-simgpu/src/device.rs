//! The device's memory. **unsafe**: it maps address space and writes to it.
//!
//! Two reservations of the same size: one that nobody can touch, whose addresses are the device's, and one beside it
//! that holds the bytes. So a CPU that follows a device address gets a fault, as it would with a GPU.
//!
//! Allocations come one after the other, as in the real driver: from 1 MiB on in whole pages of 2 MiB, smaller ones in
//! steps of 512 bytes. Freed addresses are used again only when the span is used up.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use crate::check::violation;
use crate::status::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};

/// Address space: many times what tests allocate, so that an address of freed memory stays nobody's for long.
const SPAN_BYTES: usize = 256 << 30;

/// From here on an allocation gets pages of its own.
const LARGE_BYTES: u64 = 1 << 20;
const LARGE_STEP: u64 = 2 << 20;
const SMALL_STEP: u64 = 512;
const HOST_PAGE: u64 = 4096;

/// What memory holds that nobody has written to.
pub(crate) const POISON: u8 = 0xdb;

/// Allocations of the device.
pub(crate) struct DeviceMemory {
    base: u64,
    /// From a device address to where its byte is.
    shift: u64,
    limit: u64,
    used: u64,
    /// By address.
    allocations: BTreeMap<u64, Allocation>,
    /// Where the last allocation ended.
    cursor: u64,
}

struct Allocation {
    /// As asked for.
    len: u64,
    /// As taken.
    room: u64,
}

impl DeviceMemory {
    pub(crate) fn new(limit: u64) -> Outcome<Self> {
        let addresses = reserve(libc::PROT_NONE)?.next_multiple_of(LARGE_STEP);
        let bytes = reserve(libc::PROT_READ | libc::PROT_WRITE)?.next_multiple_of(LARGE_STEP);
        Ok(Self {
            base: addresses,
            shift: bytes.wrapping_sub(addresses),
            limit,
            used: 0,
            allocations: BTreeMap::new(),
            cursor: addresses,
        })
    }

    /// Free and total bytes.
    pub(crate) fn info(&self) -> (u64, u64) {
        (self.limit - self.used, self.limit)
    }

    pub(crate) fn allocate(&mut self, len: u64) -> Outcome<u64> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let step = if len < LARGE_BYTES { SMALL_STEP } else { LARGE_STEP };
        let room = len.checked_next_multiple_of(step).ok_or(OUT_OF_MEMORY)?;
        if room > self.limit - self.used {
            return Err(OUT_OF_MEMORY);
        }
        let address = self
            .gap(self.cursor, step, room)
            .or_else(|| self.gap(self.base, step, room))
            .ok_or(OUT_OF_MEMORY)?;
        self.allocations.insert(address, Allocation { len, room });
        self.used += room;
        self.cursor = address + room;
        let bytes = self.bytes_at(address) as *mut u8;
        // SAFETY: the room lies inside our own reservation, in no other allocation.
        unsafe { ptr::write_bytes(bytes, POISON, room as usize) };
        Ok(address)
    }

    /// The first gap of `room` bytes from `start` on.
    fn gap(&self, start: u64, step: u64, room: u64) -> Option<u64> {
        let mut at = start.next_multiple_of(step);
        for (&taken, allocation) in self.allocations.range(start..) {
            if at + room <= taken {
                break;
            }
            at = (taken + allocation.room).next_multiple_of(step);
        }
        (at + room <= self.base + SPAN_BYTES as u64 - LARGE_STEP).then_some(at)
    }

    /// The range that freeing this address would give back.
    pub(crate) fn allocated_at(&self, address: u64) -> Outcome<Range<u64>> {
        match self.allocations.get(&address) {
            Some(allocation) => Ok(address..address + allocation.len),
            None => violation(INVALID_VALUE, &format!("free of {address:#x}, not allocated")),
        }
    }

    pub(crate) fn free(&mut self, address: u64) {
        let Some(Allocation { room, .. }) = self.allocations.remove(&address) else { return };
        self.used -= room;
        // Pages that belong to it alone go back to the system.
        let start = self.bytes_at(address).next_multiple_of(HOST_PAGE);
        let end = self.bytes_at(address + room) / HOST_PAGE * HOST_PAGE;
        if start < end {
            let pages = start as *mut c_void;
            // SAFETY: whole pages inside the room of an allocation that is no more.
            unsafe { libc::madvise(pages, (end - start) as usize, libc::MADV_DONTNEED) };
        }
    }

    /// The allocation that holds an address.
    pub(crate) fn holding(&self, address: u64) -> Option<Range<u64>> {
        let (&start, allocation) = self.allocations.range(..=address).next_back()?;
        let range = start..start + allocation.len;
        range.contains(&address).then_some(range)
    }

    /// Where the byte of a device address is.
    pub(crate) fn bytes_at(&self, address: u64) -> u64 {
        address.wrapping_add(self.shift)
    }
}

/// Address space, of which only what is touched costs memory.
fn reserve(protection: i32) -> Outcome<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { libc::mmap(ptr::null_mut(), SPAN_BYTES, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: our own mapping; advice changes no contents.
    unsafe { libc::madvise(base, SPAN_BYTES, libc::MADV_HUGEPAGE) };
    Ok(base as u64)
}
