//! Loads to a GPU by the command, under the simulated driver: the same bytes as on the host, and errors that say what
//! the driver said.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::ckpt_make::{State, save};
use crate::harness::Simulator;
use crate::util::{Bytes, arrived, bytes, expected, forebay, json_of, paths, stderr, text, write};

fn model(bytes_of_w: u64) -> (TempDir, PathBuf, Vec<Bytes>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let tensors =
        vec![bytes("w", &[64, bytes_of_w / 64], 1), bytes("b", &[12_345], 2), bytes("z", &[0], 3)];
    write(&path, &tensors, &[]);
    (folder, path, tensors)
}

const LOAD: [&str; 5] = ["load", "--device", "cuda:0", "--digest", "--json"];

fn load(simulator: &Simulator, model: &Path, args: &[&str]) -> serde_json::Value {
    json_of(simulator.apply(&mut forebay(), &[]).args(LOAD).args(args).arg(model))
}

#[test]
fn every_path_brings_the_same_bytes_as_to_the_host() {
    let simulator = Simulator::find();
    let (_folder, path, tensors) = model(9 << 20);
    for choice in ["auto", "dma", "copy", "direct", "buffered", "fallback"] {
        let report = load(&simulator, &path, &["--path", choice, "--repeat", "2"]);
        assert_eq!(arrived(&report), expected(&tensors), "{choice}");
        assert_eq!(report["device"]["product"], "Simulated GPU");
        if choice == "dma" {
            assert_eq!(paths(&report), ["page-cache-dma"]);
        }
    }
    // Some of the columns, so that rows are copied.
    let [host, gpu] = ["host", "cuda:0"].map(|device| {
        let mut command = forebay();
        simulator.apply(&mut command, &[]).args(["load", "--device", device]);
        command.args(["--digest", "--json", "--shard", "1:1/3"]).arg(&path);
        arrived(&json_of(&mut command))
    });
    assert_eq!(gpu, host);
}

#[test]
fn the_link_is_measured_and_memory_counted() {
    let simulator = Simulator::find();
    let (_folder, path, tensors) = model(40 << 20);
    let report = load(&simulator, &path, &[]);
    assert_eq!(arrived(&report), expected(&tensors));
    assert_eq!(report["limit"]["what"], "link");
    let memory = &report["device_memory"];
    assert!(memory["peak_bytes"].as_u64() >= memory["tensors_bytes"].as_u64(), "{memory}");
}

#[test]
fn what_the_driver_refuses_is_an_error() {
    let simulator = Simulator::find();
    let (_folder, path, _) = model(9 << 20);
    let cases = [
        (("SIMGPU_ALLOC_LIMIT", "1000000"), "out_of_memory", "CUDA error 2"),
        (("SIMGPU_COPY_FAIL_AT", "1"), "device", "CUDA error 700"),
        (("SIMGPU_PIN_LIMIT", "1"), "out_of_memory", "cannot pin"),
    ];
    for (setting, code, words) in cases {
        let mut command = forebay();
        simulator.apply(&mut command, &[setting]);
        let output = command.args(["load", "--path", "copy", text(&path)]).output().unwrap();
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{setting:?}: {errors}");
        assert!(errors.contains(&format!("error[{code}]")) && errors.contains(words), "{errors}");
    }
}

#[test]
fn strided_and_scattered_tensors_arrive_as_on_the_host() {
    let simulator = Simulator::find();
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    for case in ["torch/strided.pt", "dcp/views_w1/ckpt", "dcp/mesh2x2_w4/ckpt", "dcp/zstd_w1/ckpt"]
    {
        let path = cases.join(case);
        let host = crate::util::load(&path, &[]);
        for choice in ["auto", "dma", "copy", "direct"] {
            let report = load(&simulator, &path, &["--path", choice]);
            assert_eq!(arrived(&report), arrived(&host), "{case}, {choice}");
        }
    }
}

/// A checkpoint of enough bytes for the GPU to check them.
fn checkpoint() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), 1, 2, 1, &State::new(3).with_rows(18_000));
    (folder, path)
}

fn number(value: &serde_json::Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

#[test]
fn checksums_are_compared_by_the_gpu_after_dma() {
    let simulator = Simulator::find();
    let (_folder, path) = checkpoint();
    // Saves write past the page cache.
    let files = std::fs::read_dir(&path).unwrap().flatten().map(|file| file.path());
    for file in files.filter(|file| file.is_file()) {
        std::fs::read(file).unwrap();
    }
    let host = crate::util::load(&path, &[]);
    let host_run = host["loads"].as_array().unwrap().last().unwrap();
    let all = number(host_run, "verified_cpu_bytes");
    assert!(all > 64 << 20 && number(host_run, "verified_gpu_bytes") == 0, "{host_run}");
    assert!(host["verified"].to_string().contains("by the CPU, as they were read"), "{host}");
    for choice in ["dma", "copy"] {
        // The first load makes the kernel ready.
        let report = load(&simulator, &path, &["--path", choice, "--repeat", "2"]);
        assert_eq!(arrived(&report), arrived(&host), "{choice}");
        let run = report["loads"].as_array().unwrap().last().unwrap();
        let (gpu, cpu) = (number(run, "verified_gpu_bytes"), number(run, "verified_cpu_bytes"));
        assert_eq!((gpu, cpu), (all, 0), "every block is whole: {run}");
        assert!(report["verified"].to_string().contains("by the GPU, in its memory"), "{report}");
        let dma = paths(&report).iter().any(|path| path == "page-cache-dma");
        assert_eq!(dma, choice == "dma", "{report}");
    }
}

#[test]
fn damage_is_found_by_the_gpu_as_by_the_cpu() {
    let simulator = Simulator::find();
    let (_folder, path) = checkpoint();
    let mut files: Vec<_> = std::fs::read_dir(&path).unwrap().flatten().collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.metadata().unwrap().len()));
    let file = files[0].path();
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let mut messages = Vec::new();
    for (device, settings) in [
        ("host", &[][..]),
        ("cuda:0", &[]),
        ("cuda:0", &[("SIMGPU_LAUNCH_FAIL", "701")]),
        ("cuda:0", &[("SIMGPU_MODULE_FAIL", "222")]),
    ] {
        let mut command = forebay();
        simulator.apply(&mut command, settings).args(["load", "--device", device, text(&path)]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        let message: Vec<_> = errors.lines().filter(|line| !line.starts_with("simgpu")).collect();
        let message = message.join("\n");
        assert!(message.contains("error[checksum]"), "{message}");
        assert!(message.contains(text(file.file_name().unwrap().as_ref())), "{message}");
        messages.push(message);
    }
    assert!(messages.iter().all(|message| *message == messages[0]), "{messages:#?}");
}

#[test]
fn benchmarks_compare_who_verifies() {
    let simulator = Simulator::find();
    let (_folder, path) = checkpoint();
    let mut command = forebay();
    simulator.apply(&mut command, &[]).args(["bench", "load", "--device", "cuda:0", "--json"]);
    command.args(["--repeat", "2", "--verify", "auto,cpu,off", "--paths", "copy"]).arg(&path);
    let report = json_of(&mut command);
    let rows = report["results"].as_array().unwrap();
    let mut found = Vec::new();
    for row in rows {
        let run = row["loads"].as_array().unwrap().last().unwrap();
        let verified = |key: &str| number(run, key) > 0;
        let by = (verified("verified_gpu_bytes"), verified("verified_cpu_bytes"));
        found.push((row["verify"].as_str().unwrap().to_owned(), by));
    }
    let wanted = [("auto", (true, false)), ("cpu", (false, true)), ("off", (false, false))];
    assert_eq!(found, wanted.map(|(name, by)| (name.to_owned(), by)));
}
