//! Saving: what is there after success, after failure, and after being killed at any step.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use forebay_error::Code;
use forebay_format::safetensors::TensorSpec;
use forebay_format::{
    AtomicFile, Durability, ModelSave, Saved, clean_stale_temps, hex, open_model, sha256_extent,
};
use forebay_tensor::Dtype;
use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

fn write(file: &AtomicFile, bytes: &[u8]) {
    file.file().write_all_at(bytes, 0).unwrap();
}

/// What lies in a folder, hidden files too, sorted.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn specs(tensors: &[(&str, u64)]) -> Vec<TensorSpec> {
    let spec = |&(name, len): &(&str, u64)| TensorSpec {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: vec![len],
    };
    tensors.iter().map(spec).collect()
}

/// A model whose tensors hold `fill`, ready to commit.
fn written(folder: &Path, tensors: &[TensorSpec], max: u64, fill: u8) -> ModelSave {
    let metadata = [("format".to_owned(), "pt".to_owned())];
    let save = ModelSave::create(folder, tensors, Some(&metadata), max).unwrap();
    for shard in save.shards() {
        for (&offset, &len) in shard.layout.offsets.iter().zip(&shard.layout.bytes) {
            shard.file.file().write_all_at(&vec![fill; len as usize], offset).unwrap();
        }
        assert_eq!(shard.file.file().metadata().unwrap().len(), shard.layout.total);
    }
    save
}

fn saved(folder: &Path, tensors: &[TensorSpec], max: u64, fill: u8) -> Saved {
    written(folder, tensors, max, fill).commit().unwrap()
}

/// The byte that all tensors of a model hold, after checking names and sizes.
fn content(folder: &Path, tensors: &[TensorSpec]) -> u8 {
    let model = open_model(folder).unwrap();
    assert_eq!(model.catalog.warnings, [] as [String; 0]);
    assert_eq!(model.catalog.metadata, [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(model.catalog.tensors.len(), tensors.len());
    let mut bytes = Vec::new();
    for spec in tensors {
        let tensor = model.catalog.get(&spec.name).unwrap();
        assert_eq!(tensor.shape, spec.shape);
        let mut data = vec![0; tensor.bytes as usize];
        model.files[tensor.file].read_exact_at(&mut data, tensor.offset).unwrap();
        bytes.extend(data);
    }
    bytes.dedup();
    assert_eq!(bytes.len(), 1, "a mixture of models");
    bytes[0]
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn a_file_appears_when_it_is_committed() {
    let folder = tempfile::tempdir().unwrap();
    let dest = folder.path().join("x");
    fs::write(&dest, "old").unwrap();
    let file = AtomicFile::create(&dest).unwrap();
    file.preallocate(3).unwrap();
    write(&file, b"new");
    assert_eq!(file.dest(), dest);
    assert_eq!(fs::read(&dest).unwrap(), b"old");
    assert_eq!(file.commit().unwrap(), Durability::Proven);
    assert_eq!(fs::read(&dest).unwrap(), b"new");
    assert_eq!(names(folder.path()), ["x"]);
}

#[test]
fn a_file_that_is_dropped_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dest = folder.path().join("x");
    let file = AtomicFile::create(&dest).unwrap();
    assert_eq!(names(folder.path()).len(), 1);
    drop(file);
    let durable = AtomicFile::create(&dest).unwrap().make_durable().unwrap();
    drop(durable);
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

#[test]
fn a_new_name_is_not_taken_from_a_file_that_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let dest = folder.path().join("x");
    let late = AtomicFile::create(&dest).unwrap().make_durable().unwrap();
    fs::write(&dest, "first").unwrap();
    assert_eq!(late.publish_new().unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(fs::read(&dest).unwrap(), b"first");
    assert_eq!(names(folder.path()), ["x"]);
}

#[test]
fn modes_follow_the_umask_and_links_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, dest, target) = ("plain", "dest", "target");
    let at = |name: &str| folder.path().join(name);
    fs::write(at(plain), "").unwrap();
    fs::write(at(target), "blob").unwrap();
    symlink(target, at(dest)).unwrap();
    let file = AtomicFile::create(&at(dest)).unwrap();
    write(&file, b"new");
    file.commit().unwrap();
    let mode = |name: &str| fs::symlink_metadata(at(name)).unwrap().permissions().mode();
    assert_eq!(mode(dest), mode(plain));
    assert_eq!(fs::read(at(target)).unwrap(), b"blob");
}

#[test]
fn destinations_that_are_no_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let code = |dest: &Path| AtomicFile::create(dest).unwrap_err().code();
    assert_eq!(code(folder.path()), Code::AlreadyExists);
    assert_eq!(code(&folder.path().join("..")), Code::Usage);
    assert_eq!(code(&folder.path().join("no/x")), Code::NotFound);
    assert_eq!(code(Path::new("/dev/null")), Code::AlreadyExists);
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

#[test]
fn a_full_disk_is_told_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(folder.path())
        .output();
    if !mount.is_ok_and(|mount| mount.status.success()) {
        println!("skipped: a small tmpfs cannot be mounted here");
        return;
    }
    let dest = folder.path().join("model.safetensors");
    fs::write(&dest, "old").unwrap();
    let error = AtomicFile::create(&dest).unwrap().preallocate(2 << 20).unwrap_err();
    let tensors = specs(&[("a", 3 << 20)]);
    let model = ModelSave::create(folder.path(), &tensors, None, u64::MAX).unwrap_err();
    let kept = fs::read(&dest).unwrap();
    let left = names(folder.path());
    let unmount = Command::new("umount").arg(folder.path()).status().unwrap();
    assert!(unmount.success());
    assert_eq!(error.code(), Code::NoSpace);
    assert!(
        error.to_string().contains("2097152 bytes are needed, 1044480 are available"),
        "{error}"
    );
    assert_eq!(model.code(), Code::NoSpace);
    assert_eq!(kept, b"old");
    assert_eq!(left, ["model.safetensors"]);
}

#[test]
fn models_of_one_and_of_several_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("new/model");
    let tensors = specs(&[("b", 5), ("a", 8), ("c", 0)]);
    assert_eq!(saved(&at, &tensors, 100, 1).files, ["model.safetensors"]);
    assert_eq!(content(&at, &tensors), 1);
    assert_eq!(names(&at), ["model.safetensors"]);
    let several = saved(&at, &tensors, 8, 2);
    assert_eq!(several.removed, ["model.safetensors"]);
    assert_eq!(several.durability, Durability::Proven);
    assert_eq!(several.warnings, [] as [String; 0]);
    assert_eq!(content(&at, &tensors), 2);
    let first = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(names(&at), [first[0], first[1], INDEX]);
    // Again: the old files keep their names until the new index is there.
    let again = saved(&at, &tensors, 8, 3);
    assert_eq!(again.removed, first);
    assert!(
        again
            .files
            .iter()
            .all(|name| name.starts_with("model-") && name.ends_with("-of-00002.safetensors"))
    );
    assert_eq!(content(&at, &tensors), 3);
    assert_eq!(names(&at).len(), 3);
    // And back to one.
    let one = saved(&at, &tensors, 100, 4);
    assert_eq!(one.removed, again.files);
    assert_eq!(content(&at, &tensors), 4);
    assert_eq!(names(&at), ["model.safetensors"]);
}

#[test]
fn files_that_no_old_index_names_stay() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 8), ("b", 8)]);
    fs::write(folder.path().join("model-00002-of-00002.safetensors"), "leftover").unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let saved = saved(folder.path(), &tensors, 8, 5);
    assert_eq!(saved.removed, [] as [String; 0]);
    assert!(!saved.files.contains(&"model-00002-of-00002.safetensors".to_owned()));
    assert_eq!(content(folder.path(), &tensors), 5);
    assert_eq!(names(folder.path()).len(), 5);
}

#[test]
fn an_index_that_names_model_safetensors_is_followed_by_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 8)]);
    saved(folder.path(), &tensors, 100, 1);
    for (index, removed) in
        [(r#"{"weight_map":{"a":"model.safetensors"}}"#, true), ("damaged", false)]
    {
        fs::write(folder.path().join(INDEX), index).unwrap();
        let save = saved(folder.path(), &tensors, 100, 2);
        assert_eq!(save.files.len(), 1);
        assert_ne!(save.files, ["model.safetensors"]);
        assert_eq!(save.removed.contains(&"model.safetensors".to_owned()), removed);
        assert_eq!(save.warnings.len(), usize::from(!removed), "{:?}", save.warnings);
        assert_eq!(content(folder.path(), &tensors), 2);
        fs::write(folder.path().join("model.safetensors"), "whatever").unwrap();
    }
}

#[test]
fn a_save_given_up_leaves_the_old_model() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 8), ("b", 8)]);
    saved(folder.path(), &tensors, 8, 1);
    let before = names(folder.path());
    drop(written(folder.path(), &tensors, 8, 2));
    drop(written(folder.path(), &tensors, 100, 2));
    assert_eq!(names(folder.path()), before);
    assert_eq!(content(folder.path(), &tensors), 1);
}

#[test]
fn a_commit_that_is_not_wanted_any_more_publishes_nothing() {
    let tensors = specs(&[("a", 8), ("b", 8)]);
    // The old model in one file or two, the new one too.
    for (old, new) in [(8, 8), (8, 100), (100, 8), (100, 100)] {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), &tensors, old, 1);
        let before = names(folder.path());
        // How many looks say yes before one says no: a model with an index is looked at twice.
        let looks_max = if new == 8 { 2_u32 } else { 1 };
        for looks in 0..looks_max {
            let left = Cell::new(looks);
            let go = || left.replace(left.get().saturating_sub(1)) > 0;
            let error = written(folder.path(), &tensors, new, 2).commit_if(go).unwrap_err();
            assert_eq!(error.code(), Code::Cancelled, "{old} {new} {looks}");
            assert_eq!(names(folder.path()), before, "{old} {new} {looks}");
            assert_eq!(content(folder.path(), &tensors), 1);
        }
        written(folder.path(), &tensors, new, 3).commit_if(|| true).unwrap();
        assert_eq!(content(folder.path(), &tensors), 3);
    }
    let folder = tempfile::tempdir().unwrap();
    let dest = folder.path().join("x");
    fs::write(&dest, b"old").unwrap();
    let file = AtomicFile::create(&dest).unwrap();
    write(&file, b"new");
    assert_eq!(file.commit_if(|| false).unwrap_err().code(), Code::Cancelled);
    assert_eq!(fs::read(&dest).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["x"]);
}

#[test]
fn two_saves_at_once_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 8), ("b", 8)]);
    let first = written(folder.path(), &tensors, 8, 1);
    let second = written(folder.path(), &tensors, 8, 2);
    let theirs = second.commit().unwrap();
    assert_eq!(content(folder.path(), &tensors), 2);
    // Both chose the same names; the later one must not take the files of the earlier from under its index, so it takes
    // others, and then replaces the whole model.
    let ours = first.commit().unwrap();
    assert!(ours.files.iter().all(|name| !theirs.files.contains(name)));
    assert_eq!(ours.removed, theirs.files);
    assert_eq!(content(folder.path(), &tensors), 1);
    assert_eq!(names(folder.path()).len(), 3);
}

#[test]
fn what_cannot_be_saved_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let code = |tensors: &[(&str, u64)], max| {
        ModelSave::create(folder.path(), &specs(tensors), None, max).unwrap_err().code()
    };
    assert_eq!(code(&[("a", 8), ("a", 8)], 100), Code::Usage);
    assert_eq!(code(&[("a", 8), ("a", 8)], 8), Code::Usage);
    assert_eq!(code(&[("__metadata__", 8)], 100), Code::Usage);
    assert_eq!(code(&[("a", 8)], 0), Code::Usage);
    assert_eq!(names(folder.path()), [] as [&str; 0]);
}

/// In a child that `killed_at` started: saves up to a step and dies there as from SIGKILL, without destructors.
#[test]
fn child_of_the_killed_tests() {
    let (Ok(step), Ok(folder)) =
        (std::env::var("FOREBAY_TEST_STEP"), std::env::var("FOREBAY_TEST_FOLDER"))
    else {
        return;
    };
    let folder = Path::new(&folder);
    let tensors = specs(&[("a", 8), ("b", 8)]);
    match step.as_str() {
        "created" => std::mem::forget(written(folder, &tensors, 8, 2)),
        "committed" => drop(saved(folder, &tensors, 8, 2)),
        _ => {
            let index = AtomicFile::create(&folder.join(INDEX)).unwrap();
            let save = std::mem::ManuallyDrop::new(written(folder, &tensors, 8, 2));
            let shards = save.shards().len();
            let temps: Vec<_> = names(folder)
                .into_iter()
                .filter(|name| name.starts_with(".forebay-tmp-"))
                .collect();
            assert_eq!(temps.len(), shards + 1);
            // As the commit does: some of the new files have names, the index is not there yet.
            let count = if step == "one_renamed" { 1 } else { shards };
            for (temp, shard) in temps.iter().skip(1).zip(save.shards()).take(count) {
                fs::rename(folder.join(temp), folder.join(&shard.name)).unwrap();
            }
            std::mem::forget(index);
        }
    }
    std::process::abort();
}

#[test]
fn killed_at_any_step_the_old_model_or_the_new_one_is_there() {
    let tensors = specs(&[("a", 8), ("b", 8)]);
    for (old_max, step, expected) in [
        (8, "created", 1),
        (8, "one_renamed", 1),
        (8, "all_renamed", 1),
        (8, "committed", 2),
        (100, "created", 1),
        (100, "one_renamed", 1),
        (100, "all_renamed", 1),
        (100, "committed", 2),
    ] {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), &tensors, old_max, 1);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_of_the_killed_tests", "--nocapture"])
            .env("FOREBAY_TEST_STEP", step)
            .env("FOREBAY_TEST_FOLDER", folder.path())
            .output()
            .unwrap();
        let died = std::os::unix::process::ExitStatusExt::signal(&child.status);
        assert_eq!(died, Some(6), "{step}: {}", String::from_utf8_lossy(&child.stderr));
        assert_eq!(content(folder.path(), &tensors), expected, "{old_max} {step}");
        // The next save finds what the dead process left and does not stumble over it.
        let temps = names(folder.path()).into_iter().filter(|name| name.starts_with('.')).count();
        assert_eq!(clean_stale_temps(folder.path()).unwrap().len(), temps);
        assert_eq!(temps == 0, step == "committed");
        saved(folder.path(), &tensors, 8, 3);
        assert_eq!(content(folder.path(), &tensors), 3);
    }
}

#[test]
fn what_is_saved_has_the_digest_of_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 3)]);
    let save = ModelSave::create(folder.path(), &tensors, None, 100).unwrap();
    let shard = &save.shards()[0];
    shard.file.file().write_all_at(b"abc", shard.layout.offsets[0]).unwrap();
    save.commit().unwrap();
    let model = open_model(folder.path()).unwrap();
    assert!(!model.catalog.has_metadata);
    let tensor = model.catalog.get("a").unwrap();
    let digest = sha256_extent(&model.files[0], tensor.offset, tensor.bytes).unwrap();
    assert_eq!(hex(&digest), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

#[test]
fn an_old_index_cannot_have_files_removed_that_are_no_models() {
    let folder = tempfile::tempdir().unwrap();
    let precious = [".env", "config.json", "thesis.tex", ".hidden.safetensors"];
    for name in precious {
        fs::write(folder.path().join(name), "precious").unwrap();
    }
    fs::create_dir(folder.path().join("d.safetensors")).unwrap();
    let map: Vec<String> = precious.iter().map(|name| format!("{name:?}:{name:?}")).collect();
    let index = format!(r#"{{"weight_map":{{{},"d":"d.safetensors"}}}}"#, map.join(","));
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let saved = saved(folder.path(), &specs(&[("a", 8)]), 100, 6);
    assert_eq!(saved.removed, [] as [String; 0]);
    for name in precious {
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), "precious");
    }
}

#[test]
fn saves_side_by_side_leave_one_model_and_no_orphans() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = specs(&[("a", 8), ("b", 8), ("c", 8)]);
    std::thread::scope(|scope| {
        for fill in 0..2 {
            let (folder, tensors) = (&folder, &tensors);
            scope.spawn(move || {
                for _ in 0..20 {
                    saved(folder.path(), tensors, 8, fill);
                }
            });
        }
    });
    assert!(content(folder.path(), &tensors) < 2);
    // Three files and the index.
    assert_eq!(names(folder.path()).len(), 4, "{:?}", names(folder.path()));
}
