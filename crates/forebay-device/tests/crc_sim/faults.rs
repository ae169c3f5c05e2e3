//! Checksums on a driver that refuses. **unsafe**: blocks are given by address.
//!
//! Ignored, because each needs the simulator with settings of its own: `main` runs them with those.

use forebay_device::cuda::{ChecksumKernel, Pending, Stream};
use forebay_error::{Code, Error, Result};

use crate::gpu::{Setup, gpu, setup};

/// Queues one list of two blocks and waits for it.
fn checksums(setup: &Setup) -> Result<Vec<u32>> {
    // SAFETY: parts of the buffer of the setup, which stays until the stream was synchronized.
    unsafe { setup.kernel.queue(&setup.stream, &setup.two()) }?.wait()
}

fn assert_device_error(error: &Error, number: u32) {
    assert_eq!(error.code(), Code::Device, "{error}");
    assert!(error.to_string().contains(&format!("CUDA error {number}")), "{error}");
}

#[test]
#[ignore = "needs a driver that lacks functions"]
fn there_are_no_kernels() {
    let device = gpu().unwrap();
    for _ in 0..2 {
        assert!(ChecksumKernel::get(&device).unwrap().is_none());
    }
    // The rest works.
    Stream::new(&device).unwrap().synchronize().unwrap();
}

#[test]
#[ignore = "needs SIMGPU_MODULE_FAIL=222"]
fn the_kernel_is_refused() {
    let device = gpu().unwrap();
    for _ in 0..2 {
        let error = ChecksumKernel::get(&device).err().unwrap();
        assert_device_error(&error, 222);
        assert!(error.hints().iter().any(|hint| hint.contains("CPU")), "{:?}", error.hints());
    }
}

#[test]
#[ignore = "needs SIMGPU_LAUNCH_FAIL=701"]
fn launches_are_refused() {
    let setup = setup(1000).unwrap();
    // More often than there are scratches.
    for _ in 0..40 {
        assert_device_error(&checksums(&setup).unwrap_err(), 701);
    }
    setup.stream.synchronize().unwrap();
}

#[test]
#[ignore = "needs SIMGPU_PIN_LIMIT=1"]
fn nothing_can_be_pinned() {
    let setup = setup(1000).unwrap();
    for _ in 0..40 {
        assert_eq!(checksums(&setup).unwrap_err().code(), Code::OutOfMemory);
    }
}

#[test]
#[ignore = "needs SIMGPU_ALLOC_LIMIT=1048576"]
fn little_device_memory() {
    // One scratch of 640 KiB fits.
    let setup = setup(1000).unwrap();
    // SAFETY: as in `checksums`.
    let queue = || unsafe { setup.kernel.queue(&setup.stream, &setup.two()) };
    let first = queue().unwrap();
    assert_eq!(queue().err().unwrap().code(), Code::OutOfMemory);
    setup.compare_two(&first.wait().unwrap());
    for _ in 0..20 {
        setup.compare_two(&queue().unwrap().wait().unwrap());
    }
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT=2 or 3"]
fn a_copy_is_refused() {
    let setup = setup(1000).unwrap();
    assert_device_error(&checksums(&setup).unwrap_err(), 700);
    // Only this one.
    for _ in 0..20 {
        setup.compare_two(&checksums(&setup).unwrap());
    }
}

#[test]
#[ignore = "needs SIMGPU_COPY_FAIL_AT=2 or 3, and SIMGPU_COPY_FAIL_LATE=1"]
fn the_gpu_breaks() {
    let setup = setup(1000).unwrap();
    for _ in 0..20 {
        assert_device_error(&checksums(&setup).unwrap_err(), 700);
    }
    // What is left cannot be given back to a broken context; the process is at its end.
    std::mem::forget(setup);
}

#[test]
#[ignore = "needs SIMGPU_STRICT=0"]
fn a_block_is_not_there() {
    let setup = setup(1000).unwrap();
    let (start, len) = setup.two()[0];
    // SAFETY: none: the block ends outside of the buffer, which the simulator is to find.
    let pending = unsafe { setup.kernel.queue(&setup.stream, &[(start, len + 1000)]) };
    // Whichever call is the first after the kernel ran.
    assert_device_error(&pending.and_then(Pending::wait).unwrap_err(), 700);
    std::mem::forget(setup);
}
