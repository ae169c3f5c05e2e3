//! Checking and queueing copies.

use std::ops::Range;

use crate::check::violation;
use crate::config::config;
use crate::host::Host;
use crate::state::{Pending, State};
use crate::status::{INVALID_VALUE, Outcome};
use crate::stream::{Copy, Mark, Work};

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`, as GPUs have it.
pub(crate) const MAX_PITCH: usize = i32::MAX as usize;

/// A copy as it was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) to_device: bool,
    pub(crate) host: usize,
    pub(crate) host_pitch: usize,
    pub(crate) device: u64,
    pub(crate) device_pitch: usize,
    pub(crate) width: usize,
    pub(crate) rows: usize,
}

impl Request {
    /// One row.
    pub(crate) fn row(to_device: bool, host: usize, device: u64, len: usize) -> Self {
        Self { to_device, host, host_pitch: len, device, device_pitch: len, width: len, rows: 1 }
    }

    /// Bytes from the first to the last of rows that lie `pitch` apart.
    fn span(&self, pitch: usize) -> Outcome<usize> {
        let before = (self.rows - 1).checked_mul(pitch);
        before.and_then(|before| before.checked_add(self.width)).ok_or(INVALID_VALUE)
    }

    fn ranges(&self) -> Outcome<(Range<usize>, Range<u64>)> {
        let bad_pitch = |pitch: usize| pitch < self.width || pitch > MAX_PITCH;
        if self.rows > 1 && (bad_pitch(self.host_pitch) || bad_pitch(self.device_pitch)) {
            return violation(
                INVALID_VALUE,
                &format!("rows overlap or lie too far apart: {self:?}"),
            );
        }
        let host_end = self.host.checked_add(self.span(self.host_pitch)?);
        let device_end = self.device.checked_add(self.span(self.device_pitch)? as u64);
        match (host_end, device_end) {
            (Some(host), Some(device)) => Ok((self.host..host, self.device..device)),
            _ => violation(INVALID_VALUE, &format!("copy past the end of memory: {self:?}")),
        }
    }
}

impl State {
    /// Queues a copy. What comes back is to be waited for before the call returns: a copy of pageable memory is done
    /// then.
    pub(crate) fn copy(&mut self, request: Request, stream: usize) -> Outcome<Option<Mark>> {
        let stream = self.stream(stream)?;
        if request.width == 0 || request.rows == 0 {
            return Ok(None);
        }
        let (host, device) = request.ranges()?;
        self.check_device_range(&device)?;
        let kind = self.registrations.classify(&host)?;
        if kind == Host::PinnedReadOnly && !request.to_device {
            let what = format!("copy into memory registered for reading alone: {host:#x?}");
            return violation(INVALID_VALUE, &what);
        }
        self.copies += 1;
        if config().copy_fail_at == Some(self.copies) {
            if !config().copy_fail_late {
                return Err(config().copy_fail_code);
            }
            stream.queue(Work::Fail(config().copy_fail_code));
            return Ok(None);
        }
        let copy = Copy {
            to_device: request.to_device,
            host: request.host,
            host_pitch: request.host_pitch,
            device: self.memory.bytes_at(request.device) as usize,
            device_pitch: request.device_pitch,
            width: request.width,
            rows: request.rows,
        };
        let mark = stream.queue(Work::Copy(copy));
        self.hold(&mark, Pending { host, device });
        Ok((kind == Host::Pageable).then_some(mark))
    }

    fn check_device_range(&self, range: &Range<u64>) -> Outcome {
        match self.memory.holding(range.start) {
            Some(allocation) if range.end <= allocation.end => Ok(()),
            Some(allocation) => {
                let what = format!("copy of device memory {range:#x?} leaves {allocation:#x?}");
                violation(INVALID_VALUE, &what)
            }
            None => {
                let what = format!("copy of device memory {range:#x?}, which is not allocated");
                violation(INVALID_VALUE, &what)
            }
        }
    }
}
