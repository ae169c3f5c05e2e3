//! `forebay ckpt list`, `latest`, `show`, `du`, `prune`, `gc`: on saves of the real thing.

use std::path::Path;

use serde_json::{Value, json};

use crate::ckpt_make::{State, save, try_save};
use crate::util::{forebay, json_of, run, stderr, stdout, text};

/// Three commits, one of which was saved twice, and an attempt that did not end.
pub(crate) fn root() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (number, step) in [(1, 100), (2, 200), (3, 300), (4, 200)] {
        save(folder.path(), step, 2, number, &State::new(number.into()));
    }
    let left = folder.path().join("step-400");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("00000abc-5_0_0.distcp"), [1; 5000]).unwrap();
    folder
}

fn ckpt(args: &[&str], root: &Path) -> Value {
    json_of(forebay().arg("ckpt").args(args).arg("--json").arg(root))
}

fn steps(listing: &Value) -> Vec<(u64, String)> {
    let rows = listing["steps"].as_array().unwrap();
    let row =
        |row: &Value| (row["step"].as_u64().unwrap(), row["state"].as_str().unwrap().to_owned());
    rows.iter().map(row).collect()
}

#[test]
fn list_tells_committed_pending_and_dead_and_marks_the_latest() {
    let folder = root();
    let listing = ckpt(&["list"], folder.path());
    let state = |step, state: &str| (step, state.to_owned());
    let wanted = [
        state(100, "committed"),
        state(200, "committed"),
        state(300, "committed"),
        state(400, "pending"),
    ];
    assert_eq!(steps(&listing), wanted);
    assert_eq!(listing["latest"], 300);
    let row = &listing["steps"][1];
    assert_eq!(
        (&row["commit"]["attempt"], &row["commit"]["ranks"]),
        (&json!("00000abc-4"), &json!(2))
    );
    // The save that was replaced is still there.
    assert_eq!(row["attempts"][0]["attempt"], "00000abc-2");
    assert_eq!(row["attempts"][0]["state"], "replaced");
    let bytes: u64 = std::fs::read_dir(folder.path().join("step-100"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    assert_eq!(listing["steps"][0]["bytes"], bytes);
    // One that failed: its data file is there already, by somebody else.
    std::fs::create_dir(folder.path().join("step-500")).unwrap();
    std::fs::write(folder.path().join("step-500/00000abc-6_0_0.distcp"), b"in the way").unwrap();
    try_save(folder.path(), 500, 1, 6, &State::new(6)).unwrap_err();
    let listing = ckpt(&["list"], folder.path());
    assert_eq!(steps(&listing)[4], state(500, "dead"));
    let why = listing["steps"][4]["attempts"][0]["why"].as_str().unwrap();
    assert!(why.contains("rank 0"), "{why}");
    assert_eq!(listing["latest"], 300);
    let shown = stdout(&run(&["ckpt", "list", text(folder.path())]));
    let lines: Vec<&str> = shown.lines().collect();
    let of = |step: &str| lines.iter().filter(|line| line.trim_start().starts_with(step)).count();
    assert_eq!((lines.len(), of("200"), of("400")), (7, 2, 1), "{shown}");
    let latest = lines.iter().find(|line| line.trim_start().starts_with("300")).unwrap();
    assert!(latest.contains("committed") && latest.ends_with("latest"), "{shown}");
}

#[test]
fn latest_prints_the_step_or_fails() {
    let folder = root();
    let output = run(&["ckpt", "latest", text(folder.path())]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "300\n"));
    let newest = ckpt(&["latest"], folder.path());
    assert!(newest["path"].as_str().unwrap().ends_with("step-300"));
    let empty = tempfile::tempdir().unwrap();
    let output = run(&["ckpt", "latest", text(empty.path())]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error[not_found]"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
    // A step is no root, and is not taken for an empty one.
    let output = run(&["ckpt", "list", text(&folder.path().join("step-100"))]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn a_damaged_newest_step_is_told_by_latest_and_listed() {
    let folder = root();
    let path = folder.path().join("step-300/.metadata");
    let mut bytes = std::fs::read(&path).unwrap();
    let seal = bytes.windows(10).rposition(|window| window == b"forebay:1 ").unwrap();
    bytes[seal + 9] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let output = run(&["ckpt", "latest", text(folder.path())]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""));
    let said = stderr(&output);
    assert!(said.starts_with("error[invalid_metadata]") && said.contains("step 300"), "{said}");
    assert!(said.contains("to go on from step 200"), "{said}");
    let output = forebay().args(["ckpt", "list", "--json"]).arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("warning:"), "{}", stderr(&output));
    let listing: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&listing["latest"], steps(&listing).len()), (&Value::Null, 4));
    let damage = listing["steps"][2]["commit"]["damage"].as_str().unwrap();
    assert!(damage.contains("invalid_metadata"), "{damage}");
    // What is named is used.
    let shown = ckpt(&["show", "--step", "200"], folder.path());
    assert_eq!(shown["origin"], "forebay");
    // A collection leaves the folder as it is.
    let output = run(&["ckpt", "gc", "--grace", "0", text(folder.path())]);
    assert!(stderr(&output).contains("nothing here is removed"), "{}", stderr(&output));
    bytes[seal + 9] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let verified = run(&["ckpt", "verify", text(&folder.path().join("step-300"))]);
    assert_eq!(verified.status.code(), Some(0), "{}", stderr(&verified));
}

#[test]
fn show_tells_who_wrote_a_step_and_what_is_in_it() {
    let folder = root();
    for args in [&["show", "--step", "200"][..], &["show"]] {
        let shown = ckpt(args, folder.path());
        let step = if args.len() > 1 { 200 } else { 300 };
        assert_eq!((&shown["step"], &shown["info"]["step"]), (&json!(step), &json!(step)));
        assert_eq!(shown["origin"], "forebay");
        assert_eq!(shown["tensors"]["count"], 9);
        assert_eq!(shown["tensors"]["dtypes"]["BF16"]["bytes"], 300 * 129 * 2);
        assert_eq!(shown["tensors"]["largest"][0], "model.embed.weight");
        assert_eq!(shown["tensors"]["largest"].as_array().unwrap().len(), 5);
        let all = shown["tensors"]["all"].as_array().unwrap();
        let sum = |key: &str| all.iter().map(|row| row[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!((all.len(), sum("bytes")), (9, shown["tensors"]["bytes"].as_u64().unwrap()));
        assert_eq!(sum("chunks"), shown["tensors"]["chunks"].as_u64().unwrap());
        assert_eq!(shown["side_files"], json!(["notes.txt"]));
        let objects = shown["objects"].as_array().unwrap();
        let object = |name: &str| objects.iter().find(|row| row["name"] == name).unwrap();
        assert_eq!(object("step")["value"], 42);
        assert!(object("odd")["opaque"].as_str().unwrap().contains("getcwd"));
    }
    let step = folder.path().join("step-100");
    let output = run(&["ckpt", "show", text(&step)]);
    assert!(stdout(&output).contains("a checkpoint of Forebay"), "{}", stdout(&output));
    let help = run(&["ckpt", "list", "--help"]);
    assert!(stdout(&help).contains("`2/4` says that 2\nof its 4 ranks"), "{}", stdout(&help));
    // The lease that was held meanwhile is gone.
    assert!(!step.join(".forebay/readers").exists());
    let stock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/dcp/plain_w1/ckpt");
    let shown = ckpt(&["show"], &stock);
    assert_eq!(shown["origin"], "dcp");
    assert!(shown["files"][0]["bytes"].as_u64().unwrap() > 0);
    let output = run(&["ckpt", "show", "--step", "7", text(folder.path())]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    assert!(error.starts_with("error[not_found]") && error.contains("100, 200, 300"), "{error}");
}

#[test]
fn du_adds_up() {
    let folder = root();
    let usage = ckpt(&["du"], folder.path());
    let number = |key: &str| usage[key].as_u64().unwrap();
    let parts = ["committed_bytes", "pending_bytes", "dead_bytes", "other_bytes"];
    assert_eq!(parts.iter().map(|key| number(key)).sum::<u64>(), number("total_bytes"));
    assert_eq!(number("pending_bytes"), 5000);
    let replaced = usage["steps"][1]["dead_bytes"].as_u64().unwrap();
    let committed = usage["steps"][1]["committed_bytes"].as_u64().unwrap();
    assert!(replaced > committed / 2, "{replaced} of {committed}");
    let shown = stdout(&run(&["ckpt", "du", text(folder.path())]));
    assert!(shown.contains("in all"), "{shown}");
}

/// Names and lengths of all files below a folder, sorted.
fn tree(folder: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(tree(&path)),
            false => found.push((text(&path).to_owned(), path.metadata().unwrap().len())),
        }
    }
    found.sort();
    found
}

#[test]
fn prune_keeps_what_it_is_told_to_and_dry_runs_change_nothing() {
    let folder = root();
    let before = tree(folder.path());
    let args = ["prune", "--keep-last", "1", "--pin", "100", "--grace", "0"];
    let dry = ckpt(&[&args[..], &["--dry-run"]].concat(), folder.path());
    assert_eq!((&dry["dry_run"], &dry["unpublished"]), (&json!(true), &json!([200])));
    assert!(dry["unpublished_bytes"].as_u64().unwrap() > 100, "{dry}");
    let said = run(&["ckpt", "prune", text(folder.path()), "--keep-every", "300", "--dry-run"]);
    assert!(stdout(&said).contains("step 200: would be pruned, "), "{}", stdout(&said));
    assert_eq!(tree(folder.path()), before);
    let pruned = ckpt(&[&args[..], &["--wait"]].concat(), folder.path());
    assert_eq!((&pruned["dry_run"], &pruned["unpublished"]), (&json!(false), &json!([200])));
    let listing = ckpt(&["list"], folder.path());
    let committed: Vec<u64> = steps(&listing)
        .into_iter()
        .filter(|(_, state)| state == "committed")
        .map(|(step, _)| step)
        .collect();
    assert_eq!(committed, [100, 300]);
    for step in ["step-100", "step-300"] {
        let output = run(&["ckpt", "verify", text(&folder.path().join(step))]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let every =
        ckpt(&["prune", "--keep-last", "1", "--keep-every", "50", "--dry-run"], folder.path());
    assert_eq!(every["unpublished"], json!([]));
    let output = run(&["ckpt", "prune", text(folder.path()), "--keep-last", "0"]);
    assert_eq!(output.status.code(), Some(2));
    let output = run(&["ckpt", "prune", text(folder.path())]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("--keep-last <N>|--keep-every <K>"), "{said}");
    assert!(!stdout(&run(&["ckpt", "gc", "--help"])).contains("--wait"));
}

#[test]
fn gc_removes_what_is_left_over_and_nothing_else() {
    let folder = root();
    let before = tree(folder.path());
    // All of it is young.
    let young = ckpt(&["gc"], folder.path());
    assert_eq!(young["removed"], json!([]));
    assert_eq!(young["kept"].as_array().unwrap().len(), 2);
    let dry = ckpt(&["gc", "--grace", "0", "--dry-run"], folder.path());
    let files = |report: &Value| -> Vec<String> {
        let removed = report["removed"].as_array().unwrap().iter();
        let mut files: Vec<String> =
            removed.map(|row| row["file"].as_str().unwrap().to_owned()).collect();
        files.sort();
        files
    };
    assert!(files(&dry).contains(&"step-400/00000abc-5_0_0.distcp".to_owned()), "{dry}");
    assert!(files(&dry).iter().any(|file| file.starts_with("step-200/00000abc-2_0_")), "{dry}");
    assert_eq!(tree(folder.path()), before);
    let done = ckpt(&["gc", "--grace", "0"], folder.path());
    assert_eq!(files(&dry).iter().filter(|file| !files(&done).contains(file)).count(), 0);
    assert!(!folder.path().join("step-400").join("00000abc-5_0_0.distcp").exists());
    for step in ["step-100", "step-200", "step-300"] {
        let output = run(&["ckpt", "verify", text(&folder.path().join(step))]);
        let said = stderr(&output);
        assert_eq!((output.status.code(), said.as_str()), (Some(0), ""), "{step}");
    }
}

#[test]
fn a_link_to_a_step_is_no_step_and_nothing_goes_through_it() {
    let folder = root();
    std::os::unix::fs::symlink("step-100", folder.path().join("step-900")).unwrap();
    let listing = ckpt(&["list"], folder.path());
    assert_eq!(listing["latest"], 300);
    assert!(steps(&listing).iter().all(|(step, _)| *step != 900), "{listing}");
    let said = stderr(&run(&["ckpt", "list", text(folder.path())]));
    assert!(said.contains("step-900 is a link"), "{said}");
    let args = ["prune", "--keep-last", "1", "--pin", "100", "--grace", "0", "--wait"];
    assert_eq!(ckpt(&args, folder.path())["unpublished"], json!([200]));
    for step in ["step-100", "step-300", "step-900"] {
        let output = run(&["ckpt", "verify", text(&folder.path().join(step))]);
        assert_eq!(output.status.code(), Some(0), "{step}: {}", stderr(&output));
    }
}

#[test]
fn removed_and_lost_steps_are_told_apart() {
    let folder = root();
    let report = ckpt(&["prune", "--keep-every", "300"], folder.path());
    assert_eq!(report["unpublished"], json!([100, 200]), "the newest stays");
    let why = report["kept"][0]["why"].as_str().unwrap();
    assert!(why.contains("go in 900 s") || why.contains("go in 89"), "{why}");
    std::fs::remove_file(folder.path().join("step-300/.metadata")).unwrap();
    let listing = ckpt(&["list"], folder.path());
    let state = |step: u64, state: &str| (step, state.to_owned());
    assert_eq!(
        steps(&listing)[..3],
        [state(100, "removed"), state(200, "removed"), state(300, "lost")]
    );
    let shown = stdout(&run(&["ckpt", "list", text(folder.path())]));
    assert!(shown.contains("s until a prune or gc may take its files"), "{shown}");
    let folder_300 = folder.path().join("step-300");
    let whole = ["ckpt", "verify", text(folder.path()), "--step", "300"];
    for args in [&whole[..], &["ckpt", "verify", text(&folder_300)]] {
        let said = stderr(&run(args));
        assert!(said.contains("step 300 was committed; its .metadata is missing"), "{said}");
    }
}

#[test]
fn a_selection_or_a_rule_that_fits_nothing_is_told() {
    let folder = root();
    let (a, b) = (folder.path().join("step-100"), folder.path().join("step-300"));
    let output = run(&["ckpt", "diff", text(&a), text(&b), "--select", "typo*"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("error[usage]: no tensor is selected"));
    let to = folder.path().join("out");
    let output = run(&["ckpt", "export", text(&a), "--to", text(&to), "--rename", "typo.=x."]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("the rule `typo.=x.` fits no name"), "{}", stderr(&output));
    let inside = a.join(".metadata");
    let args = ["ckpt", "export", text(&a), "--to", text(&inside), "--format", "torch"];
    let output = run(&[&args[..], &["--overwrite"]].concat());
    assert_eq!(output.status.code(), Some(2));
    let output = run(&["ckpt", "verify", text(&a)]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}
