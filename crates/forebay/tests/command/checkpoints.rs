//! Checkpoints of torch and files of torch.save, inspected and loaded: what torch saved arrives, and what is damaged is
//! refused by name.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::util::{arrived, forebay, json_of, load, run, stderr, stdout, text};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// (name, SHA-256) of the tensors that a file of expectations lists, sorted.
fn wanted(tensors: &serde_json::Map<String, Value>) -> Vec<(String, String)> {
    let digest =
        |(name, want): (&String, &Value)| Some((name.clone(), want["sha256"].as_str()?.to_owned()));
    let mut wanted: Vec<_> = tensors.iter().filter_map(digest).collect();
    wanted.sort();
    wanted
}

fn digests(inspected: &Value) -> Vec<(String, String)> {
    let field = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    let rows = inspected["tensors"].as_array().unwrap();
    let mut digests: Vec<_> =
        rows.iter().map(|row| (field(row, "name"), field(row, "sha256"))).collect();
    digests.sort();
    digests
}

#[test]
fn checkpoints_of_torch_are_inspected_and_loaded() {
    let mut fixtures = 0;
    for entry in std::fs::read_dir(cases().join("dcp")).unwrap() {
        let folder = entry.unwrap().path();
        let (name, ckpt) = (text(&folder).to_owned(), folder.join("ckpt"));
        let expected = json(&folder.join("expected.json"));
        let keys = expected["keys"].as_object().unwrap();
        let inspected = json_of(forebay().args(["inspect", "--digest", "--json"]).arg(&ckpt));
        assert_eq!(inspected["format"], expected["layout"], "{name}");
        assert_eq!(digests(&inspected), wanted(keys), "{name}");
        for row in inspected["tensors"].as_array().unwrap() {
            let want = &keys[row["name"].as_str().unwrap()];
            assert_eq!((&row["shape"], &row["bytes"]), (&want["shape"], &want["nbytes"]), "{name}");
            assert!(ckpt.join(row["file"].as_str().unwrap()).is_file(), "{name}: {row}");
        }
        for row in inspected["objects"].as_array().unwrap() {
            let want = &keys[row["name"].as_str().unwrap()];
            assert_eq!(row["type"], want["python_type"], "{name}: {row}");
            let plain = want["json"].as_f64().is_none_or(|number| number.abs() < 1e15);
            // Longer integers do not fit this JSON library; the crate's own tests compare them.
            if plain && !want["json"].to_string().contains("e+21") {
                assert_eq!(row["value"], want["json"], "{name}: {row}");
            }
        }
        let rows = inspected["tensors"].as_array().unwrap().len();
        assert_eq!(rows + inspected["objects"].as_array().unwrap().len(), keys.len(), "{name}");
        let report = load(&ckpt, &[]);
        assert_eq!(arrived(&report), wanted(keys), "{name}");
        fixtures += 1;
    }
    assert_eq!(fixtures, 17);
}

#[test]
fn files_of_torch_are_inspected_and_loaded() {
    let folder = cases().join("torch");
    let expected = json(&folder.join("expected.json"));
    let mut files = 0;
    for (name, case) in expected.as_object().unwrap() {
        let path = folder.join(name);
        let Some(tensors) = case["tensors"].as_object() else {
            let output = run(&["load", "--device", "host", text(&path)]);
            let code = case["error"].as_str().unwrap();
            assert!(stderr(&output).starts_with(&format!("error[{code}]")), "{}", stderr(&output));
            continue;
        };
        let inspected = json_of(forebay().args(["inspect", "--digest", "--json"]).arg(&path));
        assert_eq!(inspected["format"], "torch", "{name}");
        assert_eq!(digests(&inspected), wanted(tensors), "{name}");
        let report = load(&path, &[]);
        assert_eq!(arrived(&report), wanted(tensors), "{name}");
        let verified = report["verified"].to_string();
        assert!(verified.contains("CRC-32") || tensors.is_empty(), "{name}: {verified}");
        files += 1;
    }
    assert!(files >= 7);
}

#[test]
fn parts_of_checkpoints_are_slices_of_whole_tensors() {
    let ckpt = cases().join("dcp/mesh2x2_w4/ckpt");
    let whole = load(&ckpt, &["--names", "odd_s0_s1"]);
    assert_eq!(arrived(&whole).len(), 1);
    // Each row by itself has the digest of those twelve or twenty bytes; together they are all of it.
    let rows = (0..3).map(|row| load(&ckpt, &["--region", &format!("odd_s0_s1[{row},:]")]));
    let digests: std::collections::BTreeSet<_> = rows.map(|report| arrived(&report)).collect();
    assert_eq!(digests.len(), 3);
    let sharded = load(&ckpt, &["--shard", "0:0/1"]);
    let expected = json(&cases().join("dcp/mesh2x2_w4/expected.json"));
    assert_eq!(arrived(&sharded), wanted(expected["keys"].as_object().unwrap()));
}

#[test]
fn damage_is_named_and_does_not_hide_what_is_sound() {
    let broken = |name: &str| cases().join("dcp_broken").join(name);
    let fails = |args: &[&str], folder: &Path, code: &str| {
        let output = forebay().args(args).arg(folder).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{folder:?}");
        assert!(stderr(&output).starts_with(&format!("error[{code}]")), "{}", stderr(&output));
        stderr(&output)
    };
    let inspect = ["inspect", "--digest", "--json"];
    let load_all = ["load", "--device", "host", "--json"];
    for (name, code, key) in [
        ("flipped_bit_in_tensor", "checksum", "even"),
        ("truncated_data_file", "truncated", "same_on_both"),
        ("items_swapped", "shape_mismatch", "odd"),
        ("dtype_disagrees", "dtype_mismatch", "vec"),
        ("item_not_an_archive", "invalid_item", "even"),
    ] {
        let folder = broken(name);
        for args in [&inspect[..], &load_all[..]] {
            let error = fails(args, &folder, code);
            assert!(error.contains(&format!("{key:?}")) && error.contains(".distcp"), "{error}");
        }
        // The list is there all the same, and so are other tensors.
        let listed = json_of(forebay().args(["inspect", "--json"]).arg(&folder));
        assert_eq!(listed["tensors"].as_array().unwrap().len(), 7, "{name}");
        assert_eq!(arrived(&load(&folder, &["--names", "rep"])).len(), 1, "{name}");
    }
    let folder = broken("missing_metadata");
    let error = fails(&inspect, &folder, "not_committed");
    assert!(error.contains("hint: "), "{error}");
    fails(&load_all, &folder, "not_committed");
    fails(&inspect, &broken("metadata_calls_function"), "forbidden_global");
    let output = run(&["inspect", text(&broken("leftover_metadata_tmp"))]);
    assert!(output.status.success() && stderr(&output).contains("warning: "), "{output:?}");
}

#[test]
fn a_flipped_bit_in_a_file_of_torch_stops_the_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.pt");
    let source = cases().join("torch/nested.pt");
    let inspected = json_of(forebay().args(["inspect", "--json"]).arg(&source));
    let rows = inspected["tensors"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "model.0.weight").unwrap();
    let mut bytes = std::fs::read(&source).unwrap();
    bytes[row["offset"].as_u64().unwrap() as usize + 3] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let output = run(&["load", "--device", "host", "--json", text(&path)]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    assert!(error.starts_with("error[checksum]") && error.contains("model.0.weight"), "{error}");
    assert!(stdout(&output).is_empty());
}

#[test]
fn objects_are_shown_and_never_run() {
    let output = run(&["inspect", text(&cases().join("torch/calls.pt"))]);
    let shown = stdout(&output);
    assert!(shown.contains("evil") && shown.contains("posix.getcwd"), "{shown}");
    let json = json_of(forebay().args(["inspect", "--json"]).arg(cases().join("torch/nested.pt")));
    let objects = json["objects"].as_array().unwrap();
    let find = |name: &str| objects.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(find("optim.param_groups.0.betas")["value"], serde_json::json!([0.9, 0.999]));
    assert!(find("nan")["opaque"].as_str().unwrap().contains("NaN"));
    assert!(find("nan").get("value").is_none());
}
