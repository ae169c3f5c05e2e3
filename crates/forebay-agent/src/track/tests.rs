//! Tests of folders: races with the end, what is kept and what is forgotten.

use super::*;
use crate::job::JOBS_MAX;
use crate::testing::Still;
use forebay_tier::config::{Beside, Config};
use forebay_tier::status::Status;
use std::path::Path;

fn trackers(folder: &Path) -> Arc<Trackers> {
    let tier = |name: &str| format!("[[tier]]\nname = \"{name}\"\nplace = \"{name}\"\n");
    of(folder, &(tier("local") + &tier("shared")))
}

fn of(folder: &Path, text: &str) -> Arc<Trackers> {
    let config = Config::from_text(text, &folder.join("forebay.toml"), &Beside::default());
    let tiers = Tiers::open(&config.unwrap()).unwrap();
    Arc::new(Trackers::new(tiers, Arc::new(Jobs::default())))
}

fn open(path: &Path) -> OwnedFd {
    std::fs::create_dir_all(path).unwrap();
    std::fs::File::open(path).unwrap().into()
}

#[test]
fn what_was_kept_is_taken_up_when_that_is_possible() {
    let folder = tempfile::tempdir().unwrap();
    let trackers = trackers(folder.path());
    for number in 0..JOBS_MAX {
        let work = Still::new(Status::default());
        trackers.jobs.add(&format!("j{number}"), work).unwrap();
    }
    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let removed = open(&folder.path().join("b"));
    std::fs::remove_dir(folder.path().join("b")).unwrap();
    let run7 = open(&folder.path().join("a"));
    let kept = [("run7", run7), ("no", file), ("removed", removed)];
    let left = trackers.take_up(kept.map(|(name, folder)| (name.to_owned(), folder)).into());
    assert_eq!(left.len(), 1, "what is no folder never will be one");
    assert_eq!(left[0].0, "run7");
    trackers.jobs.remove("j0").unwrap();
    assert!(trackers.take_up(left).is_empty());
    assert_eq!(trackers.jobs.find(Some("run7")).unwrap().name(), "run7");
    let names = |folders: Folders| folders.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(trackers.stop()), ["run7"], "for who goes on");
}

#[test]
fn a_configuration_with_nowhere_to_move_to_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[[tier]]\nname = \"only\"\nplace = \"only\"\n";
    let trackers = of(folder.path(), text);
    let kept = vec![("run7".to_owned(), open(&folder.path().join("a")))];
    trackers.resume(kept).unwrap();
    assert!(trackers.jobs.find(Some("run7")).is_err());
    assert_eq!(trackers.stop().len(), 1);
}

#[test]
fn a_folder_that_was_removed_makes_room_for_another() {
    let folder = tempfile::tempdir().unwrap();
    let trackers = trackers(folder.path());
    let uid = rustix::process::geteuid().as_raw();
    let a = folder.path().join("a");
    trackers.track("run7", open(&a), uid).unwrap();
    let other = trackers.track("run7", open(&folder.path().join("b")), uid).unwrap_err();
    assert_eq!(other.code(), Code::AlreadyExists);
    std::fs::remove_dir(&a).unwrap();
    trackers.track("run7", open(&a), uid).unwrap();
    trackers.track("run7", open(&a), uid).unwrap();
    assert_eq!(trackers.stop().len(), 1);
}

#[test]
fn nothing_begins_after_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let trackers = trackers(folder.path());
    let uid = rustix::process::geteuid().as_raw();
    let a = folder.path().join("a");
    trackers.track("one", open(&a), uid).unwrap();
    let many = |number: usize| format!("t{number}");
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (trackers, a) = (&trackers, &a);
            scope.spawn(move || trackers.track(&many(number), open(a), uid));
        }
        trackers.stop();
    });
    let refused = trackers.track("two", open(&a), uid).unwrap_err();
    assert_eq!(refused.code(), Code::Cancelled);
    assert!(trackers.jobs.all().is_empty(), "a job outlives the end");
    assert!(trackers.lock().tracked.is_empty());
}

#[test]
fn a_name_is_taken_until_its_runner_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let trackers = trackers(folder.path());
    let uid = rustix::process::geteuid().as_raw();
    let a = folder.path().join("a");
    trackers.track("one", open(&a), uid).unwrap();
    let place = trackers.lock().tracked.insert("one".to_owned(), Place::Ending);
    assert_eq!(trackers.track("one", open(&a), uid).unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(trackers.untrack("one", uid).unwrap_err().code(), Code::NotFound);
    trackers.lock().tracked.insert("one".to_owned(), place.unwrap());
    trackers.untrack("one", uid).unwrap();
    trackers.track("one", open(&a), uid).unwrap();
    trackers.stop();
}

#[test]
fn the_configured_folder_is_not_moved_twice() {
    let folder = tempfile::tempdir().unwrap();
    let trackers = trackers(folder.path());
    trackers.jobs.add(CONFIGURED, Still::new(Status::default())).unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let local = folder.path().join("local");
    let told = trackers.track("run7", open(&local), uid).unwrap();
    let shared = folder.path().join("shared");
    assert_eq!(told, json!({"job": "default", "places": [local, shared]}));
    let copies = trackers.track("run7", open(&shared), uid).unwrap_err();
    assert_eq!(copies.code(), Code::Usage);
    assert!(trackers.stop().is_empty());
}

#[test]
fn what_is_handed_over_has_its_records_itself() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let text = format!(
        "[[tier]]\nname = \"drive\"\nplace = \"{}\"\nrecords = \"{}\"\n\
         [[tier]]\nname = \"shared\"\nplace = \"{}\"\n",
        at("drive"),
        at("shared"),
        at("shared"),
    );
    let trackers = of(folder.path(), &text);
    let uid = rustix::process::geteuid().as_raw();
    trackers.track("run7", open(&folder.path().join("a")), uid).unwrap();
    let state = trackers.lock();
    let Some(Place::Moved(tracked)) = state.tracked.get("run7") else { panic!("not moved") };
    let first = &tracked.runner.tiers().config().tiers[0];
    assert_eq!(first.url(), format!("fd://{}", at("a")));
    drop(state);
    trackers.stop();
}

#[test]
fn who_hands_a_folder_over_is_told_whole_paths() {
    let here = std::env::current_dir().unwrap();
    assert_eq!(absolute("a/b"), here.join("a/b").display().to_string());
    assert_eq!(absolute("file:/a"), "/a");
    for place in ["/a/b", "s3://bucket/x", "file:///a/b", "memory:x"] {
        assert_eq!(absolute(place), place);
    }
}
