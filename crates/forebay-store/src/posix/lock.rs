//! One writer at a time replaces what is in a folder.
//!
//! The lock is flock(2) on `.forebay/lock` in the folder of what is replaced, so writers meet even if one opened the
//! step and the other the folder above; what is below `.forebay` shares its lock. The kernel frees it when its holder
//! dies.
//!
//! | file system | who is kept out |
//! | --- | --- |
//! | ext4, XFS, btrfs, tmpfs, overlayfs | every process of the machine, which is everybody |
//! | NFS with locks, GPFS, CephFS, WekaFS, BeeGFS and Lustre with locks enabled | every process of every machine |
//! | NFS with `nolock` or `local_lock=flock`, Lustre with `localflock` | every process of this machine only |
//! | no locks at all (some FUSE) | everybody, by a folder `.forebay/lock-claim` that only one can make |
//!
//! A claim is the folder with one more in it that has a name of the holder's own. It outlives a holder that dies, so
//! one that is older than [`CLAIM_STALE`] by the store's clock is taken away: by that inner name, which is nobody
//! else's, so that of several who find a claim stale none can take away the fresh one of another; and a holder that
//! comes back late removes its own claim and no other. Whoever has made both folders looks whether it is alone in
//! there: between the two somebody may have taken the outer one for stale, and a third may have made it again.
//!
//! A holder that slept that long between its look and its rename would replace what came in between: that window is all
//! that is left open, on file systems without locks, and none of it is open for a first publication, which is link(2).

use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use rustix::fs::{Dir, OFlags};
use rustix::io::Errno;

use super::PosixStore;
use super::files::{Files, Locked};
use crate::key::RECORDS_FOLDER;

/// Longest wait for another writer, who holds the lock for a look and a rename.
const WAIT: Duration = Duration::from_secs(60);
/// Age at which a claim's holder is taken for dead.
pub(super) const CLAIM_STALE: Duration = Duration::from_secs(20);
/// Most claims that are looked at in one folder; there is one, rarely two.
const CLAIMS_MAX: usize = 64;
/// Pause between two tries: the shortest, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The right to replace, until it is dropped.
pub(super) struct Held<'a> {
    _lock: Option<Locked>,
    _claim: Option<Claim<'a>>,
}

/// A claim of our own, given back when it is dropped.
struct Claim<'a> {
    files: &'a dyn Files,
    path: String,
    /// The folder in it that is ours.
    own: String,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Err(error) = withdraw(self.files, &self.path, &self.own) {
            tracing::debug!(%error, path = self.own, "a claim stays, and will be taken for stale");
        }
    }
}

/// Takes one claim away, if it is still there; the folder around it goes if nobody else has come into it.
fn withdraw(files: &dyn Files, path: &str, own: &str) -> Result<(), Errno> {
    match files.remove_folder(own) {
        Ok(()) => {}
        // Somebody has taken it away: what is there now is not ours.
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    }
    match files.remove_folder(path) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The records folder of a folder: of the step, for the records themselves too.
pub(super) fn records_of(folder: &str) -> String {
    let mut end = 0;
    for name in folder.split('/') {
        end += name.len();
        if name == RECORDS_FOLDER {
            return folder.get(..end).unwrap_or(folder).to_owned();
        }
        end += 1;
    }
    match folder {
        "" => RECORDS_FOLDER.to_owned(),
        folder => format!("{folder}/{RECORDS_FOLDER}"),
    }
}

/// Waits for the lock of a folder. Errors: `timeout`, and those of the file system.
pub(super) fn take<'a>(store: &'a PosixStore, folder: &str) -> Result<Held<'a>> {
    let records = records_of(folder);
    let (start, mut pause) = (Instant::now(), PAUSE.0);
    let mut looked = None;
    loop {
        match try_take(store, &records, &mut looked) {
            Ok(held) => return Ok(held),
            Err(Errno::WOULDBLOCK | Errno::INTR | Errno::EXIST) => {}
            Err(errno) => return Err(store.failed("cannot lock", &records, errno)),
        }
        if start.elapsed() >= WAIT {
            let what = format!("another writer holds the lock for more than {} s", WAIT.as_secs());
            let error = Error::new(Code::Timeout, what).at(store.place(&records));
            return Err(error.hint("look for a writer that hangs; its lock ends with its process"));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// One try; `WOULDBLOCK` or `EXIST` while another has it.
fn try_take<'a>(
    store: &'a PosixStore,
    records: &str,
    looked: &mut Option<Instant>,
) -> Result<Held<'a>, Errno> {
    match store.files.make_folder(records) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    match store.files.try_lock(&format!("{records}/lock")) {
        Ok(lock) => Ok(Held { _lock: Some(lock), _claim: None }),
        // The last user of the folder removed it just now.
        Err(Errno::NOENT) => Err(Errno::WOULDBLOCK),
        Err(errno) if is_missing(errno) => claim(store, &format!("{records}/lock-claim"), looked),
        Err(errno) => Err(errno),
    }
}

/// Whether an errno says that the file system has no locks.
pub(super) fn is_missing(errno: Errno) -> bool {
    matches!(errno, Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::BADF)
}

fn claim<'a>(
    store: &'a PosixStore,
    path: &str,
    looked: &mut Option<Instant>,
) -> Result<Held<'a>, Errno> {
    match store.files.make_folder(path) {
        Ok(()) => enter(store, path),
        Err(Errno::EXIST) => {
            // Asking for the time writes to the file system: not at every try.
            if looked.is_none_or(|then| then.elapsed() > Duration::from_secs(1)) {
                *looked = Some(Instant::now());
                break_stale(store, path)?;
            }
            Err(Errno::EXIST)
        }
        Err(errno) => Err(errno),
    }
}

/// The second half of a claim. `EXIST` where somebody was quicker.
fn enter<'a>(store: &'a PosixStore, path: &str) -> Result<Held<'a>, Errno> {
    let own = format!("{path}/{}", super::temp::fresh());
    match store.files.make_folder(&own) {
        Ok(()) => {}
        // The folder was taken for stale: this process slept.
        Err(Errno::NOENT) => return Err(Errno::EXIST),
        Err(errno) => return Err(errno),
    }
    let claim = Claim { files: store.files.as_ref(), path: path.to_owned(), own };
    match inside(store, path)?.as_slice() {
        [only] if *only == claim.own => Ok(Held { _lock: None, _claim: Some(claim) }),
        _ => Err(Errno::EXIST),
    }
}

/// The claims in the folder, by their paths.
fn inside(store: &PosixStore, path: &str) -> Result<Vec<String>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut claims = Vec::new();
    for entry in Dir::new(store.root.beneath(path, flags)?)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            claims.push(format!("{path}/{name}"));
        }
        if claims.len() > CLAIMS_MAX {
            break;
        }
    }
    Ok(claims)
}

/// Takes the claims of dead holders away, and the folder of one that died before it had entered.
fn break_stale(store: &PosixStore, path: &str) -> Result<(), Errno> {
    let now = store.now();
    let is_stale = |path: &str| -> Result<bool, Errno> {
        let stat = store.root.stat(path)?;
        Ok(stat.is_some_and(|stat| now.since(&stat) >= store.claim_stale))
    };
    let folder_is_stale = is_stale(path)?;
    let claims = match inside(store, path) {
        Err(Errno::NOENT) => return Ok(()),
        claims => claims?,
    };
    for claim in &claims {
        if is_stale(claim)? {
            withdraw(store.files.as_ref(), path, claim)?;
        }
    }
    if claims.is_empty() && folder_is_stale {
        match store.files.remove_folder(path) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn one_holds_the_lock_while_its_file_comes_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let store = PosixStore::open(folder.path()).unwrap();
        let busy = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let held =
                            store.in_folder("f", || take(&store, "f").map_err(|_| Errno::NOENT));
                        let held = held.unwrap();
                        assert!(!busy.swap(true, Relaxed), "two hold it");
                        std::thread::yield_now();
                        busy.store(false, Relaxed);
                        drop(held);
                        store.tidy("f");
                    }
                });
            }
        });
        store.tidy("f");
        assert!(!folder.path().join("f").exists(), "the lock file goes with its folder");
    }

    #[test]
    fn a_step_and_its_records_have_one_lock() {
        assert_eq!(records_of(""), ".forebay");
        assert_eq!(records_of("step-1"), "step-1/.forebay");
        assert_eq!(records_of("step-1/.forebay"), "step-1/.forebay");
        assert_eq!(records_of("step-1/.forebay/attempt/deep"), "step-1/.forebay");
        assert_eq!(records_of(".forebay/attempt"), ".forebay");
        assert_eq!(records_of("a.forebay/.forebays"), "a.forebay/.forebays/.forebay");
    }
}
