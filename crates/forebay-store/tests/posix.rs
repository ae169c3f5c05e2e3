//! A folder store on real file systems: full, read-only, with links, umasks, other processes and killed ones.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_engine::write_all_at;
use forebay_error::Code;
use forebay_store::{Expect, PosixStore, Published, Store, is_temp};

fn store() -> (tempfile::TempDir, PosixStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = PosixStore::open(folder.path()).unwrap();
    (folder, store)
}

/// A mount that goes when it is dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    /// A tmpfs of that many bytes; `None`, with the reason printed, where this user may not mount.
    fn tmpfs(bytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::piped())
            .output();
        match mounted {
            Ok(done) if done.status.success() => Some(Self(folder)),
            Ok(done) => {
                println!("skipped: mount says {}", String::from_utf8_lossy(&done.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: no mount command: {error}");
                None
            }
        }
    }

    fn remount_read_only(&self) {
        let done = Command::new("mount").args(["-o", "remount,ro"]).arg(self.0.path()).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a process that another test forks at this moment has our descriptors until it execs.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_is_told_with_numbers_and_keeps_what_was_there() {
    let Some(mount) = Mount::tmpfs(1 << 20) else { return };
    let store = PosixStore::open(mount.0.path()).unwrap();
    assert!(store.abilities().reserves_space);
    store.put("step/.metadata", b"old").unwrap();
    let error = store.create_data("step/d", 2 << 20).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::NoSpace);
    assert!(error.what().contains("2097152 bytes are needed"), "{error}");
    let kept = store.create_data("step/d", 900 << 10).unwrap();
    // What was set aside is there even when all the rest is used.
    let error = store.put("step/.metadata", &[1; 200 << 10]).unwrap_err();
    assert_eq!(error.code(), Code::NoSpace);
    assert_eq!(store.create("step/part", &[1; 200 << 10]).unwrap_err().code(), Code::NoSpace);
    write_all_at(kept.sink(), &[7; 900 << 10], 0).unwrap();
    kept.seal().unwrap();
    assert_eq!(store.get("step/.metadata", 9).unwrap().unwrap().0, b"old");
    let keys: Vec<_> = store.list("", 9).unwrap().into_iter().map(|line| line.key).collect();
    assert_eq!(keys, ["step/.metadata", "step/d"], "nothing half written stays");
}

#[test]
fn a_read_only_file_system_is_read_and_says_no() {
    let Some(mount) = Mount::tmpfs(1 << 20) else { return };
    let store = PosixStore::open(mount.0.path()).unwrap();
    store.put("f/a", b"1").unwrap();
    mount.remount_read_only();
    let store = PosixStore::open(mount.0.path()).unwrap();
    assert!(!store.abilities().reserves_space);
    let (bytes, version) = store.get("f/a", 9).unwrap().unwrap();
    assert_eq!(bytes, b"1");
    assert_eq!(store.list("", 9).unwrap().len(), 1);
    assert_eq!(store.open_data("f/a").unwrap().len(), 1);
    let refused = [
        store.put("f/a", b"2"),
        store.create("f/b", b"2").map(|_| ()),
        store.remove("f/a").map(|_| ()),
        store.create_data("f/d", 1).map(|_| ()),
        store.publish("f/a", "f/c", &Expect::Absent).map(|_| ()),
        store.publish("f/a", "f/c", &Expect::Version(version)).map(|_| ()),
    ];
    for (call, result) in refused.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().code(), Code::PermissionDenied, "call {call}");
    }
}

#[test]
fn links_are_read_through_and_never_written_through() {
    let (folder, store) = store();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("file"), b"out").unwrap();
    symlink(outside.path(), folder.path().join("out")).unwrap();
    symlink(outside.path().join("file"), folder.path().join("link")).unwrap();
    assert_eq!(store.get("out/file", 9).unwrap().unwrap().0, b"out");
    assert_eq!(store.get("link", 9).unwrap().unwrap().0, b"out");
    assert_eq!(store.open_data("link").unwrap().len(), 3);
    let (_, version) = store.get("out/file", 9).unwrap().unwrap();
    store.put("staged", b"in").unwrap();
    let refused = [
        store.put("out/file", b"2"),
        store.create("out/new", b"2").map(|_| ()),
        store.remove("out/file").map(|_| ()),
        store.create_data("out/d", 1).map(|_| ()),
        store.publish("staged", "out/new", &Expect::Absent).map(|_| ()),
        store.publish("staged", "out/file", &Expect::Version(version)).map(|_| ()),
    ];
    for (call, result) in refused.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().code(), Code::UnsafePath, "call {call}");
    }
    // The last name is replaced or removed, not followed.
    store.put("link", b"in").unwrap();
    assert!(!fs::symlink_metadata(folder.path().join("link")).unwrap().is_symlink());
    assert!(store.remove("out").unwrap());
    assert_eq!(fs::read(outside.path().join("file")).unwrap(), b"out");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn listings_do_not_follow_links_in_circles() {
    let (folder, store) = store();
    store.put("f/a", b"1").unwrap();
    symlink("..", folder.path().join("f/up")).unwrap();
    symlink("nowhere", folder.path().join("f/broken")).unwrap();
    symlink("a", folder.path().join("f/link")).unwrap();
    let keys: Vec<_> = store.list("", 9).unwrap().into_iter().map(|line| line.key).collect();
    assert_eq!(keys, ["f/a", "f/link"]);
    let names = store.names("f/", 9).unwrap();
    let named = |name: &str, folder| (name.to_owned(), folder);
    assert_eq!(names, [named("a", false), named("link", false)], "a link to a folder is none");
}

#[test]
fn files_have_the_modes_of_any_file_that_the_user_makes() {
    let (folder, store) = store();
    fs::write(folder.path().join("plain"), b"").unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    let mode = |key: &str| fs::metadata(folder.path().join(key)).unwrap().permissions().mode();
    store.put("f/put", b"").unwrap();
    store.create("f/created", b"").unwrap();
    store.create_data("f/data", 1).unwrap().seal().unwrap();
    store.put("f/staged", b"").unwrap();
    store.publish("f/staged", "f/published", &Expect::Absent).unwrap();
    for key in ["f/put", "f/created", "f/data", "f/published"] {
        assert_eq!(mode(key), mode("plain"), "{key}");
        assert_eq!(fs::metadata(folder.path().join(key)).unwrap().nlink(), 1, "{key}");
    }
    assert_eq!(mode("f"), mode("folder"));
}

#[test]
fn what_is_no_folder_or_no_file_is_refused() {
    let (folder, store) = store();
    let missing = folder.path().join("none");
    assert_eq!(PosixStore::open(&missing).err().unwrap().code(), Code::NotFound);
    fs::write(folder.path().join("file"), b"1").unwrap();
    let file = PosixStore::open(&folder.path().join("file"));
    assert_eq!(file.err().unwrap().code(), Code::NotFound);
    assert_eq!(store.get("file/x", 9).unwrap(), None);
    assert!(store.put("file/x", b"").is_err());
    fs::create_dir(folder.path().join("folder")).unwrap();
    assert_eq!(store.get("folder", 9).unwrap_err().code(), Code::Unsupported);
    assert!(store.put("folder", b"").is_err() && store.remove("folder").is_err());
    assert!(!store.create("folder", b"").unwrap(), "the name is taken");
    PosixStore::create(&missing.join("deep")).unwrap().put("a", b"1").unwrap();
    assert_eq!(fs::read(missing.join("deep/a")).unwrap(), b"1");
}

#[test]
fn folders_that_a_killed_client_left_go_with_the_next_removal() {
    let (folder, store) = store();
    fs::create_dir_all(folder.path().join("step/deep/er")).unwrap();
    assert!(!store.remove("step/deep/er/gone/a").unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    fs::create_dir_all(folder.path().join("step/deep")).unwrap();
    store.put("step/a", b"").unwrap();
    assert!(!store.remove("step/deep/a").unwrap());
    assert_eq!(store.names("step/", 9).unwrap(), [("a".to_owned(), false)]);
}

#[test]
fn looking_leaves_no_trace() {
    let (folder, store) = store();
    store.list("", 9).unwrap();
    store.names("", 9).unwrap();
    store.get("a", 9).unwrap();
    store.abilities();
    assert!(!store.remove("f/a").unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_writer_waits_for_one_in_another_process() {
    let (folder, store) = store();
    store.put("to", b"1").unwrap();
    store.put("staged", b"2").unwrap();
    let (_, version) = store.get("to", 9).unwrap().unwrap();
    fs::create_dir(folder.path().join(".forebay")).unwrap();
    let lock = folder.path().join(".forebay/lock");
    let holder = Command::new("flock").arg(&lock).args(["sleep", "0.5"]).spawn();
    let Ok(mut holder) = holder else {
        println!("skipped: no flock command: {holder:?}");
        return;
    };
    while !lock.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    let end = store.publish("staged", "to", &Expect::Version(version)).unwrap();
    assert_eq!(end, Published::Done { durable: true });
    assert!(start.elapsed() > Duration::from_millis(300), "{:?}", start.elapsed());
    holder.wait().unwrap();
}

/// Where the writer that is to be killed works; set for the child process only.
const VICTIM: &str = "FOREBAY_STORE_TEST_VICTIM";

/// Not a test of its own: what the killed processes do.
#[test]
fn victim() {
    let Some(folder) = std::env::var_os(VICTIM) else { return };
    let store = PosixStore::open(Path::new(&folder)).unwrap();
    for round in 0_u64.. {
        let bytes = vec![(round % 251) as u8; 20_000];
        let staged = format!("step/.metadata.{}-{round}", std::process::id());
        store.put("step/part", &bytes).unwrap();
        store.put(&staged, &bytes).unwrap();
        let expect = match store.get("step/.metadata", 1 << 20).unwrap() {
            Some((_, version)) => Expect::Version(version),
            None => Expect::Absent,
        };
        store.publish(&staged, "step/.metadata", &expect).unwrap();
        if round % 7 == 6 {
            store.remove("step/.metadata").unwrap();
        }
    }
}

/// Starts a process that writes without end.
fn start_victim(folder: &Path) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim"])
        .env(VICTIM, folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn killed_writers_leave_whole_objects_no_lock_and_temporary_files_that_are_known() {
    let (folder, store) = store();
    let whole = |key: &str| match store.get(key, 1 << 20).unwrap() {
        Some((bytes, _)) => {
            assert_eq!(bytes.len(), 20_000, "{key}");
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{key} is torn");
            true
        }
        None => false,
    };
    let mut seen = 0;
    for round in 0..20_u64 {
        let mut victims = [start_victim(folder.path()), start_victim(folder.path())];
        std::thread::sleep(Duration::from_millis(60 + round * 7));
        for victim in &mut victims {
            victim.kill().unwrap();
            victim.wait().unwrap();
        }
        seen += usize::from(whole("step/.metadata")) + usize::from(whole("step/part"));
        for line in store.list("", 1000).unwrap() {
            let staged = line.key.starts_with("step/.metadata.");
            let known = ["step/.metadata", "step/part"].contains(&line.key.as_str());
            assert!(staged || known || is_temp(&line.key), "{}", line.key);
            if staged {
                assert!(whole(&line.key));
            }
            if !known {
                assert!(store.remove(&line.key).unwrap());
            }
        }
        store.put("step/next", b"next").unwrap();
        let expect = match store.get("step/.metadata", 1 << 20).unwrap() {
            Some((_, version)) => Expect::Version(version),
            None => Expect::Absent,
        };
        let start = Instant::now();
        let end = store.publish("step/next", "step/.metadata", &expect).unwrap();
        assert_eq!(end, Published::Done { durable: true });
        assert!(start.elapsed() < Duration::from_secs(5), "a dead writer's lock is free");
        store.remove("step/.metadata").unwrap();
    }
    assert!(seen > 10, "the writers wrote: {seen} of 40");
}

#[test]
fn a_file_is_gone_on_with_from_the_last_range_that_is_as_it_should_be() {
    let (folder, store) = store();
    let bytes: Vec<u8> =
        (0..4 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let range = |at: usize| &bytes[at << 20..(at + 1) << 20];
    let begun = store.resume_data("d", 4 << 20).unwrap();
    for at in [0, 1, 3] {
        write_all_at(begun.sink(), range(at), (at as u64) << 20).unwrap();
    }
    drop(begun);
    let again = store.resume_data("d", 4 << 20).unwrap();
    let held: Vec<bool> =
        (0..4).map(|at| again.holds(range(at), (at as u64) << 20).unwrap()).collect();
    assert_eq!(held, [true, true, false, false], "what comes after a gap is not looked at");
    for at in [2, 3] {
        write_all_at(again.sink(), range(at), (at as u64) << 20).unwrap();
    }
    again.seal().unwrap();
    assert!(fs::read(folder.path().join("d")).unwrap() == bytes);
}

#[test]
fn a_file_that_may_be_somebodys_is_not_gone_on_with() {
    let (folder, store) = store();
    let other = PosixStore::open(folder.path()).unwrap();
    let refused = |key: &str, bytes: u64| {
        other.resume_data(key, bytes).map(|_| ()).unwrap_err().code() == Code::AlreadyExists
    };
    let begun = store.resume_data("d", 1000).unwrap();
    assert!(refused("d", 1000), "its writer lives");
    drop(begun);
    assert!(refused("d", 999), "longer than it should be");
    drop(other.resume_data("d", 1000).unwrap());
    // Killed between the two steps of its publication: one file under two names.
    fs::hard_link(folder.path().join("d"), folder.path().join("published")).unwrap();
    assert!(refused("d", 1000), "it has been published");
    symlink("d", folder.path().join("link")).unwrap();
    assert!(other.resume_data("link", 1000).is_err());
    fs::create_dir(folder.path().join("folder")).unwrap();
    assert!(other.resume_data("folder", 1000).is_err());
}

/// The child that the test below kills.
#[test]
fn writes_until_it_is_killed() {
    let Some(folder) = std::env::var_os("FOREBAY_TEST_KILLED") else { return };
    let store = PosixStore::open(Path::new(&folder)).unwrap();
    let begun = store.resume_data("d", 1 << 20).unwrap();
    write_all_at(begun.sink(), &[7; 1000], 0).unwrap();
    fs::write(Path::new(&folder).join("ready"), b"").unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn what_a_killed_process_wrote_is_gone_on_with_once_it_is_dead() {
    let (folder, store) = store();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["writes_until_it_is_killed", "--exact"])
        .env("FOREBAY_TEST_KILLED", folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !folder.path().join("ready").exists() {
        assert!(Instant::now() < until, "the child does not write");
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = store.resume_data("d", 1 << 20).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    child.kill().unwrap();
    child.wait().unwrap();
    let again = store.resume_data("d", 1 << 20).unwrap();
    assert!(again.holds(&[7; 1000], 0).unwrap());
    assert!(!again.holds(&[7; 1000], 1000).unwrap());
}
