//! `forebay tier`, `forebay config`, `forebay ckpt audit`: on saves of the real thing, in folders as tiers.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::ckpt_make::{State, save};
use crate::util::{forebay, stderr, stdout, text};

/// Two tiers below one folder, with steps 10, 20, 30 on the first.
struct World {
    folder: tempfile::TempDir,
}

const CONFIG: &str = r#"
[[tier]]
name = "near"
place = "near"
keep_last = 1

[[tier]]
name = "far"
place = "far"

[tiers]
audit_log = "audit.log"
grace = 0
look_every = "50 ms"

[agent]
socket = "no-agent.sock"
"#;

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("near")).unwrap();
        std::fs::write(folder.path().join("forebay.toml"), CONFIG).unwrap();
        for (number, step) in [(1, 10), (2, 20), (3, 30)] {
            save(&folder.path().join("near"), step, 2, number, &State::new(number.into()));
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, args: &[&str]) -> Output {
        forebay().current_dir(self.folder.path()).args(args).output().unwrap()
    }

    /// Runs what must succeed; its JSON.
    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn fails(&self, args: &[&str], code: i32, says: &str) {
        let output = self.run(args);
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {shown}");
        assert!(shown.contains(says), "{args:?}: {shown}");
    }

    fn committed(&self, tier: &str) -> Vec<u64> {
        let steps = self.json(&["ckpt", "list", text(&self.path(tier))]);
        let steps = steps["steps"].as_array().unwrap().clone();
        let committed = steps.iter().filter(|step| step["state"] == "committed");
        committed.map(|step| step["step"].as_u64().unwrap()).collect()
    }
}

/// The files of a folder, without records.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    let read = |entry: std::fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    files.map(read).collect()
}

#[test]
fn a_drain_moves_everything_says_so_and_leaves_a_log_that_verifies() {
    let world = World::new();
    let before = world.json(&["tier", "status"]);
    assert_eq!(before["waiting"], 3);
    assert_eq!(before["steps"][0]["copies"], serde_json::json!(["committed", "waiting"]));
    assert!(!world.path("far/step-10").exists(), "a look moves nothing");
    let saved = files(&world.path("near/step-10"));
    let report = world.json(&["tier", "drain"]);
    assert_eq!(report["done"], true, "{report}");
    assert!(report["bytes"].as_u64().unwrap() > 9_000_000);
    assert_eq!(world.committed("far"), [10, 20, 30]);
    assert_eq!(world.committed("near"), [30], "the rules of the first tier");
    assert_eq!(files(&world.path("far/step-10")), saved);
    let verified = world.run(&["ckpt", "verify", "--all", text(&world.path("far"))]);
    assert!(verified.status.success(), "{}", stderr(&verified));

    let log = world.json(&["ckpt", "audit", "audit.log"]);
    let records = log["records"].as_array().unwrap();
    let what: Vec<_> = records.iter().map(|record| record["what"].as_str().unwrap()).collect();
    let count = |wanted: &str| what.iter().filter(|what| **what == wanted).count();
    assert_eq!((count("move"), count("remove")), (3, 2), "{what:?}");
    let head = log["head"].as_str().unwrap();
    assert!(head.starts_with("5:"));
    let shown = world.run(&["ckpt", "audit", "audit.log", "--expect", head]);
    assert!(stdout(&shown).contains("move step 30") && stdout(&shown).contains(head));
    // The end cut off is what only the noted hash shows; a change breaks the chain.
    let path = world.path("audit.log");
    let whole = std::fs::read_to_string(&path).unwrap();
    let cut: String = whole.split_inclusive('\n').take(4).collect();
    std::fs::write(&path, &cut).unwrap();
    assert!(world.run(&["ckpt", "audit", "audit.log"]).status.success());
    world.fails(&["ckpt", "audit", "audit.log", "--expect", head], 1, "truncated");
    std::fs::write(&path, whole.replacen("\"move\"", "\"look\"", 1)).unwrap();
    world.fails(&["ckpt", "audit", "audit.log", "--check"], 1, "error[checksum]");
    world.fails(&["ckpt", "audit", "audit.log", "--expect", "5:xy"], 2, "N:HASH");
}

#[test]
fn pins_and_holds_are_set_respected_by_prune_and_taken_away() {
    let world = World::new();
    world.json(&["tier", "pin", "10", "best"]);
    world.json(&["tier", "hold", "20", "--why", "case 7"]);
    let status = world.json(&["tier", "status"]);
    assert_eq!(status["steps"][0]["pins"], serde_json::json!(["best"]));
    assert_eq!(status["steps"][1]["held"], true);
    let near = world.path("near");
    let prune = ["ckpt", "prune", text(&near), "--keep-last", "1", "--grace", "0"];
    let pruned = world.json(&prune);
    assert_eq!(pruned["unpublished"], serde_json::json!([]));
    world.fails(&["tier", "pin", "99", "best"], 1, "no tier has step 99");
    world.fails(&["tier", "pin", "10", "a/b"], 2, "no name");
    world.fails(&["tier", "unpin", "worst"], 1, "worst");
    world.json(&["tier", "drain"]);
    assert_eq!(world.committed("near"), [10, 20, 30]);
    world.json(&["tier", "unpin", "best"]);
    world.json(&["tier", "release", "20"]);
    let would = world.json(&["tier", "prune", "--dry-run"]);
    let steps: Vec<_> = would["removed"].as_array().unwrap().iter().map(|r| &r["step"]).collect();
    assert_eq!(steps, [10, 20]);
    assert_eq!(world.committed("near"), [10, 20, 30], "a dry run removes nothing");
    world.json(&["tier", "prune"]);
    assert_eq!(world.committed("near"), [30]);
    assert_eq!(world.committed("far"), [10, 20, 30]);
}

/// The other copy is not whole, so these cannot go: that is told, and nobody waits for it.
#[test]
fn a_prune_and_a_drain_end_where_a_removal_cannot_be_done() {
    let world = World::new();
    world.json(&["tier", "drain", "--set", "tier.near.keep_last=9"]);
    for step in [10, 20] {
        let folder = world.path(&format!("far/step-{step}"));
        let file = files(&folder).into_keys().find(|name| name.ends_with(".distcp")).unwrap();
        std::fs::remove_file(folder.join(file)).unwrap();
    }
    world.fails(&["tier", "prune"], 1, "2 copies cannot be removed");
    let output = world.run(&["tier", "drain", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["done"], &report["stuck"]), (&Value::Bool(false), &2.into()));
    assert_eq!(report["removing"], 0);
    assert_eq!(world.committed("near"), [10, 20, 30]);
}

#[test]
fn a_step_is_promoted_and_exported() {
    let world = World::new();
    let told = world.json(&["tier", "promote", "20", "golden", "--to", "models", "--export"]);
    assert!(told["done"].as_str().unwrap().contains("golden"), "{told}");
    let golden = world.path("models/golden");
    assert!(world.run(&["ckpt", "verify", text(&golden)]).status.success());
    let exported = world.path("models/golden-safetensors");
    let diff = world.run(&["ckpt", "diff", text(&golden), text(&exported), "--select", "model.*"]);
    assert!(stdout(&diff).contains("model.") || diff.status.success(), "{}", stderr(&diff));
    world.fails(&["tier", "promote", "30", "golden", "--to", "models"], 1, "lost_commit");
}

#[test]
fn what_is_wrong_with_a_tier_is_told_and_a_drain_ends_in_time() {
    let world = World::new();
    let lost = ["--set", "tier.far.place=no/such/mount"];
    let status = world.run(&[&["tier", "status"], &lost[..]].concat());
    assert_eq!(status.status.code(), Some(1));
    assert!(stdout(&status).contains("down") && stderr(&status).contains("mount"));
    let drain = [&["tier", "drain", "--timeout", "2s", "--json"], &lost[..]].concat();
    let output = world.run(&drain);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["done"], &report["unseen"][0]), (&Value::Bool(false), &"far".into()));
    // It waits between looks, and what lasts is told once: here, and in the log.
    assert!(report["errors"].as_array().unwrap().len() < 12, "{report}");
    let told = stderr(&output);
    assert_eq!(told.matches("no/such/mount").count(), 2, "{told}");
    assert_eq!(told.matches("warning:").count(), 1, "{told}");
    assert!(told.contains("tier=1") && !told.contains("Some(") && !told.contains("None"), "{told}");
    world.fails(&["tier", "pause"], 1, "no agent");
    world.fails(&["tier", "status", "--config", "none.toml"], 1, "none.toml");
    world.fails(&["tier", "status", "--set", "tiers.look_evry=1"], 2, "tiers.look_every");
    std::fs::write(world.path("forebay.toml"), "[[tier]]\nname = \"a\"\nplac = \"x\"\n").unwrap();
    world.fails(&["tier", "status"], 2, "`place`");
    std::fs::write(world.path("forebay.toml"), "").unwrap();
    world.fails(&["tier", "status"], 2, "no tiers");
}

#[test]
fn the_configuration_says_where_every_value_came_from() {
    let world = World::new();
    let output = forebay()
        .current_dir(world.folder.path())
        .env("FOREBAY_TIERS_GRACE", "5 min")
        .args(["config", "--json", "--set", "tier.near.capacity=1GB"])
        .output()
        .unwrap();
    let config: Value = serde_json::from_slice(&output.stdout).unwrap();
    let settings = config["settings"].as_array().unwrap();
    let of = |key: &str| settings.iter().find(|setting| setting["key"] == key).unwrap();
    let grace = of("tiers.grace");
    assert_eq!(
        (&grace["value"], &grace["from"]["name"]),
        (&300.0.into(), &"FOREBAY_TIERS_GRACE".into())
    );
    assert_eq!(of("tier.near.capacity")["from"]["kind"], "flag");
    assert_eq!(of("tier.near.keep_last")["from"]["line"], 5);
    assert_eq!(of("tier.far.keep_last")["from"]["kind"], "default");
    let shown = stdout(&world.run(&["config"]));
    assert!(shown.contains("forebay.toml:5") && !shown.contains(".store.region"), "{shown}");
}
