//! Streams and events, destroyed when dropped. **unsafe**: copies are queued by address.

use std::ffi::c_void;
use std::sync::Arc;

use forebay_error::Result;

use super::CudaDevice;
use super::driver::{RawEvent, RawFunction, RawStream};

/// A stream of the device that does not wait for the default stream.
pub struct Stream {
    device: Arc<CudaDevice>,
    raw: RawStream,
}

/// A point in a stream that can be waited for; waiting sleeps.
pub struct Event {
    device: Arc<CudaDevice>,
    raw: RawEvent,
}

impl Stream {
    /// Makes a stream. The device's context must be current on this thread.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        Ok(Self { raw: device.driver.create_stream()?, device: device.clone() })
    }

    /// Makes everything queued later wait for `event`.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.device.driver.stream_wait(self.raw, event.raw)
    }

    /// Waits until everything queued has run.
    pub fn synchronize(&self) -> Result<()> {
        self.device.driver.synchronize_stream(self.raw)
    }

    /// Queues a copy of `len` bytes from registered host memory to device memory.
    ///
    /// # Safety
    /// Both ranges are valid, and stay so and unused until the stream has run the copy.
    pub unsafe fn copy_to_device(&self, device: u64, host: usize, len: u64) -> Result<()> {
        // SAFETY: by this method's own contract.
        unsafe { self.device.driver.copy_to_device(device, host, len as usize, self.raw) }
    }

    /// Queues a copy of `len` bytes from device memory to registered host memory.
    ///
    /// # Safety
    /// As [`Self::copy_to_device`].
    pub unsafe fn copy_to_host(&self, host: usize, device: u64, len: u64) -> Result<()> {
        // SAFETY: by this method's own contract.
        unsafe { self.device.driver.copy_to_host(host, device, len as usize, self.raw) }
    }

    /// Queues a kernel of (CTAs, threads a CTA).
    ///
    /// # Safety
    /// As [`Driver::launch`](super::driver::Driver::launch); the function is of this device.
    pub(super) unsafe fn launch(
        &self,
        function: RawFunction,
        shape: (u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: by this method's own contract.
        unsafe { self.device.driver.launch(function, shape, self.raw, parameters) }
    }

    /// The device that it belongs to.
    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Queues a copy of `rows` rows of `width` bytes. `device` and `host` are (address, bytes from row to row).
    ///
    /// # Safety
    /// As [`Self::copy_to_device`], for every row.
    pub unsafe fn copy_rows_to_device(
        &self,
        device: (u64, u64),
        host: (usize, u64),
        width: u64,
        rows: u64,
    ) -> Result<()> {
        let limit = self.device.max_pitch;
        if device.1 <= limit && host.1 <= limit {
            // SAFETY: by this method's own contract.
            return unsafe {
                self.device.driver.copy_rows_to_device(device, host, width, rows, self.raw)
            };
        }
        for row in 0..rows {
            let (to, from) = (device.0 + row * device.1, host.0 + (row * host.1) as usize);
            // SAFETY: one row of those that the contract covers.
            unsafe { self.copy_to_device(to, from, width)? };
        }
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Whoever lets go last may be a thread of the caller's, with another context or none.
        let (device, raw) = (&self.device, self.raw);
        let destroyed = device.with_context(|| device.driver.destroy_stream(raw));
        if let Err(error) = destroyed {
            tracing::warn!(%error, "stream not destroyed");
        }
    }
}

impl Event {
    /// Makes an event. The device's context must be current on this thread.
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self> {
        Ok(Self { raw: device.driver.create_event()?, device: device.clone() })
    }

    /// Puts the event at the end of `stream`.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the stream is borrowed, so it is alive.
        unsafe { self.device.driver.record(self.raw, stream.raw) }
    }

    /// Puts the event at the end of a stream of somebody else's (a framework's), given as its handle.
    ///
    /// # Safety
    /// `stream` is a live `CUstream` of this device's context, or 0 for its default stream.
    pub unsafe fn record_foreign(&self, stream: usize) -> Result<()> {
        // SAFETY: by this method's own contract.
        unsafe { self.device.driver.record(self.raw, RawStream(stream as *mut c_void)) }
    }

    /// Whether the point has been reached.
    pub fn is_done(&self) -> Result<bool> {
        self.device.driver.event_done(self.raw)
    }

    /// Sleeps until the point has been reached.
    pub fn wait(&self) -> Result<()> {
        self.device.driver.wait_event(self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // As for a stream.
        let (device, raw) = (&self.device, self.raw);
        let destroyed = device.with_context(|| device.driver.destroy_event(raw));
        if let Err(error) = destroyed {
            tracing::warn!(%error, "event not destroyed");
        }
    }
}
