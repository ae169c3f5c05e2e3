//! Ctrl-C and its kin. **unsafe**: signal masks and waiting for signals, which have no safe wrapper in our libraries.
//!
//! SIGINT, SIGTERM and SIGHUP are blocked in every thread and taken by one that waits for them, so that no code ever
//! runs inside a signal handler. The first signal raises a flag that everything long looks at ([`check`]): a load is
//! cancelled, temporary files are removed, and the command ends with 128 + signal. Whatever hangs in the kernel
//! meanwhile (a dead file server) does not matter: after [`GRACE`], or at a second signal, the waiting thread removes
//! the temporary files itself and ends the process. A signal that the parent made this process ignore (nohup) stays
//! ignored. To a daemon SIGHUP is the order to read its configuration anew ([`reloads`]).

use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use forebay_error::{Code, Error, Result};

/// How long the command may take to end by itself.
const GRACE: Duration = Duration::from_millis(900);

const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// Whether SIGHUP does not end; whether one came.
static RELOADS: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);

/// For those who wait for a signal.
static WAITING: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

/// In milliseconds, where it is not [`GRACE`].
static GRACE_MS: AtomicU64 = AtomicU64::new(0);

/// Folders to remove when the process is ended from here.
static LEFTOVERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Starts to take signals. Called once, before any other thread is made: they inherit the mask.
pub(crate) fn watch() -> Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initializes the set, and the other calls are given initialized memory and valid signals.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let mut set = set.assume_init();
        for signal in SIGNALS {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed();
            let asked = libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
            if asked == 0 && action.assume_init().sa_sigaction != libc::SIG_IGN {
                libc::sigaddset(&mut set, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, ptr::null_mut());
        set
    };
    let spawned = std::thread::Builder::new().name("forebay-signal".to_owned()).spawn(move || {
        let signal = loop {
            let signal = wait_signal(&set);
            let reload = signal == libc::SIGHUP && RELOADS.load(Ordering::Relaxed);
            {
                let _waiting = WAITING.0.lock().unwrap_or_else(PoisonError::into_inner);
                match reload {
                    true => RELOAD.store(true, Ordering::Release),
                    false => RECEIVED.store(signal, Ordering::Release),
                }
            }
            WAITING.1.notify_all();
            if !reload {
                break signal;
            }
        };
        let grace = match GRACE_MS.load(Ordering::Relaxed) {
            0 => GRACE,
            other => Duration::from_millis(other),
        };
        wait_for(&set, grace);
        for folder in lock().drain(..) {
            // Nobody is left to tell if this fails.
            let _ = std::fs::remove_dir_all(folder);
        }
        // SAFETY: ends the process at once, which is the purpose: exit handlers could wait for what hangs.
        unsafe { libc::_exit(i32::from(exit_code(signal))) };
    });
    spawned.map(drop).map_err(|error| Error::io("cannot start a thread", error))
}

/// The signal that asked for the end, if one did.
pub(crate) fn received() -> Option<i32> {
    Some(RECEIVED.load(Ordering::Acquire)).filter(|&signal| signal != 0)
}

/// Gives what must be ended in good order longer than [`GRACE`].
pub(crate) fn grace(time: Duration) {
    GRACE_MS.store(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// From now on SIGHUP does not end: [`take_reload`] tells of it.
pub(crate) fn reloads() {
    RELOADS.store(true, Ordering::Relaxed);
}

/// Whether a SIGHUP came since the last call.
pub(crate) fn take_reload() -> bool {
    RELOAD.swap(false, Ordering::AcqRel)
}

/// Waits until a signal came, at most that long.
pub(crate) fn wait(limit: Duration) {
    let waiting = WAITING.0.lock().unwrap_or_else(PoisonError::into_inner);
    let nothing = |(): &mut ()| received().is_none() && !RELOAD.load(Ordering::Acquire);
    drop(WAITING.1.wait_timeout_while(waiting, limit, nothing));
}

/// Fails with `cancelled` once a signal asked for the end.
pub(crate) fn check() -> Result<()> {
    match received() {
        Some(_) => Err(Error::new(Code::Cancelled, "interrupted")),
        None => Ok(()),
    }
}

/// What shells make of a process that a signal ended.
pub(crate) fn exit_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(1)
}

/// Removes a folder if the process is ended by a signal; [`forget_leftover`] takes that back.
pub(crate) fn remember_leftover(folder: &Path) {
    lock().push(folder.to_owned());
}

/// See [`remember_leftover`].
pub(crate) fn forget_leftover(folder: &Path) {
    lock().retain(|known| known != folder);
}

fn lock() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_signal(set: &libc::sigset_t) -> i32 {
    loop {
        let mut signal = 0;
        // SAFETY: both are valid; the signals are blocked in this thread.
        if unsafe { libc::sigwait(set, &mut signal) } == 0 {
            return signal;
        }
        // An error is not possible for a valid set; if it is all the same, this must not spin.
        std::thread::sleep(GRACE);
    }
}

/// Waits for one more signal, at most `limit`.
fn wait_for(set: &libc::sigset_t, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: limit.subsec_nanos() as libc::c_long,
    };
    // SAFETY: set and time are valid, and nothing is asked to be written.
    unsafe { libc::sigtimedwait(set, ptr::null_mut(), &limit) };
}
