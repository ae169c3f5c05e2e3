//! `forebay ckpt verify`: every kind of damage is found and named, and what is sound is called so.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forebay_checkpoint::model::{Chunk, Kind};
use forebay_checkpoint::open::Checkpoint;
use serde_json::Value;

use crate::ckpt_make::{State, save};
use crate::util::{forebay, run, stderr, stdout, text};

fn saved() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let step = save(folder.path(), 7, 2, 1, &State::new(3));
    (folder, step)
}

/// The report of a check, and its exit code.
fn verify(path: &Path) -> (Value, Option<i32>) {
    let output = forebay().args(["ckpt", "verify", "--json"]).arg(path).output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    let report: Value = report.unwrap_or_else(|_| panic!("{}", stderr(&output)));
    // Every damaged file is also a line for people.
    let faults = report["checkpoints"][0]["faults"].as_array().unwrap().iter();
    let files: BTreeSet<&str> = faults.map(|fault| fault["file"].as_str().unwrap()).collect();
    let lines = stderr(&output).lines().filter(|line| line.starts_with("error[")).count();
    assert_eq!(lines, files.len(), "{}", stderr(&output));
    (report, output.status.code())
}

/// The faults of a damaged checkpoint.
fn faults(path: &Path) -> Vec<Value> {
    let (report, code) = verify(path);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(report["sound"], false);
    report["checkpoints"][0]["faults"].as_array().unwrap().clone()
}

/// Flips a bit of a file while `look` looks.
fn with_flip<R>(path: &Path, at: u64, look: impl FnOnce() -> R) -> R {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at as usize] ^= 0x10;
    std::fs::write(path, &bytes).unwrap();
    let result = look();
    bytes[at as usize] ^= 0x10;
    std::fs::write(path, &bytes).unwrap();
    result
}

/// A tensor's chunk that starts a file of its own rank's, with its file.
fn chunk_of(step: &Path, name: &str, number: usize) -> (PathBuf, Chunk) {
    let checkpoint = Checkpoint::open(step).unwrap();
    let entry = checkpoint.get(name).unwrap();
    let chunk = entry.chunks()[number].clone();
    (step.join(&checkpoint.files[chunk.file as usize].name), chunk)
}

fn is_of(fault: &Value, file: &Path, name: Option<&str>) -> bool {
    let file = file.file_name().unwrap().to_str().unwrap();
    fault["file"] == file && fault["name"].as_str() == name
}

#[test]
fn a_sound_checkpoint_is_read_to_the_last_byte() {
    let (folder, step) = saved();
    let (report, code) = verify(&step);
    assert_eq!((code, &report["sound"]), (Some(0), &Value::Bool(true)), "{report}");
    let row = &report["checkpoints"][0];
    assert_eq!((&row["tensors"], &row["objects"], &row["step"]), (&9.into(), &3.into(), &7.into()));
    assert_eq!(row["unchecked_bytes"], 0);
    // All files of the step, `.metadata` and manifest too.
    let files = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|entry| entry.file_type().unwrap().is_file());
    let bytes: u64 = files.map(|entry| entry.metadata().unwrap().len()).sum();
    assert_eq!(row["checked_bytes"], bytes);
    for path in [folder.path(), &step, &step.join(".metadata")] {
        let output = run(&["ckpt", "verify", text(path)]);
        assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()), "{path:?}");
        assert!(stdout(&output).contains("step 7: sound: 9 tensors, 3 objects"), "{path:?}");
    }
}

#[test]
fn leftovers_are_warnings() {
    let (_folder, step) = saved();
    std::fs::write(step.join("00000abc-9_0_0.distcp"), b"left").unwrap();
    std::fs::write(step.join("00000abc-9_0_notes.txt"), b"left").unwrap();
    std::fs::write(step.join("unrelated.txt"), b"somebody's").unwrap();
    let output = run(&["ckpt", "verify", text(&step)]);
    assert_eq!(output.status.code(), Some(0));
    let said = stderr(&output);
    assert_eq!(said.lines().filter(|line| line.starts_with("warning: ")).count(), 2, "{said}");
    assert!(said.contains("00000abc-9_0_0.distcp") && said.contains("00000abc-9_0_notes.txt"));
}

#[test]
fn a_flipped_bit_in_a_tensor_or_object_is_named_with_its_block() {
    let (_folder, step) = saved();
    for (name, number, at) in [
        ("model.embed.weight", 0, 5),
        ("model.embed.weight", 1, (1 << 20) + 77),
        ("model.layers.0.bias", 0, 0),
        ("model.scalar", 0, 3),
        ("optim.groups", 0, 60),
    ] {
        let (file, chunk) = chunk_of(&step, name, number);
        let data = chunk.data.unwrap();
        let found = with_flip(&file, data.offset + at, || faults(&step));
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        assert!(is_of(&found[0], &file, Some(name)), "{found:?}");
        assert_eq!(found[0]["code"], "checksum");
        assert_eq!(found[0]["offset"], data.offset + (at >> 20 << 20), "{found:?}");
        let place = found[0]["place"].as_str().unwrap();
        assert!(place.contains(".distcp") && place.contains(&format!("{name:?}")), "{place}");
    }
    let (report, code) = verify(&step);
    assert_eq!(code, Some(0), "{report}");
}

#[test]
fn every_byte_around_a_tensor_counts() {
    let (_folder, step) = saved();
    for name in ["model.layers.0.bias", "model.embed.weight"] {
        let (file, chunk) = chunk_of(&step, name, 0);
        let data = chunk.data.clone().unwrap();
        let end = chunk.offset + chunk.length;
        let head = (chunk.offset..data.offset).step_by(97);
        let tail = (data.offset + data.bytes..end).step_by(41);
        for at in head.chain(tail).chain([data.offset - 1, end - 1]) {
            let found = with_flip(&file, at, || faults(&step));
            assert_eq!(found.len(), 1, "{name}, byte {at}: {found:?}");
            assert!(is_of(&found[0], &file, Some(name)), "{found:?}");
            assert_eq!(found[0]["offset"], at, "{found:?}");
        }
    }
}

#[test]
fn every_byte_of_manifest_and_metadata_counts() {
    let (_folder, step) = saved();
    let names = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path());
    let manifest = names.into_iter().find(|path| text(path).contains("forebay.manifest-")).unwrap();
    let len = std::fs::metadata(&manifest).unwrap().len();
    for at in (0..len).step_by(211).chain([len - 1]) {
        let found = with_flip(&manifest, at, || faults(&step));
        assert!(found.iter().any(|fault| is_of(fault, &manifest, None)), "byte {at}: {found:?}");
    }
    // The address, which is for people alone, is the one thing that nothing says twice.
    let metadata = step.join(".metadata");
    let bytes = std::fs::read(&metadata).unwrap();
    let root = text(step.parent().unwrap());
    let address = bytes.windows(root.len()).position(|window| window == root.as_bytes()).unwrap();
    let address = address..address + root.len() + "/step-7".len();
    let places = (0..bytes.len()).step_by(53).chain([bytes.len() - 1]);
    for at in places.filter(|at| !address.contains(at)) {
        let found = with_flip(&metadata, at as u64, || faults(&step));
        let told = found.iter().any(|fault| fault["file"] == ".metadata");
        assert!(told, "byte {at}: {found:?}");
    }
}

#[test]
fn files_that_are_gone_cut_or_longer_are_named() {
    let (_folder, step) = saved();
    let (file, chunk) = chunk_of(&step, "model.embed.weight", 0);
    let bytes = std::fs::read(&file).unwrap();
    let code = |found: &[Value], code: &str| {
        assert!(found.iter().any(|fault| fault["code"] == code), "{found:?}");
        assert!(
            found.iter().all(|fault| fault["file"] == file.file_name().unwrap().to_str().unwrap())
        );
    };
    std::fs::write(&file, &bytes[..chunk.data.unwrap().offset as usize + 9]).unwrap();
    let found = faults(&step);
    code(&found, "truncated");
    assert!(found.iter().any(|fault| fault["name"] == "model.embed.weight"), "{found:?}");
    std::fs::write(&file, [&bytes[..], b"more"].concat()).unwrap();
    code(&faults(&step), "invalid_item");
    std::fs::remove_file(&file).unwrap();
    code(&faults(&step), "missing_file");
    std::fs::write(&file, &bytes).unwrap();
    let side = step.join("00000abc-1_0_notes.txt");
    let found = with_flip(&side, 3, || faults(&step));
    assert_eq!(found.len(), 1);
    assert!(is_of(&found[0], &side, None) && found[0]["code"] == "checksum", "{found:?}");
    let names = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path());
    let manifest = names.into_iter().find(|path| text(path).contains("forebay.manifest-")).unwrap();
    std::fs::remove_file(&manifest).unwrap();
    let found = faults(&step);
    assert_eq!((found.len(), &found[0]["code"]), (1, &"missing_file".into()), "{found:?}");
    // The data are checked all the same, as torch's.
    let (report, _) = verify(&step);
    assert!(report["checkpoints"][0]["checked_bytes"].as_u64().unwrap() > 3_000_000);
}

#[test]
fn all_steps_of_a_root_are_checked_and_each_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let first = save(folder.path(), 1, 1, 1, &State::new(1));
    save(folder.path(), 2, 1, 2, &State::new(2));
    let all = ["ckpt", "verify", "--all", text(folder.path())];
    let output = run(&all);
    assert_eq!((output.status.code(), stdout(&output).lines().count()), (Some(0), 2));
    let checkpoint = Checkpoint::open(&first).unwrap();
    let Kind::Tensor { chunks, .. } = &checkpoint.get("model.embed.weight").unwrap().kind else {
        panic!("no tensor");
    };
    let file = first.join(&checkpoint.files[chunks[0].file as usize].name);
    let output = with_flip(&file, chunks[0].data.as_ref().unwrap().offset, || run(&all));
    assert_eq!(output.status.code(), Some(1));
    let said = stdout(&output);
    assert!(said.contains("step 1: damaged, 1 fault") && said.contains("step 2: sound"), "{said}");
}

#[test]
fn checkpoints_of_torch_are_checked_too() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    let mut sound = 0;
    for entry in std::fs::read_dir(cases.join("dcp")).unwrap() {
        let output = run(&["ckpt", "verify", text(&entry.unwrap().path().join("ckpt"))]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        sound += 1;
    }
    assert_eq!(sound, 17);
    for (name, code) in [
        ("flipped_bit_in_tensor", "checksum"),
        ("items_swapped", "shape_mismatch"),
        ("missing_data_file", "missing_file"),
    ] {
        let found = faults(&cases.join("dcp_broken").join(name));
        assert!(found.iter().any(|fault| fault["code"] == code), "{name}: {found:?}");
    }
    for (name, code) in [
        ("missing_metadata", "not_committed"),
        ("metadata_calls_function", "forbidden_global"),
        ("truncated_metadata", "invalid_metadata"),
    ] {
        let output = run(&["ckpt", "verify", text(&cases.join("dcp_broken").join(name))]);
        assert_eq!(output.status.code(), Some(1), "{name}");
        let said = stderr(&output);
        assert!(said.starts_with(&format!("error[{code}]")), "{name}: {said}");
    }
}

#[test]
fn damage_is_an_exit_code_where_nobody_reads_stdout_and_a_cut_file_is_one_line() {
    let (folder, step) = saved();
    let files = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path());
    let file = files.filter(|path| path.extension().is_some_and(|end| end == "distcp")).max();
    let file = file.unwrap();
    let bytes = std::fs::metadata(&file).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(bytes / 2).unwrap();
    for json in [&[][..], &["--json"]] {
        let mut command = forebay();
        command.args(["ckpt", "verify"]).args(json).arg(folder.path());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(writer).stderr(std::process::Stdio::piped()).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error[")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(errors[0].starts_with("error[truncated]"), "{said}");
    }
}
