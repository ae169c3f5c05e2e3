//! What was asked for arrives, and nothing else. Expected bytes are cut out of the tensors by plain loops. **unsafe**:
//! limits that a child sets between fork and exec.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::util::{
    Bytes, arrived, bytes, expected, json_of, load, run, sha256, stderr, text, write,
};

const ROWS: u64 = 500;
const COLUMNS: u64 = 3000;

/// A matrix that spans pieces, a vector, a scalar, and one with no elements.
fn model() -> (TempDir, PathBuf, Vec<Bytes>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let tensors = vec![
        bytes("layer.0.w", &[ROWS, COLUMNS], 1),
        bytes("layer.0.b", &[10], 2),
        bytes("scale", &[], 3),
        bytes("none", &[0, 7], 4),
    ];
    write(&path, &tensors, &[]);
    (folder, path, tensors)
}

/// Rows `rows` and columns `columns` of the matrix.
fn cut(matrix: &Bytes, rows: std::ops::Range<u64>, columns: std::ops::Range<u64>) -> Vec<u8> {
    let row = |row: u64| {
        let start = (row * COLUMNS + columns.start) as usize;
        matrix.data[start..start + (columns.end - columns.start) as usize].to_vec()
    };
    rows.flat_map(row).collect()
}

fn only<'a>(report: &'a Value, name: &str) -> &'a Value {
    let tensors = report["arrived"].as_array().unwrap();
    tensors.iter().find(|tensor| tensor["name"] == name).unwrap()
}

#[test]
fn everything_and_by_pattern() {
    let (_folder, path, tensors) = model();
    let report = load(&path, &[]);
    assert_eq!(arrived(&report), expected(&tensors));
    assert_eq!(report["bytes"], ROWS * COLUMNS + 11);
    let report = load(&path, &["--names", "layer.*", "--names", "sca?e"]);
    assert_eq!(arrived(&report), expected(&tensors[..3]));
    let report = load(&path, &["--names", "*.{b,x}"]);
    assert_eq!(arrived(&report), expected(&tensors[1..2]));
    let inspected =
        json_of(crate::util::forebay().args(["inspect", "--json", "--names", "none", text(&path)]));
    assert_eq!(inspected["tensors"].as_array().unwrap().len(), 1);
    let missed = run(&["load", "--device", "host", "--names", "layer.1.*", text(&path)]);
    assert_eq!(missed.status.code(), Some(2));
    assert!(stderr(&missed).starts_with("error[no_such_tensor]: "));
}

#[test]
fn shards_of_rows_and_of_columns() {
    let (_folder, path, tensors) = model();
    for path_choice in ["auto", "buffered", "fallback", "direct"] {
        let mut rows = 0;
        for rank in 0..3 {
            let range = (rank * 167).min(ROWS)..((rank + 1) * 167).min(ROWS);
            rows += range.end - range.start;
            let shard = format!("0:{rank}/3");
            let report = load(&path, &["--shard", &shard, "--path", path_choice]);
            let matrix = only(&report, "layer.0.w");
            assert_eq!(matrix["sha256"], sha256(&cut(&tensors[0], range.clone(), 0..COLUMNS)));
            assert_eq!(matrix["shape"], json!([range.end - range.start, COLUMNS]));
            assert_eq!(matrix["start"], json!([range.start, 0]));
            // The scalar has no rows and comes whole.
            assert_eq!(report["tensors_unsharded"], 1);
            assert_eq!(only(&report, "scale")["sha256"], sha256(&tensors[2].data));
            // Ranks read their part of the vector and not the rest: 4, 4 and 2 of ten.
            assert_eq!(only(&report, "layer.0.b")["bytes"], [4, 4, 2][rank as usize]);
        }
        assert_eq!(rows, ROWS);
        let report = load(&path, &["--shard", "1:1/4", "--path", path_choice]);
        let columns = only(&report, "layer.0.w");
        assert_eq!(columns["sha256"], sha256(&cut(&tensors[0], 0..ROWS, 750..1500)));
        assert_eq!(report["tensors_unsharded"], 2);
    }
}

#[test]
fn regions() {
    let (_folder, path, tensors) = model();
    let report = load(&path, &["--region", "layer.0.w[17:300,1:2999]"]);
    assert_eq!(report["arrived"].as_array().unwrap().len(), 1);
    let matrix = only(&report, "layer.0.w");
    assert_eq!(matrix["sha256"], sha256(&cut(&tensors[0], 17..300, 1..2999)));
    assert_eq!(matrix["start"], json!([17, 1]));
    let both = ["--region", "layer.0.w[:,5]", "--names", "layer.*"];
    let report = load(&path, &both);
    assert_eq!(only(&report, "layer.0.w")["sha256"], sha256(&cut(&tensors[0], 0..ROWS, 5..6)));
    assert_eq!(only(&report, "layer.0.b")["sha256"], sha256(&tensors[1].data));
    for (region, code) in [("layer.0.w[0:501]", "bad_slice"), ("x[0]", "no_such_tensor")] {
        let bad = run(&["load", "--device", "host", "--region", region, text(&path)]);
        assert_eq!(bad.status.code(), Some(2), "{region}");
        assert!(stderr(&bad).starts_with(&format!("error[{code}]: ")), "{}", stderr(&bad));
    }
}

#[test]
fn many_loads_stay_flat() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use std::os::unix::process::CommandExt;
    let (_folder, path, tensors) = model();
    let mut command = crate::util::forebay();
    command.args([
        "load",
        "--device",
        "host",
        "--digest",
        "--json",
        "--repeat",
        "300",
        text(&path),
    ]);
    let limit = |count| Rlimit { current: Some(count), maximum: Some(count) };
    // SAFETY: setrlimit is a plain system call, and may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            setrlimit(Resource::Nofile, limit(64))?;
            setrlimit(Resource::As, limit(8 << 30))?;
            Ok(())
        });
    }
    let report = json_of(&mut command);
    assert_eq!(report["loads"].as_array().unwrap().len(), 300);
    assert_eq!(arrived(&report), expected(&tensors));
}

#[test]
fn expected_digests_of_files() {
    let (folder, path, _) = model();
    let right = sha256(&std::fs::read(&path).unwrap());
    let report = load(&path, &["--expect-sha256", &right]);
    assert!(report["verified"].to_string().contains("SHA-256 of m.safetensors"));
    assert_eq!(report["not_verified"], json!([]));
    let named = format!("m.safetensors={}", right.to_uppercase());
    let report = load(folder.path(), &["--expect-sha256", &named]);
    assert_eq!(report["not_verified"], json!([]));
    assert_ne!(load(&path, &[])["not_verified"], json!([]));
    let wrong = "0".repeat(64);
    check_digest_error(&path, &wrong, 1, "checksum");
    check_digest_error(&path, &format!("x={wrong}"), 2, "usage");
}

fn check_digest_error(path: &Path, digest: &str, exit: i32, code: &str) {
    let args = ["load", "--json", "--device", "host", "--expect-sha256", digest, text(path)];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(exit));
    assert!(stderr(&output).starts_with(&format!("error[{code}]: ")), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}
