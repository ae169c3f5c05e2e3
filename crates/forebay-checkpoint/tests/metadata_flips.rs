//! Bits of a step's `.metadata`, flipped one by one: nothing is removed, nothing wrong or unchecked is loaded, no older
//! step is taken for the latest, and `verify` finds it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod save_support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_checkpoint::commit::{GcOptions, gc, latest};
use forebay_checkpoint::open::{Checkpoint, Origin, verify_folder};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::restore::Reader;
use forebay_error::{Category, Error};
use forebay_tensor::Region;

use save_support::{Rank, bytes, root, save};

const SEED: u64 = 3;
/// The last bytes of `.metadata`, where the seal is looked for.
const TAIL_BYTES: usize = 4096;

fn saved() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut rank = Rank::new();
    rank.tensor("model.w", &[4, 3], Region::whole(&[4, 3]), SEED);
    rank.object("step", b"\x80\x02K\x2a.");
    save(&root(folder.path()), rank, (0, 1), 1).unwrap();
    let step = folder.path().join("step-7");
    (folder, step)
}

/// Calls `look` with bits of the tail flipped, of each byte one or all; returns how many calls there were.
fn with_flips(step: &Path, all: bool, mut look: impl FnMut(usize)) -> usize {
    let path = step.join(".metadata");
    let sound = std::fs::read(&path).unwrap();
    let bits = sound.len().saturating_sub(TAIL_BYTES) * 8..sound.len() * 8;
    let bits = bits.filter(|bit| all || (bit / 8) % 8 == bit % 8);
    let bits: Vec<usize> = bits.collect();
    for bit in bits.iter().copied() {
        let mut bad = sound.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, &bad).unwrap();
        look(bit);
    }
    std::fs::write(&path, &sound).unwrap();
    bits.len()
}

fn names(step: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(step).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Damage is called damage, not want of a file or a wrong call.
fn is_told(error: &Error) -> bool {
    error.code().category() == Category::Data
}

#[test]
fn a_collector_removes_nothing_of_a_commit_whose_metadata_is_damaged() {
    let (folder, step) = saved();
    let root = root(folder.path());
    let zero = Duration::ZERO;
    let options = GcOptions { grace: zero, settle: zero, ..GcOptions::default() };
    // What the save itself left to tidy.
    gc(&root, &options).unwrap();
    let before = names(&step);
    let mut kept = 0;
    with_flips(&step, false, |bit| {
        let report = gc(&root, &options).unwrap();
        assert!(report.removed.is_empty(), "bit {bit}: {report:?}");
        kept += report.failed.len();
    });
    assert_eq!(names(&step), before);
    // Of the seal and what it repeats.
    assert!(kept > 2 * (10 + 29 + 64), "{kept}");
}

#[test]
fn loads_fail_or_give_what_was_saved_with_its_checksums() {
    let (_folder, step) = saved();
    let (mut opened, mut failed) = (0, 0);
    with_flips(&step, true, |bit| {
        let (whole, some) = (Checkpoint::open(&step), Reader::open(&step));
        assert_eq!(whole.is_ok(), some.is_ok(), "bit {bit}");
        match (whole, some) {
            (Ok(whole), Ok(some)) => {
                assert!(matches!(whole.origin, Origin::Forebay(_)), "bit {bit}: unchecked");
                assert_eq!(some.origin(), &whole.origin);
                let entry = whole.get("model.w").unwrap();
                assert!(entry.chunks().iter().all(|chunk| chunk.data.is_some()), "bit {bit}");
                assert_eq!(whole.read_tensor(entry).unwrap(), bytes(SEED, 48), "bit {bit}");
                opened += 1;
            }
            (Err(error), Err(_)) => {
                assert!(is_told(&error), "bit {bit}: {error}");
                failed += 1;
            }
            _ => {}
        }
    });
    assert!(opened > 1000 && failed > 1000, "{opened} {failed}");
}

#[test]
fn verify_finds_each_and_latest_steps_over_none() {
    let (folder, step) = saved();
    let older = folder.path().join("step-6");
    std::fs::create_dir(&older).unwrap();
    for name in names(&step).iter().filter(|name| *name != ".forebay") {
        std::fs::copy(step.join(name), older.join(name)).unwrap();
    }
    let root = root(folder.path());
    let mut sound = 0;
    let bits = with_flips(&step, false, |bit| {
        match latest(&root) {
            Ok(state) => {
                assert_eq!(state.map(|state| state.step), Some(7), "bit {bit}");
                sound += 1;
            }
            Err(error) => assert!(is_told(&error), "bit {bit}: {error}"),
        }
        match verify_folder(&step, &Unwatched) {
            Ok(found) => assert!(!found.is_sound(), "bit {bit} is not missed"),
            Err(error) => assert!(is_told(&error), "bit {bit}: {error}"),
        }
    });
    assert!(sound > 0 && sound < bits);
    assert!(verify_folder(&step, &Unwatched).unwrap().is_sound());
}

#[test]
fn a_step_of_the_first_version_is_sound_and_its_metadata_has_no_stamp() {
    let step = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/old/step-1");
    let verified = verify_folder(&step, &Unwatched).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.faults);
    assert!(matches!(Checkpoint::open(&step).unwrap().origin, Origin::Forebay(_)));
    let metadata = std::fs::read(step.join(".metadata")).unwrap();
    assert!(!metadata.windows(6).any(|window| window == b"crc32:"));
}

#[test]
fn metadata_of_ours_without_any_line_is_no_checkpoint_of_torch() {
    let (_folder, step) = saved();
    let path = step.join(".metadata");
    let sound = std::fs::read(&path).unwrap();
    // What a reader that keeps neither the line nor the dict would write: the files' names are left.
    let at = |what: &[u8]| sound.windows(what.len()).rposition(|window| window == what).unwrap();
    let mut bad = sound.clone();
    for (what, with) in [("forebay:1 ", "________: "), ("manifest_sha256", "_______________")] {
        let start = at(what.as_bytes());
        bad[start..start + what.len()].copy_from_slice(with.as_bytes());
    }
    let prefix = b"forebay.manifest-";
    while let Some(start) = bad.windows(prefix.len()).position(|window| window == prefix) {
        bad[start] = b'_';
    }
    std::fs::write(&path, &bad).unwrap();
    let error = Checkpoint::open(&step).unwrap_err();
    assert_eq!(error.code().as_str(), "invalid_metadata");
    assert_eq!(error.hints().len(), 2, "{error:?}");
    // To say what is left of it, it is read all the same.
    let found = verify_folder(&step, &Unwatched).unwrap();
    assert!(!found.is_sound() && found.values == (1, 1), "{found:?}");
}
