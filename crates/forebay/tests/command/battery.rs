//! The safetensors battery: what the reference library accepts is accepted, with the same bytes; the rest is refused
//! with the right code, by `inspect` and by `load` alike.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::util::{arrived, forebay, json_of, load, stderr, text};

/// Writes the battery and reads what to expect of it.
fn cases() -> (tempfile::TempDir, Value) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("python3")
        .arg(sources.join("make_safetensors_cases.py"))
        .arg(folder.path())
        .output()
        .expect("the battery is written by a script: install python3");
    assert!(made.status.success(), "{}", stderr(&made));
    let expected = std::fs::read_to_string(sources.join("safetensors_cases.json")).unwrap();
    (folder, serde_json::from_str(&expected).unwrap())
}

fn check(path: &Path, case: &Value) {
    let name = case["name"].as_str().unwrap();
    match case["expected"].as_str().unwrap() {
        "ok" => check_sound(path, case, name),
        _ => check_refused(path, case, name),
    }
}

fn check_sound(path: &Path, case: &Value, name: &str) {
    let inspected = json_of(forebay().args(["inspect", "--digest", "--json"]).arg(path));
    assert_eq!(inspected["format"], "safetensors", "{name}");
    if let Some(metadata) = case.get("metadata") {
        let wanted = if metadata.is_null() { &serde_json::json!({}) } else { metadata };
        assert_eq!(&inspected["metadata"], wanted, "{name}");
    }
    let sorted = |tensors: &Value| {
        let mut tensors = tensors.as_array().unwrap().clone();
        tensors.sort_by_key(|tensor| tensor["name"].as_str().unwrap().to_owned());
        tensors
    };
    let (found, wanted) = (sorted(&inspected["tensors"]), sorted(&case["tensors"]));
    assert_eq!(found.len(), wanted.len(), "{name}");
    for (found, wanted) in found.iter().zip(&wanted) {
        for key in ["name", "dtype", "shape", "sha256"] {
            assert_eq!(found[key], wanted[key], "{name}: {key}");
        }
        assert_eq!(found["bytes"], wanted["nbytes"], "{name}");
        assert!(found["offset"].is_u64(), "{name}");
        if let Some(source) = wanted.get("source") {
            assert_eq!(&found["file"], source, "{name}");
        }
    }
    let digest = |tensor: &Value| {
        let field = |key: &str| tensor[key].as_str().unwrap().to_owned();
        (field("name"), field("sha256"))
    };
    let wanted: Vec<_> = wanted.iter().map(digest).collect();
    assert_eq!(arrived(&load(path, &[])), wanted, "{name}");
}

fn check_refused(path: &Path, case: &Value, name: &str) {
    let also = case.get("category_also_fair").and_then(Value::as_array).into_iter().flatten();
    let codes: Vec<_> = std::iter::once(&case["category"])
        .chain(also)
        .map(|code| format!("error[{}]: ", code.as_str().unwrap()))
        .collect();
    let commands: [&[&str]; 3] =
        [&["inspect"], &["inspect", "--json", "--digest"], &["load", "--device", "host"]];
    for args in commands {
        let output = forebay().args(args).arg(path).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name} {args:?}: {message}");
        let known = codes.iter().any(|code| message.starts_with(code));
        assert!(known, "{name} {args:?}: {message} has none of {codes:?}");
        assert!(output.stdout.is_empty(), "{name} {args:?}");
    }
}

#[test]
fn every_file() {
    let (folder, expected) = cases();
    let files = expected["files"].as_array().unwrap();
    assert!(files.len() >= 107);
    for case in files {
        check(&folder.path().join(case["file"].as_str().unwrap()), case);
    }
}

#[test]
fn every_folder() {
    let (folder, expected) = cases();
    let folders = expected["sharded"].as_array().unwrap();
    assert!(folders.len() >= 18);
    for case in folders {
        let path = folder.path().join(case["open"].as_str().unwrap());
        check(&path, case);
        if case["expected"] == "ok" {
            let output = forebay().args(["inspect", text(&path)]).output().unwrap();
            let warned = stderr(&output).contains("warning: ");
            let wanted = case.get("warning_expected").is_some();
            assert_eq!(warned, wanted, "{}: {}", case["name"], stderr(&output));
        }
    }
}
