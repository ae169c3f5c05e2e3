//! How the disk treats the threads that move steps. **unsafe**: the system call has no wrapper.

use crate::config::IoPriority;

/// The calling thread, of `ioprio_set`.
const WHO_PROCESS: libc::c_int = 1;
/// Classes: shifted above thirteen bits of level.
const CLASS_SHIFT: u32 = 13;
const BEST_EFFORT: libc::c_int = 2 << CLASS_SHIFT;
const IDLE: libc::c_int = 3 << CLASS_SHIFT;
/// The last of eight levels.
const LAST_LEVEL: libc::c_int = 7;

/// Sets it for the calling thread and the threads that it starts. A kernel that refuses is told in the log: a transfer
/// is not worth less for it.
pub(crate) fn set(priority: IoPriority) {
    let value = match priority {
        IoPriority::Unchanged => return,
        IoPriority::Idle => IDLE,
        IoPriority::BestEffort => BEST_EFFORT | LAST_LEVEL,
    };
    // SAFETY: the call takes three integers and touches no memory of ours.
    let failed = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, value) } != 0;
    if failed {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "the I/O priority stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current() -> libc::c_long {
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0) }
    }

    #[test]
    fn threads_get_the_priority_and_their_children_inherit_it() {
        let of = |priority| {
            let thread = std::thread::spawn(move || {
                set(priority);
                (current(), std::thread::spawn(current).join().unwrap())
            });
            thread.join().unwrap()
        };
        let idle = libc::c_long::from(IDLE);
        let (own, child) = of(IoPriority::Idle);
        assert_eq!((own >> CLASS_SHIFT, child), (idle >> CLASS_SHIFT, own));
        let last = libc::c_long::from(BEST_EFFORT | LAST_LEVEL);
        assert_eq!(of(IoPriority::BestEffort), (last, last));
    }
}
