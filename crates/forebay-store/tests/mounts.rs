//! A folder on a JuiceFS mount, a real network file system in user space: the whole suite, and what it is taken for;
//! and any folder that is named, for file systems that tests cannot bring along.
//!
//! It is mounted by the test program and unmounted when that ends, however it ends. Where nothing can be mounted here
//! (no FUSE, no right to) the tests say so and pass.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[macro_use]
mod conformance;
mod servers;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use conformance::Place;
use forebay_store::{PosixStore, Store};
use forebay_topology::{DirectAdvice, FsKind, file_profile};

static JUICEFS: LazyLock<Option<Mount>> = LazyLock::new(mount);

struct Mount {
    at: PathBuf,
    /// Ends when its input does, which is with this process, and takes the mount away.
    _janitor: Child,
}

fn skipped(why: &str) -> Option<Mount> {
    println!("skipped: JuiceFS is not mounted: {why}");
    None
}

#[expect(
    clippy::zombie_processes,
    reason = "it lives as long as this process, and the janitor ends it"
)]
fn mount() -> Option<Mount> {
    let program = servers::program("FOREBAY_TEST_JUICEFS")?;
    if let Err(error) = File::options().read(true).write(true).open("/dev/fuse") {
        return skipped(&format!("/dev/fuse: {error}"));
    }
    // Not removed by its owner, who lives as long as the process: the janitor does.
    let folder = tempfile::tempdir().unwrap().keep();
    let at = folder.join("mount");
    std::fs::create_dir(&at).unwrap();
    let meta = servers::format_juicefs(&program, &folder);
    let log = File::create(folder.join("log")).unwrap();
    let janitor = Command::new("sh")
        .args(["-c", "read _; umount -l \"$0\"; rm -rf --one-file-system \"$1\""])
        .args([&at, &folder])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mounted = Mount { at, _janitor: janitor };
    let mut daemon = Command::new(&program)
        .args(["mount", "--no-usage-report", "--foreground", "--cache-size", "64"])
        .args(["--cache-dir".as_ref(), folder.join("cache").as_os_str()])
        .args([meta.as_ref(), mounted.at.as_os_str()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while !is_mounted(&mounted.at) {
        let ended = daemon.try_wait().unwrap();
        if ended.is_some() || Instant::now() > until {
            let _ = daemon.kill().and_then(|()| daemon.wait());
            let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
            return skipped(log.lines().last().unwrap_or("it does not start"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(mounted)
}

fn is_mounted(at: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    table.lines().any(|line| line.split(' ').nth(1) == at.to_str())
}

fn fresh() -> Option<tempfile::TempDir> {
    Some(tempfile::tempdir_in(&JUICEFS.as_ref()?.at).unwrap())
}

conformance!(juicefs, || {
    let folder = fresh()?;
    Some(Place::real(PosixStore::open(folder.path()).unwrap(), folder))
});

// Any other: `FOREBAY_TEST_FOLDER=/mnt/gluster cargo test -p forebay-store --test mounts named_folder`.
conformance!(named_folder, || {
    let named = std::env::var_os("FOREBAY_TEST_FOLDER")?;
    let folder = tempfile::tempdir_in(named).unwrap();
    Some(Place::real(PosixStore::open(folder.path()).unwrap(), folder))
});

#[test]
fn it_is_known_by_the_mount_table() {
    let Some(folder) = fresh() else { return };
    let path = folder.path().join("file");
    let file = File::create(&path).unwrap();
    let profile = file_profile(&file, &path).unwrap();
    assert_eq!(profile.kind, FsKind::JuiceFs);
    assert_eq!(profile.direct, DirectAdvice::Avoid);
    // A file below another mount on the way is that one's.
    let other =
        file_profile(File::open("/proc/self/mounts").unwrap(), "/proc/self/mounts".as_ref());
    assert_ne!(other.unwrap().kind, FsKind::JuiceFs);
}

#[test]
fn what_it_honours_is_found_out() {
    let Some(folder) = fresh() else { return };
    let can = PosixStore::open(folder.path()).unwrap().abilities();
    assert!(can.create_if_absent && can.replace_if_version && can.durable_publish, "{can:?}");
}
