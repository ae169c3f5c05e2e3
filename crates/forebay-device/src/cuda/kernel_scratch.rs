//! The memory through which a list goes to a kernel and its results come back. **unsafe**: it maps memory, registers
//! it, and reads and writes it by address.
//!
//! A kernel runs when its caller has long gone on, so what it is given must stay. Each list therefore gets a scratch of
//! its own, of fixed size, half pinned memory and half device memory. When the list is done with, or its owner has lost
//! interest, the scratch goes back to the pool with the event that tells when the GPU is done; only then is it used
//! again. Nothing is freed: `cuMemFree` may wait for the whole device, and a pool of fixed size needs no care.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_error::{Code, Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{CudaDevice, DeviceBuffer, Event, Registration, Stream};

/// Entries of one scratch: what one launch may take.
pub(super) const ENTRIES: usize = 32_768;

/// An entry of the list: device address and length in bytes, as the kernel's `Block`.
pub(super) type Entry = (u64, u64);

const ENTRY_BYTES: usize = 16;
const RESULT_BYTES: usize = 4;

/// Bytes of a scratch, on each side: 640 KiB.
const SCRATCH_BYTES: usize = ENTRIES * (ENTRY_BYTES + RESULT_BYTES);

/// The most scratches of one device, so 10 MiB of each memory. One or two are common; a list of 20,000 needs one.
pub(super) const SCRATCHES_MAX: usize = 16;

/// Pinned and device memory of the same layout: entries, then results.
pub(super) struct Scratch {
    pinned: Pinned,
    device: DeviceBuffer,
    /// At the end of what was queued last.
    done: Event,
}

impl Scratch {
    fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        Ok(Self {
            pinned: Pinned::new(device)?,
            device: DeviceBuffer::new(device, SCRATCH_BYTES as u64)?,
            done: Event::new(device)?,
        })
    }

    /// Device addresses of entries and results.
    pub(super) fn places(&self) -> (u64, u64) {
        let start = self.device.address();
        (start, start + (ENTRIES * ENTRY_BYTES) as u64)
    }

    /// Writes the entries and queues their copy; there are no more than [`ENTRIES`].
    pub(super) fn send(&mut self, entries: &[Entry], stream: &Stream) -> Result<()> {
        debug_assert!(entries.len() <= ENTRIES);
        let mut place = self.pinned.address as *mut u64;
        for &(address, len) in entries.iter().take(ENTRIES) {
            // SAFETY: the mapping holds `ENTRIES` entries of two words; the GPU is done with it (the pool's rule).
            unsafe {
                place.write(address);
                place.add(1).write(len);
                place = place.add(2);
            }
        }
        let bytes = entries.len() * ENTRY_BYTES;
        // SAFETY: both sides are that long and belong to the scratch, which stays until `done`.
        unsafe { stream.copy_to_device(self.device.address(), self.pinned.address, bytes as u64) }
    }

    /// Queues the copy of the results and the event after it.
    pub(super) fn receive(&self, entries: usize, stream: &Stream) -> Result<()> {
        let bytes = entries * RESULT_BYTES;
        // SAFETY: as in `send`.
        unsafe { stream.copy_to_host(self.results(), self.places().1, bytes as u64)? };
        self.done.record(stream)
    }

    /// After an error halfway: the scratch may go back to the pool only if something tells when the GPU is done.
    pub(super) fn settle(&self, stream: &Stream) -> Result<()> {
        self.done.record(stream).or_else(|_| stream.synchronize())
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        self.done.is_done()
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.done.wait()
    }

    /// Appends the results of as many entries; the event has been waited for.
    pub(super) fn read(&self, entries: usize, results: &mut Vec<u32>) {
        let place = self.results() as *const u32;
        // SAFETY: the results are `ENTRIES` aligned words, initialised (zeros at first), and no copy writes to them.
        let words = unsafe { std::slice::from_raw_parts(place, entries.min(ENTRIES)) };
        results.extend_from_slice(words);
    }

    fn results(&self) -> usize {
        self.pinned.address + ENTRIES * ENTRY_BYTES
    }
}

/// The scratches of a device.
#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Nobody's, but the GPU may still be at work on some.
    back: Vec<Scratch>,
    made: usize,
}

impl Pool {
    /// A scratch that the GPU is done with. Waits for one that was given back too early rather than grow.
    ///
    /// Errors: `usage` when [`SCRATCHES_MAX`] are in use.
    pub(super) fn take(&self, device: &Arc<CudaDevice>) -> Result<Scratch> {
        let mut state = self.lock();
        for index in 0..state.back.len() {
            if state.back[index].is_done()? {
                return Ok(state.back.swap_remove(index));
            }
        }
        if state.made == SCRATCHES_MAX {
            let Some(scratch) = state.back.pop() else {
                let what = format!("{SCRATCHES_MAX} lists of blocks are being checked already");
                return Err(Error::new(Code::Usage, what).hint("wait for some of them first"));
            };
            drop(state);
            return match scratch.wait() {
                Ok(()) => Ok(scratch),
                Err(error) => {
                    self.give(scratch);
                    Err(error)
                }
            };
        }
        state.made += 1;
        drop(state);
        Scratch::new(device).inspect_err(|_| self.lock().made -= 1)
    }

    /// Takes one back; its event is at the end of what uses it.
    pub(super) fn give(&self, scratch: Scratch) {
        self.lock().back.push(scratch);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Registered memory of [`SCRATCH_BYTES`].
struct Pinned {
    address: usize,
    len: usize,
    /// Taken before the mapping goes.
    registration: Option<Registration>,
}

impl Pinned {
    fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        let len = SCRATCH_BYTES.next_multiple_of(rustix::param::page_size());
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)
        }
        .map_err(|errno| Error::io(format!("cannot map {len} bytes"), errno.into()))?;
        let mut pinned = Self { address: base as usize, len, registration: None };
        // SAFETY: the mapping is ours and whole; a child must not share pages that the GPU writes to.
        if let Err(error) = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontFork) } {
            tracing::debug!(%error, "advice on pinned memory refused");
        }
        // SAFETY: page-aligned, mapped, and unmapped only after the registration went. The pool's rule is that
        // nothing is dropped while the GPU uses it.
        let registration = unsafe { Registration::new(device, pinned.address, len)? };
        pinned.registration = Some(registration);
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.registration = None;
        // SAFETY: our own mapping, which nothing refers to any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.address as *mut c_void, self.len) } {
            tracing::warn!(%error, "pinned memory not unmapped");
        }
    }
}
