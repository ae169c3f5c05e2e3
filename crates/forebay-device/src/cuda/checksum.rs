//! CRC-32 of blocks in device memory, by a kernel. **unsafe**: it launches one on addresses that callers vouch for.
//!
//! # Why
//!
//! Bytes that came by DMA were seen by no CPU, so the GPU checks them itself. The kernel (`kernels/crc32.cu`, whose
//! opening says how it works) reads them once, at the rate of the memory, with few of the GPU's processors.
//!
//! # How
//!
//! Its PTX is part of this library; the driver translates it for the GPU at first use (some tenths of a second, once
//! for each user and driver, as the driver keeps the result on disk). A driver without functions for kernels gives
//! `None`, a driver that refuses the PTX an error; either way the CPU can check what was copied back or read.
//!
//! [`ChecksumKernel::queue`] copies a list of blocks to the device, launches, and copies the checksums back, all in the
//! stream's order: behind the copies that bring the bytes, before whatever is queued later. [`Pending`] tells when they
//! are there.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use forebay_error::{Code, Error, Result};

use super::driver::{RawFunction, repeated};
use super::kernel_scratch::{ENTRIES, Pool, Scratch};
use super::{CudaDevice, Stream};

const PTX: &str = concat!(include_str!("../../kernels/crc32.ptx"), "\0");
const NAME: &CStr = c"forebay_crc32";
/// `THREADS` of the source: the kernel works with no other number.
const THREADS: u32 = 256;

/// Large blocks: this many CTAs are several times as fast as a link, and leave half of a large GPU's processors alone.
/// By arithmetic 25 GB/s each (32 KiB in flight, 1.3 us a round trip).
const CTAS_MAX: u32 = 64;
/// Blocks up to [`SMALL_BYTES`] on the average cost mostly latency: more at a time.
const SMALL_CTAS_MAX: u32 = 1024;
const SMALL_BYTES: u64 = 16 << 10;

/// The longest block, in bytes: one CTA reads it alone.
pub const CHECKSUM_BLOCK_BYTES_MAX: u64 = 1 << 30;

/// The kernel on one device.
///
/// Device memory beside it: 640 KiB for each list of up to 32,768 blocks that is being checked at one time, at most 16
/// of these, kept for the next.
pub struct ChecksumKernel {
    device: Arc<CudaDevice>,
    function: RawFunction,
    pool: Pool,
}

/// What [`ChecksumKernel::get`] keeps for a device.
pub(super) type Cached = Result<Option<Arc<ChecksumKernel>>>;

/// Checksums that are being computed.
///
/// Dropping it early is allowed: the GPU goes on, so the blocks must stay all the same (see [`ChecksumKernel::queue`]).
#[must_use = "the checksums are lost"]
pub struct Pending {
    kernel: Arc<ChecksumKernel>,
    /// One for each launch, in the stream's order, with the number of blocks.
    parts: Vec<(Scratch, usize)>,
}

impl ChecksumKernel {
    /// The kernel for a device, loaded at the first call; `None`, which is logged once, where the driver has no
    /// functions for kernels. The device's context must be current on this thread.
    ///
    /// Errors: `device` when the driver refuses it, the same at every later call.
    pub fn get(device: &Arc<CudaDevice>) -> Cached {
        // A cycle, of a device that is kept for ever.
        match device.checksum.get_or_init(|| Self::load(device)) {
            Ok(kernel) => Ok(kernel.clone()),
            Err(error) => Err(repeated(error)),
        }
    }

    /// What [`Self::get`] gave before; `None` when nobody has asked yet, as loading may take its time.
    pub fn loaded(device: &CudaDevice) -> Option<Result<Option<Arc<Self>>>> {
        match device.checksum.get()? {
            Ok(kernel) => Some(Ok(kernel.clone())),
            Err(error) => Some(Err(repeated(error))),
        }
    }

    fn load(device: &Arc<CudaDevice>) -> Cached {
        if !device.driver.has_kernels() {
            tracing::warn!("the CUDA driver cannot launch kernels: the CPU computes checksums");
            return Ok(None);
        }
        let function = CStr::from_bytes_with_nul(PTX.as_bytes())
            .map_err(|error| Error::new(Code::Device, error.to_string()))
            .and_then(|ptx| device.driver.load_module(ptx))
            .and_then(|module| device.driver.function(module, NAME))
            .map_err(|error| {
                let what = format!("the GPU cannot compute checksums: {}", error.what());
                Error::new(Code::Device, what)
                    .hint("the CPU can check instead")
                    .hint("driver 525 or newer and a GPU of Turing or newer can do it")
            })?;
        Ok(Some(Arc::new(Self { device: device.clone(), function, pool: Pool::default() })))
    }

    /// Queues the checksums of blocks, given as device address and length in bytes, of any alignment and in any order.
    /// The device's context must be current on this thread.
    ///
    /// More than 32,768 blocks take several launches. As a rule the GPU is not waited for. The type says which memory
    /// this takes.
    ///
    /// Errors: `usage` for a block over [`CHECKSUM_BLOCK_BYTES_MAX`], a stream of another device, or too many lists at
    /// a time; `out_of_memory`; `device` when the driver fails. After an error part of the list may have been queued.
    ///
    /// # Safety
    /// Every block is device memory of this device, and stays so until the checksums were waited for or the stream
    /// was synchronized, also after an error or when the result is dropped.
    pub unsafe fn queue(
        self: &Arc<Self>,
        stream: &Stream,
        blocks: &[(u64, u64)],
    ) -> Result<Pending> {
        if !Arc::ptr_eq(stream.device(), &self.device) {
            return Err(Error::new(Code::Usage, "the stream belongs to another GPU"));
        }
        blocks.iter().try_for_each(|&block| check(block))?;
        let mut pending = Pending { kernel: self.clone(), parts: Vec::new() };
        for part in blocks.chunks(ENTRIES) {
            let mut scratch = self.pool.take(&self.device)?;
            // SAFETY: by this method's own contract.
            match unsafe { self.queue_part(&mut scratch, stream, part) } {
                Ok(()) => pending.parts.push((scratch, part.len())),
                Err(error) => {
                    self.give_up(scratch, stream);
                    return Err(error);
                }
            }
        }
        Ok(pending)
    }

    /// # Safety
    /// As [`Self::queue`].
    unsafe fn queue_part(
        &self,
        scratch: &mut Scratch,
        stream: &Stream,
        blocks: &[(u64, u64)],
    ) -> Result<()> {
        scratch.send(blocks, stream)?;
        let (mut entries, mut results) = scratch.places();
        let mut count = blocks.len() as u32;
        let mut parameters = [
            ptr::from_mut(&mut entries).cast::<c_void>(),
            ptr::from_mut(&mut results).cast(),
            ptr::from_mut(&mut count).cast(),
        ];
        // SAFETY: two device pointers and a 32-bit count, as the source declares them. The kernel reads `count` entries
        // and the blocks in them, by this method's contract, and writes `count` results into the scratch.
        unsafe { stream.launch(self.function, (ctas(blocks), THREADS), &mut parameters)? };
        scratch.receive(blocks.len(), stream)
    }

    /// Puts a scratch back that the GPU may be using, or leaves it to the GPU where nothing tells.
    fn give_up(&self, scratch: Scratch, stream: &Stream) {
        match scratch.settle(stream) {
            Ok(()) => self.pool.give(scratch),
            Err(_) => std::mem::forget(scratch),
        }
    }
}

impl Pending {
    /// Whether all checksums are there. The device's context must be current on this thread.
    ///
    /// Errors: `device` when the GPU failed, for instance over a block that was not there.
    pub fn is_done(&self) -> Result<bool> {
        // The stream runs them in order.
        self.parts.last().map_or(Ok(true), |(scratch, _)| scratch.is_done())
    }

    /// Sleeps until all are there, and gives them in the order of the blocks. Context and errors as
    /// [`Self::is_done`].
    pub fn wait(self) -> Result<Vec<u32>> {
        if let Some((scratch, _)) = self.parts.last() {
            scratch.wait()?;
        }
        let mut checksums = Vec::with_capacity(self.parts.iter().map(|(_, count)| count).sum());
        for (scratch, count) in &self.parts {
            scratch.read(*count, &mut checksums);
        }
        Ok(checksums)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        for (scratch, _) in self.parts.drain(..) {
            self.kernel.pool.give(scratch);
        }
    }
}

fn check((address, len): (u64, u64)) -> Result<()> {
    if len > CHECKSUM_BLOCK_BYTES_MAX || address.checked_add(len).is_none() {
        let what = format!("a block of {len} bytes at {address:#x} cannot be checked");
        let hint = format!("blocks may have up to {CHECKSUM_BLOCK_BYTES_MAX} bytes");
        return Err(Error::new(Code::Usage, what).hint(hint));
    }
    Ok(())
}

/// How many CTAs share the blocks, of which there is one at the least.
fn ctas(blocks: &[(u64, u64)]) -> u32 {
    let bytes: u64 = blocks.iter().map(|(_, len)| len).sum();
    let count = blocks.len() as u32;
    let most =
        if bytes / u64::from(count).max(1) > SMALL_BYTES { CTAS_MAX } else { SMALL_CTAS_MAX };
    count.clamp(1, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_checked_and_ctas_are_few() {
        assert!(check((0, 0)).is_ok() && check((1 << 40, CHECKSUM_BLOCK_BYTES_MAX)).is_ok());
        for bad in [(0, CHECKSUM_BLOCK_BYTES_MAX + 1), (u64::MAX, 1)] {
            assert_eq!(check(bad).err().map(|error| error.code()), Some(Code::Usage));
        }
        assert_eq!(ctas(&[(0, 1 << 20); 3]), 3);
        assert_eq!(ctas(&[(0, 1 << 20); 1000]), CTAS_MAX);
        assert_eq!(ctas(&[(0, 64); 20_000]), SMALL_CTAS_MAX);
        assert_eq!(ctas(&[(0, CHECKSUM_BLOCK_BYTES_MAX); ENTRIES]), CTAS_MAX);
    }

    #[test]
    fn the_ptx_is_one_text() {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap().to_str().unwrap();
        let entry = format!(".entry {}(", NAME.to_str().unwrap());
        let threads = format!(".maxntid {THREADS}, 1, 1");
        assert!(text.contains(&entry) && text.contains(&threads));
    }
}
