//! Damaged checkpoints (tests/cases/dcp_broken): each gets the verdict and the category that cases.json asks for, on
//! opening, on a full check and on reading; keys that are not hit still give the right values.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod cases_support;

use cases_support::*;
use forebay_checkpoint::model::Kind;
use forebay_checkpoint::open::{Checkpoint, Verdict, open_model};
use forebay_error::{Code, Result};
use forebay_format::sha256_tensor;
use serde_json::Value;

fn case(name: &str) -> Value {
    let all = json(&cases().join("dcp_broken/cases.json"));
    let found = all.as_array().unwrap().iter().find(|case| case["name"] == name);
    found.unwrap_or_else(|| panic!("no case {name}")).clone()
}

/// Whether an answer is the one asked for, or one that is just as good.
fn is_fair(case: &Value, what: &str, answer: &str) -> bool {
    let fair = match &case[format!("{what}_also_fair")] {
        Value::String(fair) => fair == answer,
        Value::Array(fair) => fair.iter().any(|fair| fair == answer),
        _ => false,
    };
    case[what] == answer || fair
}

fn check(name: &str) {
    let case = case(name);
    let folder = cases().join("dcp_broken").join(case["folder"].as_str().unwrap());
    let opened = Checkpoint::open(&folder);
    let answer = if opened.is_ok() { "ok" } else { "error" };
    assert!(is_fair(&case, "open", answer), "{name}: open gives {answer}: {:?}", opened.err());
    match opened {
        Err(error) => {
            assert!(is_fair(&case, "category", error.code().as_str()), "{name}: {error:?}");
            assert!(error.place().is_some_and(|place| place.contains(name)), "{name}: {error:?}");
            if let Some(global) = case["global_name"].as_str() {
                assert!(error.what().contains(global), "{name}: {error:?}");
            }
            assert_eq!(open_model(&folder).unwrap_err().code(), error.code(), "{name}");
        }
        Ok(checkpoint) => {
            check_verdict(&case, &checkpoint.verify(|_| Ok(())).unwrap());
            check_reads(&case, &checkpoint);
            check_model(&case, &checkpoint);
        }
    }
}

fn check_verdict(case: &Value, verdict: &Verdict) {
    let name = case["name"].as_str().unwrap();
    let answer = match (verdict.faults.is_empty(), verdict.warnings.is_empty()) {
        (false, _) => "error",
        (true, false) => "warning",
        (true, true) => "ok",
    };
    assert!(is_fair(case, "verify", answer), "{name}: verify gives {answer}: {verdict:?}");
    match answer {
        "error" => {
            let failing: Vec<&str> =
                verdict.faults.iter().map(|fault| fault.name.as_str()).collect();
            for fault in &verdict.faults {
                let code = fault.error.code().as_str();
                assert!(is_fair(case, "category", code), "{name}: {fault:?}");
                assert!(must_fail(case, &fault.name) != Some(false), "{name}: {fault:?}");
                let place = fault.error.place().unwrap();
                let what = fault.error.what();
                assert!(place.contains(".distcp") || what.contains(".distcp"), "{fault:?}");
                assert!(place.contains(&format!("{:?}", fault.name)), "{fault:?}");
                if let Some(file) = case["file"].as_str() {
                    assert_eq!(fault.file, file, "{name}");
                }
            }
            for key in case["read"].as_object().unwrap().keys() {
                assert!(failing.contains(&key.as_str()), "{name}: {key} is not among {failing:?}");
            }
        }
        "warning" => {
            let concern = |concern: &str| is_fair(case, "category", concern);
            assert!(
                verdict.warnings.iter().all(|told| concern(told.concern.name())),
                "{verdict:?}"
            );
            for file in case["files"].as_array().into_iter().flatten() {
                let file = file.as_str().unwrap();
                assert!(
                    verdict.warnings.iter().any(|told| told.text.contains(file)),
                    "{verdict:?}"
                );
            }
        }
        _ => {}
    }
}

/// Whether reading a key must fail; `None` where either is right.
fn must_fail(case: &Value, key: &str) -> Option<bool> {
    let either = case["read_either"].as_array();
    if either.is_some_and(|keys| keys.iter().any(|either| either == key)) {
        return None;
    }
    Some(case["read"].get(key).is_some())
}

/// Reads each key and compares with the sound checkpoint that the case was made from.
fn check_reads(case: &Value, checkpoint: &Checkpoint) {
    let name = case["name"].as_str().unwrap();
    let base = cases().join("dcp").join(case["base"].as_str().unwrap()).join("expected.json");
    let expected = json(&base);
    for (key, want) in expected["keys"].as_object().unwrap() {
        let entry = checkpoint.get(key).unwrap_or_else(|| panic!("{name}: {key} is missing"));
        let result = match entry.kind {
            Kind::Tensor { .. } => checkpoint.read_tensor(entry).map(|bytes| {
                assert_eq!(sha256(&bytes), want["sha256"].as_str().unwrap(), "{name}: {key}");
            }),
            Kind::Object { .. } => checkpoint.read_object(entry).and_then(|object| {
                object.json()?;
                check_object(key, &object, want);
                Ok(())
            }),
        };
        check_result(case, key, result);
    }
}

fn check_result(case: &Value, key: &str, result: Result<()>) {
    let name = case["name"].as_str().unwrap();
    match (must_fail(case, key), result) {
        (Some(true), Ok(())) => panic!("{name}: {key} can be read"),
        (Some(false), Err(error)) => panic!("{name}: {key} cannot be read: {error:?}"),
        (_, Err(error)) => {
            assert!(is_fair(case, "category", error.code().as_str()), "{name}: {key}: {error:?}");
        }
        _ => {}
    }
}

/// The same tensors through the catalog, where a wrong checksum is found by the pass over checksums.
fn check_model(case: &Value, checkpoint: &Checkpoint) {
    let model = open_model(checkpoint.folder()).unwrap().resolve_all().unwrap();
    for entry in &model.catalog.tensors {
        let (Some(fails), false) = (must_fail(case, &entry.name), case["category"] == "checksum")
        else {
            continue;
        };
        let digest = sha256_tensor(&model.files, entry);
        assert_eq!(digest.is_err(), fails, "{}: {digest:?}", entry.name);
        if let Err(error) = digest {
            assert!(is_fair(case, "category", error.code().as_str()), "{error:?}");
            assert!(error.place().is_some_and(|place| place.contains(&entry.name)), "{error:?}");
        }
    }
    let checks = check_all(&model);
    assert_eq!(checks.is_err(), case["category"] == "checksum", "{checks:?}");
    if let Err(error) = checks {
        assert_eq!(error.code(), Code::Checksum);
        assert!(error.place().unwrap().contains("\"even\""), "{error:?}");
    }
}

macro_rules! broken {
    ($($name:ident)+) => {
        $(#[test] fn $name() { check(stringify!($name)); })+

        #[test]
        fn every_case_has_a_test() {
            let mut tested = vec![$(stringify!($name)),+];
            tested.sort_unstable();
            assert_eq!(folders(&cases().join("dcp_broken")), tested);
        }
    };
}

broken! {
    flipped_bit_in_tensor truncated_data_file missing_data_file missing_metadata
    only_metadata_tmp leftover_metadata_tmp stale_extra_data_files metadata_calls_function
    overlapping_pieces item_past_end_of_file truncated_metadata missing_piece
    data_path_to_parent dtype_disagrees empty_data_file items_swapped piece_past_bounds
    piece_rank_differs item_length_negative item_not_stored item_without_key data_path_absolute
    metadata_old_global_opcode metadata_persistent_id metadata_huge_text_length
    metadata_holds_itself metadata_wrong_type metadata_stack_underflow metadata_empty_file
    metadata_unknown_class object_item_calls_function item_storage_too_small
    item_storage_claims_more item_stride_leaves_storage item_record_missing item_shape_disagrees
    item_not_an_archive
}

#[test]
fn no_flipped_bit_of_a_data_file_is_read_as_a_number() {
    let folder = tempfile::tempdir().unwrap();
    let from = cases().join("dcp/views_w1/ckpt");
    for name in [".metadata", "__0_0.distcp"] {
        std::fs::copy(from.join(name), folder.path().join(name)).unwrap();
    }
    let sound = Checkpoint::open(folder.path()).unwrap();
    let values = |checkpoint: &Checkpoint| {
        let entries = checkpoint.entries.iter();
        entries.map(|entry| checkpoint.read_tensor(entry).ok()).collect::<Vec<_>>()
    };
    let want = values(&sound);
    let path = folder.path().join("__0_0.distcp");
    let bytes = std::fs::read(&path).unwrap();
    let mut noticed = 0;
    for at in (0..bytes.len()).step_by(13) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &damaged).unwrap();
        let got = values(&Checkpoint::open(folder.path()).unwrap());
        for (got, want) in got.iter().zip(&want) {
            assert!(got.is_none() || got == want, "byte {at} is not noticed");
        }
        noticed += usize::from(got.contains(&None));
    }
    // The rest of the file is padding, times and versions.
    assert!(noticed > bytes.len() / 13 / 4, "only {noticed} flips were noticed");
}
