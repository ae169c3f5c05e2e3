//! The table of driver functions. **unsafe** lives here: foreign calls, and nothing else.
//!
//! Every symbol is looked up once, by its versioned name from cuda.h of CUDA 12 and 13, and stored as a plain function
//! pointer; a library that lacks one gives `error[no_device]` naming it. Those for kernels are optional: without them
//! the rest works ([`Driver::has_kernels`]). Each foreign call is wrapped by one method that turns its code into an
//! [`Error`].

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use forebay_error::{Code, Error, Result};

/// `CUresult`; 0 is success.
pub(super) type Status = c_int;
type DeviceHandle = c_int;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) *mut c_void);

        // SAFETY: the handle is an opaque number to us, and the driver allows its use from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    };
}

handle!(
    /// `CUcontext`.
    Context
);
handle!(
    /// `CUstream`; null is the legacy default stream.
    RawStream
);
handle!(
    /// `CUevent`.
    RawEvent
);
handle!(
    /// `CUmodule`.
    RawModule
);
handle!(
    /// `CUfunction`.
    RawFunction
);

/// `CUDA_MEMCPY2D_v2` of cuda.h, field by field.
#[repr(C)]
struct Memcpy2d {
    src_x: usize,
    src_y: usize,
    src_type: c_uint,
    src_host: *const c_void,
    src_device: u64,
    src_array: *mut c_void,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_type: c_uint,
    dst_host: *mut c_void,
    dst_device: u64,
    dst_array: *mut c_void,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

const MEMORY_TYPE_HOST: c_uint = 1;
const MEMORY_TYPE_DEVICE: c_uint = 2;
const STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: waiting sleeps instead of spinning.
const EVENT_FLAGS: c_uint = 1 | 2;
const ERROR_NOT_READY: Status = 600;

macro_rules! table {
    (
        required { $($field:ident = $symbol:literal: fn($($argument:ty),*);)+ }
        optional { $($extra:ident = $extra_symbol:literal: fn($($extra_argument:ty),*);)+ }
    ) => {
        /// The driver's functions.
        pub(super) struct Driver {
            _library: libloading::Library,
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)+
            $($extra: Option<unsafe extern "C" fn($($extra_argument),*) -> Status>,)+
        }

        impl Driver {
            fn load(library: libloading::Library) -> Result<Self> {
                $(
                    // SAFETY: the type is the one that cuda.h declares for this versioned symbol, and the pointer
                    // lives as long as the library, which the table owns and a static keeps for ever.
                    let $field = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> Status>(
                            concat!($symbol, "\0").as_bytes(),
                        )
                    }
                    .map_err(|source| {
                        Error::new(Code::NoDevice, concat!("the CUDA driver lacks ", $symbol))
                            .with_source(source)
                            .hint("update the NVIDIA driver; 525 or newer is needed")
                    })?;
                )+
                $(
                    // SAFETY: as above.
                    let $extra = unsafe {
                        library.get::<unsafe extern "C" fn($($extra_argument),*) -> Status>(
                            concat!($extra_symbol, "\0").as_bytes(),
                        )
                    }
                    .ok()
                    .map(|symbol| *symbol);
                )+
                Ok(Self { _library: library, $($field,)+ $($extra,)+ })
            }
        }
    };
}

table! {
    required {
        init = "cuInit": fn(c_uint);
        driver_get_version = "cuDriverGetVersion": fn(*mut c_int);
        get_error_string = "cuGetErrorString": fn(Status, *mut *const c_char);
        device_get_count = "cuDeviceGetCount": fn(*mut c_int);
        device_get = "cuDeviceGet": fn(*mut DeviceHandle, c_int);
        device_get_name = "cuDeviceGetName": fn(*mut c_char, c_int, DeviceHandle);
        device_get_uuid = "cuDeviceGetUuid_v2": fn(*mut [u8; 16], DeviceHandle);
        device_get_pci_bus_id = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, DeviceHandle);
        device_get_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, DeviceHandle);
        primary_ctx_retain = "cuDevicePrimaryCtxRetain": fn(*mut Context, DeviceHandle);
        ctx_set_current = "cuCtxSetCurrent": fn(Context);
        ctx_get_current = "cuCtxGetCurrent": fn(*mut Context);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
        mem_get_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
        mem_free = "cuMemFree_v2": fn(u64);
        mem_get_address_range = "cuMemGetAddressRange_v2": fn(*mut u64, *mut usize, u64);
        mem_host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
        mem_host_unregister = "cuMemHostUnregister": fn(*mut c_void);
        memcpy_h2d_async = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, RawStream);
        memcpy_d2h_async = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, RawStream);
        memcpy_2d_async = "cuMemcpy2DAsync_v2": fn(*const Memcpy2d, RawStream);
        stream_create = "cuStreamCreate": fn(*mut RawStream, c_uint);
        stream_destroy = "cuStreamDestroy_v2": fn(RawStream);
        stream_synchronize = "cuStreamSynchronize": fn(RawStream);
        stream_wait_event = "cuStreamWaitEvent": fn(RawStream, RawEvent, c_uint);
        event_create = "cuEventCreate": fn(*mut RawEvent, c_uint);
        event_destroy = "cuEventDestroy_v2": fn(RawEvent);
        event_record = "cuEventRecord": fn(RawEvent, RawStream);
        event_query = "cuEventQuery": fn(RawEvent);
        event_synchronize = "cuEventSynchronize": fn(RawEvent);
    }
    optional {
        module_load_data = "cuModuleLoadData": fn(*mut RawModule, *const c_void);
        module_get_function = "cuModuleGetFunction": fn(*mut RawFunction, RawModule, *const c_char);
        launch_kernel = "cuLaunchKernel": fn(
            RawFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, RawStream,
            *mut *mut c_void, *mut *mut c_void
        );
    }
}

/// The driver, opened and initialised at the first call; the same error again and again where there is none.
pub(super) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    match DRIVER.get_or_init(open) {
        Ok(driver) => Ok(driver),
        Err(error) => Err(repeated(error)),
    }
}

/// A kept error once more, without its cause.
pub(super) fn repeated(error: &Error) -> Error {
    let again = Error::new(error.code(), error.what());
    error.hints().iter().fold(again, |again, hint| again.hint(hint))
}

fn open() -> Result<Driver> {
    // SAFETY: loading runs the initialisers of the vendor's driver library, as every CUDA program does.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|source| {
        Error::new(Code::NoDevice, "no CUDA driver (libcuda.so.1) on this machine")
            .with_source(source)
            .hint("use the host device, or install the NVIDIA driver")
    })?;
    let driver = Driver::load(library)?;
    // SAFETY: cuInit takes flags, which must be 0.
    let status = unsafe { (driver.init)(0) };
    driver.check(status, "cuInit").map_err(|error| {
        Error::new(Code::NoDevice, "the CUDA driver found no usable GPU")
            .with_source(error)
            .hint("see `nvidia-smi`; in a container, is the GPU passed in?")
    })?;
    Ok(driver)
}

impl Driver {
    /// Turns a code into an error that names the call and carries the driver's own words.
    fn check(&self, status: Status, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text: *const c_char = ptr::null();
        // SAFETY: on success the driver stores a pointer to a constant string of its own; else it stores null.
        let known = unsafe { (self.get_error_string)(status, &mut text) } == 0 && !text.is_null();
        let words = if known {
            // SAFETY: as above; the string is NUL-terminated and lives for ever.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            "unknown error".to_owned()
        };
        let code = if status == 2 { Code::OutOfMemory } else { Code::Device };
        Err(Error::new(code, format!("{call} failed: {words} (CUDA error {status})")))
    }

    pub(super) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.driver_get_version)(&mut version) };
        self.check(status, "cuDriverGetVersion").map(|()| version)
    }

    pub(super) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.device_get_count)(&mut count) };
        self.check(status, "cuDeviceGetCount").map(|()| count.max(0) as u32)
    }

    pub(super) fn device(&self, ordinal: u32) -> Result<DeviceHandle> {
        let mut device = 0;
        // SAFETY: the pointer is valid for the call; a wrong ordinal is an error code.
        let status = unsafe { (self.device_get)(&mut device, ordinal as c_int) };
        self.check(status, "cuDeviceGet").map(|()| device)
    }

    pub(super) fn device_name(&self, device: DeviceHandle) -> Result<String> {
        let mut text = [0 as c_char; 128];
        // SAFETY: the buffer and its length match; the driver terminates the text.
        let status =
            unsafe { (self.device_get_name)(text.as_mut_ptr(), text.len() as c_int, device) };
        self.check(status, "cuDeviceGetName").map(|()| text_of(&text))
    }

    pub(super) fn device_pci_address(&self, device: DeviceHandle) -> Result<String> {
        let mut text = [0 as c_char; 32];
        // SAFETY: the buffer and its length match; the driver terminates the text.
        let status =
            unsafe { (self.device_get_pci_bus_id)(text.as_mut_ptr(), text.len() as c_int, device) };
        self.check(status, "cuDeviceGetPCIBusId").map(|()| text_of(&text).to_ascii_lowercase())
    }

    pub(super) fn device_uuid(&self, device: DeviceHandle) -> Result<String> {
        let mut bytes = [0_u8; 16];
        // SAFETY: CUuuid is 16 bytes.
        let status = unsafe { (self.device_get_uuid)(&mut bytes, device) };
        self.check(status, "cuDeviceGetUuid")?;
        let mut text = String::from("GPU");
        for (index, byte) in bytes.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        Ok(text)
    }

    pub(super) fn device_attribute(&self, device: DeviceHandle, number: i32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the pointer is valid for the call; an unknown attribute is an error code.
        let status = unsafe { (self.device_get_attribute)(&mut value, number, device) };
        self.check(status, "cuDeviceGetAttribute").map(|()| value)
    }

    pub(super) fn retain_primary_context(&self, device: DeviceHandle) -> Result<Context> {
        let mut context = Context(ptr::null_mut());
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.primary_ctx_retain)(&mut context, device) };
        self.check(status, "cuDevicePrimaryCtxRetain").map(|()| context)
    }

    pub(super) fn current_context(&self) -> Result<Context> {
        let mut context = Context(ptr::null_mut());
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.ctx_get_current)(&mut context) };
        self.check(status, "cuCtxGetCurrent").map(|()| context)
    }

    pub(super) fn set_current(&self, context: Context) -> Result<()> {
        // SAFETY: the context is one that we retained for ever, or one that was current (null included).
        let status = unsafe { (self.ctx_set_current)(context) };
        self.check(status, "cuCtxSetCurrent")
    }

    pub(super) fn relax_capture_mode(&self) -> Result<()> {
        let mut mode = STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call, which stores this thread's former mode there.
        let status = unsafe { (self.exchange_capture_mode)(&mut mode) };
        self.check(status, "cuThreadExchangeStreamCaptureMode")
    }

    pub(super) fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for the call.
        let status = unsafe { (self.mem_get_info)(&mut free, &mut total) };
        self.check(status, "cuMemGetInfo").map(|()| (free as u64, total as u64))
    }

    pub(super) fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.mem_alloc)(&mut address, len) };
        self.check(status, "cuMemAlloc").map(|()| address)
    }

    /// # Safety
    /// `address` came from [`Self::allocate`] and nothing uses it any more.
    pub(super) unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.mem_free)(address) };
        self.check(status, "cuMemFree")
    }

    /// Start and length of the allocation that holds a device address.
    pub(super) fn allocation_of(&self, address: u64) -> Result<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: both pointers are valid for the call; an address of no allocation is an error code.
        let status = unsafe { (self.mem_get_address_range)(&mut base, &mut len, address) };
        self.check(status, "cuMemGetAddressRange").map(|()| (base, len))
    }

    /// # Safety
    /// `[address, address + len)` is mapped and stays so until it was unregistered.
    pub(super) unsafe fn register(&self, address: usize, len: usize, flags: u32) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.mem_host_register)(address as *mut c_void, len, flags) };
        self.check(status, "cuMemHostRegister")
    }

    /// # Safety
    /// `address` was registered, and no copy from or to the range is in flight.
    pub(super) unsafe fn unregister(&self, address: usize) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.mem_host_unregister)(address as *mut c_void) };
        self.check(status, "cuMemHostUnregister")
    }

    /// # Safety
    /// Both ranges are valid and stay so until the stream has run the copy; the host range is registered.
    pub(super) unsafe fn copy_to_device(
        &self,
        device: u64,
        host: usize,
        len: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.memcpy_h2d_async)(device, host as *const c_void, len, stream) };
        self.check(status, "cuMemcpyHtoDAsync")
    }

    /// # Safety
    /// As [`Self::copy_to_device`].
    pub(super) unsafe fn copy_to_host(
        &self,
        host: usize,
        device: u64,
        len: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.memcpy_d2h_async)(host as *mut c_void, device, len, stream) };
        self.check(status, "cuMemcpyDtoHAsync")
    }

    /// Copies `rows` rows of `width` bytes, each side with its own distance between rows.
    ///
    /// # Safety
    /// As [`Self::copy_to_device`], for every row.
    pub(super) unsafe fn copy_rows_to_device(
        &self,
        device: (u64, u64),
        host: (usize, u64),
        width: u64,
        rows: u64,
        stream: RawStream,
    ) -> Result<()> {
        let copy = Memcpy2d {
            src_x: 0,
            src_y: 0,
            src_type: MEMORY_TYPE_HOST,
            src_host: host.0 as *const c_void,
            src_device: 0,
            src_array: ptr::null_mut(),
            src_pitch: host.1 as usize,
            dst_x: 0,
            dst_y: 0,
            dst_type: MEMORY_TYPE_DEVICE,
            dst_host: ptr::null_mut(),
            dst_device: device.0,
            dst_array: ptr::null_mut(),
            dst_pitch: device.1 as usize,
            width: width as usize,
            height: rows as usize,
        };
        // SAFETY: by this method's own contract; the driver reads the structure during the call only.
        let status = unsafe { (self.memcpy_2d_async)(&copy, stream) };
        self.check(status, "cuMemcpy2DAsync")
    }

    pub(super) fn create_stream(&self) -> Result<RawStream> {
        let mut stream = RawStream(ptr::null_mut());
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.stream_create)(&mut stream, STREAM_NON_BLOCKING) };
        self.check(status, "cuStreamCreate").map(|()| stream)
    }

    pub(super) fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: called once, by the owner's drop; the driver finishes the work that is queued.
        let status = unsafe { (self.stream_destroy)(stream) };
        self.check(status, "cuStreamDestroy")
    }

    pub(super) fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the stream is alive: its owner borrows it for the call.
        let status = unsafe { (self.stream_synchronize)(stream) };
        self.check(status, "cuStreamSynchronize")
    }

    pub(super) fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: both are alive: their owners are borrowed for the call.
        let status = unsafe { (self.stream_wait_event)(stream, event, 0) };
        self.check(status, "cuStreamWaitEvent")
    }

    pub(super) fn create_event(&self) -> Result<RawEvent> {
        let mut event = RawEvent(ptr::null_mut());
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.event_create)(&mut event, EVENT_FLAGS) };
        self.check(status, "cuEventCreate").map(|()| event)
    }

    pub(super) fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: called once, by the owner's drop; the driver keeps what is pending.
        let status = unsafe { (self.event_destroy)(event) };
        self.check(status, "cuEventDestroy")
    }

    /// # Safety
    /// `stream` is alive, or null for the default stream.
    pub(super) unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: by this method's own contract.
        let status = unsafe { (self.event_record)(event, stream) };
        self.check(status, "cuEventRecord")
    }

    pub(super) fn event_done(&self, event: RawEvent) -> Result<bool> {
        // SAFETY: the event is alive: its owner is borrowed for the call.
        match unsafe { (self.event_query)(event) } {
            ERROR_NOT_READY => Ok(false),
            status => self.check(status, "cuEventQuery").map(|()| true),
        }
    }

    pub(super) fn wait_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: the event is alive: its owner is borrowed for the call.
        let status = unsafe { (self.event_synchronize)(event) };
        self.check(status, "cuEventSynchronize")
    }

    /// Whether the library has what kernels need.
    pub(super) fn has_kernels(&self) -> bool {
        self.module_load_data.is_some()
            && self.module_get_function.is_some()
            && self.launch_kernel.is_some()
    }

    /// Translates PTX for the current context's device; the module stays for as long as the context does.
    pub(super) fn load_module(&self, ptx: &CStr) -> Result<RawModule> {
        let load = self.module_load_data.ok_or_else(|| lacks("cuModuleLoadData"))?;
        let mut module = RawModule(ptr::null_mut());
        // SAFETY: the pointer is valid for the call, and PTX is text that ends with NUL.
        let status = unsafe { load(&mut module, ptx.as_ptr().cast()) };
        self.check(status, "cuModuleLoadData").map(|()| module)
    }

    pub(super) fn function(&self, module: RawModule, name: &CStr) -> Result<RawFunction> {
        let get = self.module_get_function.ok_or_else(|| lacks("cuModuleGetFunction"))?;
        let mut function = RawFunction(ptr::null_mut());
        // SAFETY: modules are never unloaded; the pointer and the name are valid for the call.
        let status = unsafe { get(&mut function, module, name.as_ptr()) };
        self.check(status, "cuModuleGetFunction").map(|()| function)
    }

    /// Queues a kernel of `grid` CTAs of `block` threads, without dynamic shared memory.
    ///
    /// # Safety
    /// `parameters` point to values of the types of the kernel's parameters, in their order and number; the driver
    /// copies them during the call. What the kernel does with them is allowed until the stream has run it.
    pub(super) unsafe fn launch(
        &self,
        function: RawFunction,
        (grid, block): (u32, u32),
        stream: RawStream,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let launch = self.launch_kernel.ok_or_else(|| lacks("cuLaunchKernel"))?;
        let (place, none) = (parameters.as_mut_ptr(), ptr::null_mut());
        // SAFETY: by this method's own contract; the function's module is never unloaded.
        let status = unsafe { launch(function, grid, 1, 1, block, 1, 1, 0, stream, place, none) };
        self.check(status, "cuLaunchKernel")
    }
}

fn lacks(symbol: &str) -> Error {
    Error::new(Code::Device, format!("the CUDA driver lacks {symbol}"))
}

fn text_of(text: &[c_char]) -> String {
    text.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8 as char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_structure_has_the_size_of_cuda_h() {
        // 7 + 7 fields of 8 bytes (the two 4-byte memory types are padded) and 2 sizes, on a 64-bit machine.
        assert_eq!(size_of::<Memcpy2d>(), 128);
    }

    #[test]
    fn absence_of_a_driver_is_an_error_with_a_hint() {
        if let Err(error) = driver() {
            assert_eq!(error.code(), Code::NoDevice);
            assert!(!error.hints().is_empty());
        } else {
            println!("skipped: this machine has a CUDA driver");
        }
    }
}
