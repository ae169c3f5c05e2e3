//! The GPU half of the engine under the simulated driver (`forebay-simgpu`), for machines without a GPU. **unsafe**:
//! targets are provided by address.
//!
//! The tests of `gpu.rs` and of `stress` run on whatever driver the process finds. Those here start this program again
//! with the simulator in the driver's place, so that each child has a driver of its own with settings of its own, and
//! look at how it ends: a violation of the driver's rules aborts it.
//!
//! | module | what is tested |
//! | --- | --- |
//! | `gpu` | the tests of real GPUs |
//! | `stress` | random plans and feeds, cancelled loads, loads side by side, fences |
//! | `checks` | checksums by the GPU, and what becomes of them when the driver refuses |
//! | `release` | registrations after their load |
//! | `pace` | slow and fast registering |
//! | `staging` | slots of saves that fail; as `faults` |
//! | `faults` | what loads do when the driver refuses; each needs the settings that its parent gives |

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod checks;
mod faults;
#[path = "../gpu.rs"]
mod gpu;
#[path = "../../../forebay-simgpu/harness.rs"]
mod harness;
mod pace;
mod release;
mod staging;
mod stress;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use harness::Simulator;

/// How long a child may take before it counts as hanging.
const CHILD_MAX: Duration = Duration::from_secs(600);

/// Runs the tests of this program whose names contain `filter` under the simulator; there must be `least`, and all
/// pass.
fn run(filter: &str, least: usize, settings: &[(&str, &str)]) -> String {
    run_by(&Simulator::find(), filter, least, settings)
}

fn run_by(simulator: &Simulator, filter: &str, least: usize, settings: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([filter, "--nocapture", "--include-ignored", "--test-threads=2"]);
    let output = finish(simulator.apply(&mut command, settings));
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!(output.status.success(), "{filter} {settings:?}: {}\n{text}", output.status);
    assert!(!text.to_lowercase().contains("skipped"), "{text}");
    assert!(!text.contains("VIOLATION"), "{text}");
    let passed = text.rsplit_once(" passed; 0 failed; 0 ignored").unwrap().0;
    let passed: usize = passed.rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!(passed >= least, "{passed} tests of {filter} ran, {least} at the least\n{text}");
    text
}

/// Waits for a child, but not for ever.
fn finish(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let started = Instant::now();
    let waiter = std::thread::spawn(move || child.wait_with_output().unwrap());
    while !waiter.is_finished() {
        if started.elapsed() > CHILD_MAX {
            // Its output so far is in the failure.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::ABORT);
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    waiter.join().unwrap()
}

#[test]
fn the_tests_of_real_gpus_pass_under_the_simulator() {
    run("gpu::", 5, &[]);
}

#[test]
fn random_loads_pass_under_the_simulator() {
    run("stress::", 6, &[("SIMGPU_DELAY_US", "400")]);
}

#[test]
fn registration_may_be_refused() {
    run("faults::registration_refused", 1, &[("SIMGPU_REGISTER_FAIL", "801")]);
    run("faults::no_read_only_registration", 1, &[("SIMGPU_READ_ONLY", "0")]);
}

#[test]
fn copies_may_fail() {
    for at in ["1", "20", "60"] {
        let fails = ("SIMGPU_COPY_FAIL_AT", at);
        let late = ("SIMGPU_COPY_FAIL_LATE", "1");
        run("faults::a_copy_fails", 1, &[fails]);
        run("faults::a_copy_fails", 1, &[fails, late]);
    }
    for at in ["1", "7"] {
        let fails = ("SIMGPU_COPY_FAIL_AT", at);
        let late = ("SIMGPU_COPY_FAIL_LATE", "1");
        run("faults::a_dma_copy_fails_when_queued", 1, &[fails]);
        run("faults::a_dma_copy_fails_when_it_runs", 1, &[fails, late]);
    }
}

#[test]
fn slots_stay_while_a_copy_into_them_may_run() {
    let slow = ("SIMGPU_DELAY_US", "20000");
    let test = "staging::a_slot_comes_back_after_the_copies_into_it";
    run(test, 1, &[("SIMGPU_COPY_FAIL_AT", "200"), slow]);
    let late = ("SIMGPU_COPY_FAIL_LATE", "1");
    let test = "staging::a_slot_is_given_up_where_nobody_knows_what_the_device_does";
    run(test, 1, &[("SIMGPU_COPY_FAIL_AT", "1"), late]);
}

#[test]
fn memory_may_be_short() {
    run("faults::device_memory_is_full", 1, &[("SIMGPU_ALLOC_LIMIT", "8388608")]);
    // Slots of 256 KiB and their margin of 128 KiB.
    run("faults::little_can_be_pinned", 1, &[("SIMGPU_PIN_LIMIT", "1179648")]);
    run("faults::nothing_can_be_pinned", 1, &[("SIMGPU_PIN_LIMIT", "1")]);
}

#[test]
fn the_gpu_checks_what_arrives() {
    for test in [
        "a_target_with_a_wrong_block_is_never_ready",
        "files_with_and_without_checksums_in_one_load",
        "many_loads_at_a_time_share_the_lists",
        "small_loads_are_the_cpus",
        "the_first_load_makes_the_kernel_ready",
    ] {
        run(&format!("checks::{test}"), 1, &[("SIMGPU_DELAY_US", "400")]);
    }
}

#[test]
fn the_cpu_checks_where_the_gpu_cannot() {
    run("checks::the_kernel_is_refused", 1, &[("SIMGPU_MODULE_FAIL", "222")]);
    let refuses = ("SIMGPU_LAUNCH_FAIL", "701");
    run("checks::launches_are_refused_after_dma", 1, &[refuses]);
    run("checks::launches_are_refused_after_copies", 1, &[refuses]);
    run("checks::launches_are_refused_amid_records", 1, &[refuses]);
    // Targets take two times 4 MiB and 750 KB; a list does not fit in the rest.
    run("checks::device_memory_is_full", 1, &[("SIMGPU_ALLOC_LIMIT", "9400000")]);
    for symbol in ["cuModuleLoadData", "cuLaunchKernel"] {
        run_by(&Simulator::without(&[symbol]), "checks::there_are_no_kernels", 1, &[]);
    }
}

#[test]
fn registration_may_be_slow() {
    run("faults::registering_is_slow", 1, &[("SIMGPU_REGISTER_GBPS", "0.5")]);
}

#[test]
fn dma_ends_where_registering_is_slow() {
    let slow = ("SIMGPU_REGISTER_GBPS", "0.05");
    run("pace::slow_registering_ends_dma_for_a_while", 1, &[slow]);
    run("pace::fast_registering_keeps_dma", 1, &[]);
    let refuses = ("SIMGPU_REGISTER_FAIL", "801");
    run("pace::a_refusal_starts_the_other_readers_too", 1, &[refuses]);
}

#[test]
fn registrations_go_after_their_load() {
    // Each alone: they look at the process's threads and mappings.
    let slow = ("SIMGPU_UNREGISTER_GBPS", "0.2");
    for test in [
        "a_load_returns_before_its_registrations_go",
        "the_window_holds_over_loads_that_follow_each_other",
        "nothing_is_released_beside_a_load_that_has_room",
        "an_engine_that_is_dropped_leaves_nothing",
        "a_file_may_shrink_or_go_before_its_registrations_do",
        "who_waits_for_the_release_gets_it",
        "a_child_leaves_the_registrations_of_its_parent_alone",
    ] {
        run(&format!("release::{test}"), 1, &[slow]);
    }
    run("release::many_loads_leave_nothing", 1, &[]);
}
