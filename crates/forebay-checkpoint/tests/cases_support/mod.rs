//! What the tests of cases share.

#![allow(dead_code, reason = "each test binary uses its part")]

use forebay_format::torch_zip::PlainObject;
use forebay_format::{Model, Stored, hex, verify_checks};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

pub(crate) fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases")
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Compares every checksum of what can be read of a model.
pub(crate) fn check_all(model: &Model) -> forebay_error::Result<(usize, u64)> {
    let opened = |at: &usize| !matches!(model.catalog.tensors[*at].stored, Stored::Unopened(_));
    let all: Vec<usize> = (0..model.catalog.tensors.len()).filter(opened).collect();
    verify_checks(&model.catalog, &model.files, &all, |_| Ok(()))
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Names in a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// Names of the folders in a folder, sorted.
pub(crate) fn folders(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| folder.join(name).is_dir()).collect()
}

/// Type and value of an object. JSON here has 64 bits, so longer integers are compared as floats.
pub(crate) fn check_object(key: &str, object: &PlainObject, want: &Value) {
    assert_eq!(object.python_type, want["python_type"].as_str().unwrap(), "{key:?}");
    let ours = object.json().map(|json| serde_json::from_str::<Value>(json).unwrap());
    match want["opaque"] == true {
        true => assert!(ours.is_err(), "{key:?}: {ours:?}"),
        false => assert!(same(&ours.unwrap(), &want["json"]), "{key:?}: {object:?}"),
    }
}

fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (a, b) => a == b,
    }
}
