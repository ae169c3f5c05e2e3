//! Machines that refuse, files of others, files that change, and signals. **unsafe**: limits and filters that a child
//! sets between fork and exec.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use tempfile::TempDir;

use crate::util::{
    Bytes, arrived, bytes, drop_pages, expected, forebay, is_root, json_of, load, open_folder,
    paths, skip, stderr, text, write,
};

const NOBODY: u32 = 65534;

fn model_in(folder: &Path, mib: u64) -> (PathBuf, Vec<Bytes>) {
    let path = folder.join("m.safetensors");
    let tensors = vec![bytes("w", &[mib << 20], 1), bytes("b", &[12_345], 2)];
    write(&path, &tensors, &[]);
    (path, tensors)
}

fn model(mib: u64) -> (TempDir, PathBuf, Vec<Bytes>) {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model_in(folder.path(), mib);
    (folder, path, tensors)
}

const LOAD: [&str; 5] = ["load", "--device", "host", "--digest", "--json"];

#[test]
fn every_path_brings_the_same_bytes() {
    let (_folder, path, tensors) = model(9);
    for choice in ["auto", "dma", "copy", "direct", "buffered", "fallback"] {
        for cache in ["auto", "keep", "bypass"] {
            for cold in [false, true] {
                if cold && !drop_pages(&path) {
                    skip("the file cannot be dropped from the page cache here (tmpfs?)");
                    continue;
                }
                let report = load(&path, &["--path", choice, "--cache", cache]);
                assert_eq!(arrived(&report), expected(&tensors), "{choice} {cache} cold: {cold}");
            }
        }
    }
}

/// Makes a system call fail in the child, as container runtimes and old kernels do; with `flag` only calls that have
/// this bit in their third argument.
fn refuse_call(command: &mut Command, number: i64, errno: i32, flag: Option<i32>) {
    // SAFETY: two prctl calls on memory that lives through them; they may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
            const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
            const JUMP_SET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
            const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
            // struct seccomp_data: the number, the architecture, the address (8 bytes), six arguments of 8 bytes.
            const THIRD_ARGUMENT: u32 = 4 + 4 + 8 + 2 * 8;
            let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
            let flag = flag.map_or(u32::MAX, |flag| flag as u32);
            let every = u8::from(flag != u32::MAX);
            let mut steps = [
                step(LOAD, 0, 0, 0),
                step(JUMP_EQUAL, 0, 3, number as u32),
                step(LOAD, 0, 0, THIRD_ARGUMENT),
                // Without a flag every call of the number is refused.
                step(JUMP_SET, 0, every, flag),
                step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
                step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            ];
            let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

fn refuse_io_uring(command: &mut Command) {
    refuse_call(command, libc::SYS_io_uring_setup, libc::EPERM, None);
}

#[test]
fn an_io_uring_that_can_only_be_made_is_given_up() {
    let (_folder, path, tensors) = model(12);
    for errno in [libc::EPERM, libc::EINVAL] {
        if !drop_pages(&path) {
            return skip("the file cannot be dropped from the page cache here (tmpfs?)");
        }
        let mut command = forebay();
        command.args(LOAD).arg(&path);
        refuse_call(&mut command, libc::SYS_io_uring_enter, errno, None);
        let report = json_of(&mut command);
        assert_eq!(arrived(&report), expected(&tensors));
        assert!(!paths(&report).contains(&"direct".to_owned()), "{report}");
        assert!(report["loads"][0]["refusals"].to_string().contains("io_uring"), "{report}");
    }
}

#[test]
fn o_direct_refused_is_reported_and_the_load_goes_on() {
    let (_folder, path, tensors) = model(12);
    for (errno, words) in [(libc::EINVAL, "O_DIRECT"), (libc::EMFILE, "Too many open files")] {
        if !drop_pages(&path) {
            return skip("the file cannot be dropped from the page cache here (tmpfs?)");
        }
        let mut command = forebay();
        command.args(LOAD).arg(&path);
        refuse_call(&mut command, libc::SYS_openat, errno, Some(libc::O_DIRECT));
        let report = json_of(&mut command);
        assert_eq!(arrived(&report), expected(&tensors));
        let taken = paths(&report);
        assert!(taken.contains(&"buffered".to_owned()), "{report}");
        assert!(!taken.iter().any(|path| path.starts_with("direct")), "{report}");
        assert!(report["loads"][0]["refusals"].to_string().contains(words), "{report}");
    }
}

#[test]
fn io_uring_refused_is_reported_and_the_load_goes_on() {
    let (_folder, path, tensors) = model(12);
    if !drop_pages(&path) {
        return skip("the file cannot be dropped from the page cache here (tmpfs?)");
    }
    let mut command = forebay();
    command.args(LOAD).arg(&path);
    refuse_io_uring(&mut command);
    let report = json_of(&mut command);
    assert_eq!(arrived(&report), expected(&tensors));
    assert!(!paths(&report).contains(&"direct".to_owned()), "{report}");
    let refusals = report["loads"][0]["refusals"].to_string();
    assert!(refusals.contains("io_uring"), "{refusals}");
    // For people as well.
    assert!(drop_pages(&path));
    let mut command = forebay();
    command.args(["load", "--device", "host"]).arg(&path);
    refuse_io_uring(&mut command);
    let output = command.output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("refused") && shown.contains("io_uring"), "{shown}");
}

/// The command as a user who owns nothing, with `memlock` bytes of lockable memory.
fn as_nobody(command: &Path, memlock: Option<u64>) -> Command {
    let mut command = Command::new(command);
    command.args(LOAD).env_clear().uid(NOBODY).gid(NOBODY).current_dir("/");
    if let Some(bytes) = memlock {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        // SAFETY: setrlimit is a plain system call, and may be made between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::Memlock, limit)?));
        }
    }
    command
}

#[test]
fn files_of_another_user_and_no_locked_memory() {
    if !is_root() {
        return skip("needs root, to become another user");
    }
    let (folder, command) = open_folder();
    let (path, tensors) = model_in(folder.path(), 24);
    for memlock in [None, Some(0), Some(64 << 10)] {
        let warm = json_of(as_nobody(&command, memlock).arg(&path));
        assert_eq!(arrived(&warm), expected(&tensors));
        assert_eq!(paths(&warm), ["page-cache-copy"], "warm, and seen to be: {warm}");
        if !drop_pages(&path) {
            skip("the file cannot be dropped from the page cache here (tmpfs?)");
            continue;
        }
        let cold = json_of(as_nobody(&command, memlock).arg(&path));
        assert_eq!(arrived(&cold), expected(&tensors));
        let copied = cold["loads"][0]["paths"].as_array().unwrap().iter();
        let copied: u64 = copied
            .filter(|part| part["path"] == "page-cache-copy")
            .map(|part| part["bytes"].as_u64().unwrap())
            .sum();
        assert!(copied < 12 << 20, "a cold file was taken for resident: {cold}");
        assert!(drop_pages(&path));
        let bypass = json_of(as_nobody(&command, memlock).args(["--cache", "bypass"]).arg(&path));
        assert_eq!(arrived(&bypass), expected(&tensors));
        std::fs::read(&path).unwrap();
    }
}

#[test]
fn unreadable_files_are_an_error() {
    if !is_root() {
        return skip("needs root, to become another user");
    }
    use std::os::unix::fs::PermissionsExt;
    let (folder, command) = open_folder();
    let (path, _) = model_in(folder.path(), 1);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let output = as_nobody(&command, None).arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error[permission_denied]: "), "{}", stderr(&output));
}

/// A mount that goes away with its guard.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status();
        assert!(done.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn overlayfs_cold_and_warm() {
    let folder = tempfile::tempdir().unwrap();
    let [lower, upper, work, merged] =
        ["lower", "upper", "work", "merged"].map(|name| folder.path().join(name));
    for folder in [&lower, &upper, &work, &merged] {
        std::fs::create_dir(folder).unwrap();
    }
    let (below, tensors) = model_in(&lower, 9);
    let layers =
        format!("lowerdir={},upperdir={},workdir={}", text(&lower), text(&upper), text(&work));
    let mount = Command::new("mount")
        .args(["-t", "overlay", "overlay", "-o", &layers, text(&merged)])
        .output();
    if !mount.is_ok_and(|output| output.status.success()) {
        return skip(
            "overlayfs cannot be mounted here (needs root, and a folder that can be a layer)",
        );
    }
    let _mounted = Mounted(merged.clone());
    let path = merged.join("m.safetensors");
    for choice in ["auto", "direct", "buffered", "fallback"] {
        for cold in [true, false] {
            if cold {
                drop_pages(&below);
            } else {
                std::fs::read(&path).unwrap();
            }
            let report = load(&path, &["--path", choice]);
            assert_eq!(arrived(&report), expected(&tensors), "{choice}, cold: {cold}");
        }
    }
}

/// Starts many loads of a file, and returns once the file is open and loads are under way.
fn start_loads(path: &Path) -> Child {
    let mut command = forebay();
    command.args(["load", "--device", "host", "--repeat", "10000"]).arg(path);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let open = format!("/proc/{}/fd", child.id());
    let start = Instant::now();
    let is_open = || {
        let links = std::fs::read_dir(&open).into_iter().flatten().flatten();
        let mut links = links.filter_map(|link| std::fs::read_link(link.path()).ok());
        links.any(|link| link == path)
    };
    while !is_open() {
        assert!(start.elapsed() < Duration::from_secs(20), "the file was never opened");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(300));
    child
}

fn failed_with(output: &Output, codes: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    let known = codes.iter().any(|code| message.starts_with(&format!("error[{code}]: ")));
    assert!(known && message.contains("m.safetensors"), "{message}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_file_that_shrinks_while_it_loads() {
    let (_folder, path, _) = model(64);
    let path = path.canonicalize().unwrap();
    let child = start_loads(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(20 << 20).unwrap();
    let output = child.wait_with_output().unwrap();
    failed_with(&output, &["truncated", "file_changed"]);
    assert!(!stderr(&output).contains("header"), "{}", stderr(&output));
}

#[test]
fn a_file_that_is_replaced_while_it_loads() {
    let (folder, path, _) = model(64);
    let path = path.canonicalize().unwrap();
    let child = start_loads(&path);
    let other = folder.path().join("other");
    write(&other, &[bytes("w", &[100], 9)], &[]);
    std::fs::rename(&other, &path).unwrap();
    failed_with(&child.wait_with_output().unwrap(), &["file_changed"]);
}

#[test]
fn signals_end_a_load_within_a_second() {
    let (_folder, path, _) = model(64);
    let path = path.canonicalize().unwrap();
    for (signal, exit) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let child = start_loads(&path);
        let pid = Pid::from_child(&child);
        let start = Instant::now();
        kill_process(pid, signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(output.status.code(), Some(exit), "{}", stderr(&output));
        assert!(seconds < 1.5, "{seconds} s (one second, and some for a busy machine)");
        // Said by the command as it ends, not by the last resort, which says nothing.
        assert_eq!(stderr(&output), "interrupted\n");
        assert!(output.stdout.is_empty());
    }
}
