//! What is printed where, and how the command ends.

use std::io::Read;
use std::process::Stdio;
use std::time::Instant;

use serde_json::{Value, json};

use crate::util::{bytes, forebay, json_of, paths, run, stderr, stdout, text, write};

fn keys(value: &Value) -> Vec<String> {
    value.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn the_shape_of_inspect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &[bytes("w", &[2, 3], 1)], &[("format", "pt"), ("a", "")]);
    let output = run(&["inspect", "--json", text(&path)]);
    // Field by field, in this order.
    let offset = std::fs::metadata(&path).unwrap().len() - 6;
    let wanted = format!(
        r#"{{"format":"safetensors","metadata":{{"format":"pt","a":""}},"tensors":[{}]}}"#,
        format_args!(
            r#"{{"name":"w","dtype":"U8","shape":[2,3],{},"offset":{offset},"bytes":6}}"#,
            r#""file":"m.safetensors""#
        )
    );
    assert_eq!(stdout(&output), format!("{wanted}\n"));
    write(&path, &[], &[]);
    let empty = json_of(forebay().args(["inspect", "--digest", "--json", text(&path)]));
    assert_eq!(empty, json!({"format": "safetensors", "metadata": {}, "tensors": []}));
}

#[test]
fn the_shape_of_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &[bytes("w", &[40 << 20], 1)], &[]);
    let args = ["load", "--device", "host", "--json", "--repeat", "3", "--threads", "2"];
    let report = json_of(forebay().args(args).arg(&path));
    assert_eq!(report["bytes"], 40 << 20);
    let loads = report["loads"].as_array().unwrap();
    assert_eq!(loads.len(), 3);
    for load in loads {
        assert!(load["gb_per_s"].as_f64().unwrap() > 0.0);
        assert!(load["cpu_seconds"].as_f64().unwrap() > 0.0);
        assert!(load["share_of_limit"].as_f64().unwrap() > 0.0);
        assert_eq!(load["threads"], 2);
        let parts = load["paths"].as_array().unwrap();
        let sum: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sum, 40 << 20);
        assert!(parts.iter().all(|part| part["reasons"][0].is_string()));
    }
    assert_eq!(report["limit"]["what"], "memory-copy");
    assert!(keys(&report).contains(&"not_verified".to_owned()));
    let text_report = run(&["load", "--device", "host", text(&path)]);
    let shown = stdout(&text_report);
    for word in ["GB/s", "path", "because", "cpu", "memory", "verified", "not verified", "limit"] {
        assert!(shown.contains(word), "{word} is not in {shown}");
    }
    assert!(stderr(&text_report).is_empty(), "no progress bar without a terminal");
    let quiet = run(&["load", "--device", "host", "--quiet", text(&path)]);
    assert!(quiet.status.success() && quiet.stdout.is_empty() && quiet.stderr.is_empty());
}

#[test]
fn names_cannot_steer_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let evil = "w\u{1b}[31m\u{9b}2J\r\n\u{202e}x";
    write(&path, &[bytes(evil, &[4], 1)], &[("k\u{1b}]0;t\u{7}", "v\u{8}")]);
    let harmless = |bytes: &[u8]| {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let unsafe_char = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!text.contains(unsafe_char), "{text:?}");
        assert!(!text.contains("\r\n"));
    };
    let missed = ["load", "--device", "host", "--names", "\u{1b}[2J"];
    let sliced = format!("{evil}[9]");
    let commands: [&[&str]; 6] = [
        &["inspect"],
        &["inspect", "--digest", "--json"],
        &["load", "--device", "host", "--digest"],
        &["load", "--device", "host", "--digest", "--json"],
        &missed,
        &["load", "--device", "host", "--region", &sliced],
    ];
    for args in commands {
        let output = forebay().args(args).arg(&path).output().unwrap();
        harmless(&output.stdout);
        harmless(&output.stderr);
    }
    let inspected = json_of(forebay().args(["inspect", "--json"]).arg(&path));
    assert_eq!(inspected["tensors"][0]["name"], evil);
    assert_eq!(inspected["metadata"]["k\u{1b}]0;t\u{7}"], "v\u{8}");
}

#[test]
fn ten_thousand_tensors_are_quick() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let tensors: Vec<_> =
        (0..10_000).map(|index| bytes(&format!("layer.{index}.w"), &[8, 8], index)).collect();
    write(&path, &tensors, &[]);
    let start = Instant::now();
    let inspected = json_of(forebay().args(["inspect", "--digest", "--json"]).arg(&path));
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(inspected["tensors"].as_array().unwrap().len(), 10_000);
    // An unoptimized build on a busy machine takes half a second; quadratic work would take minutes.
    assert!(seconds < 20.0, "{seconds} s");
    let report = crate::util::load(&path, &[]);
    assert_eq!(crate::util::arrived(&report), crate::util::expected(&tensors));
    reader_that_leaves(text(&path));
}

/// Nobody is told off for `forebay inspect | head`.
fn reader_that_leaves(path: &str) {
    for args in [&["inspect", path][..], &["inspect", "--json", path]] {
        let mut child =
            forebay().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // One byte read, and the pipe is closed; the output is larger than any pipe holds.
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{:?}", output.status);
        assert!(output.stderr.is_empty(), "{}", stderr(&output));
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = forebay().args(["inspect", path]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error[no_space]: cannot write to stdout"));
}

#[test]
fn exit_codes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &[bytes("w", &[8], 1)], &[]);
    let path = text(&path);
    let cases: [(&[&str], i32, &str); 14] = [
        (&["--version"], 0, ""),
        (&["load", "--help"], 0, ""),
        (&["inspect", path], 0, ""),
        (&["inspect", "/no/such/file"], 1, "error[not_found]: "),
        (&["load", "--device", "host", "/no/such/file"], 1, "error[not_found]: "),
        (&["inspect", "/dev/null"], 1, "error["),
        (&["load", "--device", "cuda:9999", path], 1, "error[no_device]: "),
        (&["load", "--device", "toaster", path], 2, "error[usage]: "),
        (
            &["load", "--device", "host", "--arena", "4KiB", "--path", "direct", path],
            2,
            "error[usage]: ",
        ),
        (&["load", "--path", "teleport", path], 2, "error[usage]: "),
        (&["load", "--threads", "0", path], 2, "error[usage]: "),
        (&["load", "--shard", "0:2/2", path], 2, "error[usage]: "),
        (&["load", "--shard", "0:0/2", "--region", "w[0]", path], 2, "error[usage]: "),
        (&["frobnicate"], 2, "error[usage]: "),
    ];
    for (args, exit, start) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(exit), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).starts_with(start), "{args:?}: {}", stderr(&output));
        assert_eq!(output.stdout.is_empty(), exit != 0, "{args:?}");
    }
}

#[test]
fn the_environment_sets_and_flags_win() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &[bytes("w", &[8 << 20], 1)], &[]);
    let set = || {
        let mut command = forebay();
        command.env("FOREBAY_DEVICE", "host").env("FOREBAY_PATH", "buffered");
        command.env("FOREBAY_THREADS", "1").args(["load", "--json"]).arg(&path);
        command
    };
    let report = json_of(&mut set());
    assert_eq!(paths(&report), ["buffered"]);
    assert_eq!(report["loads"][0]["threads"], 1);
    let report = json_of(set().args(["--path", "copy", "--threads", "2"]));
    assert_eq!(report["loads"][0]["threads"], 2);
    assert_ne!(paths(&report), ["buffered"]);
    for (name, value) in
        [("FOREBAY_THREADS", "many"), ("FOREBAY_LOG", "[[["), ("FOREBAY_ARENA", "big")]
    {
        let output = set().env(name, value).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {}", stderr(&output));
    }
    let output = set().env("FOREBAY_LOG", "trace").output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice::<Value>(&output.stdout).expect("the log is not on stdout");
    assert!(!stderr(&output).contains('\u{1b}'), "no colours in a file");
}
