//! Checksums by the GPU under the simulated driver (`forebay-simgpu`), for machines without a GPU.
//!
//! The tests of `gpu_crc.rs` run on whatever driver the process finds. Those here start this program again with the
//! simulator in the driver's place, each child with settings of its own; a violation of the driver's rules aborts it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod faults;
#[path = "../gpu_crc.rs"]
mod gpu;
#[path = "../../../forebay-simgpu/harness.rs"]
mod harness;

use std::process::Command;

use harness::Simulator;

/// Runs the tests of this program whose names contain `filter`; there must be `least`, and all pass.
fn run(simulator: &Simulator, filter: &str, least: usize, settings: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([filter, "--nocapture", "--include-ignored", "--test-threads=2"]);
    let output = simulator.apply(&mut command, settings).output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!(output.status.success(), "{filter} {settings:?}: {}\n{text}", output.status);
    assert!(!text.contains("skipped") && !text.contains("VIOLATION"), "{text}");
    let passed = text.rsplit_once(" passed; 0 failed; 0 ignored").unwrap().0;
    let passed: usize = passed.rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!(passed >= least, "{passed} tests of {filter} ran, {least} at the least\n{text}");
    text
}

#[test]
fn the_tests_of_real_gpus_pass_under_the_simulator() {
    run(&Simulator::find(), "gpu::", 7, &[("SIMGPU_DELAY_US", "400")]);
}

#[test]
fn a_driver_may_lack_kernels() {
    for symbol in ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"] {
        run(&Simulator::without(&[symbol]), "faults::there_are_no_kernels", 1, &[]);
    }
}

#[test]
fn a_driver_may_refuse() {
    let simulator = Simulator::find();
    run(&simulator, "faults::the_kernel_is_refused", 1, &[("SIMGPU_MODULE_FAIL", "222")]);
    run(&simulator, "faults::launches_are_refused", 1, &[("SIMGPU_LAUNCH_FAIL", "701")]);
    run(&simulator, "faults::nothing_can_be_pinned", 1, &[("SIMGPU_PIN_LIMIT", "1")]);
    run(&simulator, "faults::little_device_memory", 1, &[("SIMGPU_ALLOC_LIMIT", "1048576")]);
}

#[test]
fn the_gpu_may_fail() {
    // The first copies are: bytes, list, results.
    for at in ["2", "3"] {
        let fails = ("SIMGPU_COPY_FAIL_AT", at);
        run(&Simulator::find(), "faults::a_copy_is_refused", 1, &[fails]);
        let late = ("SIMGPU_COPY_FAIL_LATE", "1");
        run(&Simulator::find(), "faults::the_gpu_breaks", 1, &[fails, late]);
    }
    let loose = ("SIMGPU_STRICT", "0");
    let simulator = Simulator::find();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["faults::a_block_is_not_there", "--nocapture", "--include-ignored"]);
    let output = simulator.apply(&mut command, &[loose]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && text.contains("VIOLATION"), "{text}");
}
