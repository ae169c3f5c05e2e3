//! Every `.metadata` of `tests/cases`: the sound ones give what was saved, the damaged ones the right verdict.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use forebay_error::{Code, Error};
use forebay_format::dcp::metadata::{Chunk, DcpMetadata, Entry, EntryKind, Place, Step};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases")
}

fn json_of(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn sound(name: &str) -> (DcpMetadata, Value) {
    let folder = cases().join("dcp").join(name);
    let bytes = std::fs::read(folder.join("ckpt/.metadata")).unwrap();
    (DcpMetadata::read(&bytes).unwrap(), json_of(folder.join("expected.json")))
}

fn item(metadata: &DcpMetadata, region: Option<Chunk<'_>>, place: Place<'_>) -> Value {
    let mut item = json!({
        "file": metadata.files()[place.file],
        "at": place.offset,
        "length": place.length,
    });
    if let Some(chunk) = region {
        item["offsets"] = json!(chunk.offsets);
        item["sizes"] = json!(chunk.sizes);
    }
    if !place.transforms.is_empty() {
        item["transforms"] = json!(place.transforms);
    }
    item
}

/// An entry in the form of `expected.json`, without what only the data tells.
fn entry_json(metadata: &DcpMetadata, entry: &Entry<'_>) -> Value {
    let mut found = match &entry.kind {
        EntryKind::Object { place } => json!({
            "kind": "object",
            "items": [item(metadata, None, *place)],
        }),
        EntryKind::Tensor { element, shape, chunks } => {
            let items: Vec<Value> = chunks
                .clone()
                .map(|chunk| item(metadata, Some(chunk), chunk.place.unwrap()))
                .collect();
            json!({ "kind": "tensor", "dtype": element.torch, "shape": shape, "items": items })
        }
    };
    if let Some(path) = &entry.path {
        let steps = path.iter().map(|step| match step {
            Step::Key(key) => json!(key),
            Step::Index(index) => json!(index),
        });
        found["path"] = Value::Array(steps.collect());
    }
    found
}

fn sorted(items: &Value) -> Vec<String> {
    let mut items: Vec<String> =
        items.as_array().unwrap().iter().map(|item| item.to_string()).collect();
    items.sort();
    items
}

fn check_sound(name: &str) {
    let (metadata, expected) = sound(name);
    let keys = expected["keys"].as_object().unwrap();
    let names: BTreeSet<&str> = metadata.entries().map(|entry| entry.name).collect();
    assert_eq!(names, keys.keys().map(String::as_str).collect());
    assert_eq!(metadata.entries().len(), keys.len());
    for entry in metadata.entries() {
        let wanted = &keys[entry.name];
        let found = entry_json(&metadata, &entry);
        for field in ["kind", "dtype", "shape", "path"] {
            assert_eq!(found[field], wanted[field], "{}: {field}", entry.name);
        }
        assert_eq!(sorted(&found["items"]), sorted(&wanted["items"]), "{}", entry.name);
        if let EntryKind::Tensor { element, .. } = entry.kind {
            let readable = !matches!(element.torch.as_str(), "complex128");
            assert_eq!(element.dtype.is_some(), readable, "{}", element.torch);
        }
    }
    assert!(metadata.stale().is_empty());
    assert_eq!(metadata.warnings(), [""; 0]);
    assert!(metadata.attributes().is_empty());
    // The field came with torch 2.9.
    let torch = expected["torch"].as_str().unwrap();
    assert_eq!(metadata.version(), (torch != "2.4.1").then_some("1.0.0"));
    let meta = metadata.storage_meta().unwrap();
    assert!(meta.checkpoint_id.as_deref().unwrap().ends_with("ckpt"), "{meta:?}");
    assert_eq!(meta.save_id.as_deref().unwrap().len(), 36);
}

macro_rules! sound_cases {
    ($($name:ident)+) => {
        const SOUND: &[&str] = &[$(stringify!($name)),+];

        mod sound_cases {
            $(#[test] fn $name() { super::check_sound(stringify!($name)); })+
        }
    };
}

sound_cases! {
    dtypes_w2 file_per_item_w2 hybrid_w4 mesh2x2_w4 nested_w1 no_flatten_w1 odd_keys_w1
    optimizer_w1 plain_w1 shard0_w2
    shards_w4 three_threads_w2 two_threads_w4 uneven_w4 views_w1 zstd_w1
}

/// Checks the verdict of one damaged case, as far as `.metadata` alone decides it.
fn check_broken(name: &str) {
    let list = json_of(cases().join("dcp_broken/cases.json"));
    let case = list.as_array().unwrap().iter().find(|case| case["name"] == name).unwrap();
    let folder = cases().join("dcp_broken").join(case["folder"].as_str().unwrap());
    let read = std::fs::read(folder.join(".metadata"));
    if case["category"] == "not_committed" {
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::NotFound);
        return;
    }
    match DcpMetadata::read(&read.unwrap()) {
        Ok(metadata) => check_opened(case, &metadata),
        Err(error) => check_refused(case, &error),
    }
}

fn check_opened(case: &Value, metadata: &DcpMetadata) {
    assert_eq!(case["open"], "ok", "{case}");
    let base = cases().join("dcp").join(case["base"].as_str().unwrap());
    let keys = json_of(base.join("expected.json"));
    assert_eq!(metadata.entries().len(), keys["keys"].as_object().unwrap().len());
    match case["category"].as_str().unwrap() {
        "stale_item" => {
            assert_eq!(metadata.stale().len(), 1);
            assert!(metadata.warnings()[0].contains("belong to no entry"));
        }
        "opaque" => {
            let error = metadata.attribute("extra").unwrap().json().unwrap_err();
            assert!(error.what().contains("not_there.Thing"), "{error}");
        }
        _ => assert!(metadata.stale().is_empty() && metadata.warnings().is_empty()),
    }
}

fn check_refused(case: &Value, error: &Error) {
    assert_eq!(case["open"], "error", "{error}");
    assert_eq!(error.code().as_str(), case["category"], "{error}");
    if let Some(global) = case["global_name"].as_str() {
        assert!(error.what().contains(global), "{error}");
    }
    // A fault of one entry names it.
    if let Some(read) = case["read"].as_object() {
        for key in read.keys() {
            assert!(error.what().contains(&format!("{key:?}")), "{error}");
        }
    }
}

macro_rules! broken_cases {
    ($($name:ident)+) => {
        const BROKEN: &[&str] = &[$(stringify!($name)),+];

        mod broken_cases {
            $(#[test] fn $name() { super::check_broken(stringify!($name)); })+
        }
    };
}

broken_cases! {
    data_path_absolute data_path_to_parent dtype_disagrees empty_data_file flipped_bit_in_tensor
    item_length_negative
    item_not_an_archive item_not_stored item_past_end_of_file item_record_missing
    item_shape_disagrees
    item_storage_claims_more item_storage_too_small item_stride_leaves_storage item_without_key
    items_swapped
    leftover_metadata_tmp metadata_calls_function metadata_empty_file metadata_holds_itself
    metadata_huge_text_length
    metadata_old_global_opcode metadata_persistent_id metadata_stack_underflow
    metadata_unknown_class
    metadata_wrong_type missing_data_file missing_metadata missing_piece
    object_item_calls_function only_metadata_tmp
    overlapping_pieces piece_past_bounds piece_rank_differs stale_extra_data_files
    truncated_data_file
    truncated_metadata
}

#[test]
fn no_case_is_left_out() {
    let folders = |name: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(cases().join(name)).unwrap().map(Result::unwrap);
        let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        folders.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
    assert_eq!(folders("dcp_broken"), names(BROKEN));
    // Shards of safetensors have no `.metadata`.
    assert!(!cases().join("dcp/hf_w2/ckpt/.metadata").exists());
    assert_eq!(folders("dcp"), names(&[SOUND, &["hf_w2"]].concat()));
}

/// User report 55: `.metadata` is a pickle, and stock readers run it.
#[test]
fn a_metadata_file_never_runs_code() {
    let marker = std::env::temp_dir().join(format!("forebay-ran-{}", std::process::id()));
    let shell = format!("touch {}", marker.display());
    let mut pickle = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c".to_vec();
    pickle.push(shell.len() as u8);
    pickle.extend(shell.as_bytes());
    pickle.extend(b"\x85R.");
    let error = DcpMetadata::read(&pickle).err().unwrap();
    assert_eq!(error.code(), Code::ForbiddenGlobal);
    assert!(error.what().contains("posix.system"), "{error}");
    assert!(!marker.exists());
}

#[test]
fn a_file_cut_anywhere_is_invalid() {
    for name in ["nested_w1", "hybrid_w4"] {
        let bytes = std::fs::read(cases().join("dcp").join(name).join("ckpt/.metadata")).unwrap();
        for len in 0..bytes.len() {
            let error = DcpMetadata::read(&bytes[..len]).err().unwrap();
            assert_eq!(error.code(), Code::InvalidMetadata, "{len} bytes: {error}");
        }
    }
}
