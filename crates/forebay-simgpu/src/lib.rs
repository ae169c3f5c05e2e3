//! A CUDA driver library that simulates one GPU, for tests on machines without one. **unsafe** is everywhere below: it
//! is a C interface that handles other people's memory.
//!
//! # Why
//!
//! Real GPUs stay the judge, but they are rare, and the half of the engine that talks to one must not be tested only
//! there. This library exports the functions of the driver that Forebay uses. Put into a folder of `LD_LIBRARY_PATH`
//! under the name `libcuda.so.1`, it is found instead of the vendor's (`harness.rs` beside this crate does that).
//!
//! # What it is strict about
//!
//! The simulator is meaner than a GPU, so that what is wrong shows at once:
//!
//! - **Copies run later**, on a thread for each stream, after a random delay, and read their source only then: a
//!   staging slot that is filled again too early gives wrong bytes. Waiting and events are all that orders them.
//! - **Ranges are checked**: a copy stays inside one allocation on the device, and on the host inside one registration
//!   or outside of all (then it is pageable, and the call waits for it, as the driver's does). Allocations lie side by
//!   side without a gap, as a real driver hands them out, so an engine that joins neighbours is found out.
//! - **Memory stays until the caller knows** that its copies are done: unregistering or freeing a range whose copies
//!   were not waited for (through an event, a stream, or an event that another stream waited for) is an error even if
//!   the copies happen to be done. That needs no luck with the timing.
//! - **Device addresses are no host addresses**: a CPU that touches one gets a fault, and fresh memory is poison.
//! - Without a current context every call but a few gives 201; unknown handles give 400.
//!
//! What a correct program never does is a *violation*: the call gives the real driver's code, the place goes to
//! stderr with a backtrace, and the process aborts (`SIMGPU_STRICT=0`: goes on). What happens to correct programs too,
//! such as no memory, only gives its code.
//!
//! # What it is not
//!
//! No kernels but the one of `forebay-device` that computes checksums (`kernel.rs`), which is not run but computed; no
//! device-to-device copies, no graphs; streams made without `CU_STREAM_NON_BLOCKING` do not wait for the
//! default stream. Times mean nothing. Shared memory that is no file's (memfd) counts as a file's.
//!
//! # Settings
//!
//! Read from the environment once, at `cuInit`; one that cannot be read aborts.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `SIMGPU_SEED` | start of the random delays; printed at `cuInit` | from the clock |
//! | `SIMGPU_DELAY_US` | longest common delay of a copy; one in 64 takes ten times that | 200 |
//! | `SIMGPU_STRICT` | 0: violations do not abort | 1 |
//! | `SIMGPU_READ_ONLY` | 0: the GPU cannot register read-only memory | 1 |
//! | `SIMGPU_REGISTER_FAIL` | the code that every read-only registration gives | none |
//! | `SIMGPU_REGISTER_GBPS` | how fast memory is registered, under the driver's one lock | no limit |
//! | `SIMGPU_UNREGISTER_GBPS` | how fast it is unregistered, likewise | no limit |
//! | `SIMGPU_PIN_LIMIT` | bytes that may be registered for writing | no limit |
//! | `SIMGPU_ALLOC_LIMIT` | bytes of device memory | 16 GiB |
//! | `SIMGPU_COPY_FAIL_AT` | the copy that fails, counted from 1 | none |
//! | `SIMGPU_COPY_FAIL_CODE` | its code | 700 |
//! | `SIMGPU_COPY_FAIL_LATE` | 1: it fails when it runs, and every call after that gives its code | 0 |
//! | `SIMGPU_MODULE_FAIL` | the code that loading a module gives | none |
//! | `SIMGPU_LAUNCH_FAIL` | the code that every launch gives | none |
//!
//! A driver without some of the functions is made by `harness.rs` (`Simulator::without`).

mod check;
mod config;
mod copies;
mod device;
mod exports;
mod host;
mod kernel;
mod state;
mod status;
mod stream;

#[cfg(test)]
mod tests;
