//! `forebay ckpt export` and `diff`: what is written is what was saved, by our own readers and by ourselves once more.

use std::path::Path;

use forebay_format::{open_model, read_tensor};
use forebay_tensor::Dtype;
use serde_json::{Value, json};

use crate::ckpt_make::{State, save};
use crate::util::{forebay, json_of, run, stderr, stdout, text};

/// Bytes and type of every tensor of a model, by name.
fn contents(path: &Path) -> Vec<(String, Dtype, Vec<u64>, Vec<u8>)> {
    let model = open_model(path).unwrap();
    let mut tensors: Vec<_> = model
        .catalog
        .tensors
        .iter()
        .map(|entry| {
            let mut bytes = Vec::new();
            read_tensor(&model.files, entry, |part| {
                bytes.extend_from_slice(part);
                Ok(())
            })
            .unwrap();
            (entry.name.clone(), entry.dtype, entry.shape.clone(), bytes)
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

fn export(from: &Path, to: &Path, args: &[&str]) -> Value {
    json_of(forebay().args(["ckpt", "export", "--json"]).arg(from).arg("--to").arg(to).args(args))
}

fn fails(from: &Path, to: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = forebay();
    let output =
        command.args(["ckpt", "export"]).arg(from).arg("--to").arg(to).args(args).output().unwrap();
    (output.status.code(), stderr(&output))
}

/// Compares an export under its own names and types with the state.
fn assert_is(state: &State, found: &[(String, Dtype, Vec<u64>, Vec<u8>)], names: usize) {
    assert_eq!(found.len(), names);
    for (name, dtype, shape, bytes) in found {
        let own = state.aliases.iter().find(|(alias, _)| alias == name);
        let own = own.map_or(name, |(_, of)| of);
        let tensor = state.tensors.iter().find(|tensor| tensor.name == *own).unwrap();
        assert_eq!((dtype, shape), (&tensor.dtype, &tensor.shape), "{name}");
        assert!(bytes == state.data(name), "{name}");
    }
}

#[test]
fn exports_are_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let state = State::new(5);
    for world in [1, 3] {
        let root = folder.path().join(format!("root{world}"));
        std::fs::create_dir(&root).unwrap();
        let step = save(&root, 7, world, 1, &state);
        let out = |name: &str| folder.path().join(format!("{world}{name}"));
        // A folder of one file, and of many; one file by name.
        let report = export(&root, &out("folder"), &[]);
        assert_eq!(
            (&report["tensors"], &report["files"]),
            (&json!(8), &json!(["model.safetensors"]))
        );
        let aliases = json!({"model.head.weight": "model.embed.weight"});
        assert_eq!(report["aliases"], aliases);
        assert_eq!(report["left_out"].as_object().unwrap().len(), 3);
        assert_is(&state, &contents(&out("folder")), 8);
        let noted = open_model(&out("folder")).unwrap().catalog.metadata;
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(noted, [pair("format", "pt"), pair("model.head.weight", "model.embed.weight")]);
        let args = ["--max-shard-bytes", "100KB", "--aliases", "copy"];
        let report = export(&step, &out("shards"), &args);
        assert!(report["files"].as_array().unwrap().len() > 2, "{report}");
        assert!(out("shards").join("model.safetensors.index.json").is_file());
        assert_is(&state, &contents(&out("shards")), 9);
        export(&step, &out("one.safetensors"), &[]);
        assert_is(&state, &contents(&out("one.safetensors")), 8);
        // A file of torch: its own reader finds all, twice what was saved twice, and objects that are plain.
        let report = export(&step, &out("flat.pt"), &["--flat"]);
        assert_eq!((&report["format"], &report["objects"]), (&json!("torch"), &json!(2)));
        assert!(report["left_out"]["odd"].as_str().unwrap().contains("getcwd"), "{report}");
        assert_is(&state, &contents(&out("flat.pt")), 9);
        let model = open_model(&out("flat.pt")).unwrap();
        let object = |name: &str| {
            let objects = model.catalog.objects.iter();
            let found = objects.into_iter().find(|object| object.name == name).unwrap();
            found.object.json().unwrap().to_owned()
        };
        assert_eq!(object("step"), "42");
        // Stored once: the file is not longer than what is in it.
        let bytes: usize = state.tensors.iter().map(|tensor| tensor.data.len()).sum();
        assert!(std::fs::metadata(out("flat.pt")).unwrap().len() < bytes as u64 + 20_000);
        export(&step, &out("nested.pt"), &[]);
        assert_is(&state, &contents(&out("nested.pt")), 9);
    }
}

#[test]
fn names_types_and_selection_are_the_callers() {
    let folder = tempfile::tempdir().unwrap();
    let state = State::new(6);
    let step = save(folder.path(), 1, 2, 1, &state);
    let to = folder.path().join("out");
    let args = [
        "--select",
        "model.*",
        "--rename",
        "model.layers.*.weight=h.*.w",
        "--rename",
        "model.=",
        "--dtype",
        "f32",
    ];
    export(&step, &to, &args);
    let found = contents(&to);
    let names: Vec<&str> = found.iter().map(|(name, ..)| name.as_str()).collect();
    let wanted =
        ["embed.weight", "empty", "h.0.w", "layers.0.bias", "mask", "scalar", "steps", "wide"];
    assert_eq!(names, wanted);
    let find = |name: &str| found.iter().find(|(own, ..)| own == name).unwrap();
    let (_, dtype, shape, bytes) = find("h.0.w");
    assert_eq!((dtype, shape.as_slice()), (&Dtype::F32, &[300, 129][..]));
    let wide: Vec<u8> = state
        .data("model.layers.0.weight")
        .chunks(2)
        .flat_map(|half| {
            let bits = u32::from(u16::from_le_bytes([half[0], half[1]])) << 16;
            // A NaN stays one; its bits are another test's.
            bits.to_le_bytes()
        })
        .collect();
    assert!(*bytes == wide);
    let (_, dtype, _, bytes) = find("steps");
    assert_eq!((*dtype, bytes.as_slice()), (Dtype::I64, state.data("model.steps")));
    // The whole as bf16: a quarter of the large one's bytes in half.
    let half = folder.path().join("half.safetensors");
    let report = export(&step, &half, &["--dtype", "bf16", "--select", "model.embed*"]);
    assert_eq!(report["bytes"], 1001 * 777 * 2);
    // What cannot be is refused before anything is written.
    let none = folder.path().join("none");
    for (args, code) in [
        (&["--select", "nothing*"][..], "usage"),
        (&["--rename", "model.*=x"], "usage"),
        (&["--flat"], "usage"),
        (&["--step", "3"], "usage"),
    ] {
        let (status, error) = fails(&step, &none, args);
        assert_eq!(status, Some(2), "{args:?}: {error}");
        assert!(error.starts_with(&format!("error[{code}]")), "{error}");
        assert!(!none.exists(), "{args:?}");
    }
    let (status, error) = fails(&step, &to, &[]);
    assert_eq!(status, Some(1));
    assert!(error.starts_with("error[already_exists]"), "{error}");
    export(&step, &to, &["--overwrite"]);
    assert_is(&state, &contents(&to), 8);
}

#[test]
fn damage_ends_an_export_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let step = save(folder.path(), 1, 2, 1, &State::new(6));
    let file = step.join("00000abc-1_1_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    for name in ["out", "out.safetensors", "out.pt"] {
        let to = folder.path().join("made").join(name);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        let (status, error) = fails(&step, &to, &[]);
        assert_eq!(status, Some(1), "{error}");
        assert!(error.starts_with("error[checksum]"), "{error}");
        let left: Vec<_> = std::fs::read_dir(to.parent().unwrap())
            .unwrap()
            .flat_map(|entry| {
                let path = entry.unwrap().path();
                if path.is_dir() { std::fs::read_dir(path).unwrap().count() } else { 1 }
                    .checked_sub(1)
            })
            .filter(|&files| files > 0)
            .collect();
        assert!(left.is_empty() && !to.is_file(), "{name}");
    }
}

#[test]
fn stock_checkpoints_and_models_are_exported() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    let folder = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for entry in std::fs::read_dir(cases.join("dcp")).unwrap() {
        let case = entry.unwrap().path();
        let name = case.file_name().unwrap().to_str().unwrap().to_owned();
        let expected: Value =
            serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        let to = folder.path().join(&name);
        // One of them has a name that safetensors cannot have.
        if name == "odd_keys_w1" {
            let (status, error) = fails(&case.join("ckpt"), &to, &[]);
            assert!(status == Some(2) && error.contains("--rename"), "{error}");
        }
        let args = ["--aliases", "copy", "--rename", "__metadata__=meta"];
        export(&case.join("ckpt"), &to, &args);
        for (name, _, _, bytes) in contents(&to) {
            let name = if name == "meta" { "__metadata__" } else { &name };
            assert_eq!(expected["keys"][name]["sha256"], crate::util::sha256(&bytes), "{name}");
            compared += 1;
        }
        let keys = expected["keys"].as_object().unwrap().values();
        let tensors = keys.filter(|key| key["sha256"].is_string()).count();
        assert_eq!(contents(&to).len(), tensors, "{name}");
        // Again from the model that was made, and compared with where it came from.
        let again = folder.path().join(format!("{name}.safetensors"));
        export(&to, &again, &["--aliases", "copy"]);
        let names: Vec<String> = contents(&to).into_iter().map(|(name, ..)| name).collect();
        let plain = |name: &&String| !name.contains(['[', '*', '?', '{', '\\']) && *name != "meta";
        let selects = names.iter().filter(plain);
        let mut diff = forebay();
        diff.args(["ckpt", "diff"]).arg(case.join("ckpt")).arg(&again);
        for name in selects {
            diff.args(["--select", name]);
        }
        let output = diff.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}: {}{}", stdout(&output), stderr(&output));
    }
    assert!(compared > 50, "{compared}");
}

#[test]
fn tensors_of_many_batches_arrive_whole() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("large.safetensors");
    // 90 MiB: three batches, in one tensor that is cut and two that are not.
    let shapes: [(&str, &[u64]); 3] =
        [("large", &[70, 1 << 20]), ("middle", &[12 << 20]), ("other", &[8, 1 << 20])];
    let tensors: Vec<_> =
        shapes.iter().map(|(name, shape)| crate::util::bytes(name, shape, 3)).collect();
    crate::util::write(&source, &tensors, &[]);
    let to = folder.path().join("out.pt");
    export(&source, &to, &[]);
    for (name, _, _, bytes) in contents(&to) {
        let tensor = tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert!(bytes == tensor.data, "{name}");
    }
    let output = run(&["ckpt", "diff", text(&source), text(&to)]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    // The checksums in the archive are right, those put together from pieces too.
    let report = json_of(forebay().args(["load", "--device", "host", "--json"]).arg(&to));
    assert!(report["verified"].to_string().contains("CRC-32"), "{report}");
}

/// Temporary files in a folder.
fn temporaries(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.starts_with(".forebay-tmp-")).collect()
}

/// Kills an export as soon as its temporary file is there; whether it was in time.
fn kill_export(from: &Path, to: &Path) -> bool {
    let folder = to.parent().unwrap();
    let before = temporaries(folder);
    let mut command = forebay();
    let mut child = command.args(["ckpt", "export"]).arg(from).arg("--to").arg(to).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        if temporaries(folder).iter().any(|name| !before.contains(name)) {
            child.kill().unwrap();
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    !child.wait().unwrap().success()
}

#[test]
fn what_killed_exports_left_goes_with_the_next_to_that_folder() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from.safetensors");
    crate::util::write(&from, &[crate::util::bytes("w", &[64, 1 << 20], 3)], &[]);
    for name in ["out.pt", "out.safetensors"] {
        let out = folder.path().join(name.replace('.', "-"));
        std::fs::create_dir(&out).unwrap();
        let to = out.join(name);
        // One that is quicker than the look at its folder leaves nothing.
        for _ in 0..2 {
            assert!((0..50).any(|_| {
                let _ = std::fs::remove_file(&to);
                kill_export(&from, &to)
            }));
            assert!(!to.exists());
            assert_eq!(temporaries(&out).len(), 1, "the second removes what the first left");
        }
        // Of a writer that lives: a process of this machine, this one.
        let theirs = forebay_format::AtomicFile::create(&to).unwrap();
        assert_eq!(temporaries(&out).len(), 2);
        export(&from, &out.join(format!("other-{name}")), &[]);
        assert_eq!(temporaries(&out).len(), 1);
        drop(theirs);
        assert!(temporaries(&out).is_empty());
    }
}

#[test]
fn diff_tells_what_is_different() {
    let folder = tempfile::tempdir().unwrap();
    let state = State::new(5);
    let a = save(folder.path(), 1, 2, 1, &state);
    let b = save(folder.path(), 2, 3, 2, &state);
    let diff = |a: &Path, b: &Path| {
        let output = forebay().args(["ckpt", "diff", "--json"]).arg(a).arg(b).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report, output.status.code())
    };
    // The same state on another number of ranks.
    let (report, code) = diff(&a, &b);
    assert_eq!((code, &report["equal"], &report["changes"]), (Some(0), &json!(true), &json!([])));
    assert_eq!((&report["equal_tensors"], &report["equal_objects"]), (&json!(9), &json!(3)));
    let mut other = state.clone();
    let floats = &mut other.tensors[0].data;
    floats[..8].copy_from_slice(&[1.0_f32.to_le_bytes(), 2.5_f32.to_le_bytes()].concat());
    other.tensors[1].shape = vec![129, 300];
    other.tensors[7].name = "model.new".to_owned();
    other.objects[1].1 = b"\x80\x02K\x2b.".to_vec();
    let mut first = state;
    first.tensors[0].data[..8]
        .copy_from_slice(&[1.0_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat());
    let a = save(folder.path(), 3, 2, 3, &first);
    let b = save(folder.path(), 4, 2, 4, &other);
    let (report, code) = diff(&a, &b);
    assert_eq!((code, &report["equal"]), (Some(1), &json!(false)));
    let changes = report["changes"].as_array().unwrap();
    let find = |name: &str| changes.iter().find(|change| change["name"] == name).unwrap();
    assert_eq!(changes.len(), 6, "{report}");
    for name in ["model.embed.weight", "model.head.weight"] {
        let change = find(name);
        assert_eq!((&change["change"], &change["differing"]), (&json!("values"), &json!(1)));
        assert_eq!((&change["max_abs"], &change["elements"]), (&json!(0.5), &json!(1001 * 777)));
    }
    assert_eq!(find("model.layers.0.weight")["b"], "BF16 [129, 300]");
    assert_eq!(find("model.empty")["change"], "only_in_a");
    assert_eq!(find("model.new")["change"], "only_in_b");
    assert_eq!((&find("step")["a"], &find("step")["b"]), (&json!("42"), &json!("43")));
    let output = run(&["ckpt", "diff", text(&a), text(&b)]);
    let said = stdout(&output);
    assert!(
        said.contains("model.embed.weight: 1 of 777777 elements differ, by 5e-1 at most"),
        "{said}"
    );
    assert!(said.contains("6 different"), "{said}");
    // A part of it.
    let output = run(&["ckpt", "diff", text(&a), text(&b), "--select", "model.wide"]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
}
