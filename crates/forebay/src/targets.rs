//! The memory that a load goes to. **unsafe**: one anonymous mapping on the host, and addresses handed to the engine.
//!
//! All targets are cut out of one allocation at multiples of [`ALIGN`], as an allocator of a framework would cut them:
//! on a GPU a [`DeviceBuffer`], on the host a private mapping, which the kernel hands out zeroed page by page at the
//! first touch, so that nothing is zeroed twice.
//!
//! Who reads what arrived ([`Targets::sha256`]) does so after the load: the memory is written by one session at a time,
//! and `provide` and reading are called in turn by one thread.

use std::ffi::c_void;
use std::sync::Arc;

use forebay_device::cuda::{CudaDevice, DeviceBuffer, Stream};
use forebay_device::{Arena, ArenaConfig, Device, advise_huge};
use forebay_engine::Session;
use forebay_error::{Code, Error, Result};
use rustix::mm::{MapFlags, ProtFlags};
use sha2::{Digest, Sha256};

/// Alignment of targets: what CUDA's own allocator and torch's guarantee.
const ALIGN: u64 = 512;

/// Bytes brought back from a GPU at a time.
const PIECE: usize = 4 << 20;

/// Opens the device of this name; without one the first GPU, and where there is none the host.
pub(crate) fn open_device(name: Option<&str>) -> Result<Device> {
    match name {
        Some(name) => Device::open(name),
        None if CudaDevice::count() > 0 => Device::open("cuda:0"),
        None => Ok(Device::Host),
    }
}

/// Memory for the targets of a plan.
pub(crate) struct Targets {
    memory: Memory,
    addresses: Vec<u64>,
    sizes: Vec<u64>,
}

enum Memory {
    Host(Mapping),
    Gpu(Arc<CudaDevice>, DeviceBuffer),
}

impl Targets {
    /// Allocates memory for targets of these sizes.
    pub(crate) fn new(device: &Device, sizes: &[u64]) -> Result<Arc<Self>> {
        let too_much = || Error::new(Code::OutOfMemory, "the tensors exceed the address space");
        let mut total = 0_u64;
        let mut offsets = Vec::with_capacity(sizes.len());
        for &size in sizes {
            offsets.push(total);
            let end = total.checked_add(size).and_then(|end| end.checked_next_multiple_of(ALIGN));
            total = end.ok_or_else(too_much)?;
        }
        let total = total.max(ALIGN);
        let (memory, base) = match device {
            Device::Host => {
                let mapping = Mapping::new(usize::try_from(total).map_err(|_| too_much())?)?;
                let base = mapping.address as u64;
                (Memory::Host(mapping), base)
            }
            Device::Cuda(gpu) => {
                let buffer = gpu.with_context(|| DeviceBuffer::new(gpu, total))?;
                let base = buffer.address();
                (Memory::Gpu(gpu.clone(), buffer), base)
            }
        };
        let addresses = offsets.into_iter().map(|offset| base + offset).collect();
        Ok(Arc::new(Self { memory, addresses, sizes: sizes.to_vec() }))
    }

    /// Bytes of the allocation.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        match &self.memory {
            Memory::Host(mapping) => mapping.len as u64,
            Memory::Gpu(_, buffer) => buffer.len(),
        }
    }

    /// Bytes of target `index`.
    pub(crate) fn bytes_of(&self, index: usize) -> u64 {
        self.sizes.get(index).copied().unwrap_or(0)
    }

    /// Hands all addresses to a session of the plan that the sizes came from.
    pub(crate) fn provide(self: &Arc<Self>, session: &Session) -> Result<()> {
        let owner = Box::new(self.clone());
        // SAFETY: each address is valid for its target's bytes as long as the owner lives, and nothing reads or writes
        // there before the session has ended (the module's rule).
        unsafe { session.provide(&self.addresses, None, Some(owner)) }
    }

    /// SHA-256 of what is in target `index`. Reads memory that was never written as zeros.
    pub(crate) fn sha256(&self, index: usize) -> Result<[u8; 32]> {
        let (Some(&address), Some(&size)) = (self.addresses.get(index), self.sizes.get(index))
        else {
            return Err(Error::new(Code::Internal, "no such target"));
        };
        match &self.memory {
            Memory::Host(_) => {
                // SAFETY: the range lies in the mapping, which lives as long as `self`; no session writes to it now
                // (the module's rule).
                let bytes =
                    unsafe { std::slice::from_raw_parts(address as *const u8, size as usize) };
                Ok(Sha256::digest(bytes).into())
            }
            Memory::Gpu(gpu, _) => sha256_of_device(gpu, address, size),
        }
    }
}

fn sha256_of_device(gpu: &Arc<CudaDevice>, address: u64, size: u64) -> Result<[u8; 32]> {
    gpu.with_context(|| {
        let piece = (size as usize).clamp(1, PIECE);
        let config = ArenaConfig { size_bytes: piece + (1 << 20), slot_bytes: piece };
        let arena = Arena::new(&Device::Cuda(gpu.clone()), &config)?;
        let slots = arena.acquire(1, &|| false)?;
        let stream = Stream::new(gpu)?;
        let mut hasher = Sha256::new();
        let mut done = 0;
        while let Some(slot) = slots.first().filter(|_| done < size) {
            let len = (size - done).min(piece as u64);
            // SAFETY: `len` bytes of the target and of the slot, both alive until the stream was synchronized.
            unsafe { stream.copy_to_host(slot.address(), address + done, len)? };
            stream.synchronize()?;
            hasher.update(slot.bytes(len as usize));
            done += len;
        }
        Ok(hasher.finalize().into())
    })
}

/// Private anonymous memory.
struct Mapping {
    address: usize,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let address = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|errno| {
            Error::io(format!("cannot allocate {len} bytes for the tensors"), errno.into())
                .hint("load a part of the model: `--names` or `--shard`")
        })? as usize;
        // SAFETY: the mapping was just made.
        unsafe { advise_huge(address, len as u64) };
        Ok(Self { address, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; the targets, whose owner this is, are let go by sessions before.
        let unmapped = unsafe { rustix::mm::munmap(self.address as *mut c_void, self.len) };
        if let Err(error) = unmapped {
            tracing::debug!(%error, "targets not unmapped");
        }
    }
}
