//! The arena: pinned staging memory of fixed size. **unsafe**: it maps memory and hands out ranges of it.
//!
//! A CPU copy on the way to a GPU (page-cache copy, direct, buffered) needs memory that the GPU can read at full rate:
//! pinned memory. Pinning is slow (2.4 GB/s for memory that was never touched), so it is done once, in slots, by the
//! threads that use them: a slot is touched (which the kernel does with 2 MiB pages where it can: 5.4 GB/s a thread
//! against 1.5 with small pages), then registered (20 to 49 GB/s under one lock of the driver), and stays so. Sixteen
//! workers with two slots of 4 MiB each are ready within about 5 ms, where pinning 1 GiB at start would cost 80.
//!
//! The size is a promise: [`ArenaConfig::size_bytes`] is never exceeded. When all slots are out, [`Arena::acquire`]
//! waits; a worker needs one slot to make progress and holds what it has only while it works, so waiting ends.
//!
//! A slot belongs to whoever holds it until the kernel and the GPU are done with it. When a read hangs (a dead NFS
//! server), its worker keeps the slot, and the rest of the arena goes on.
//!
//! The memory is private and anonymous, not inherited by a fork (`MADV_DONTFORK`): a child would share pages with a
//! device that writes to them.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use forebay_error::{Code, Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Device;
use crate::cuda::Registration;

/// Space beside the payload of a slot, so that a direct read can start and end on a block boundary outside of it.
/// Two blocks of up to 64 KiB (the largest page size in use, which bounds the logical block size).
const MARGIN_BYTES: usize = 2 * (64 << 10);

/// How an arena is made.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// The most memory that it may use, in bytes. Default 1 GiB.
    pub size_bytes: usize,
    /// Payload of one slot, in bytes: the largest piece that a worker moves at a time.
    pub slot_bytes: usize,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self { size_bytes: 1 << 30, slot_bytes: 4 << 20 }
    }
}

/// What an arena holds at this moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArenaStats {
    /// The limit.
    pub size_bytes: usize,
    /// Memory in slots that were ever used: what the arena costs the machine.
    pub touched_bytes: usize,
    /// The most that was handed out at one time.
    pub peak_bytes: usize,
}

/// Staging memory of fixed size, cut in equal slots.
pub struct Arena {
    device: Device,
    base: usize,
    mapped: usize,
    /// The size that was asked for; whole slots of it are mapped.
    limit: usize,
    stride: usize,
    payload: usize,
    slots: usize,
    state: Mutex<State>,
    returned: Condvar,
    waiting: AtomicUsize,
    peak: AtomicUsize,
}

struct State {
    /// Slots that are ready (touched, registered) and not in use.
    ready: Vec<ReadySlot>,
    /// Slots that were never used, the lowest last.
    fresh: Vec<usize>,
    out: usize,
}

struct ReadySlot {
    index: usize,
    /// Kept for as long as the arena lives: dropped before the mapping goes.
    _registration: Option<Registration>,
}

/// One slot, returned to its arena when dropped.
pub struct Slot {
    arena: Arc<Arena>,
    ready: Option<ReadySlot>,
    address: usize,
}

impl Arena {
    /// Reserves address space; memory is taken slot by slot, at first use.
    ///
    /// Errors: `usage` when the size holds no slot, `out_of_memory` when the reservation is refused.
    pub fn new(device: &Device, config: &ArenaConfig) -> Result<Arc<Self>> {
        Self::with_margin(device, config, MARGIN_BYTES)
    }

    /// As [`Self::new`], without room for alignment beside the payload: for what is filled from memory. All of
    /// [`ArenaConfig::size_bytes`] is payload then.
    pub fn without_margin(device: &Device, config: &ArenaConfig) -> Result<Arc<Self>> {
        Self::with_margin(device, config, 0)
    }

    fn with_margin(device: &Device, config: &ArenaConfig, margin: usize) -> Result<Arc<Self>> {
        let page = rustix::param::page_size();
        let payload = config.slot_bytes.next_multiple_of(page);
        let stride = payload + margin.next_multiple_of(page);
        let slots = config.size_bytes / stride;
        if config.slot_bytes == 0 || slots == 0 {
            let text =
                format!("an arena of {} bytes holds no slot of {stride} bytes", config.size_bytes);
            return Err(Error::new(Code::Usage, text).hint("make the arena larger"));
        }
        let mapped = slots * stride;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|errno| {
            Error::io(format!("cannot reserve an arena of {mapped} bytes"), errno.into())
        })?;
        for advice in [Advice::LinuxDontFork, Advice::LinuxHugepage] {
            // SAFETY: the mapping is ours and whole; neither advice changes its contents.
            if let Err(error) = unsafe { rustix::mm::madvise(base, mapped, advice) } {
                tracing::debug!(%error, ?advice, "advice on the arena refused");
            }
        }
        if let Device::Cuda(gpu) = device
            && let Some(node) = gpu.numa_node()
        {
            bind_to_node(base, mapped, node);
        }
        let state = State { ready: Vec::new(), fresh: (0..slots).rev().collect(), out: 0 };
        Ok(Arc::new(Self {
            device: device.clone(),
            base: base as usize,
            mapped,
            limit: config.size_bytes,
            stride,
            payload,
            slots,
            state: Mutex::new(state),
            returned: Condvar::new(),
            waiting: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }))
    }

    /// Payload bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.payload
    }

    /// How many slots there are in all.
    pub fn slot_count(&self) -> usize {
        self.slots
    }

    /// What it holds.
    pub fn stats(&self) -> ArenaStats {
        ArenaStats {
            size_bytes: self.limit,
            touched_bytes: (self.slots - self.lock().fresh.len()) * self.stride,
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }

    /// Takes up to `wanted` slots, at least one; waits while all are out. For a GPU's arena the device's context must
    /// be current on this thread.
    ///
    /// Errors: `cancelled` once `give_up` says so; `out_of_memory` or `device` when memory cannot be pinned.
    pub fn acquire(
        self: &Arc<Self>,
        wanted: usize,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Slot>> {
        let mut taken = Vec::with_capacity(wanted);
        let mut fresh = Vec::new();
        {
            let mut state = self.lock();
            let _waiting = Waiting::new(&self.waiting);
            while state.ready.is_empty() && state.fresh.is_empty() {
                if give_up() {
                    return Err(Error::new(
                        Code::Cancelled,
                        "cancelled while waiting for the arena",
                    ));
                }
                // Short, so that a cancelled load ends within its second.
                state = match self.returned.wait_timeout(state, Duration::from_millis(50)) {
                    Ok((guard, _)) => guard,
                    Err(poisoned) => poisoned.into_inner().0,
                };
            }
            while taken.len() + fresh.len() < wanted {
                if let Some(ready) = state.ready.pop() {
                    taken.push(self.hand_out(ready));
                } else if let Some(index) = state.fresh.pop() {
                    fresh.push(index);
                } else {
                    break;
                }
            }
            state.out += taken.len() + fresh.len();
            self.peak.fetch_max(state.out * self.stride, Ordering::Relaxed);
        }
        // Touching and registering happen outside the lock, so that workers prepare their slots side by side.
        let mut refusal = None;
        for index in fresh {
            match self.prepare(index) {
                Ok(ready) => taken.push(self.hand_out(ready)),
                Err(error) => {
                    let mut state = self.lock();
                    state.fresh.push(index);
                    state.out -= 1;
                    refusal = Some(error);
                }
            }
        }
        match refusal {
            // One slot is enough to go on with, only slower.
            Some(error) if taken.is_empty() => Err(error),
            _ => Ok(taken),
        }
    }

    /// Whether somebody waits for a slot: who holds idle ones gives them back then.
    pub fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn prepare(&self, index: usize) -> Result<ReadySlot> {
        let address = self.base + index * self.stride;
        let Device::Cuda(gpu) = &self.device else {
            return Ok(ReadySlot { index, _registration: None });
        };
        let page = rustix::param::page_size();
        for offset in (0..self.stride).step_by(page) {
            // SAFETY: inside our mapping, and this slot was handed to nobody yet.
            unsafe { ptr::write_volatile((address + offset) as *mut u8, 0) };
        }
        // SAFETY: page-aligned, inside the mapping, which outlives the registration: `ReadySlot`s go first in `drop`.
        let registration =
            unsafe { Registration::new(gpu, address, self.stride) }.map_err(|error| {
                let what = format!("cannot pin {} bytes of staging memory", self.stride);
                let pinned = Error::new(error.code(), what);
                match error.code() {
                    Code::OutOfMemory => {
                        pinned.hint("lower the arena's size, or raise the limit on locked memory")
                    }
                    _ => pinned,
                }
                .with_source(error)
            })?;
        Ok(ReadySlot { index, _registration: Some(registration) })
    }

    fn hand_out(self: &Arc<Self>, ready: ReadySlot) -> Slot {
        let address = self.base + ready.index * self.stride;
        Slot { arena: self.clone(), ready: Some(ready), address }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        match self.state.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }
}

/// Counts a waiter for as long as it lives.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Registrations before the mapping. No slot is out: each holds an `Arc` of the arena.
        self.lock().ready.clear();
        // SAFETY: our own mapping, of this length, and nobody can reach it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base as *mut c_void, self.mapped) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "arena not unmapped");
        }
    }
}

impl Slot {
    /// The address of the slot's first byte, page-aligned.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Bytes that may be used from [`Self::address`] on: the payload and the margin for block alignment.
    pub fn len(&self) -> usize {
        self.arena.stride
    }

    /// Whether it has no bytes; it never does.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether somebody waits for a slot of the arena.
    pub fn is_wanted(&self) -> bool {
        self.arena.is_wanted()
    }

    /// The first `len` bytes, to be filled by the CPU.
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.arena.stride);
        // SAFETY: the slot is ours alone while we hold it (`&mut`), lies inside the mapping, and anonymous memory is
        // initialised (zero) memory.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, len) }
    }

    /// The first `len` bytes.
    pub fn bytes(&self, len: usize) -> &[u8] {
        let len = len.min(self.arena.stride);
        // SAFETY: as above, borrowed shared.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, len) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(ready) = self.ready.take() {
            let mut state = self.arena.lock();
            state.ready.push(ready);
            state.out -= 1;
            drop(state);
            self.arena.returned.notify_one();
        }
    }
}

/// Prefers `node` for the pages of a mapping. A preference, not a rule: on a full node slow memory beats none.
fn bind_to_node(base: *mut c_void, len: usize, node: u32) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0_u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word |= 1 << (node % 64);
    // SAFETY: the range is our mapping; the mask is 1024 bits long and outlives the call.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, base, len, MPOL_PREFERRED, mask.as_ptr(), 1024_usize, 0)
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, node, "arena not bound to its NUMA node");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(size_bytes: usize) -> Arc<Arena> {
        Arena::new(&Device::Host, &ArenaConfig { size_bytes, slot_bytes: 1 << 20 }).unwrap()
    }

    #[test]
    fn never_more_slots_than_fit() {
        let arena = arena(4 << 20);
        assert_eq!(arena.slot_count(), 3);
        let slots = arena.acquire(10, &|| false).unwrap();
        assert_eq!(slots.len(), 3);
        let error = arena.acquire(1, &|| true).err().unwrap();
        assert_eq!(error.code(), Code::Cancelled);
        drop(slots);
        assert_eq!(arena.acquire(2, &|| true).unwrap().len(), 2);
        let stats = arena.stats();
        assert!(stats.peak_bytes <= stats.size_bytes && stats.size_bytes <= 4 << 20);
    }

    #[test]
    fn without_a_margin_all_of_it_is_payload() {
        let config = ArenaConfig { size_bytes: 4 << 20, slot_bytes: 1 << 20 };
        let arena = Arena::without_margin(&Device::Host, &config).unwrap();
        let slots = arena.acquire(5, &|| false).unwrap();
        assert_eq!((slots.len(), slots[0].len()), (4, 1 << 20));
        assert_eq!(arena.stats().peak_bytes, 4 << 20);
    }

    #[test]
    fn slots_do_not_overlap_and_keep_their_bytes() {
        let arena = arena(4 << 20);
        let mut slots = arena.acquire(3, &|| false).unwrap();
        for (value, slot) in (1_u8..).zip(&mut slots) {
            let len = slot.len();
            slot.bytes_mut(len).fill(value);
        }
        for (value, slot) in (1_u8..).zip(&slots) {
            assert!(slot.bytes(slot.len()).iter().all(|&byte| byte == value));
        }
    }

    #[test]
    fn a_waiter_gets_the_slot_that_comes_back() {
        let arena = arena(2 << 20);
        let slots = arena.acquire(1, &|| false).unwrap();
        let waiter = {
            let arena = arena.clone();
            std::thread::spawn(move || arena.acquire(1, &|| false).map(|slots| slots.len()))
        };
        std::thread::sleep(Duration::from_millis(20));
        drop(slots);
        assert_eq!(waiter.join().unwrap().unwrap(), 1);
    }

    #[test]
    fn too_small_is_an_error() {
        let config = ArenaConfig { size_bytes: 1 << 20, slot_bytes: 4 << 20 };
        assert_eq!(Arena::new(&Device::Host, &config).err().unwrap().code(), Code::Usage);
    }
}
