//! Residency of real files: as owner, as a reader who does not own them, through overlayfs and with
//! holes.
//!
//! What needs root (another user, a mount) says why it was skipped where there is no root.

#![expect(
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests; clippy allows these only in the test functions themselves"
)]

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_topology::residency::{self, Method, Resident};
use forebay_topology::{DirectAdvice, FsKind, file_profile, page_size};
use rustix::fs::Advice;

const MIB: u64 = 1 << 20;
const FILE_LEN: u64 = 16 * MIB;
const GRANULE_LEN: u64 = 4 * MIB;

/// Set in a child process that runs as another user: the file that it asks about.
const CHILD_FILE: &str = "FOREBAY_TEST_RESIDENCY_FILE";
const NOBODY: u32 = 65_534;

/// A folder on the disk that the build folder is on: `/tmp` may be a tmpfs, whose pages never
/// leave.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

fn write_file(path: &Path) -> File {
    let bytes: Vec<u8> = (0..FILE_LEN).map(|at| (at / 4096 % 251) as u8).collect();
    fs::write(path, bytes).unwrap();
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    file
}

fn drop_pages(file: &File) {
    rustix::fs::fadvise(file, 0, None, Advice::DontNeed).unwrap();
}

/// Reads without readahead beyond the range.
fn read_pages(path: &Path, offset: u64, len: u64) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, offset).unwrap();
}

/// Whether the pages of files here can be dropped; tmpfs and some others keep them.
fn can_drop(file: &File, path: &Path) -> bool {
    let profile = file_profile(file, path).unwrap();
    let keeps = profile.direct == DirectAdvice::Never || profile.kind == FsKind::Zfs;
    if keeps {
        println!("skipped: {} does not drop pages", profile.kind);
    }
    !keeps
}

fn probe(file: &File) -> Resident {
    residency::probe(file, 0, FILE_LEN).unwrap()
}

#[test]
fn the_owner_sees_what_is_there() {
    let folder = folder();
    let path = folder.path().join("file");
    let file = write_file(&path);
    if !can_drop(&file, &path) {
        return;
    }
    let full = probe(&file);
    assert_eq!(full.pages, FILE_LEN / page_size() as u64);
    assert!(full.is_resident(), "{full:?}");
    drop_pages(&file);
    let empty = probe(&file);
    assert!(empty.share() < 0.1, "{empty:?}");
    read_pages(&path, 0, 8 * MIB);
    let map = residency::map(&file, 0, FILE_LEN, GRANULE_LEN).unwrap();
    assert_eq!(map.resident, [true, true, false, false], "{map:?}");
    assert!(map.is_resident_at(0) && map.is_resident_at(8 * MIB - 1));
    assert!(!map.is_resident_at(8 * MIB) && !map.is_resident_at(FILE_LEN));
    if map.method == Method::Cachestat {
        assert_eq!(probe(&file).dirty_pages, Some(0));
    }
}

#[test]
fn ranges_end_with_the_file() {
    let folder = folder();
    let path = folder.path().join("file");
    let file = write_file(&path);
    let page = page_size() as u64;
    let ask = |offset, len| residency::probe(&file, offset, len).unwrap().pages;
    assert_eq!(ask(0, 0), 0);
    assert_eq!(ask(page - 1, 2), 2);
    assert_eq!(ask(FILE_LEN - 1, 1), 1);
    assert_eq!(ask(FILE_LEN, 1), 0);
    assert_eq!(ask(0, u64::MAX), FILE_LEN / page);
    assert_eq!(ask(u64::MAX, u64::MAX), 0);
    let map = |offset, len, granule| residency::map(&file, offset, len, granule);
    assert_eq!(map(MIB, u64::MAX, GRANULE_LEN).unwrap().resident.len(), 4);
    assert_eq!(map(FILE_LEN, MIB, GRANULE_LEN).unwrap().resident.len(), 0);
    assert_eq!(map(0, MIB, 0).unwrap_err().code().as_str(), "usage");
    let large = File::create(folder.path().join("sparse")).unwrap();
    large.set_len(1 << 40).unwrap();
    assert_eq!(residency::map(&large, 0, 1 << 40, 1).unwrap_err().code().as_str(), "usage");
}

#[test]
fn what_is_no_file_is_unknown() {
    let (reader, _writer) = io::pipe().unwrap();
    let pipe = File::from(std::os::fd::OwnedFd::from(reader));
    assert_eq!(residency::probe(&pipe, 0, MIB).unwrap().method, Method::Unknown);
}

/// Run in a child as another user by the test below; does nothing in an ordinary run.
#[test]
fn child_of_another_user() {
    let Some(path) = std::env::var_os(CHILD_FILE).map(PathBuf::from) else { return };
    let file = File::open(&path).unwrap();
    let map = residency::map(&file, 0, FILE_LEN, GRANULE_LEN).unwrap();
    println!("child: {:?} {:?}", map.method, map.resident);
}

/// Copies this test program to where the other user may run it, and lets it ask. Gives what it
/// printed.
fn ask_as_nobody(folder: &Path, file: &Path) -> String {
    let program = folder.join("asker");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(&program)
        .args(["--exact", "child_of_another_user", "--nocapture"])
        .env(CHILD_FILE, file)
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| Some(line.split_once("child: ")?.1.to_owned()));
    line.unwrap_or_else(|| panic!("the child printed no answer: {text}"))
}

fn is_root(why: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: {why} needs root");
    }
    root
}

/// A folder that every user can reach, on a disk whose pages can be dropped; none when there is no
/// such place.
fn public_folder() -> Option<tempfile::TempDir> {
    let places = [std::env::temp_dir(), PathBuf::from("/var/tmp")];
    for place in places {
        let Ok(folder) = tempfile::tempdir_in(place) else { continue };
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("trial");
        let file = write_file(&path);
        if can_drop(&file, &path) {
            return Some(folder);
        }
    }
    println!("skipped: no public folder on a disk");
    None
}

#[test]
fn a_reader_who_does_not_own_the_file_is_not_told_lies() {
    if !is_root("running as another user") {
        return;
    }
    let Some(folder) = public_folder() else { return };
    let path = folder.path().join("file");
    let file = write_file(&path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    drop_pages(&file);
    read_pages(&path, 0, 8 * MIB);
    let answer = ask_as_nobody(folder.path(), &path);
    println!("not the owner: {answer}");
    // An old kernel lets anybody ask cachestat; a new one refuses, and mincore must not be
    // believed.
    assert!(answer.starts_with("Sampled ") || answer.starts_with("Cachestat "), "{answer}");
    assert!(answer.ends_with("[true, true, false, false]"), "{answer}");

    drop_pages(&file);
    let answer = ask_as_nobody(folder.path(), &path);
    assert!(answer.ends_with("[false, false, false, false]"), "{answer}");
    // Samples pull in a page each, not a window of readahead.
    let left = probe(&file);
    assert!(left.share() < 0.1, "asking filled the cache: {left:?}");

    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    read_pages(&path, 12 * MIB, 4 * MIB);
    let answer = ask_as_nobody(folder.path(), &path);
    println!("a writer: {answer}");
    assert!(answer.ends_with("[false, false, false, true]"), "{answer}");
}

/// Unmounts at the end, also of a test that failed.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn mount_overlay(folder: &Path) -> Option<(Mounted, PathBuf)> {
    for name in ["lower", "upper", "work", "merged"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    let place = folder.display();
    let options = format!("lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work");
    let merged = folder.join("merged");
    let mut mount = Command::new("mount");
    mount.args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged);
    match mount.output() {
        Ok(output) if output.status.success() => Some((Mounted(merged.clone()), merged)),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            println!("skipped: no overlay can be mounted here: {why}");
            None
        }
        Err(error) => {
            println!("skipped: no overlay can be mounted here: {error}");
            None
        }
    }
}

#[test]
fn overlayfs_shows_the_pages_of_the_file_beneath() {
    if !is_root("mounting an overlay") {
        return;
    }
    let Some(folder) = public_folder() else { return };
    let Some((_mounted, merged)) = mount_overlay(folder.path()) else { return };
    let beneath = folder.path().join("lower/file");
    let lower = write_file(&beneath);
    let path = merged.join("file");
    let file = File::open(&path).unwrap();
    assert_eq!(file_profile(&file, &path).unwrap().kind, FsKind::Overlay);
    drop_pages(&lower);
    read_pages(&path, 0, 8 * MIB);
    let map = residency::map(&file, 0, FILE_LEN, GRANULE_LEN).unwrap();
    assert_eq!(map.resident, [true, true, false, false], "{map:?}");
    assert_eq!(map.method, Method::Mincore);

    // Nobody can ask: cachestat sees the overlay's own empty cache, mincore lies, reads may not be
    // told not to wait.
    let answer = ask_as_nobody(folder.path(), &path);
    println!("overlay, not the owner: {answer}");
    let honest = ["Unknown [false, false, false, false]", "Sampled [true, true, false, false]"];
    assert!(honest.contains(&answer.as_str()), "{answer}");
}
