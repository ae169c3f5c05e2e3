//! The battery of small files in `tests/cases`: each with the verdict of the safetensors library, each folder with
//! the verdict that its comment argues for.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests are tests")]

use forebay_error::{Code, Error};
use forebay_format::{Model, hex, open_files, open_model, sha256_extent};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

type Checked = Result<(), String>;

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases")
}

/// Writes the files of the battery and returns what to expect of them.
fn battery() -> (tempfile::TempDir, Value) {
    let folder = tempfile::tempdir().unwrap();
    let script = cases().join("make_safetensors_cases.py");
    let run = Command::new("python3").arg(&script).arg(folder.path()).output();
    let run = run.expect(
        "the battery is written by a script: install python3 (its standard library is enough)",
    );
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let text = std::fs::read_to_string(cases().join("safetensors_cases.json")).unwrap();
    (folder, serde_json::from_str(&text).unwrap())
}

fn run_all(list: &str, least: usize, check: impl Fn(&Path, &Value) -> Checked) {
    let (folder, expected) = battery();
    let cases = expected[list].as_array().unwrap();
    assert!(cases.len() >= least, "{} cases", cases.len());
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let fault = check(folder.path(), case).err()?;
            Some(format!("{}: {fault}", case["name"]))
        })
        .collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

#[test]
fn files_have_the_verdict_of_the_reference() {
    run_all("files", 107, |folder, case| {
        let path = folder.join(text(&case["file"]));
        let one = verdict(open_model(&path), case)?;
        if let Some(model) = &one {
            let metadata = model.catalog.has_metadata.then_some(&model.catalog.metadata);
            check_metadata(metadata, &case["metadata"])?;
        }
        verdict(open_files(&[path]), case).map(|_| ())
    });
}

#[test]
fn folders_have_the_verdict_of_their_rule() {
    run_all("sharded", 18, |folder, case| {
        let open = folder.join(text(&case["open"]));
        let model = verdict(open_model(&open), case)?;
        let index = open.join("model.safetensors.index.json");
        if index.exists() {
            verdict(open_model(&index), case)?;
        }
        if let Some(model) = model {
            let expected = usize::from(case.get("warning_expected").is_some());
            let warnings = &model.catalog.warnings;
            if warnings.len() != expected {
                return Err(format!("{expected} warnings expected, there are {warnings:?}"));
            }
        }
        Ok(())
    });
}

#[test]
fn faults_name_what_they_are_about() {
    let (folder, _) = battery();
    let fault = |open: &str| open_model(&folder.path().join(open)).unwrap_err().to_string();
    let contains = |text: String, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    };
    let truncated = fault("files/data_truncated_one_byte.safetensors");
    contains(
        truncated,
        &["truncated, file has ", ", needs ", "data_truncated_one_byte.safetensors"],
    );
    contains(fault("files/hole_in_middle.safetensors"), &["\"b\"", "the 4 bytes between"]);
    contains(fault("files/overlap_partial.safetensors"), &["\"b\"", "\"a\""]);
    contains(
        fault("files/shape_too_big_for_range.safetensors"),
        &["\"w\"", "needs 32 bytes", "give it 16"],
    );
    contains(fault("files/dtype_unknown.safetensors"), &["\"w\"", "\"F128\""]);
    contains(fault("files/trailing_one_byte.safetensors"), &["1 bytes follow the last tensor"]);
    contains(fault("files/shape_negative.safetensors"), &["\"w\"", "-4"]);
    contains(
        fault("sharded/missing_shard"),
        &["model-00002-of-00002.safetensors", "1 of the 2 files"],
    );
    contains(
        fault("sharded/no_index_same_name"),
        &["\"b\"", "first.safetensors", "second.safetensors"],
    );
    contains(fault("sharded/tensor_not_in_shard"), &["\"d\"", "model-00002-of-00002.safetensors"]);
    contains(
        fault("sharded/shard_truncated"),
        &["truncated, file has ", "model-00002-of-00002.safetensors"],
    );
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The model, if opening it was right; nothing, if failing was; else what is wrong.
fn verdict(opened: Result<Model, Error>, case: &Value) -> Result<Option<Model>, String> {
    let also = case.get("category_also_fair").and_then(Value::as_array);
    let fair = |code: Code| {
        let is = |category: &Value| category == code.as_str();
        is(&case["category"]) || also.is_some_and(|also| also.iter().any(is))
    };
    match (opened, text(&case["expected"])) {
        (Ok(model), "ok") => check_tensors(&model, case).map(|()| Some(model)),
        (Ok(_), _) => Err("accepted".to_owned()),
        (Err(error), "error") if fair(error.code()) && error.place().is_some() => Ok(None),
        (Err(error), "error") if fair(error.code()) && error.code() == Code::DuplicateTensor => {
            Ok(None)
        }
        (Err(error), _) => Err(error.render()),
    }
}

fn check_tensors(model: &Model, case: &Value) -> Checked {
    let expected = case["tensors"].as_array().map(Vec::as_slice).unwrap_or_default();
    let catalog = &model.catalog;
    if catalog.tensors.len() != expected.len() {
        return Err(format!("{} tensors", catalog.tensors.len()));
    }
    for want in expected {
        let name = text(&want["name"]);
        let got = catalog.get(name).ok_or(format!("{name:?} not found"))?;
        let shape: Vec<u64> =
            serde_json::from_value(want["shape"].clone()).map_err(|error| error.to_string())?;
        let digest = sha256_extent(&model.files[got.file], got.offset, got.bytes);
        let digest = hex(&digest.map_err(|error| error.render())?);
        let same = got.dtype.name() == text(&want["dtype"])
            && got.shape == shape
            && Some(got.bytes) == want["nbytes"].as_u64()
            && digest == text(&want["sha256"]);
        if !same {
            return Err(format!("{got:?} with digest {digest}"));
        }
        let source = want.get("source").map(text);
        if source.is_some_and(|source| source != catalog.files[got.file].name) {
            return Err(format!("{name:?} came from {}", catalog.files[got.file].name));
        }
    }
    let places: Vec<_> =
        catalog.tensors.iter().map(|tensor| (tensor.file, tensor.offset)).collect();
    if !places.is_sorted() {
        return Err("tensors are not in the order of their place".to_owned());
    }
    let names: Vec<_> = catalog.by_name().map(|place| &catalog.tensors[place].name).collect();
    if names.len() != expected.len() || !names.is_sorted() {
        return Err(format!("names {names:?}"));
    }
    model.check_unchanged().map_err(|error| error.render())
}

fn check_metadata(got: Option<&Vec<(String, String)>>, want: &Value) -> Checked {
    let same = match (got, want.as_object()) {
        (None, None) => true,
        (Some(got), Some(want)) => {
            got.len() == want.len()
                && got.iter().all(|(key, value)| want.get(key).is_some_and(|want| want == value))
        }
        _ => false,
    };
    if same { Ok(()) } else { Err(format!("metadata {got:?}, expected {want}")) }
}
