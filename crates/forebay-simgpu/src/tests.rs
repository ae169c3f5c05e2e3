//! The rules, each kept and broken once. **unsafe**: through the C functions, as programs use them.

use std::ffi::{CStr, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::check::{break_context, violations};
use crate::exports::*;
use crate::state::CONTEXT;
use crate::status::*;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// One test at a time: neighbours are to be neighbours, and violations are counted.
struct Driver {
    _alone: MutexGuard<'static, ()>,
    violations: u64,
}

fn driver() -> Driver {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(init(0), SUCCESS);
    assert_eq!(ctx_set_current(CONTEXT as *mut c_void), SUCCESS);
    Driver { _alone: alone, violations: violations() }
}

impl Driver {
    /// Violations since the test began.
    fn violations(&self) -> u64 {
        violations() - self.violations
    }
}

/// Anonymous pages, or pages of a file.
struct Pages {
    address: usize,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Self {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::map(len, libc::PROT_READ | libc::PROT_WRITE, kind, -1)
    }

    fn of_file(file: &File, len: usize) -> Self {
        Self::map(len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(len: usize, protection: i32, kind: i32, file: i32) -> Self {
        // SAFETY: a fresh mapping.
        let address = unsafe { libc::mmap(ptr::null_mut(), len, protection, kind, file, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        Self { address: address as usize, len }
    }

    fn bytes(&self) -> &'static mut [u8] {
        // SAFETY: mapped until the test ends, which uses it with care: that is what is tested.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.len) }
    }

    fn register(&self, flags: u32) -> Status {
        mem_host_register(self.address as *mut c_void, self.len, flags)
    }

    fn unregister(&self) -> Status {
        mem_host_unregister(self.address as *mut c_void)
    }

    fn unmap(&self) {
        // SAFETY: our own mapping, not used any more but by copies that are to find out.
        assert_eq!(unsafe { libc::munmap(self.address as *mut c_void, self.len) }, 0);
    }
}

fn file(len: usize) -> File {
    let path = std::env::temp_dir().join(format!("simgpu-{}-{len}", std::process::id()));
    std::fs::write(&path, vec![7; len]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn allocate(len: usize) -> u64 {
    let mut address = 0;
    // SAFETY: a valid place; so for all handles below.
    assert_eq!(unsafe { mem_alloc(&mut address, len) }, SUCCESS);
    address
}

fn stream() -> *mut c_void {
    let mut handle = ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { stream_create(&mut handle, 1) }, SUCCESS);
    handle
}

fn event() -> *mut c_void {
    let mut handle = ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { event_create(&mut handle, 3) }, SUCCESS);
    handle
}

fn to_device(device: u64, host: usize, len: usize, stream: *mut c_void) -> Status {
    memcpy_h2d_async(device, host as *const c_void, len, stream)
}

fn read_back(device: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let host = bytes.as_mut_ptr().cast();
    assert_eq!(memcpy_d2h_async(host, device, len, ptr::null_mut()), SUCCESS, "pageable: waits");
    bytes
}

#[test]
fn allocations_are_neighbours_and_no_copy_spans_two() {
    let driver = driver();
    let (first, second) = (allocate(2 * MIB), allocate(2 * MIB));
    assert_eq!(first + 2 * MIB as u64, second);
    assert_eq!(read_back(first, 3), [crate::device::POISON; 3]);
    let host = Pages::new(4 * MIB);
    let stream = stream();
    assert_eq!(to_device(first, host.address, 2 * MIB, stream), SUCCESS);
    assert_eq!(driver.violations(), 0);
    assert_eq!(to_device(first, host.address, 2 * MIB + 1, stream), INVALID_VALUE);
    assert_eq!(to_device(second + 2 * MIB as u64, host.address, 1, stream), INVALID_VALUE);
    let small = (allocate(100), allocate(100));
    assert_eq!(small.0 + 512, small.1);
    assert_eq!(to_device(small.0, host.address, 101, stream), INVALID_VALUE);
    assert_eq!(mem_free(first), SUCCESS);
    assert_eq!(mem_free(first), INVALID_VALUE);
    assert_eq!(to_device(first, host.address, 1, stream), INVALID_VALUE);
    assert_eq!(driver.violations(), 5);
}

#[test]
fn copies_read_their_source_when_they_run() {
    let _driver = driver();
    let (device, stream) = (allocate(64 * MIB), stream());
    let host = Pages::new(64 * MIB);
    assert_eq!(host.register(0), SUCCESS);
    host.bytes().fill(1);
    assert_eq!(to_device(device, host.address, 64 * MIB, stream), SUCCESS);
    assert_eq!(to_device(device, host.address + 60 * MIB, 1, stream), SUCCESS);
    let event = event();
    assert_eq!(event_query(event), SUCCESS, "never recorded");
    assert_eq!(event_record(event, stream), SUCCESS);
    assert_eq!(event_query(event), NOT_READY);
    host.bytes()[60 * MIB] = 2;
    assert_eq!(event_synchronize(event), SUCCESS);
    assert_eq!(event_query(event), SUCCESS);
    assert_eq!(read_back(device, 2), [2, 1]);
    assert_eq!(host.unregister(), SUCCESS);
    host.unmap();
    assert_eq!(mem_free(device), SUCCESS);
}

#[test]
fn a_host_range_is_in_one_registration_or_in_none() {
    let driver = driver();
    let (device, stream) = (allocate(MIB), stream());
    let host = Pages::new(4 * PAGE);
    let register =
        |page: usize| mem_host_register((host.address + page * PAGE) as *mut c_void, PAGE, 0);
    assert_eq!((register(1), register(2)), (SUCCESS, SUCCESS));
    assert_eq!(to_device(device, host.address + PAGE, PAGE, stream), SUCCESS);
    assert_eq!(to_device(device, host.address, PAGE, stream), SUCCESS, "pageable");
    assert_eq!(driver.violations(), 0);
    for (from, len) in [(PAGE, 2 * PAGE), (PAGE - 1, 2), (3 * PAGE - 1, 2), (0, 4 * PAGE)] {
        assert_eq!(to_device(device, host.address + from, len, stream), INVALID_VALUE);
    }
    assert_eq!(register(1), ALREADY_REGISTERED);
    let nothing = mem_host_unregister((host.address + 3 * PAGE) as *mut c_void);
    assert_eq!(nothing, NOT_REGISTERED);
    assert_eq!(driver.violations(), 6);
}

#[test]
fn what_can_be_registered() {
    let driver = driver();
    let pages = Pages::new(4 * PAGE);
    let file = file(3 * PAGE);
    let mapped = Pages::of_file(&file, 3 * PAGE);
    assert_eq!(mapped.register(0), INVALID_VALUE, "a file needs the read-only flag");
    assert_eq!(driver.violations(), 1);
    assert_eq!(mapped.register(8), SUCCESS);
    let device = allocate(PAGE);
    let host = mapped.address as *mut c_void;
    assert_eq!(memcpy_d2h_async(host, device, 1, ptr::null_mut()), INVALID_VALUE);
    assert_eq!(mapped.unregister(), SUCCESS);
    pages.unmap();
    assert_eq!(pages.register(0), INVALID_VALUE, "not mapped");
    assert_eq!(driver.violations(), 3);
    file.set_len(PAGE as u64).unwrap();
    assert_eq!(mapped.register(8), INVALID_VALUE, "behind the end of the file");
    assert_eq!(driver.violations(), 3, "which is nobody's fault");
}

#[test]
fn memory_stays_until_the_caller_knows() {
    let driver = driver();
    let (device, first, second) = (allocate(MIB), stream(), stream());
    let host = Pages::new(PAGE);
    assert_eq!(host.register(0), SUCCESS);
    assert_eq!(to_device(device, host.address, PAGE, first), SUCCESS);
    let (done, later) = (event(), event());
    assert_eq!(event_record(done, first), SUCCESS);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(host.unregister(), INVALID_VALUE, "it is done, but nobody has asked");
    assert_eq!(mem_free(device), INVALID_VALUE);
    assert_eq!(driver.violations(), 2);
    assert_eq!(stream_wait_event(second, done, 0), SUCCESS);
    assert_eq!(event_record(later, second), SUCCESS);
    assert_eq!(event_synchronize(later), SUCCESS);
    assert_eq!(host.unregister(), SUCCESS, "known through the other stream");
    assert_eq!(mem_free(device), SUCCESS);
    assert_eq!(stream_destroy(first), SUCCESS);
    assert_eq!(event_destroy(done), SUCCESS);
    assert_eq!(driver.violations(), 2);
    assert_eq!(stream_destroy(first), INVALID_HANDLE);
    assert_eq!(event_destroy(done), INVALID_HANDLE);
    assert_eq!(event_record(later, first), INVALID_HANDLE);
}

#[test]
fn memory_that_goes_while_copies_are_queued() {
    let driver = driver();
    let (device, stream) = (allocate(64 * MIB), stream());
    let (slow, gone) = (Pages::new(64 * MIB), Pages::new(PAGE));
    let file = file(4 * PAGE);
    let shrinks = Pages::of_file(&file, 4 * PAGE);
    let registered = (slow.register(0), gone.register(0), shrinks.register(8));
    assert_eq!(registered, (SUCCESS, SUCCESS, SUCCESS));
    assert_eq!(to_device(device, slow.address, 64 * MIB, stream), SUCCESS);
    assert_eq!(to_device(device, shrinks.address, 4 * PAGE, stream), SUCCESS);
    file.set_len(PAGE as u64).unwrap();
    assert_eq!(stream_synchronize(stream), SUCCESS, "a file that shrinks is no violation");
    assert_eq!(driver.violations(), 0);
    assert_eq!(to_device(device, slow.address, 64 * MIB, stream), SUCCESS);
    assert_eq!(to_device(device, gone.address, PAGE, stream), SUCCESS);
    gone.unmap();
    assert_eq!(stream_synchronize(stream), ILLEGAL_ADDRESS);
    assert_eq!(event_query(ptr::null_mut()), ILLEGAL_ADDRESS, "it sticks");
    break_context(SUCCESS);
    assert_eq!(driver.violations(), 1);
    // Its address may become another test's.
    assert_eq!(gone.unregister(), SUCCESS);
}

#[test]
fn a_thread_without_a_context_gets_201() {
    let driver = driver();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut address = 0;
            // SAFETY: a valid place.
            assert_eq!(unsafe { mem_alloc(&mut address, 1) }, INVALID_CONTEXT);
            assert_eq!(stream_synchronize(ptr::null_mut()), INVALID_CONTEXT);
        });
    });
    assert_eq!(driver.violations(), 2);
    let event = event();
    for default in [0, 1, 2] {
        assert_eq!(event_record(event, default as *mut c_void), SUCCESS);
        assert_eq!(event_synchronize(event), SUCCESS);
    }
    assert_eq!(driver.violations(), 2);
}

#[test]
fn rows_go_to_their_places_and_stay_in_range() {
    let driver = driver();
    let (device, stream) = (allocate(MIB), stream());
    let host: Vec<u8> = (0..100).collect();
    let rows = |height| Memcpy2d {
        src_x: 0,
        src_y: 0,
        src_type: 1,
        src_host: host.as_ptr().cast(),
        src_device: 0,
        src_array: ptr::null_mut(),
        src_pitch: 10,
        dst_x: 0,
        dst_y: 0,
        dst_type: 2,
        dst_host: ptr::null_mut(),
        dst_device: device,
        dst_array: ptr::null_mut(),
        dst_pitch: 4,
        width: 3,
        height,
    };
    // SAFETY: ten rows lie in `host`, and the call waits for pageable memory.
    assert_eq!(unsafe { memcpy_2d_async(&rows(10), stream) }, SUCCESS);
    let poison = crate::device::POISON;
    assert_eq!(read_back(device, 8), [0, 1, 2, poison, 10, 11, 12, poison]);
    let overlap = Memcpy2d { dst_pitch: 2, ..rows(2) };
    // SAFETY: refused before anything is read; so below.
    assert_eq!(unsafe { memcpy_2d_async(&overlap, stream) }, INVALID_VALUE);
    // SAFETY: as above.
    assert_eq!(unsafe { memcpy_2d_async(&rows(MIB / 4 + 1), stream) }, INVALID_VALUE);
    assert_eq!(driver.violations(), 2);
}

const PTX: &CStr = c".version 8.0
.target sm_75
.visible .entry forebay_crc32(
.param .u64 list,
.param .u64 results,
.param .u32 count
)
.maxntid 256, 1, 1
{ ret; }";

fn kernel() -> *mut c_void {
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: valid places and texts; so below.
    unsafe {
        assert_eq!(module_load_data(&mut module, PTX.as_ptr().cast()), SUCCESS);
        assert_eq!(module_get_function(&mut function, module, c"other".as_ptr()), NOT_FOUND);
        let name = c"forebay_crc32";
        assert_eq!(module_get_function(&mut function, module, name.as_ptr()), SUCCESS);
    }
    function
}

fn launch(
    function: *mut c_void,
    mut list: u64,
    mut results: u64,
    mut count: u32,
    threads: u32,
    stream: *mut c_void,
) -> Status {
    let mut parameters: [*mut c_void; 3] = [
        ptr::from_mut(&mut list).cast(),
        ptr::from_mut(&mut results).cast(),
        ptr::from_mut(&mut count).cast(),
    ];
    let (place, none) = (parameters.as_mut_ptr(), ptr::null_mut());
    // SAFETY: a pointer to each parameter.
    unsafe { launch_kernel(function, 1, 1, 1, threads, 1, 1, 0, stream, place, none) }
}

#[test]
fn a_kernel_runs_in_its_turn_and_its_memory_stays() {
    let driver = driver();
    let (function, stream) = (kernel(), stream());
    let (data, list, results) = (allocate(MIB), allocate(PAGE), allocate(PAGE));
    let host = Pages::new(PAGE);
    assert_eq!(host.register(0), SUCCESS);
    host.bytes()[..9].copy_from_slice(b"123456789");
    let entries = [data, 9, 0, 0];
    for (index, word) in entries.iter().enumerate() {
        host.bytes()[64 + index * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    assert_eq!(to_device(data, host.address, 9, stream), SUCCESS);
    assert_eq!(to_device(list, host.address + 64, 32, stream), SUCCESS);
    assert_eq!(launch(function, list, results, 2, 256, stream), SUCCESS);
    // What it is to read comes after the two copies, so it is not there yet as a rule.
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(mem_free(results), INVALID_VALUE, "nobody has waited");
    assert_eq!(driver.violations(), 1);
    assert_eq!(stream_synchronize(stream), SUCCESS);
    let found = read_back(results, 8);
    assert_eq!(found, [0xCBF4_3926_u32.to_le_bytes(), [0; 4]].concat());
    // Known only when it runs: what the list names.
    assert_eq!(launch(function, list, results, 2, 256, stream), SUCCESS);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(mem_free(data), INVALID_VALUE);
    assert_eq!(driver.violations(), 2);
    assert_eq!(stream_synchronize(stream), SUCCESS);
    for address in [data, list, results] {
        assert_eq!(mem_free(address), SUCCESS);
    }
    assert_eq!(host.unregister(), SUCCESS);
    assert_eq!(driver.violations(), 2);
}

#[test]
fn launches_are_checked() {
    let driver = driver();
    let (function, stream) = (kernel(), stream());
    let memory = allocate(PAGE);
    let end = memory + PAGE as u64;
    assert_eq!(launch(stream, memory, memory, 1, 256, stream), INVALID_HANDLE);
    assert_eq!(launch(function, memory, memory, 1, 128, stream), INVALID_VALUE);
    assert_eq!(launch(function, end - 16, memory, 2, 256, stream), ILLEGAL_ADDRESS);
    assert_eq!(launch(function, memory, end - 4, 2, 256, stream), ILLEGAL_ADDRESS);
    assert_eq!(launch(function, memory + 4, memory, 1, 256, stream), MISALIGNED);
    assert_eq!(driver.violations(), 5);
    // The list is poison.
    assert_eq!(launch(function, memory, memory, 1, 256, stream), SUCCESS);
    assert_eq!(stream_synchronize(stream), ILLEGAL_ADDRESS);
    break_context(SUCCESS);
    assert_eq!(driver.violations(), 6);
}
