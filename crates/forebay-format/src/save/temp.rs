//! Names of temporary files, and what to do with those that a killed process left.
//!
//! A name is `.forebay-tmp-NODE-PID-START-N`: NODE stands for this boot of this machine and this PID namespace, START
//! is when the process started (in kernel ticks), N counts. So a reader of the folder can tell a file of a dead
//! process from one that is being written: NODE is its own and no process PID that started at START runs. Files of
//! other machines, containers and earlier boots are left alone, because nothing here can tell whether their writer
//! lives; remove them by hand (`rm .forebay-tmp-*`) when nothing saves into the folder. They are hidden, so no reader
//! takes them for a model.

use crate::text::shown;
use forebay_error::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const PREFIX: &str = ".forebay-tmp-";

/// A name that no other process and no other call has.
pub(super) fn fresh_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let start = start_ticks(pid).unwrap_or(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{PREFIX}{}-{pid}-{start}-{count}", node())
}

/// Removes the temporary files in a folder whose writer was a process of this machine that is gone, and returns them.
pub fn clean_stale_temps(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| Error::io("cannot list folder", error).at(shown(folder));
    let mut removed = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let stale = entry.file_name().to_str().is_some_and(is_stale);
        // Somebody else may be cleaning too, and a file that cannot be removed does no harm.
        if stale && std::fs::remove_file(entry.path()).is_ok() {
            removed.push(entry.path());
        }
    }
    Ok(removed)
}

fn is_stale(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix(node())) else {
        return false;
    };
    let numbers: Option<Vec<u64>> = rest.split('-').skip(1).map(|part| part.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[pid, start, _]) => u32::try_from(pid).is_ok_and(|pid| is_dead(pid, start)),
        _ => false,
    }
}

/// Whether no process of this number runs, or one that started at another time. In doubt it lives.
fn is_dead(pid: u32, start: u64) -> bool {
    let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    match test_kill_process(id) {
        Err(Errno::SRCH) => true,
        Err(_) => false,
        Ok(()) => start != 0 && start_ticks(pid).is_some_and(|now| now != start),
    }
}

/// When a process started: field 22 of its stat line. Field 2, in parentheses, may hold anything.
fn start_ticks(pid: u32) -> Option<u64> {
    let line = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let line = String::from_utf8_lossy(&line);
    let (_, fields) = line.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Sixteen digits for this boot of this machine and this PID namespace. Where the system does not say, they are those
/// of this process alone, so that nothing is ever found stale.
fn node() -> &'static str {
    static NODE: OnceLock<String> = OnceLock::new();
    NODE.get_or_init(|| {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let space = std::fs::read_link("/proc/self/ns/pid");
        let text = match (boot, space) {
            (Ok(boot), Ok(space)) => format!("{} {}", boot.trim(), space.display()),
            _ => format!("{:?} {}", std::time::SystemTime::now(), std::process::id()),
        };
        let digest = Sha256::digest(text.as_bytes());
        crate::digest::hex(digest.get(..8).unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn only_files_of_dead_processes_of_this_machine_go() {
        let mut child = Command::new("true").spawn().unwrap();
        let dead = child.id();
        child.wait().unwrap();
        let me = std::process::id();
        let start = start_ticks(me).unwrap();
        let node = node();
        let gone = [
            format!("{PREFIX}{node}-{dead}-77-0"),
            // The number was used again by a process that started later.
            format!("{PREFIX}{node}-{me}-{}-1", start - 1),
        ];
        let kept = [
            fresh_name(),
            format!("{PREFIX}{node}-{dead}-77"),
            format!("{PREFIX}{node}-{dead}-77-0-x"),
            format!("{PREFIX}0123456789abcdef-{dead}-77-0"),
            format!("{PREFIX}{node}-0-77-0"),
            format!("{PREFIX}{node}-99999999999999999999-77-0"),
            ".other".to_owned(),
        ];
        let folder = tempfile::tempdir().unwrap();
        for name in gone.iter().chain(&kept) {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        let removed = clean_stale_temps(folder.path()).unwrap();
        assert_eq!(removed.len(), gone.len(), "{removed:?}");
        for name in &gone {
            assert!(!folder.path().join(name).exists(), "{name}");
        }
        for name in &kept {
            assert!(folder.path().join(name).exists(), "{name}");
        }
    }

    #[test]
    fn names_differ() {
        assert_ne!(fresh_name(), fresh_name());
    }
}
