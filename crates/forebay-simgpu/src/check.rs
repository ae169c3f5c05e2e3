//! Violations: what a correct program never does.

use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::config::config;
use crate::status::{Outcome, SUCCESS, Status};

/// Violations so far.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// The code of a copy that failed while it ran. Such an error sticks to the context: every later call gives it.
static BROKEN: AtomicI32 = AtomicI32::new(SUCCESS);

/// Reports a violation; returns the code that the call is to give, if it gets that far.
#[expect(clippy::print_stderr, reason = "stderr is where tests look for it")]
pub(crate) fn violation<T>(status: Status, what: &str) -> Outcome<T> {
    COUNT.fetch_add(1, Ordering::Relaxed);
    if cfg!(test) {
        return Err(status);
    }
    let seed = config().seed;
    eprintln!("simgpu: VIOLATION (code {status}, SIMGPU_SEED={seed}): {what}");
    if config().strict {
        eprintln!("{}", Backtrace::force_capture());
        std::process::abort();
    }
    Err(status)
}

/// Ends the process over a setting.
#[expect(clippy::print_stderr, reason = "there is nobody to return an error to")]
pub(crate) fn give_up(what: &str) -> ! {
    eprintln!("simgpu: {what}");
    std::process::abort();
}

#[cfg(test)]
pub(crate) fn violations() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Breaks the context.
pub(crate) fn break_context(status: Status) {
    BROKEN.store(status, Ordering::Release);
}

/// Errors: the code that broke the context.
pub(crate) fn context_works() -> Outcome {
    match BROKEN.load(Ordering::Acquire) {
        SUCCESS => Ok(()),
        status => Err(status),
    }
}
