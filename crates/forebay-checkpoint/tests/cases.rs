//! Checkpoints that torch wrote (tests/cases/dcp, of torch 2.4, 2.9 and 2.15) give what was saved: each tensor put
//! together, each object, with nothing to complain about.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod cases_support;

use cases_support::*;
use forebay_checkpoint::model::{Kind, PathStep};
use forebay_checkpoint::open::{Checkpoint, Origin, open_model};
use forebay_engine::{Selection, Wanted};
use forebay_format::torch_zip::dtype_of;
use forebay_format::{hex, sha256_tensor};
use forebay_tensor::Region;
use serde_json::Value;

/// Reads one fixture in every way and compares with its expected.json.
fn check(name: &str) {
    let folder = cases().join("dcp").join(name);
    let expected = json(&folder.join("expected.json"));
    let checkpoint = Checkpoint::open(&folder.join("ckpt")).unwrap();
    let keys = expected["keys"].as_object().unwrap();
    assert_eq!(checkpoint.entries.len(), keys.len(), "{name}");
    assert_eq!(checkpoint.warnings, [], "{name}");
    match (&checkpoint.origin, expected["layout"].as_str().unwrap()) {
        (Origin::Dcp { .. }, "dcp") | (Origin::HfShards, "safetensors_shards") => {}
        other => panic!("{name}: {other:?}"),
    }
    for (key, want) in keys {
        check_key(&checkpoint, key, want);
    }
    let verdict = checkpoint.verify(|_| Ok(())).unwrap();
    assert!(verdict.faults.is_empty() && verdict.warnings.is_empty(), "{name}: {verdict:?}");
    check_as_model(name, keys);
}

fn check_key(checkpoint: &Checkpoint, key: &str, want: &Value) {
    let entry = checkpoint.get(key).unwrap_or_else(|| panic!("{key:?} is missing"));
    if let Some(path) = want["path"].as_array() {
        let step = |step: &PathStep| match step {
            PathStep::Key(key) => Value::from(key.as_str()),
            PathStep::Index(index) => Value::from(*index),
        };
        let ours: Vec<Value> = entry.path.iter().map(step).collect();
        // A planner that does not flatten keeps no paths.
        assert!(ours == *path || ours.is_empty() && path.len() == 1, "{key:?}: {ours:?}");
    }
    match (&entry.kind, want["kind"].as_str().unwrap()) {
        (Kind::Tensor { dtype, shape, chunks }, "tensor") => {
            assert_eq!(Some(*dtype), dtype_of(want["dtype"].as_str().unwrap()), "{key:?}");
            assert_eq!(Value::from(shape.clone()), want["shape"], "{key:?}");
            if let Some(items) = want["items"].as_array() {
                assert_eq!(chunks.len(), items.len(), "{key:?}");
            }
            let bytes = checkpoint.read_tensor(entry).unwrap();
            assert_eq!(bytes.len() as u64, want["nbytes"].as_u64().unwrap(), "{key:?}");
            assert_eq!(sha256(&bytes), want["sha256"].as_str().unwrap(), "{key:?}");
        }
        (Kind::Object { .. }, "object") => {
            let object = checkpoint.read_object(entry).unwrap();
            check_object(key, &object, want);
        }
        other => panic!("{key:?}: {other:?}"),
    }
}

/// The same through the catalog that the engine loads from.
fn check_as_model(name: &str, keys: &serde_json::Map<String, Value>) {
    let opened = open_model(&cases().join("dcp").join(name).join("ckpt")).unwrap();
    let model = opened.resolve_all().unwrap();
    let tensors = keys.iter().filter(|(_, want)| want["kind"] == "tensor");
    for (key, want) in tensors.clone() {
        let entry = model.catalog.get(key).unwrap_or_else(|| panic!("{name}: {key:?} is missing"));
        let digest = hex(&sha256_tensor(&model.files, entry).unwrap());
        assert_eq!(digest, want["sha256"].as_str().unwrap(), "{name}: {key:?}");
    }
    assert_eq!(model.catalog.tensors.len(), tensors.count(), "{name}");
    check_all(&model).unwrap();
    let objects = opened.objects(|_| true);
    for (key, object) in &objects {
        check_object(key, object.as_ref().unwrap(), &keys[key]);
    }
    assert_eq!(objects.len() + model.catalog.tensors.len(), keys.len(), "{name}");
}

macro_rules! fixtures {
    ($($name:ident)+) => {
        $(#[test] fn $name() { check(stringify!($name)); })+

        #[test]
        fn every_fixture_has_a_test() {
            let mut tested = vec![$(stringify!($name)),+];
            tested.sort_unstable();
            assert_eq!(folders(&cases().join("dcp")), tested);
        }
    };
}

fixtures! {
    dtypes_w2 file_per_item_w2 hf_w2 hybrid_w4 mesh2x2_w4 nested_w1 no_flatten_w1 odd_keys_w1
    optimizer_w1 plain_w1 shard0_w2 shards_w4 three_threads_w2 two_threads_w4 uneven_w4 views_w1
    zstd_w1
}

#[test]
fn a_rank_without_rows_is_no_missing_key() {
    // Six rows over four ranks, [2, 2, 2, 0]: the last rank's piece has an item and no elements.
    let checkpoint = Checkpoint::open(&cases().join("dcp/shards_w4/ckpt")).unwrap();
    let entry = checkpoint.get("six_rows").unwrap();
    assert_eq!(entry.chunks().len(), 4);
    assert_eq!(entry.chunks()[3].region.elements(), 0);
    for chunk in entry.chunks() {
        checkpoint.verify_item(entry, chunk).unwrap();
    }
    assert_eq!(checkpoint.read_tensor(entry).unwrap().len(), 6 * 2 * 4);
}

#[test]
fn a_slice_of_shards_reads_its_own_bytes_only() {
    for (ckpt, name, row_bytes) in [("hf_w2", "model.q.weight", 16), ("views_w1", "whole", 16)] {
        let opened = open_model(&cases().join("dcp").join(ckpt).join("ckpt")).unwrap();
        let model = opened.resolve(|wanted| wanted == name).unwrap();
        let tensor = model.catalog.find(name).unwrap();
        let region = Region::new(vec![1, 0], vec![1, 4]).unwrap();
        let wanted = vec![Wanted { tensor, region: Some(region) }];
        let (_, plan) = Selection::new(&model.catalog, wanted).unwrap().plan(1 << 20).unwrap();
        assert_eq!((plan.bytes(), plan.read_bytes()), (row_bytes, row_bytes), "{ckpt}");
    }
}

#[test]
fn long_integers_in_objects_keep_every_digit() {
    let checkpoint = Checkpoint::open(&cases().join("dcp/nested_w1/ckpt")).unwrap();
    let ints = checkpoint.read_object(checkpoint.get("ints").unwrap()).unwrap();
    assert_eq!(ints.json().unwrap(), "[1099511627776,-1180591620717411303424,0]");
}

#[test]
fn a_missing_shard_of_hugging_face_files_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let from = cases().join("dcp/hf_w2/ckpt");
    for name in names(&from) {
        std::fs::copy(from.join(&name), folder.path().join(&name)).unwrap();
    }
    std::fs::remove_file(folder.path().join("shard-00001-model-00001-of-00001.safetensors"))
        .unwrap();
    let error = open_model(folder.path()).unwrap_err();
    assert_eq!(error.code().as_str(), "missing_file", "{error:?}");
}
