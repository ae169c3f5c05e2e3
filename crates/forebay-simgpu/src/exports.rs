//! The C functions, with the names and types of cuda.h. **unsafe**: they are handed pointers.
//!
//! Each takes its pointers apart, and leaves the work to the other modules. A null pointer for a result gives 1.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::check::violation;
use crate::config::config;
use crate::copies::{MAX_PITCH, Request};
use crate::kernel;
use crate::state::{self, wait_for, with_context, with_driver};
use crate::status::{
    INVALID_DEVICE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, Outcome, SUCCESS, Status, text,
};

const NAME: &[u8] = b"Simulated GPU\0";
const UUID: [u8; 16] = *b"simulated-gpu-00";
/// An address that no machine has.
const PCI_BUS_ID: &[u8] = b"FFFF:FF:1F.0\0";
/// CUDA 13.0.
const VERSION: c_int = 13000;

const ATTRIBUTE_MAX_PITCH: c_int = 11;
const ATTRIBUTE_READ_ONLY_REGISTER: c_int = 113;

const MEMORY_HOST: c_uint = 1;
const MEMORY_DEVICE: c_uint = 2;

/// `CUDA_MEMCPY2D_v2`.
#[repr(C)]
pub(crate) struct Memcpy2d {
    pub(crate) src_x: usize,
    pub(crate) src_y: usize,
    pub(crate) src_type: c_uint,
    pub(crate) src_host: *const c_void,
    pub(crate) src_device: u64,
    pub(crate) src_array: *mut c_void,
    pub(crate) src_pitch: usize,
    pub(crate) dst_x: usize,
    pub(crate) dst_y: usize,
    pub(crate) dst_type: c_uint,
    pub(crate) dst_host: *mut c_void,
    pub(crate) dst_device: u64,
    pub(crate) dst_array: *mut c_void,
    pub(crate) dst_pitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

fn code(outcome: Outcome) -> Status {
    outcome.err().unwrap_or(SUCCESS)
}

/// Stores a result.
///
/// # Safety
/// `place` is null or valid for a `T`, by the contract of the C function.
unsafe fn store<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by this function's own contract.
    unsafe { place.write(value) };
    Ok(())
}

/// Stores as much of a text as fits; it ends with NUL.
///
/// # Safety
/// `place` is null or valid for `len` bytes.
unsafe fn store_text(place: *mut c_char, len: c_int, text: &[u8]) -> Outcome {
    let len = usize::try_from(len).map_err(|_| INVALID_VALUE)?.min(text.len());
    if place.is_null() || len == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `len` bytes fit, by this function's own contract.
    unsafe {
        place.copy_from_nonoverlapping(text.as_ptr().cast(), len);
        place.add(len - 1).write(0);
    }
    Ok(())
}

fn check_device(device: c_int) -> Outcome {
    with_driver(|_| if device == 0 { Ok(()) } else { Err(INVALID_DEVICE) })
}

#[unsafe(export_name = "cuInit")]
pub(crate) extern "C" fn init(flags: c_uint) -> Status {
    if flags != 0 {
        return INVALID_VALUE;
    }
    code(state::initialise())
}

#[unsafe(export_name = "cuDriverGetVersion")]
pub(crate) unsafe extern "C" fn driver_get_version(version: *mut c_int) -> Status {
    // SAFETY: valid or null, by the function's contract in cuda.h; so everywhere below.
    code(unsafe { store(version, VERSION) })
}

#[unsafe(export_name = "cuGetErrorString")]
pub(crate) unsafe extern "C" fn get_error_string(
    status: Status,
    words: *mut *const c_char,
) -> Status {
    let found = text(status);
    let pointer = found.map_or(std::ptr::null(), |text| text.as_ptr());
    // SAFETY: as above.
    let stored = unsafe { store(words, pointer) };
    code(stored.and(found.map(|_| ()).ok_or(INVALID_VALUE)))
}

#[unsafe(export_name = "cuDeviceGetCount")]
pub(crate) unsafe extern "C" fn device_get_count(count: *mut c_int) -> Status {
    // SAFETY: as above.
    code(with_driver(|_| unsafe { store(count, 1) }))
}

#[unsafe(export_name = "cuDeviceGet")]
pub(crate) unsafe extern "C" fn device_get(device: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: as above.
    code(check_device(ordinal).and_then(|()| unsafe { store(device, ordinal) }))
}

#[unsafe(export_name = "cuDeviceGetName")]
pub(crate) unsafe extern "C" fn device_get_name(
    name: *mut c_char,
    len: c_int,
    device: c_int,
) -> Status {
    // SAFETY: the caller says that `name` has `len` bytes.
    code(check_device(device).and_then(|()| unsafe { store_text(name, len, NAME) }))
}

#[unsafe(export_name = "cuDeviceGetUuid_v2")]
pub(crate) unsafe extern "C" fn device_get_uuid(uuid: *mut [u8; 16], device: c_int) -> Status {
    // SAFETY: as above.
    code(check_device(device).and_then(|()| unsafe { store(uuid, UUID) }))
}

#[unsafe(export_name = "cuDeviceGetPCIBusId")]
pub(crate) unsafe extern "C" fn device_get_pci_bus_id(
    id: *mut c_char,
    len: c_int,
    device: c_int,
) -> Status {
    // SAFETY: the caller says that `id` has `len` bytes.
    code(check_device(device).and_then(|()| unsafe { store_text(id, len, PCI_BUS_ID) }))
}

#[unsafe(export_name = "cuDeviceGetAttribute")]
pub(crate) unsafe extern "C" fn device_get_attribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> Status {
    let found = match attribute {
        ATTRIBUTE_MAX_PITCH => MAX_PITCH as c_int,
        ATTRIBUTE_READ_ONLY_REGISTER => c_int::from(config().read_only),
        _ => return INVALID_VALUE,
    };
    // SAFETY: as above.
    code(check_device(device).and_then(|()| unsafe { store(value, found) }))
}

#[unsafe(export_name = "cuDevicePrimaryCtxRetain")]
pub(crate) unsafe extern "C" fn primary_ctx_retain(
    context: *mut *mut c_void,
    device: c_int,
) -> Status {
    let handle = state::CONTEXT as *mut c_void;
    // SAFETY: as above.
    code(check_device(device).and_then(|()| unsafe { store(context, handle) }))
}

#[unsafe(export_name = "cuCtxSetCurrent")]
pub(crate) extern "C" fn ctx_set_current(context: *mut c_void) -> Status {
    code(with_driver(|_| state::set_current(context as usize)))
}

#[unsafe(export_name = "cuCtxGetCurrent")]
pub(crate) unsafe extern "C" fn ctx_get_current(context: *mut *mut c_void) -> Status {
    // SAFETY: as above.
    code(with_driver(|_| unsafe { store(context, state::current() as *mut c_void) }))
}

#[unsafe(export_name = "cuThreadExchangeStreamCaptureMode")]
pub(crate) unsafe extern "C" fn exchange_capture_mode(mode: *mut c_int) -> Status {
    if mode.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, so valid by the function's contract.
    let wanted = unsafe { mode.read() };
    if !(0..=2).contains(&wanted) {
        return code(violation(INVALID_VALUE, &format!("no capture mode {wanted}")));
    }
    // SAFETY: as above.
    code(with_driver(|_| unsafe { store(mode, state::exchange_capture_mode(wanted)) }))
}

#[unsafe(export_name = "cuMemGetInfo_v2")]
pub(crate) unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize) -> Status {
    code(with_context("cuMemGetInfo", |state| {
        let (free_now, total_now) = state.memory.info();
        // SAFETY: as above.
        unsafe { store(free, free_now as usize).and(store(total, total_now as usize)) }
    }))
}

#[unsafe(export_name = "cuMemAlloc_v2")]
pub(crate) unsafe extern "C" fn mem_alloc(address: *mut u64, len: usize) -> Status {
    code(with_context("cuMemAlloc", |state| {
        let allocated = state.memory.allocate(len as u64)?;
        // SAFETY: as above.
        unsafe { store(address, allocated) }
    }))
}

#[unsafe(export_name = "cuMemFree_v2")]
pub(crate) extern "C" fn mem_free(address: u64) -> Status {
    code(with_context("cuMemFree", |state| {
        if address == 0 {
            return Ok(());
        }
        let range = state.memory.allocated_at(address)?;
        state.check_device_unused(&range)?;
        state.memory.free(address);
        Ok(())
    }))
}

#[unsafe(export_name = "cuMemGetAddressRange_v2")]
pub(crate) unsafe extern "C" fn mem_get_address_range(
    base: *mut u64,
    len: *mut usize,
    address: u64,
) -> Status {
    code(with_context("cuMemGetAddressRange", |state| {
        let range = state.memory.holding(address).ok_or(INVALID_VALUE)?;
        // Either pointer may be null here.
        // SAFETY: as above.
        unsafe {
            let _ = store(base, range.start);
            let _ = store(len, (range.end - range.start) as usize);
        }
        Ok(())
    }))
}

#[unsafe(export_name = "cuMemHostRegister_v2")]
pub(crate) extern "C" fn mem_host_register(
    address: *mut c_void,
    len: usize,
    flags: c_uint,
) -> Status {
    code(with_context("cuMemHostRegister", |state| {
        state.registrations.add(address as usize, len, flags)
    }))
}

#[unsafe(export_name = "cuMemHostUnregister")]
pub(crate) extern "C" fn mem_host_unregister(address: *mut c_void) -> Status {
    code(with_context("cuMemHostUnregister", |state| {
        let range = state.registrations.registered_at(address as usize)?;
        state.check_host_unused(&range)?;
        state.registrations.remove(range.start);
        Ok(())
    }))
}

fn copy(call: &str, request: Request, stream: *mut c_void) -> Status {
    let queued = with_context(call, |state| state.copy(request, stream as usize));
    code(queued.and_then(|pageable| pageable.map_or(Ok(()), |mark| wait_for(&mark))))
}

#[unsafe(export_name = "cuMemcpyHtoDAsync_v2")]
pub(crate) extern "C" fn memcpy_h2d_async(
    device: u64,
    host: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> Status {
    copy("cuMemcpyHtoDAsync", Request::row(true, host as usize, device, len), stream)
}

#[unsafe(export_name = "cuMemcpyDtoHAsync_v2")]
pub(crate) extern "C" fn memcpy_d2h_async(
    host: *mut c_void,
    device: u64,
    len: usize,
    stream: *mut c_void,
) -> Status {
    copy("cuMemcpyDtoHAsync", Request::row(false, host as usize, device, len), stream)
}

#[unsafe(export_name = "cuMemcpy2DAsync_v2")]
pub(crate) unsafe extern "C" fn memcpy_2d_async(
    request: *const Memcpy2d,
    stream: *mut c_void,
) -> Status {
    // SAFETY: null or valid for the call, by the function's contract.
    let Some(rows) = (unsafe { request.as_ref() }) else { return INVALID_VALUE };
    let from = rows.src_y.wrapping_mul(rows.src_pitch).wrapping_add(rows.src_x);
    let to = rows.dst_y.wrapping_mul(rows.dst_pitch).wrapping_add(rows.dst_x);
    let request = match (rows.src_type, rows.dst_type) {
        (MEMORY_HOST, MEMORY_DEVICE) => Request {
            to_device: true,
            host: (rows.src_host as usize).wrapping_add(from),
            host_pitch: rows.src_pitch,
            device: rows.dst_device.wrapping_add(to as u64),
            device_pitch: rows.dst_pitch,
            width: rows.width,
            rows: rows.height,
        },
        (MEMORY_DEVICE, MEMORY_HOST) => Request {
            to_device: false,
            host: (rows.dst_host as usize).wrapping_add(to),
            host_pitch: rows.dst_pitch,
            device: rows.src_device.wrapping_add(from as u64),
            device_pitch: rows.src_pitch,
            width: rows.width,
            rows: rows.height,
        },
        // Others the real driver knows; nobody here needs them.
        _ => return NOT_SUPPORTED,
    };
    copy("cuMemcpy2DAsync", request, stream)
}

#[unsafe(export_name = "cuStreamCreate")]
pub(crate) unsafe extern "C" fn stream_create(stream: *mut *mut c_void, flags: c_uint) -> Status {
    code(with_context("cuStreamCreate", |state| {
        if flags > 1 || stream.is_null() {
            return Err(INVALID_VALUE);
        }
        let handle = state.create_stream()?;
        // SAFETY: as above.
        unsafe { store(stream, handle) }
    }))
}

#[unsafe(export_name = "cuStreamDestroy_v2")]
pub(crate) extern "C" fn stream_destroy(stream: *mut c_void) -> Status {
    code(with_context("cuStreamDestroy", |state| state.destroy_stream(stream as usize)))
}

#[unsafe(export_name = "cuStreamSynchronize")]
pub(crate) extern "C" fn stream_synchronize(stream: *mut c_void) -> Status {
    let end = with_context("cuStreamSynchronize", |state| Ok(state.stream(stream as usize)?.end()));
    code(end.and_then(|end| wait_for(&end)))
}

#[unsafe(export_name = "cuStreamWaitEvent")]
pub(crate) extern "C" fn stream_wait_event(
    stream: *mut c_void,
    event: *mut c_void,
    flags: c_uint,
) -> Status {
    code(with_context("cuStreamWaitEvent", |state| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        state.stream_wait(stream as usize, event as usize)
    }))
}

#[unsafe(export_name = "cuEventCreate")]
pub(crate) unsafe extern "C" fn event_create(event: *mut *mut c_void, flags: c_uint) -> Status {
    code(with_context("cuEventCreate", |state| {
        if flags > 7 || event.is_null() {
            return Err(INVALID_VALUE);
        }
        let handle = state.create_event();
        // SAFETY: as above.
        unsafe { store(event, handle) }
    }))
}

#[unsafe(export_name = "cuEventDestroy_v2")]
pub(crate) extern "C" fn event_destroy(event: *mut c_void) -> Status {
    code(with_context("cuEventDestroy", |state| state.destroy_event(event as usize)))
}

#[unsafe(export_name = "cuEventRecord")]
pub(crate) extern "C" fn event_record(event: *mut c_void, stream: *mut c_void) -> Status {
    code(with_context("cuEventRecord", |state| state.record(event as usize, stream as usize)))
}

#[unsafe(export_name = "cuEventQuery")]
pub(crate) extern "C" fn event_query(event: *mut c_void) -> Status {
    code(with_context("cuEventQuery", |state| match state.event(event as usize)? {
        Some(mark) if mark.is_done() => {
            state.learn(&mark);
            Ok(())
        }
        Some(_) => Err(NOT_READY),
        None => Ok(()),
    }))
}

#[unsafe(export_name = "cuEventSynchronize")]
pub(crate) extern "C" fn event_synchronize(event: *mut c_void) -> Status {
    let mark = with_context("cuEventSynchronize", |state| state.event(event as usize));
    code(mark.and_then(|mark| mark.map_or(Ok(()), |mark| wait_for(&mark))))
}

#[unsafe(export_name = "cuModuleLoadData")]
pub(crate) unsafe extern "C" fn module_load_data(
    module: *mut *mut c_void,
    image: *const c_void,
) -> Status {
    if image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: PTX is text that ends with NUL; nothing else is known here.
    let image = unsafe { CStr::from_ptr(image.cast()) };
    code(with_context("cuModuleLoadData", |state| {
        let handle = state.load_module(image)?;
        // SAFETY: as above.
        unsafe { store(module, handle as *mut c_void) }
    }))
}

#[unsafe(export_name = "cuModuleGetFunction")]
pub(crate) unsafe extern "C" fn module_get_function(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: text, by the function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    code(with_context("cuModuleGetFunction", |state| {
        let handle = state.function(module as usize, name)?;
        // SAFETY: as above.
        unsafe { store(function, handle as *mut c_void) }
    }))
}

#[unsafe(export_name = "cuLaunchKernel")]
pub(crate) unsafe extern "C" fn launch_kernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    code(with_context("cuLaunchKernel", |state| {
        state.check_function(function as usize)?;
        if parameters.is_null() || !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a pointer to each of the kernel's parameters, of their types.
        let (list, results, count) = unsafe {
            (
                (*parameters).cast::<u64>().read(),
                (*parameters.add(1)).cast::<u64>().read(),
                (*parameters.add(2)).cast::<u32>().read(),
            )
        };
        let request = kernel::Request {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            list,
            results,
            count,
        };
        state.launch(request, stream as usize)
    }))
}
