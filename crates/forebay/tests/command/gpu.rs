//! Loads to a GPU by the command, under the simulated driver: the same bytes as on the host, and errors that say what
//! the driver said.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

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
