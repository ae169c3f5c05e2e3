//! Device memory and registered host memory, given back when dropped. **unsafe** calls into the driver table.

use std::sync::Arc;

use forebay_error::Result;

use super::CudaDevice;

/// `CU_MEMHOSTREGISTER_READ_ONLY`: the pages are only read by the GPU, so a read-only mapping will do.
const REGISTER_READ_ONLY: u32 = 8;

/// Device memory of our own, for the command and the benchmarks; frameworks bring theirs.
pub struct DeviceBuffer {
    device: Arc<CudaDevice>,
    address: u64,
    len: u64,
}

impl DeviceBuffer {
    /// Allocates `len` bytes. The device's context must be current on this thread.
    pub fn new(device: &Arc<CudaDevice>, len: u64) -> Result<Self> {
        let address = device.driver.allocate(len.max(1) as usize)?;
        Ok(Self { device: device.clone(), address, len })
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let (device, address) = (&self.device, self.address);
        // SAFETY: the address is ours, and who queued copies has waited for them (the session's contract).
        let freed = device.with_context(|| unsafe { device.driver.free(address) });
        if let Err(error) = freed {
            tracing::warn!(%error, "device memory not freed");
        }
    }
}

/// A range of host memory that the GPU may access directly, until dropped.
pub struct Registration {
    device: Arc<CudaDevice>,
    address: usize,
    len: usize,
}

impl Registration {
    /// Registers memory for reading and writing by the GPU. The device's context must be current.
    ///
    /// # Safety
    /// The range is page-aligned, mapped, and stays mapped until the registration is dropped; at that time no copy
    /// from or to it is in flight.
    pub unsafe fn new(device: &Arc<CudaDevice>, address: usize, len: usize) -> Result<Self> {
        // SAFETY: by this function's own contract.
        unsafe { Self::with_flags(device, address, len, 0) }
    }

    /// Registers memory for reading by the GPU alone, which a read-only shared mapping of a file allows.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub unsafe fn read_only(device: &Arc<CudaDevice>, address: usize, len: usize) -> Result<Self> {
        // SAFETY: by this function's own contract.
        unsafe { Self::with_flags(device, address, len, REGISTER_READ_ONLY) }
    }

    unsafe fn with_flags(
        device: &Arc<CudaDevice>,
        address: usize,
        len: usize,
        flags: u32,
    ) -> Result<Self> {
        // SAFETY: by the callers' contract.
        unsafe { device.driver.register(address, len, flags)? };
        Ok(Self { device: device.clone(), address, len })
    }

    /// The registered bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it covers no bytes; it never does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let (device, address) = (&self.device, self.address);
        // SAFETY: registered by `with_flags`, and by its contract no copy is in flight.
        let released = device.with_context(|| unsafe { device.driver.unregister(address) });
        if let Err(error) = released {
            tracing::warn!(%error, "registration not released");
        }
    }
}
