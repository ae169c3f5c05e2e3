//! `forebay ckpt gc` on a folder that is one checkpoint.

use serde_json::Value;

use crate::ckpt::root;
use crate::util::{forebay, stderr};

#[test]
fn what_a_save_left_in_a_folder_that_is_a_checkpoint_is_collected_and_the_checkpoint_stays() {
    let folder = root();
    let step = folder.path().join("step-300");
    let left = step.join("00000abc-77_0_0.distcp");
    std::fs::write(&left, [1; 5000]).unwrap();
    std::fs::write(step.join("notes.txt"), b"of somebody").unwrap();
    let gc = |more: &[&str]| -> Value {
        let output =
            forebay().args(["ckpt", "gc", "--json"]).args(more).arg(&step).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(gc(&[])["removed_bytes"], 0, "it is young");
    let dry = gc(&["--grace", "0", "--dry-run"]);
    assert_eq!(dry["removed"][0]["file"], "00000abc-77_0_0.distcp", "{dry}");
    assert!(left.exists());
    let done = gc(&["--grace", "0"]);
    assert!(done["removed_bytes"].as_u64() >= Some(5000), "{done}");
    assert!(!left.exists() && step.join("notes.txt").exists());
    let verified = forebay().args(["ckpt", "verify"]).arg(&step).output().unwrap();
    assert_eq!(verified.status.code(), Some(0), "{}", stderr(&verified));
}
