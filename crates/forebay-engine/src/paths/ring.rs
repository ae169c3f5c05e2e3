//! An io_uring that knows how many of its reads the kernel still works on. **unsafe**: pushing a read promises memory.
//!
//! What was pushed and not yet consumed has no claim on its buffer; what was consumed has, until its completion was
//! taken. Dropping the ring waits for that, so that buffers declared after it in the same owner are free when they go,
//! after an error or a panic too.

use std::io;
use std::time::Duration;

use io_uring::{IoUring, squeue, types};

pub(super) struct Ring {
    ring: IoUring,
    pushed: usize,
    completed: usize,
}

impl Ring {
    /// A ring for at least `entries` reads. Errors: what the kernel says; ENOSYS from one that cannot wait with a
    /// timeout (before 5.11).
    pub(super) fn new(entries: usize) -> io::Result<Self> {
        let ring = IoUring::new(entries.next_power_of_two().clamp(1, 4096) as u32)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self { ring, pushed: 0, completed: 0 })
    }

    /// Queues a read; false when the queue is full.
    ///
    /// # Safety
    /// The buffer is valid until the read's completion was taken, or the ring dropped; so is the descriptor.
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: by this function's own contract.
        let pushed = unsafe { self.ring.submission().push(entry) }.is_ok();
        self.pushed += usize::from(pushed);
        pushed
    }

    /// Reads that the kernel works on.
    pub(super) fn in_kernel(&mut self) -> usize {
        let waiting = self.ring.submission().len();
        self.pushed.saturating_sub(waiting + self.completed)
    }

    /// Whether the kernel never took anything from it.
    pub(super) fn is_unused(&mut self) -> bool {
        self.completed == 0 && self.in_kernel() == 0
    }

    /// Hands the queue to the kernel, and waits for a completion if `wait` is given, at most so long. Being busy,
    /// interrupted or out of time is no error: the caller takes what has completed, and comes again.
    pub(super) fn enter(&mut self, wait: Option<Duration>) -> io::Result<()> {
        let entered = match wait {
            None => self.ring.submit(),
            Some(wait) => {
                let timeout = types::Timespec::from(wait);
                let args = types::SubmitArgs::new().timespec(&timeout);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match entered {
            Ok(_) => Ok(()),
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes what has completed: user data and result of each.
    pub(super) fn take(&mut self) -> Vec<(u64, i32)> {
        let completed: Vec<_> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        self.completed += completed.len();
        completed
    }
}

impl Drop for Ring {
    /// Blocks for as long as the kernel takes: a read that hangs keeps this thread and its buffers, nothing else.
    fn drop(&mut self) {
        const NAP: Duration = Duration::from_millis(10);
        loop {
            drop(self.take());
            if self.in_kernel() == 0 {
                return;
            }
            if self.enter(Some(NAP)).is_err() {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// Whether an error of io_uring_enter or of a read says no more than "again".
pub(super) fn is_passing(error: &io::Error) -> bool {
    let again = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ETIME];
    error.raw_os_error().is_some_and(|errno| again.contains(&errno))
}
