//! The driver's codes, by their numbers in cuda.h.

use std::ffi::{CStr, c_int};

/// `CUresult`.
pub(crate) type Status = c_int;

/// A call's outcome: its code, if that is not 0.
pub(crate) type Outcome<T = ()> = Result<T, Status>;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const NOT_INITIALIZED: Status = 3;
pub(crate) const INVALID_DEVICE: Status = 101;
pub(crate) const INVALID_CONTEXT: Status = 201;
pub(crate) const INVALID_PTX: Status = 218;
pub(crate) const UNSUPPORTED_PTX: Status = 222;
pub(crate) const INVALID_HANDLE: Status = 400;
pub(crate) const NOT_FOUND: Status = 500;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const ILLEGAL_ADDRESS: Status = 700;
pub(crate) const ALREADY_REGISTERED: Status = 712;
pub(crate) const NOT_REGISTERED: Status = 713;
pub(crate) const MISALIGNED: Status = 716;
pub(crate) const NOT_SUPPORTED: Status = 801;
pub(crate) const UNKNOWN: Status = 999;

/// What `cuGetErrorString` says.
pub(crate) fn text(status: Status) -> Option<&'static CStr> {
    Some(match status {
        SUCCESS => c"no error",
        INVALID_VALUE => c"invalid argument",
        OUT_OF_MEMORY => c"out of memory",
        NOT_INITIALIZED => c"initialization error",
        INVALID_DEVICE => c"invalid device ordinal",
        INVALID_CONTEXT => c"invalid device context",
        INVALID_PTX => c"a PTX JIT compilation failed",
        UNSUPPORTED_PTX => c"the provided PTX was compiled with an unsupported toolchain.",
        INVALID_HANDLE => c"invalid resource handle",
        NOT_FOUND => c"named symbol not found",
        NOT_READY => c"device not ready",
        ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        ALREADY_REGISTERED => c"part or all of the requested memory range is already mapped",
        NOT_REGISTERED => c"pointer does not correspond to a registered memory region",
        MISALIGNED => c"misaligned address",
        NOT_SUPPORTED => c"operation not supported",
        UNKNOWN => c"unknown error",
        _ => return None,
    })
}
